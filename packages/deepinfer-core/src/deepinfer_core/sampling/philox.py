"""Counter-based noise. It is an operation of the contract, so it lies with the reference operations."""

from __future__ import annotations

from deepinfer_core.kernels.reference.philox import (
    gumbel,
    gumbel_noise,
    gumbel_noise_at,
    philox4x32,
    random_words,
    random_words_at,
    uniform,
)

__all__ = ["gumbel", "gumbel_noise", "gumbel_noise_at", "philox4x32", "random_words", "random_words_at", "uniform"]
