"""A row's logits depend on its request alone, bit for bit: not on chunks, company, padding, threads."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_core.model import Backbone
from deepinfer_core.scheduling.plan import Writes
from tests.core.harness import Chunk, TinyModel, plan_of


def run_in_company(
    model: TinyModel, requests: list[list[int]], seed: int, *, decoder_from: list[int] | None = None
) -> list[Tensor]:
    """Logits of every row of every request, fed in random chunks, in random company, with random padding."""
    rng = random.Random(seed)
    state = model.state(num_slots=len(requests))
    done = [0] * len(requests)
    rows: list[list[Tensor]] = [[] for _ in requests]
    cuts = decoder_from or [0] * len(requests)
    while any(done[i] < len(tokens) for i, tokens in enumerate(requests)):
        chunks = []
        for slot in rng.sample(range(len(requests)), len(requests)):
            left = len(requests[slot]) - done[slot]
            if left and (rng.random() < 0.7 or not chunks):
                count = min(left, rng.choice([1, 1, 2, 3, 7, 8, 9, 30, 64, left]))
                chunks.append(Chunk(slot, done[slot], requests[slot][done[slot] : done[slot] + count], cuts[slot]))
        if not chunks:
            continue
        total = sum(len(chunk.tokens) for chunk in chunks)
        out = model.step(state, plan_of(chunks, padded_rows=total + rng.choice([0, 1, 20])))
        at = 0
        for chunk in chunks:
            kept = sum(1 for i in range(len(chunk.tokens)) if chunk.start + i >= cuts[chunk.slot])
            if kept:
                assert out.logits is not None
                rows[chunk.slot].append(out.logits[at : at + kept])
            at += kept
            done[chunk.slot] += len(chunk.tokens)
    return [torch.cat(parts) for parts in rows]


def sequences(model: TinyModel, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_chunks_and_company_leave_the_bits_alone(tiny_a: TinyModel, seed: int) -> None:
    requests = sequences(tiny_a, 1, 37, 150)
    alone = [tiny_a.logits(tokens) for tokens in requests]
    together = run_in_company(tiny_a, requests, seed)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_chunks_and_company_leave_the_bits_alone_at_length(tiny: TinyModel, seed: int) -> None:
    requests = sequences(tiny, 3, 130, 301, 2)
    alone = [tiny.logits(tokens) for tokens in requests]
    for one, other in zip(alone, run_in_company(tiny, requests, seed), strict=True):
        assert torch.equal(one, other)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_chunks_leave_the_kept_rows_of_a_compact_prefill_alone(tiny_a: TinyModel, seed: int) -> None:
    requests = sequences(tiny_a, 60, 150)
    cuts = [39, 120]
    whole = [
        tiny_a.step(tiny_a.state(), plan_of([Chunk(0, 0, tokens, cut)])).logits
        for tokens, cut in zip(requests, cuts, strict=True)
    ]
    for one, other in zip(whole, run_in_company(tiny_a, requests, seed, decoder_from=cuts), strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_company_with_a_cut_does_not_choose_between_fused_and_single_operations(tiny_a: TinyModel) -> None:
    """A provider's `mhc_next` may round otherwise than the norm of the collapse does; which of the two a row goes
    through must not depend on whether the step holds rows that end at the cut.
    """

    def rounds_otherwise(*arguments: Any) -> tuple[Tensor, Tensor]:
        streams, x = tiny_a.backbone.kernels.mhc_next(*arguments)
        return streams, x * (1 + 2**-12)

    kernels = replace(tiny_a.backbone.kernels, mhc_next=rounds_otherwise)
    model = replace(tiny_a, backbone=Backbone(tiny_a.config, tiny_a.params, kernels))
    short, long = sequences(model, 20, 60)
    alone = model.logits(short)
    out = model.step(model.state(), plan_of([Chunk(0, 0, short), Chunk(1, 0, long, decoder_from=50)])).logits
    assert out is not None
    assert torch.equal(out[:20], alone)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_leave_the_bits_alone_across_batch_sizes(tiny_a: TinyModel, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokens = sequences(tiny_a, 90)[0]
        whole = tiny_a.logits(tokens)
        assert torch.equal(run_in_company(tiny_a, [tokens], seed=threads)[0], whole)
    finally:
        torch.set_num_threads(before)


def test_a_rejected_draft_leaves_no_trace(tiny_a: TinyModel) -> None:
    tokens = sequences(tiny_a, 80)[0]
    clean = tiny_a.logits(tokens)
    state = tiny_a.state()
    rows: list[Tensor] = []
    position = 0
    while position < len(tokens):
        wrong = [(token + 1) % tiny_a.config.vocab_size for token in tokens[position + 1 : position + 6]]
        out = tiny_a.step(state, plan_of([Chunk(0, position, [tokens[position], *wrong])]))
        assert out.logits is not None
        rows.append(out.logits[:1])
        position += 1
    assert torch.equal(torch.cat(rows), clean)


def test_replayed_rows_rebuild_windows_and_write_no_block(tiny_a: TinyModel) -> None:
    """Windows that are lost come back by a replay from far enough, and the request goes on as if it had run through."""
    tokens = sequences(tiny_a, 200)[0]
    config = tiny_a.config
    state = tiny_a.state()
    tiny_a.step(state, plan_of([Chunk(0, 0, tokens[:128])]))
    before = {name: cache.clone() for name, (cache, _) in state.block_buffers().items()}
    start = 128 - config.num_hidden_layers * (config.sliding_window - 1)
    history = torch.tensor(tokens[start - 3 : start])
    ring = state.layout.history
    state.history[0 * ring.capacity + torch.arange(start - 3, start) % ring.capacity] = tiny_a.params.token_classes[
        history
    ]
    for window in state.window:
        window.fill_(float(7))  # whatever an earlier request left
    tiny_a.step(state, plan_of([Chunk(0, start, tokens[start:128], window_from=start, writes=Writes.WINDOW)]))
    for name, (cache, per_block) in state.block_buffers().items():
        assert torch.equal(cache[:-per_block], before[name][:-per_block]), name
    out = tiny_a.step(state, plan_of([Chunk(0, 128, tokens[128:])]))
    assert out.logits is not None
    assert torch.equal(out.logits, tiny_a.logits(tokens)[128:])
