"""Few rows take other tiles than many (`ops/tiling.py`), and every tile gives a row the same bits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deepinfer_core.kernels.reference.coded import code_columns
from deepinfer_core.kernels.registry import build_kernels, choose_provider
from deepinfer_core.runtime.rank_slice import release_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

MANY, FEW = 300, (1, 8, 63, 64, 65)


@pytest.fixture(scope="module")
def kernels() -> SimpleNamespace:
    table, _ = build_kernels(choose_provider("nvidia"), release_config(), torch.bfloat16)
    return SimpleNamespace(**vars(table))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.float32).to(dtype)


def products() -> dict[str, Callable[[SimpleNamespace, int], tuple[Tensor, ...]]]:
    """Name -> results of the first `rows` rows, at widths that take each of the tiles."""
    rows_5120, rows_1280, rows_8192 = random(MANY, 5120), random(MANY, 1280), random(MANY, 8192)
    streams, grouped = random(MANY, 4, 5120), random(MANY, 8, 512)
    w_128, w_256, w_160 = random(5120, 1792), random(1280, 16896), random(8192, 5120)
    coded_256, coded_192 = code_columns(w_256), code_columns(w_160)
    w13, w2 = random(5120, 4608), random(2304, 5120)
    coded_13, coded_2 = code_columns(w13), code_columns(w2)
    gate, bias = random(5120, 384), random(384, dtype=torch.float32)
    by_group, head = random(8, 512, 1024), random(1280, 20_000)
    fn, scale, base = (random(*shape, dtype=torch.float32) for shape in ((20_480, 24), (24,), (24,)))
    return {
        "128 columns": lambda k, n: (k.linear(rows_5120[:n], w_128),),
        "256 columns": lambda k, n: (k.linear(rows_1280[:n], w_256),),
        "160 columns": lambda k, n: (k.linear(rows_8192[:n], w_160),),
        "256 coded columns": lambda k, n: (k.linear(rows_1280[:n], coded_256),),
        "192 coded columns": lambda k, n: (k.linear(rows_8192[:n], coded_192),),
        "groups": lambda k, n: (k.grouped_linear(grouped[:n], by_group),),
        "head": lambda k, n: (k.head_logits(rows_1280[:n], head),),
        "shared expert": lambda k, n: (k.shared_expert(rows_5120[:n], w13, w2, 10.0),),
        "coded shared expert": lambda k, n: (k.shared_expert(rows_5120[:n], coded_13, coded_2, 10.0),),
        "router": lambda k, n: k.route(rows_5120[:n], gate, bias, 6, 1.5),
        "mixes": lambda k, n: k.mhc_mix(streams[:n], fn, base, scale, iterations=20, norm_eps=1e-20, eps=1e-6),
    }


def test_a_row_has_the_same_bits_in_every_tile(kernels: SimpleNamespace) -> None:
    for name, run in products().items():
        together = run(kernels, MANY)
        for rows in FEW:
            for got, want in zip(run(kernels, rows), together, strict=True):
                assert torch.equal(got, want[:rows]), f"{name}: {rows} rows"
