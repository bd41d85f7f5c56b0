"""Sinkhorn of mHC as one Triton kernel forward and one backward.

    forward    C += eps;  C /= (column sums + eps);  then n - 1 times: C /= (row sums + eps), C /= (column sums + eps)
    backward   y = x / (s + eps), s = sum x   =>   dx = (dy - sum(dy y)) / (s + eps),  x = y (s + eps)

The sums of the forward pass are kept, so the values are rebuilt on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64


@triton.jit
def _forward(
    c_ptr, out_ptr, sums_ptr, rows, eps, iterations: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * block + tl.arange(0, block)
    i, j = tl.arange(0, size), tl.arange(0, size)
    inside = row < rows
    at = row[:, None, None] * size * size + i[None, :, None] * size + j[None, None, :]
    c = tl.load(c_ptr + at, mask=inside[:, None, None], other=1.0) + eps
    for step in range(2 * iterations - 1):
        place = (step * rows + row[:, None]) * size + j[None, :]
        if step % 2 == 0:
            s = tl.sum(c, 1) + eps
            c = c / tl.expand_dims(s, 1)
        else:
            s = tl.sum(c, 2) + eps
            c = c / tl.expand_dims(s, 2)
        tl.store(sums_ptr + place, s, mask=inside[:, None])
    tl.store(out_ptr + at, c, mask=inside[:, None, None])


@triton.jit
def _backward(
    y_ptr, grad_ptr, sums_ptr, out_ptr, rows, iterations: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * block + tl.arange(0, block)
    i, j = tl.arange(0, size), tl.arange(0, size)
    inside = row < rows
    at = row[:, None, None] * size * size + i[None, :, None] * size + j[None, None, :]
    y = tl.load(y_ptr + at, mask=inside[:, None, None], other=0.0)
    grad = tl.load(grad_ptr + at, mask=inside[:, None, None], other=0.0)
    for back in range(2 * iterations - 1):
        step = 2 * iterations - 2 - back
        place = (step * rows + row[:, None]) * size + j[None, :]
        s = tl.load(sums_ptr + place, mask=inside[:, None], other=1.0)
        if step % 2 == 0:
            grad = (grad - tl.expand_dims(tl.sum(grad * y, 1), 1)) / tl.expand_dims(s, 1)
            y = y * tl.expand_dims(s, 1)
        else:
            grad = (grad - tl.expand_dims(tl.sum(grad * y, 2), 2)) / tl.expand_dims(s, 2)
            y = y * tl.expand_dims(s, 2)
    tl.store(out_ptr + at, grad, mask=inside[:, None, None])


class Sinkhorn(torch.autograd.Function):
    """c [R, S, S] float32, rows normalized by softmax -> doubly stochastic up to eps."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, iterations: int, eps: float) -> Tensor:
        rows, s, _ = c.shape
        out = torch.empty_like(c)
        sums = c.new_empty(2 * iterations - 1, rows, s)
        grid = (triton.cdiv(rows, _BLOCK),)
        _forward[grid](c, out, sums, rows, eps, iterations, s, _BLOCK)  # pyright: ignore[reportArgumentType]  - Triton makes constants of the last three
        ctx.save_for_backward(out, sums)
        ctx.iterations = iterations
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        y, sums = ctx.saved_tensors
        rows, s, _ = y.shape
        out = torch.empty_like(y)
        grid = (triton.cdiv(rows, _BLOCK),)
        _backward[grid](y, grad.contiguous(), sums, out, rows, ctx.iterations, s, _BLOCK)  # pyright: ignore[reportArgumentType]  - as above
        return out, None, None
