"""Norm and dense products: torch_npu's RMSNorm, and torch's own products, which run on the cube cores.

Neither torch nor torch_npu says that a row's bits are independent of the number of rows, so none of these promises it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError

__all__ = ["grouped_linear", "linear", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]; see contract `rms_norm`.

    The operation wants both of one dtype; a float32 weight over bfloat16 rows is not rounded: the rows are widened.
    """
    torch_npu: Any = import_module("torch_npu")
    if x.numel() == 0:
        return torch.empty_like(x)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return torch_npu.npu_rms_norm(x.to(dtype), weight.to(dtype), epsilon=eps)[0].to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K], weight [K, N] of one dtype -> [R, N]; see contract `linear`. Raises KernelError for two dtypes."""
    _check_one_dtype(x, weight)
    return torch.mm(x, weight)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, G, K], weight [G, K, N] of one dtype -> [R, G, N]; see contract `grouped_linear`. Raises KernelError."""
    _check_one_dtype(x, weight)
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


def _check_one_dtype(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype:
        raise KernelError(f"a product on Ascend takes one dtype, not {x.dtype} by {weight.dtype}")
