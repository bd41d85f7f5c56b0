"""The engine end to end on a GPU: the same tokens in any company, and what a graph needs. benchmarks/gpu/e2e.py reports
more of the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.checkpoint.mapped_memory import on_cuda_in_place
from deepinfer_core.errors import KernelError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, seed=i, temperature=(0.0, 1.0, 0.8)[i % 3], top_p=(1.0, 0.9)[i % 2])
    for i in range(64)
]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(11, 3000, int(length)).tolist() for length in random.integers(3, 600, len(PARAMS))]


def answers(ids: list[list[int]], params: list[SamplingParams], **settings: Any) -> list[list[int]]:
    with LLM(model="tiny", accelerator="nvidia", batch_invariant=True, quiet=True, **settings) as llm:
        outputs = llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def together() -> list[list[int]]:
    """64 requests in one batch, with drafts, graphs and overlap."""
    return answers(prompts(), PARAMS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"overlap": False},
        {"num_drafts": 0},
        {"max_num_seqs": 5},
        {"weight_form": "experts"},
        {"weight_form": "packed"},
    ],
    ids=["again", "without graphs", "without overlap", "without drafts", "small batches", "experts", "packed"],
)
def test_tokens_do_not_depend_on_how_they_are_computed(together: list[list[int]], settings: dict[str, Any]) -> None:
    assert answers(prompts(), PARAMS, **settings) == together


@pytest.mark.parametrize("index", [0, 1, 2, 17])
def test_a_request_alone_gets_the_tokens_that_it_gets_in_a_batch_of_64(together: list[list[int]], index: int) -> None:
    assert answers([prompts()[index]], [PARAMS[index]]) == [together[index]]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_a_float32_model_gives_the_tokens_of_the_cpu(eager: bool) -> None:
    """Attention, index and experts come from the reference then, on the device and in graphs; the rest are kernels."""
    openings = ["Once upon a time", "It was a fine morning, and Elizabeth", "In the beginning", "The module provides"]
    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0)
    tokens: list[list[list[int]]] = []
    for accelerator in ("cpu", "nvidia"):
        with LLM(model="tiny", accelerator=accelerator, dtype="float32", enforce_eager=eager, quiet=True) as llm:
            outputs = llm.generate(openings, params, use_tqdm=False)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.bad_input
@pytest.mark.parametrize(("setting", "lacking"), [("batch_invariant", "attend"), ("float8_products", "run_experts")])
def test_a_float32_model_is_refused_where_its_kernels_do_not_keep_what_is_asked_for(setting: str, lacking: str) -> None:
    settings: dict[str, Any] = {setting: True}
    with pytest.raises(KernelError, match=lacking):
        LLM(model="tiny", accelerator="nvidia", dtype="float32", quiet=True, **settings)


def test_host_memory_is_read_by_the_gpu_in_place() -> None:
    stored = torch.randint(0, 256, (70 << 10, 1 << 10), dtype=torch.uint8)
    seen = on_cuda_in_place(stored, torch.device("cuda"))
    assert seen.device.type == "cuda"
    rows = torch.randint(0, len(stored), (100,))
    assert torch.equal(seen[rows.cuda()].cpu(), stored[rows])
    stored[5] += 1  # not a copy
    torch.cuda.synchronize()
    assert torch.equal(seen[5].cpu(), stored[5])


@pytest.mark.parametrize(
    ("rows", "choices", "experts"), [(1, 1, 1), (7, 3, 16), (300, 2, 4), (5, 5, 384), (1500, 6, 600)]
)
def test_every_pair_stands_in_one_slot_of_a_tile_of_its_expert(rows: int, choices: int, experts: int) -> None:
    from deepinfer_kernels_nvidia.ops.experts import TILE, plan_experts  # imports TileLang

    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, experts, generator=generator).argsort(1)[:, :choices].sort(1).values
    tiles = plan_experts(ids.cuda(), experts)
    slots = tiles.slot_pair.cpu().view(-1, TILE)
    assert len(slots) == len(tiles.tile_expert)
    filled = slots[slots >= 0]
    assert sorted(filled.tolist()) == list(range(rows * choices))
    for expert, pairs in zip(tiles.tile_expert.tolist(), slots, strict=True):
        inside = pairs[pairs >= 0].tolist()
        assert inside == sorted(inside)
        assert all(ids.flatten()[pair] == expert for pair in inside)
        assert bool(inside) == (expert >= 0)
