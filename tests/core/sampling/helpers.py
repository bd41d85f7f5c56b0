"""Requests, rows and one-line sampling for the tests of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.sampling import Sampler, SampleRows
from deepinfer_core.scheduling.plan import Admission

EOS = 1


def admission(
    slot: int,
    params: SamplingParams,
    tokens: Sequence[int] = (5,),
    prompt_tokens: int | None = None,
    generation: int = 0,
) -> Admission:
    """A request with its seed from `params` (0 if there is none)."""
    ids = np.array(tokens, np.int64)
    num_prompt = len(tokens) if prompt_tokens is None else prompt_tokens
    return Admission(slot, generation, slot, ids, num_prompt, 0, params, params.seed or 0)


def make_sampler(num_ids: int, requests: Sequence[SamplingParams], **settings: Any) -> Sampler:
    """A sampler with one request a slot, each with the prompt [5]."""
    options: dict[str, Any] = {"mask_from": num_ids, "eos_token_id": EOS} | settings
    sampler = Sampler(num_ids, len(requests), "cpu", **options)
    for slot, params in enumerate(requests):
        sampler.admit(admission(slot, params))
    return sampler


def rows_of(
    logits: torch.Tensor,
    position: Sequence[int],
    token: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    **more: Any,
) -> SampleRows:
    """Sample rows from plain lists."""
    return SampleRows(
        logits,
        torch.tensor(position),
        torch.tensor(token),
        np.array(starts, np.int32),
        np.array(slots, np.int32),
        **more,
    )


def single_rows(logits: torch.Tensor, position: Sequence[int], slots: Sequence[int] | None = None) -> SampleRows:
    """One segment a row, without drafts."""
    count = len(logits)
    return rows_of(logits, position, [5] * count, range(count + 1), range(count) if slots is None else slots)
