# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Mixes and expansion of single-pass mHC (docs/model.md: Residual streams): torch_npu's operations, and Sinkhorn.

    npu_mhc_pre    pre = sigmoid(m) + eps, post = 2 sigmoid(m), logits of C;  m = (flatten(X) fn) rsqrt(mean X^2 + eps)
    sinkhorn       C = softmax_j(logits) + eps; columns; then (iterations - 1) times rows, columns
    npu_mhc_post   X'_j = post_j y + sum_i C[i, j] X_i

torch_npu's own Sinkhorn does not say in its documentation whether it starts with the softmax, so ours is written out:
one thread holds the S x S matrix of a row.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels_ascend.jit import BLOCKS, THREADS, T, each_unit, program

_OUTPUT_ALL = 1  # npu_mhc_pre: with its intermediate results, of which the last is `pre`


@program
def sinkhorn_program(streams: int, iterations: int):
    """logits [rows, streams, streams] -> C of the same shape."""
    rows = T.dynamic("rows")

    @T.prim_func
    def sinkhorn(
        logits: T.Tensor((rows, streams, streams), "float32"),
        out: T.Tensor((rows, streams, streams), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            c = T.alloc_local((streams, streams), "float32")
            total = T.alloc_var("float32")
            for step in T.serial(each_unit(rows)):
                row = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if row < rows:
                    for i in T.serial(streams):
                        total = logits[row, i, 0]
                        for j in T.serial(streams):
                            total = T.max(total, logits[row, i, j])
                        for j in T.serial(streams):
                            c[i, j] = T.exp(logits[row, i, j] - total)
                        total = 0.0
                        for j in T.serial(streams):
                            total += c[i, j]
                        for j in T.serial(streams):
                            c[i, j] = c[i, j] / total + eps
                    for half in T.serial(2 * iterations - 1):
                        for a in T.serial(streams):
                            total = eps
                            if half % 2 == 0:
                                for i in T.serial(streams):
                                    total += c[i, a]
                                for i in T.serial(streams):
                                    c[i, a] = c[i, a] / total
                            else:
                                for j in T.serial(streams):
                                    total += c[a, j]
                                for j in T.serial(streams):
                                    c[a, j] = c[a, j] / total
                    for i, j in T.grid(streams, streams):
                        out[row, i, j] = c[i, j]

    return sinkhorn


def mhc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [R, S, D] bfloat16, fn [S D, 2S + S S], base and scale [2S + S S] float32 -> pre, post [R, S], C [R, S,
    S]; see contract `mhc_mix`.
    """
    torch_npu: Any = import_module("torch_npu")
    # The operation scales by three numbers; a scale for each column is part of the matrix, whatever it is.
    _, post, logits, _, _, pre = torch_npu.npu_mhc_pre(
        streams, (fn * scale).t(), scale.new_ones(3), base, norm_eps=norm_eps, hc_eps=eps, out_flag=_OUTPUT_ALL
    )
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if len(logits):
        sinkhorn_program(streams.shape[1], iterations)(logits.contiguous(), out, eps)
    return pre, post, out


def mhc_expand(streams: Tensor, y: Tensor, post: Tensor, c: Tensor) -> Tensor:
    """streams [R, S, D], y [R, D], post [R, S], C [R, S, S] -> [R, S, D]; see contract `mhc_expand`."""
    torch_npu: Any = import_module("torch_npu")
    return torch_npu.npu_mhc_post(streams, c, y, post)
