"""Products by deepinfer-gemm 2.8 (module deep_gemm), SM100 and SM103: bf16 and e4m3, dense and by expert.

    linear          x [R, K] ── one group ─► [R, N]
    run_experts     rows to slots, tiles of 128 slots of one expert ── w13[e] ─► activation ── w2[e] ─► slots to pairs
    shared_expert   the same in one group

All of them are its product grouped over the rows ("contiguous" layout): `layout[m]` names the group of row m, -1 =
none, and rows come in whole tiles of one group. By its sources the tiling of this form is a function of N and K alone,
which keeps a row's bits independent of the batch; its dense form picks tiles by the number of rows.

    bf16    m_grouped_bf16_gemm_nn_contiguous      (x [M, K], w [G, K, N], out [M, N], layout [M] int32)
    e4m3    m_grouped_fp8_fp4_gemm_nt_contiguous   ((codes [M, K], scales), (codes [G, N, K], scales), out, layout)
            scales [.., M or N, ceil(K / 512)] int32: four exponents a word, one for 128 values; rows contiguous, the
            stride of a word a multiple of four. Ours are one power of two a row or column, so all of a row are equal.

A shape that it does not take runs our kernel. Bound to the signatures and the checks of its sources; **never run by
us**: there is no SM100 device here. Not bound: its index scores (keys of a block apart from their scales, bf16 scores),
`mega_gate` and `mega_mhc` (a buffer a stream that must not be made while a graph is captured; the second fuses what are
four operations here), `einsum` (weights [G, N, K]), bf16 products into float32 (tiles by the number of rows).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_core.kernels.reference.coded import CodedWeight, Weight, plain_weight
from deepinfer_kernels_nvidia.jit import aligned
from deepinfer_kernels_nvidia.ops import experts as own_experts
from deepinfer_kernels_nvidia.ops.coded import code_rows_program
from deepinfer_kernels_nvidia.ops.experts import TILE, ExpertTiles
from deepinfer_kernels_nvidia.ops.linear import linear as own_linear

__all__ = ["NEEDS", "linear", "prepare", "run_experts", "shared_expert"]

NEEDS = (
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "set_mk_alignment_for_contiguous_layout",
    "use_deterministic_algorithms",
)
_UNIT_BYTES = 16  # rows of operands are whole units of the bulk copy engine
_SCALED, _PER_WORD = 128, 4  # values of K that share a scale, scales in a word
_RECIPE = (1, _SCALED)

_weight_scales: WeakKeyDictionary[CodedWeight, Tensor] = WeakKeyDictionary()


def prepare(library: Any) -> None:
    """Settings of the process: tiles of our height, and no algorithm that depends on the number of rows."""
    library.set_mk_alignment_for_contiguous_layout(TILE)
    library.use_deterministic_algorithms(True)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [R, K], weight [K, N] -> [R, N]; see contract `linear`."""
    if not _takes(x, weight):
        return own_linear(x, weight)
    return _one_group(x, weight)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """x [R, D], w13 [D, 2 I], w2 [I, D] -> [R, D]; see contract `shared_expert`."""
    if not _takes(x, w13, w2):
        return own_experts.shared_expert(x, w13, w2, limit)
    return _one_group(_gated(_one_group(x, w13), None, limit), w2)


def run_experts(x: Tensor, weights: Tensor, tiles: ExpertTiles, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """x [R, D], weights [R, k], w13 [E, D, 2 I], w2 [E, I, D] -> [R, k, D]; see contract `run_experts`."""
    if not _takes(x, w13, w2):
        return own_experts.run_experts(x, weights, tiles, w13, w2, limit)
    rows, choices = weights.shape
    pair = tiles.slot_pair.clamp_min(0)  # an empty slot computes the first pair again, and nobody reads it
    layout = tiles.tile_expert.repeat_interleave(TILE, output_size=len(pair))
    hidden = _product(x.index_select(0, pair // choices), w13, layout)
    act = _gated(hidden, weights.float().flatten().index_select(0, pair), limit)
    out = x.new_empty(rows * choices + 1, x.shape[1])  # empty slots write the last row
    place = torch.where(tiles.slot_pair >= 0, tiles.slot_pair, rows * choices)
    out.index_copy_(0, place.long(), _product(act, w2, layout))
    return out[:-1].view(rows, choices, -1)


def _takes(x: Tensor, *weights: Weight) -> bool:
    """Rows there are, of bf16; weights of one kind, both sides of each in whole units."""
    coded = isinstance(weights[0], CodedWeight)
    unit = _UNIT_BYTES if coded else _UNIT_BYTES // 2
    sides = [side for weight in weights for side in weight.shape[-2:]]
    form = CodedWeight if coded else Tensor  # those that are packed are ours
    alike = all(isinstance(weight, form) and weight.dtype == torch.bfloat16 for weight in weights)
    return x.numel() > 0 and x.dtype == torch.bfloat16 and alike and all(side % unit == 0 for side in sides)


def _one_group(x: Tensor, weight: Weight) -> Tensor:
    """x [R, K] @ weight [K, N] -> [R, N]; rows are padded to whole tiles."""
    rows = len(x)
    padded = F.pad(x, (0, 0, 0, -rows % TILE))
    return _product(padded, weight, torch.zeros(len(padded), dtype=torch.int32, device=x.device))[:rows]


def _product(x: Tensor, weight: Weight, layout: Tensor) -> Tensor:
    """x [M, K] @ weight [(G,) K, N] by the group of each row -> [M, N]."""
    library: Any = import_module("deep_gemm")
    out = x.new_empty(len(x), weight.shape[-1])
    if isinstance(weight, CodedWeight):
        codes = weight.codes.view(-1, *weight.codes.shape[-2:])
        library.m_grouped_fp8_fp4_gemm_nt_contiguous(
            _coded_rows(x), (codes, _scales_of(weight)), out, layout, recipe_a=_RECIPE, recipe_b=_RECIPE
        )
    else:
        values = plain_weight(weight, torch.bfloat16)
        library.m_grouped_bf16_gemm_nn_contiguous(aligned(x), values.view(-1, *values.shape[-2:]), out, layout)
    return out


def _gated(hidden: Tensor, factor: Tensor | None, limit: float) -> Tensor:
    """hidden [M, 2 I], gate half first, factor [M] -> silu(min(gate, limit)) clamp(up, -limit, limit) factor [M, I]."""
    gate, up = hidden.float().chunk(2, -1)
    act = F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return (act if factor is None else act * factor[:, None]).to(hidden.dtype)


def _coded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> e4m3 codes [M, K], scales [M, ceil(K / 512)]."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    code_rows_program(x.shape[1])(aligned(x), codes, scale)
    return codes, _packed(scale, x.shape[1])


def _scales_of(weight: CodedWeight) -> Tensor:
    """[G, N, ceil(K / 512)], made at the first use of a weight, which no graph captures: a step runs before that."""
    found = _weight_scales.get(weight)
    if found is None:
        scale = weight.scale.view(-1, weight.scale.shape[-1])
        found = _weight_scales[weight] = _packed(scale, weight.codes.shape[-1])
    return found


def _packed(scale: Tensor, k: int) -> Tensor:
    """scale [.., M], powers of two -> [.., M, ceil(k / 512)] int32 as above."""
    words = -(-k // (_SCALED * _PER_WORD))
    exponent = (scale.view(torch.int32) >> 23).to(torch.uint8)  # [.., M]
    word = exponent[..., None].expand(*exponent.shape, _PER_WORD).contiguous().view(torch.int32)[..., 0]
    rows = F.pad(word, (0, -word.shape[-1] % 4))
    by_word = rows[..., None, :].expand(*rows.shape[:-1], words, rows.shape[-1]).contiguous()
    return by_word.transpose(-1, -2)[..., : scale.shape[-1], :]
