"""Rows of a step over the ranks of a context group: the bits of one process, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_core.cache import ModelState
from deepinfer_core.model import Backbone, Drafter, build_batch
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.scheduling.plan import Content, StepPlan, TokenSource, Writes
from tests.core.harness import Chunk, TinyModel, plan_of
from tests.core.parallel.in_process import on_ranks

RANKS = (2, 3, 4)


def tokens_of(model: TinyModel, count: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (count,), generator=generator).tolist()


def stored(state: ModelState) -> dict[str, Tensor]:
    """Everything that outlives a step: rings without trash and scratch rows, entries without the trash block."""
    layout, config = state.layout, state.layout.config
    found = {f"window {i}": cache[: layout.window.trash_row] for i, cache in enumerate(state.window)}
    found |= {f"context {i}": cache[: layout.draft_window.trash_row] for i, cache in enumerate(state.draft_window)}
    found |= {f"pairs {i}": cache[: layout.pairs.trash_row] for i, cache in state.pairs.items()}
    for layer, ratio in ((layer, config.compress_ratios[layer]) for layer in config.kv_source_layer_ids):
        found[f"entries {layer}"] = state.entries[layer][: layout.entry_trash_row(ratio)]
        found[f"index keys {layer}"] = state.index_keys[layer][: layout.entry_trash_row(ratio)]
    return found | {"history": state.history[: layout.history.trash_row]}


@torch.inference_mode()
def run_plans(
    model: TinyModel, plans: Sequence[StepPlan], group: Communicator | None, *, mask: bool
) -> tuple[list[Tensor | None], dict[str, Tensor], list[tuple[int, ...]]]:
    """Logits of each step, the state after the last, the rows that were computed here."""
    state, logits, rows = model.state(), [], []
    backbone = Backbone(model.config, model.params, model.backbone.kernels)
    state.held_tokens[:, :3] = torch.tensor([5, 9, 11])
    state.held_position.fill_(10)
    for plan in plans:
        batch = build_batch(plan, state, model.params, backbone.kernels, mask_decoder=mask, group=group)
        out = backbone.forward(batch, state)
        if out.features is not None and model.params.draft is not None:
            Drafter(backbone, model.params.draft).store_context(out.features, batch, state)
        logits.append(out.logits)
        rows.append(out.rows_per_layer)
    return logits, stored(state), rows


def bytes_sent(model: TinyModel, plans: Sequence[StepPlan], group: Communicator) -> dict[str, int]:
    """Bytes that this rank hands in, by label of the collective."""
    sent: dict[str, int] = {}
    gather = group.all_gather_rows

    def counted(rows: Tensor, counts: Sequence[int], label: str) -> Tensor:
        sent[label] = sent.get(label, 0) + rows.numel() * rows.element_size()
        return gather(rows, counts, label)

    group.all_gather_rows = counted  # type: ignore[method-assign]  # of this rank's object alone
    run_plans(model, plans, group, mask=False)
    return sent


def check_equal(model: TinyModel, plans: Sequence[StepPlan], size: int, *, mask: bool = False) -> list[int]:
    """Rows of the first layer that each rank computed in all steps, after comparing everything else."""
    logits, state, rows = run_plans(model, plans, None, mask=mask)
    found = on_ranks(size, lambda group: run_plans(model, plans, group, mask=mask))
    for rank, (rank_logits, rank_state, _) in enumerate(found):
        for step, (expected, value) in enumerate(zip(logits, rank_logits, strict=True)):
            assert (expected is None) == (value is None), (rank, step)
            assert expected is None or (value is not None and torch.equal(expected, value)), (rank, step)
        for name, expected in state.items():
            assert torch.equal(expected, rank_state[name]), (rank, name)
    total = sum(step[0] for step in rows)
    computed = [sum(step[0] for step in rank_rows) for _, _, rank_rows in found]
    assert total <= sum(computed)
    return computed


@pytest.mark.parametrize(("size", "length"), [(2, 230), (3, 97), (4, 40), (4, 230)])
def test_a_whole_prompt(tiny: TinyModel, size: int, length: int) -> None:
    plan = plan_of([Chunk(0, 0, tokens_of(tiny, length))])
    computed = check_equal(tiny, [plan], size)
    if length >= size * tiny.config.sliding_window:
        assert sum(computed) == length


@pytest.mark.parametrize(("size", "keep"), [(2, 90), (3, 20), (3, 200), (4, 90)])
def test_the_decoder_half_of_the_last_rows_alone(tiny: TinyModel, size: int, keep: int) -> None:
    plan = plan_of([Chunk(0, 0, tokens_of(tiny, 201), 201 - keep)], sample="last")
    check_equal(tiny, [plan], size)


@pytest.mark.parametrize("keep", [20, 90])
def test_masked_rows_below_the_cut(tiny_a: TinyModel, keep: int) -> None:
    plan = plan_of([Chunk(0, 0, tokens_of(tiny_a, 131), 131 - keep)], sample="last")
    check_equal(tiny_a, [plan], 2, mask=True)


@pytest.mark.parametrize("size", RANKS)
def test_chunks_that_begin_and_end_anywhere(tiny: TinyModel, size: int) -> None:
    tokens = tokens_of(tiny, 250)
    borders = [0, 61, 134, 135, 139, 250]
    plans = [plan_of([Chunk(0, start, tokens[start:stop], 215)], sample="last") for start, stop in pairwise(borders)]
    check_equal(tiny, plans, size)


@pytest.mark.parametrize("size", RANKS)
def test_many_requests_of_every_kind_in_a_step(tiny: TinyModel, size: int) -> None:
    """A long and a medium prompt, a short one, and a decode row with drafts that the device holds."""
    first = plan_of([Chunk(3, 0, tokens_of(tiny, 10)), Chunk(1, 0, tokens_of(tiny, 33, 5))])
    second = plan_of([
        Chunk(3, 12, [0, 1, 2]),
        Chunk(0, 0, tokens_of(tiny, 120, 7), 100),
        Chunk(1, 33, tokens_of(tiny, 77, 9), 20),
        Chunk(2, 0, tokens_of(tiny, 5, 11)),
    ])  # fmt: skip
    held = np.zeros(second.num_rows, np.uint8)
    held[:3] = TokenSource.HELD
    third = plan_of([Chunk(0, 120, [3]), Chunk(1, 110, [4]), Chunk(2, 5, [6])])
    computed = check_equal(tiny, [first, replace(second, row_source=held), third], size)
    assert max(computed) < first.num_rows + second.num_rows + third.num_rows


@pytest.mark.parametrize("size", RANKS)
def test_replayed_rows_write_windows_and_no_block(tiny_a: TinyModel, size: int) -> None:
    """A replay with its lower bound, then new rows in the same segment; another request has filled the block."""
    tokens = tokens_of(tiny_a, 260)
    filled = plan_of([Chunk(0, 0, tokens[:128], 100)], sample="last")
    replay = plan_of([Chunk(1, 90, tokens[90:], 230, window_from=90)], sample="last")
    writes = np.full(replay.num_rows, Writes.GLOBAL | Writes.WINDOW, np.uint8)
    writes[:38] = Writes.WINDOW
    tables = filled.block_tables.copy()
    tables[0, 1:] = replay.block_tables[0, 1:]  # block 0 is shared
    replay = replace(replay, row_writes=writes, block_tables=tables)
    check_equal(tiny_a, [filled, replay], size)


def test_images_and_rows_that_write_nothing(tiny_a: TinyModel) -> None:
    plan = plan_of([Chunk(0, 0, tokens_of(tiny_a, 150), 60)])
    content = plan.row_content.copy()
    content[30:71] = Content.IMAGE
    check_equal(tiny_a, [replace(plan, row_content=content)], 2)
    silent = plan_of([Chunk(0, 0, tokens_of(tiny_a, 150), 60, writes=Writes.NONE)])
    check_equal(tiny_a, [silent], 2)


def test_a_step_of_short_segments_exchanges_nothing(tiny_a: TinyModel) -> None:
    plan = plan_of([Chunk(slot, 0, tokens_of(tiny_a, 15, slot)) for slot in range(4)])

    assert on_ranks(2, lambda group: bytes_sent(tiny_a, [plan], group)) == [{}, {}]


def test_a_layer_exchanges_halos_and_tails_and_no_more(tiny_a: TinyModel) -> None:
    """Window records: (2 P - 2)(W - 1) before pieces and at most the ring at the end; of the rest, what is new."""
    length, size, config = 400, 4, tiny_a.config
    plan = plan_of([Chunk(0, 0, tokens_of(tiny_a, length), length - 20)], sample="last")
    sent = on_ranks(size, lambda group: bytes_sent(tiny_a, [plan], group))
    total = {label: sum(rank[label] for rank in sent) for label in sent[0]}
    layout, float_bytes = tiny_a.state().layout, 4
    halos, ring = (2 * size - 2) * (config.sliding_window - 1), layout.window.capacity
    for layer in range(config.decoder_start):
        records = total[f"window keys of layer {layer}"] / (config.head_dim * float_bytes)
        assert halos <= records <= halos + ring
    entry = (config.head_dim + config.index_head_dim) * float_bytes
    assert total["entries of layer 2"] == length // 2 * entry
    assert total["entries of layer 4"] == length * entry
    assert total["open pairs of layer 2"] == layout.pairs.capacity * 2 * config.head_dim * float_bytes
    streams = config.hc_mult * config.hidden_size
    features = sum(layer < config.decoder_start for layer in config.dspark_target_layer_ids) * config.hidden_size
    assert total["rows at the cut"] == 20 * (streams + config.hc_mult + features) * float_bytes
    decoder = [label for label in total if label == "sampled rows" or label.endswith(f"layer {config.decoder_start}")]
    assert decoder == [f"entries of layer {config.decoder_start}"]  # few rows: every rank computes them
