"""What a request asks of its logits before they are filtered, for the rows of a step at once:

    x_v  -> mask          -inf where the grammar's bit of v is 0
         -> entries       x_v + value of single ids: logit_bias, and -inf for end tokens before min_tokens
         -> repetition    v in prompt or output:  x_v / r  if x_v > 0  else  x_v r
         -> presence      v in output:            x_v - presence
         -> frequency                             x_v - frequency times v is in the output

A row under verification takes the drafts before it for granted: its output count is the request's, plus those drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.kernels.reference.columns import rows_of, to_device

__all__ = [
    "Entries",
    "LogitChanges",
    "Masks",
    "Penalties",
    "add_sparse",
    "adjust_logits",
    "apply_bit_masks",
    "apply_penalties",
]

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Masks:
    """Grammar masks of G rows, on the host."""

    rows: NDArray[np.int64]  # [G]
    words: NDArray[np.int32]  # [G, ceil(V / 32)], bit v % 32 of word v // 32 stands for id v


@dataclass(frozen=True, slots=True)
class Entries:
    """Values for E single logits; of two for one of them, one at most is neither 0 nor -inf. Rows ascend."""

    rows: NDArray[np.int64]  # [E]
    ids: NDArray[np.int64]  # [E]
    values: Tensor  # [E] float32, on the device


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of n rows, on the host, and the token counts that they refer to, on the device."""

    rows: NDArray[np.int64]  # [n]
    pool_row: NDArray[np.int64]  # [n] of the counts
    num_drafts: NDArray[np.int64]  # [n] the row's own token and so many - 1 before it are drafts
    repetition: NDArray[np.float32]  # [n]
    presence: NDArray[np.float32]  # [n]
    frequency: NDArray[np.float32]  # [n]
    token: Tensor  # [R] int64, the own tokens of all rows of the step
    prompt_seen: Tensor  # [P, V] bool, v is in the prompt
    output_count: Tensor  # [P, V] int32, how often v is in the output


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """What is to be done to some of the rows of a step."""

    masks: Masks | None = None
    entries: Entries | None = None
    penalties: Penalties | None = None

    def __bool__(self) -> bool:
        return self.masks is not None or self.entries is not None or self.penalties is not None


def adjust_logits(logits: Tensor, changes: LogitChanges) -> Tensor:
    """Logits [R, V] float32 -> changed ones; the input stays as it is."""
    logits = logits.clone()
    device = logits.device
    if (masks := changes.masks) is not None:
        apply_bit_masks(logits, to_device(masks.rows, device), to_device(masks.words, device))
    if (entries := changes.entries) is not None:
        add_sparse(logits, to_device(entries.rows, device), to_device(entries.ids, device), entries.values)
    if (penalties := changes.penalties) is not None:
        pool_row = to_device(penalties.pool_row, device)
        columns = (penalties.repetition, penalties.presence, penalties.frequency)
        factors = [to_device(column, device) for column in columns]
        changed = apply_penalties(
            rows_of(logits, penalties.rows), penalties.prompt_seen[pool_row], _counts(penalties, pool_row), *factors
        )
        logits[to_device(penalties.rows, device)] = changed
    return logits


def _counts(penalties: Penalties, pool_row: Tensor) -> Tensor:
    """int32 [n, V]: how often each id is in the output, the drafts that a row takes for granted included."""
    counts = penalties.output_count[pool_row]
    num_drafts = penalties.num_drafts
    seeing = np.repeat(np.arange(len(num_drafts)), num_drafts)  # a pair for each row and draft
    if len(seeing):
        back = np.arange(len(seeing)) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)
        seen = to_device(penalties.rows[seeing] - back, counts.device)
        at = (to_device(seeing, counts.device), penalties.token[seen])
        counts.index_put_(at, torch.ones_like(seen, dtype=torch.int32), accumulate=True)
    return counts


def apply_bit_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """In place: -inf where a row's bit is 0. rows: int64 [G] rows of `logits` [R, V]; masks: int32 [G, ceil(V / 32)].

    Bit v % 32 of word v // 32 stands for id v; the words are those of a uint32 array.
    """
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()  # [G, V]
    logits[rows] = logits[rows].masked_fill(~allowed, _NEVER)


def add_sparse(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """In place: logits[rows[i], ids[i]] += values[i]. All three are [E].

    A (row, id) may come twice, with a bias and with 0 or -inf: then the order of the additions does not matter.
    """
    logits.index_put_((rows, ids), values, accumulate=True)


def apply_penalties(
    logits: Tensor, prompt_seen: Tensor, output_count: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Penalised logits [R, V]. prompt_seen: bool [R, V]; output_count: int32 [R, V]; the rest: float32 [R]."""
    in_output = output_count > 0
    scaled = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    logits = torch.where(in_output | prompt_seen, scaled, logits)
    logits = logits - presence[:, None] * in_output
    return logits - frequency[:, None] * output_count
