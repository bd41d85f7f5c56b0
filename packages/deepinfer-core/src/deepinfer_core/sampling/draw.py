"""The draw of a token. It is an operation of the contract, so it lies with the reference operations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer_core.kernels.reference.draw import argmax_token, draw_token

__all__ = ["DrawToken", "argmax_token", "draw_token"]

type DrawToken = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
