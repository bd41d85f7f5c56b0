"""Compiling ahead covers what a step asks for: a step of one rank of 64 at the release's sizes on torch's fake CUDA
tensors, which have shapes and no values; programs are recorded instead of compiled and launched.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer_core.cache import CacheLayout, ModelState
from deepinfer_core.checkpoint import dequantize
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.kernels.reference import REFERENCE, records
from deepinfer_core.kernels.reference.packed import ArrangedWeight, PackedWeight
from deepinfer_core.model import Backbone, Drafter, params
from deepinfer_core.model.batch import batch_of
from deepinfer_core.model.step_arrays import StepShape, pack_step
from deepinfer_core.runtime import rank_slice
from deepinfer_core.runtime.weight_form import PACKINGS

RANKS, CONTEXT, DRAFTS = 64, 131_072, 3
BLOCKS = CONTEXT // 128 + 1


class NoGenerator:
    """A generator on a device that does not exist."""

    def __init__(self, device: str) -> None: ...

    def manual_seed(self, seed: int) -> None: ...


@pytest.fixture(scope="module")
def package() -> Any:
    pytest.importorskip("tilelang")
    return importlib.import_module("deepinfer_kernels_nvidia.ops")


@pytest.fixture
def asked(package: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Programs that are asked for, while fake tensors stand for a GPU's."""
    jit = importlib.import_module("deepinfer_kernels_nvidia.jit")
    found: set[tuple[str, tuple[Any, ...]]] = set()

    def record(self: Any, *parameters: Any) -> Any:
        found.add((self.name, parameters))
        return lambda *_: None

    monkeypatch.setattr(jit.Program, "__call__", record)
    for name, module in list(sys.modules.items()):
        if name.startswith("deepinfer_kernels_nvidia.") and hasattr(module, "aligned"):
            monkeypatch.setattr(module, "aligned", lambda tensor: tensor.contiguous())  # fake tensors have no address
    # Weights are drawn and two constants read where there are no values.
    monkeypatch.setattr(torch, "Generator", NoGenerator)
    monkeypatch.setattr(torch, "repeat_interleave", lambda scale, _: scale.new_empty(24))
    monkeypatch.setattr(params, "int", lambda _: 0, raising=False)
    yield found
    for kept in (records._constant, dequantize._e4m3_values):
        kept.cache_clear()


@pytest.mark.parametrize("form", ["bfloat16", "float8_products", "packed"])
def test_a_rank_compiles_nothing_in_its_steps_after_warming(package: Any, asked: Any, form: Any) -> None:
    coded, packed = form == "float8_products", PACKINGS.get(form, "none")
    arrange = _empty_tiles if packed != "none" else None
    release = rank_slice.release_config()
    config = rank_slice._own_share(release, RANKS)
    local = rank_slice._local_experts(release, RANKS)
    kernels = replace(REFERENCE, **package.TABLE)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        drawn = rank_slice.random_weights(config, 0, torch.bfloat16, "cuda", with_experts=False, packed=packed)
        model = params.build_params(drawn, config, coded=coded, arrange=arrange, consume=True)
        model = rank_slice._with_experts(model, local, None, arrange)
        backbone = Backbone(config, model, kernels, rank_slice.BalancedExperts(local))
        drafter = Drafter(backbone, model.draft)
        for requests in (4, 64):  # tiles for few rows, and for many
            _step(backbone, drafter, requests)
    warm = importlib.import_module("deepinfer_kernels_nvidia.warm")
    ahead = set(warm.variants(release, release.n_routed_experts // RANKS, coded=coded, packed=packed))
    assert len(asked) > 40
    bits = {parameters[3] for name, parameters in asked if name == "multiply_packed"}  # of a code
    assert bits == {"none": set(), "experts": {4}, "products": {4, 8}}[packed]
    assert asked - ahead == set()


def _empty_tiles(weight: PackedWeight, halves: bool) -> ArrangedWeight:
    """As `arranged` lays it out, which reads scales."""
    tiles = importlib.import_module("deepinfer_kernels_nvidia.ops.packed_tiles")
    counts = tiles.tile_counts(*weight.shape[-2:])
    shape = (*weight.shape[:-2], *counts, tiles.tile_words(weight.form.value_bits))
    made = torch.empty(shape, dtype=torch.int32, device=weight.records.device)
    return ArrangedWeight(made, weight.form, weight.shape, weight.dtype)


def _step(backbone: Backbone, drafter: Drafter, requests: int) -> None:
    """A verification step of `requests` at full context and the drafting behind it."""
    rows = requests * (1 + DRAFTS)
    layout = CacheLayout(backbone.config, requests, requests * BLOCKS, rows, DRAFTS, form="packed")
    tables = np.arange(requests * BLOCKS, dtype=np.int32).reshape(requests, BLOCKS)
    part: Any = SimpleNamespace(size=SimpleNamespace(num_drafts=DRAFTS, context=CONTEXT), block_tables=tables)
    plan = rank_slice.RankSlice.decode_plan(part, requests, SamplingParams(temperature=0), first=False)
    shape = StepShape.fixed(rows, BLOCKS)
    arrays = pack_step(plan, layout, rows, fixed=shape)
    state = ModelState.allocate(layout, device="cuda", dtype=torch.bfloat16)
    columns = arrays.views(torch.zeros(arrays.largest_size, dtype=torch.int64, device="cuda"))
    batch = batch_of(shape, columns, state, backbone.params, backbone.kernels)
    out = backbone.forward(batch, state)
    assert out.features is not None
    drafter.store_context(out.features, batch, state)
    slot = torch.zeros(requests, dtype=torch.int64, device="cuda")
    block = drafter.make_block(slot, slot, slot, slot, state, DRAFTS)
    drafter.draw_block(block, slot, lambda _, logits: logits.argmax(-1))
