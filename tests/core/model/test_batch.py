"""Building a step's tensors: numpy on the host and torch on a device compute the same."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.reference.cache_ops import KeyPlan
from deepinfer_core.model.batch import Batch, batch_of
from deepinfer_core.model.step_arrays import pack_step, upload
from deepinfer_core.model.step_split import split_step
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.scheduling.plan import Content, StepPlan, TokenSource
from tests.core.harness import Chunk, TinyModel, plan_of
from tests.core.parallel.in_process import Meeting, ThreadCommunicator


def mixed_plan(*, decoder_from: int, held: bool, image: bool) -> StepPlan:
    """A long chunk, a decode row and three rows of drafts, with padding."""
    plan = plan_of([Chunk(0, 120, range(30), decoder_from), Chunk(2, 7, [5]), Chunk(1, 40, [3, 4, 5])], padded_rows=41)
    source, content = plan.row_source.copy(), plan.row_content.copy()
    token = plan.row_token.copy()
    if held:
        source[31:] = TokenSource.HELD
        token[31:] = [0, 1, 2]
    if image:
        content[3:9] = Content.IMAGE
    return replace(plan, row_source=source, row_content=content, row_token=token)


def flat(value: Any, name: str = "batch") -> dict[str, Any]:
    """Every tensor and number in a batch by its path."""
    if isinstance(value, KeyPlan):
        return {f"{name}.rows": value.rows, f"{name}.bias": value.bias}
    if is_dataclass(value) and type(value).__module__.endswith(("model.batch", "parallel.context")):
        return {k: v for f in fields(value) for k, v in flat(getattr(value, f.name), f"{name}.{f.name}").items()}
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}[{key}]").items()}
    return {name: value}


def built(model: TinyModel, plan: StepPlan, *, on_host: bool, mask: bool, group: Communicator | None = None) -> Batch:
    state = model.state()
    generator = torch.Generator().manual_seed(1)
    state.history.copy_(torch.randint(0, 50, state.history.shape, generator=generator))
    state.held_position.copy_(torch.tensor([1, 33, 5, 0]))
    state.held_tokens.copy_(torch.randint(0, 50, state.held_tokens.shape, generator=generator))
    split = split_step(plan, state.layout, group, mask_decoder=mask)
    arrays = pack_step(plan, state.layout, REFERENCE.row_multiple, mask_decoder=mask, split=split)
    columns = arrays.columns if on_host else arrays.views(upload(arrays, torch.device("cpu")))
    return batch_of(arrays.shape, columns, state, model.params, REFERENCE, mask_decoder=mask, split=split)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("decoder_from", [0, 130, 10_000])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_host_and_device_build_the_same_batch(
    tiny_a: TinyModel, mask: bool, held: bool, image: bool, decoder_from: int, rank: int | None
) -> None:
    """`rank`: of two that share the rows of the long chunk."""
    plan = mixed_plan(decoder_from=decoder_from, held=held, image=image)
    group = None if rank is None else ThreadCommunicator(Meeting(2), rank)
    host, device = (flat(built(tiny_a, plan, on_host=on_host, mask=mask, group=group)) for on_host in (True, False))
    assert host.keys() == device.keys()
    for name, value in host.items():
        if isinstance(value, Tensor):
            assert value.dtype == device[name].dtype, name
            assert torch.equal(value, device[name]), name
        else:
            assert value == device[name], name


def test_held_rows_stand_where_the_device_says(tiny_a: TinyModel) -> None:
    plan = mixed_plan(decoder_from=0, held=True, image=False)
    batch = built(tiny_a, plan, on_host=True, mask=False)
    assert batch.encoder.position[31:34].tolist() == [33, 34, 35]
    assert batch.encoder.position[30].item() == 7
    assert np.array_equal(batch.sample_rows.take.numpy(), np.arange(34))
