"""Where answers end: how many of the drawn tokens of each request belong to it, and why it stops there.

    tokens[n]    a b EOS c   num_tokens 4, limit leaves room for 5   ->  kept 3, STOP
                 a b c   d   num_tokens 4, limit leaves room for 2   ->  kept 2, LENGTH

A token that ends an answer is part of it, and of its usage; what was drawn after it never existed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from deepinfer_core.errors import EngineError
from deepinfer_core.scheduling.plan import Int32Array, Int64Array, StepResult, UInt8Array
from deepinfer_core.scheduling.request import FinishReason
from deepinfer_core.scheduling.slots import SlotTable

__all__ = ["RUNS_ON", "Ending", "check_result", "find_endings"]

RUNS_ON: Final = 0
_STOPPED: Final = 1
_TOO_LONG: Final = 2


@dataclass(slots=True)
class Ending:
    """For N entries: tokens kept [N] and a code [N], `RUNS_ON` or why the request ends after them."""

    kept: Int32Array
    code: UInt8Array
    watched_reasons: dict[int, int | str | None] = field(default_factory=dict[int, int | str | None])

    def stop(self, n: int, kept: int, stop_reason: int | str | None) -> None:
        """A watcher ends entry `n` after `kept` of its tokens."""
        self.kept[n] = kept
        self.code[n] = _STOPPED
        self.watched_reasons[n] = stop_reason

    def reason(self, n: int, tokens: Int64Array) -> tuple[FinishReason, int | str | None]:
        """(why entry `n` ends, the token or string that ended it)."""
        if self.code[n] == _TOO_LONG:
            return FinishReason.LENGTH, None
        if n in self.watched_reasons:
            return FinishReason.STOP, self.watched_reasons[n]
        return FinishReason.STOP, int(tokens[n, self.kept[n] - 1])


def check_result(result: StepResult, table: SlotTable) -> None:
    """Raise EngineError where a device is out of step: an entry of a current request has another position, or no token.

    A placeholder must never become a token.
    """
    current = table.generation[result.slot] == result.generation
    wrong = current & (result.position != table.length[result.slot])
    if wrong.any():
        n = int(np.argmax(wrong))
        slot = int(result.slot[n])
        raise EngineError(
            f"step {result.step}: request {table.number[slot]} expects the token at position {table.length[slot]} "
            f"and the device sent the one at {result.position[n]}"
        )
    columns, count = result.tokens.T, result.num_tokens
    drawn = np.arange(len(columns), dtype=np.int64)[:, None] < count
    if (drawn & (columns < 0)).any() or count.min(initial=1) < 1 or count.max(initial=1) > len(columns):
        raise EngineError(f"step {result.step}: the device sent a placeholder, or nothing, where a token belongs")


def find_endings(table: SlotTable, slots: Int64Array, columns: Int64Array, num_tokens: Int32Array) -> Ending:
    """Apply end-of-sequence, stop token ids and the length limit to columns [W, N], the tokens drawn by `slots` [N]."""
    length, limit = table.length[slots], table.limit[slots]
    order = np.arange(len(columns), dtype=np.int64)[:, None]
    kept = np.minimum(num_tokens, limit - length).astype(np.int32)
    stops = columns == table.eos[slots]
    for ids in table.stop_ids.T:
        stops |= columns == ids[slots]
    stops &= order < kept
    code = np.where(length + kept == limit, np.uint8(_TOO_LONG), np.uint8(RUNS_ON))
    if stops.any():
        stops &= length + order >= table.stop_from[slots]
        stopped = np.flatnonzero(stops.any(axis=0))
        kept[stopped] = np.argmax(stops[:, stopped], axis=0) + 1
        code[stopped] = _STOPPED
    return Ending(kept, code)
