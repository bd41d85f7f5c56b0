"""Logistic functions whose bits don't depend on where an element stands.

torch's own sigmoid, silu and softplus use one formula in vector registers and another for the last few elements of a
buffer, so a value changes in the last bit with the number of rows. exp, log1p and division don't (tests/core/kernels);
these forms use only them.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sigmoid", "silu", "softplus"]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp_min(0.0)
