# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Router: s = sqrt(softplus(x Wg)); the k experts with the largest s + bias; weight = scale s / (sum + 1e-20).

The product has float32 sums. K is cut into parts of 1,024, groups of one grouped product, so that enough blocks run;
a gate in float32 goes through `linear_float32`. Then one warp adds a row's parts in order, holds its experts in
registers and takes the best k times: the largest value, then the lowest id that has it. Ids come out ascending, and the
sum follows them.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, program
from deepinfer_kernels_nvidia.ops.linear import padded_product
from deepinfer_kernels_nvidia.ops.linear_float32 import linear_float32

__all__ = ["num_route_parts", "route"]

_WARP = 32
_PART = 1024  # of K


def num_route_parts(k: int) -> int:
    """How many parts K of the bf16 product is cut into."""
    return k // _PART if k % _PART == 0 else 1


@program
def select_experts_program(parts: int, experts: int, columns: int, k: int, bias_by_row: bool):
    """parts [rows, parts, columns >= experts] of the logits, bias [rows or 1, experts] -> ids, weights [rows, k]."""
    rows = T.dynamic("rows")
    width = -(-experts // _WARP) * _WARP

    @T.prim_func
    def select_experts(
        logits: T.Tensor((rows, parts, columns), "float32"),
        bias: T.Tensor((rows if bias_by_row else 1, experts), "float32"),
        ids: T.Tensor((rows, k), "int64"),
        weights: T.Tensor((rows, k), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(rows, threads=_WARP) as row:
            score = T.alloc_fragment((width,), "float32")
            rank = T.alloc_fragment((width,), "float32")
            place = T.alloc_fragment((width,), "int32")
            chosen = T.alloc_fragment((width,), "float32")
            best = T.alloc_fragment((1,), "float32")
            winner = T.alloc_fragment((1,), "int32")
            value = T.alloc_fragment((1,), "float32")
            picks = T.alloc_local((k,), "int32")
            values = T.alloc_local((k,), "float32")
            before = T.alloc_var("int32")
            total = T.alloc_var("float32")
            for e in T.Parallel(width):
                score[e] = 0.0
            for part in T.serial(parts):
                for e in T.Parallel(width):
                    score[e] += T.if_then_else(e < experts, logits[row, part, e], 0.0)
            for e in T.Parallel(width):
                score[e] = T.sqrt(T.log1p(T.exp(-T.abs(score[e]))) + T.max(score[e], 0.0))
                rank[e] = T.if_then_else(
                    e < experts, score[e] + bias[row if bias_by_row else 0, e], -T.infinity("float32")
                )
            for choice in T.unroll(k):
                T.reduce_max(rank, best, dim=0)
                for e in T.Parallel(width):
                    place[e] = T.if_then_else(rank[e] == best[0], e, width)
                T.reduce_min(place, winner, dim=0)
                for e in T.Parallel(width):
                    chosen[e] = T.if_then_else(e == winner[0], score[e], 0.0)
                    rank[e] = T.if_then_else(e == winner[0], -T.infinity("float32"), rank[e])
                T.reduce_sum(chosen, value, dim=0)
                picks[choice] = winner[0]
                values[choice] = value[0]
            if T.get_thread_binding() == 0:
                total = 0.0
                for position in T.unroll(k):
                    for choice in T.unroll(k):
                        before = 0
                        for other in T.unroll(k):
                            before += T.if_then_else(picks[other] < picks[choice], 1, 0)
                        if before == position:
                            total += values[choice]
                for choice in T.unroll(k):
                    before = 0
                    for other in T.unroll(k):
                        before += T.if_then_else(picks[other] < picks[choice], 1, 0)
                    ids[row, before] = T.cast(picks[choice], "int64")
                    weights[row, before] = values[choice] / (total + 1e-20) * scale

    return select_experts


def route(x: Tensor, gate: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """x [R, D], gate [D, E], bias [E] or [R, E] -> ids [R, k] int64 ascending, weights [R, k] float32; see contract
    `route`.
    """
    rows, experts = x.shape[0], gate.shape[1]
    ids = torch.empty(rows, k, dtype=torch.int64, device=x.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=x.device)
    if rows:
        parts = _parts(x, gate)
        launch = select_experts_program(parts.shape[1], experts, parts.shape[2], k, bias.dim() == 2)
        launch(parts, bias.float().contiguous().view(-1, experts), ids, weights, scale)
    return ids, weights


def _parts(x: Tensor, gate: Tensor) -> Tensor:
    """x [R, K], gate [K, E] -> parts of the logits [R, P, >= E] float32."""
    if x.dtype == gate.dtype == torch.bfloat16:
        parts = num_route_parts(x.shape[1])
        return padded_product(x.unflatten(1, (parts, -1)), gate.unflatten(0, (parts, -1)), torch.float32)
    return linear_float32(x, gate.float()).contiguous()[:, None]
