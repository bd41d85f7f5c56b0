# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Router: s = sqrt(softplus(x Wg)); the k experts with the largest s + bias; weight = scale s / (sum + 1e-20).

    torch.mm         x [R, D] x gate [D, E] in float32 -> logits [R, E]
    select_experts   one thread a row: k times the best of `rank`, which it then strikes out; ids ascending

torch_npu's gating operation knows softmax and sigmoid, not this score. The largest value wins, then the lowest id; the
sum of the chosen follows the ids.
"""

import torch
from torch import Tensor

from deepinfer_kernels_ascend.jit import BLOCKS, THREADS, T, each_unit, program

_STRUCK_OUT = -3.4e38  # below every score with its bias


@program
def select_experts_program(experts: int, k: int, bias_by_row: bool):
    """logits, rank (working memory) [rows, experts], bias [rows or 1, experts] -> ids, weights [rows, k]."""
    rows = T.dynamic("rows")

    @T.prim_func
    def select_experts(
        logits: T.Tensor((rows, experts), "float32"),
        bias: T.Tensor((rows if bias_by_row else 1, experts), "float32"),
        rank: T.Tensor((rows, experts), "float32"),
        ids: T.Tensor((rows, k), "int64"),
        weights: T.Tensor((rows, k), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            score = T.alloc_var("float32")
            best = T.alloc_var("float32")
            winner = T.alloc_var("int32")
            place = T.alloc_var("int32")
            picks = T.alloc_local((k,), "int32")
            for step in T.serial(each_unit(rows)):
                row = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if row < rows:
                    for e in T.serial(experts):
                        score = T.exp(-T.abs(logits[row, e]))
                        best = 1.0 + score
                        # log1p: the rounding of 1 + z is made good by the same factor.
                        if best != 1.0:
                            score = T.log(best) * (score / (best - 1.0))
                        score = T.sqrt(score + T.max(logits[row, e], 0.0))
                        logits[row, e] = score
                        rank[row, e] = score + bias[row if bias_by_row else 0, e]
                    for i in T.serial(k):
                        picks[i] = 0
                    for choice in T.serial(k):
                        best = _STRUCK_OUT
                        winner = 0
                        for e in T.serial(experts):
                            if rank[row, e] > best:
                                best = rank[row, e]
                                winner = e
                        rank[row, winner] = _STRUCK_OUT
                        # The picks before it stay ascending: those above it move up by one.
                        place = 0
                        for i in T.serial(k):
                            place += T.if_then_else(i < choice, T.if_then_else(picks[i] < winner, 1, 0), 0)
                        for i in T.serial(k - 1):
                            moved = T.if_then_else(k - 1 - i <= choice, k - 1 - i, 0)
                            if moved > place:
                                picks[moved] = picks[moved - 1]
                        picks[place] = winner
                    best = 0.0
                    for i in T.serial(k):
                        best += logits[row, picks[i]]
                    for i in T.serial(k):
                        ids[row, i] = T.cast(picks[i], "int64")
                        weights[row, i] = logits[row, picks[i]] / (best + 1e-20) * scale

    return select_experts


def route(x: Tensor, gate: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """x [R, D], gate [D, E], bias [E] or [R, E] -> ids [R, k] int64 ascending, weights [R, k] float32; see contract
    `route`.
    """
    rows, experts = len(x), gate.shape[1]
    ids = torch.empty(rows, k, dtype=torch.int64, device=x.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=x.device)
    if rows:
        logits = torch.mm(x.float(), gate.float())
        launch = select_experts_program(experts, k, bias.dim() == 2)
        biases = bias.float().contiguous().view(-1, experts)
        launch(logits, biases, torch.empty_like(logits), ids, weights, float(scale))
    return ids, weights
