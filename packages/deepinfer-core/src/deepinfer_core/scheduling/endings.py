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
_TOO_LONG: Final = 1
_STOPPED: Final = 2


@dataclass(slots=True)
class Ending:
    """For N entries: tokens kept [N] and a code [N], `RUNS_ON` or why the request ends after them."""

    kept: Int32Array
    code: UInt8Array
    length: Int64Array  # [N] of the request before these tokens
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


def check_result(result: StepResult, slots: Int64Array, columns: Int64Array, table: SlotTable) -> None:
    """Raise EngineError where a device is out of step: an entry of a current request has another position, or no token.

    A placeholder must never become a token. slots [N], columns [W, N]: the tokens, one position a row.
    """
    wrong = result.position != table.length[slots]
    if wrong.any() and (wrong := wrong & (table.generation[slots] == result.generation)).any():
        n = int(np.argmax(wrong))
        slot = int(slots[n])
        raise EngineError(
            f"step {result.step}: request {table.number[slot]} expects the token at position {table.length[slot]} "
            f"and the device sent the one at {result.position[n]}"
        )
    count, placeholders = result.num_tokens, columns < 0
    placeholders &= _order(columns) < count  # behind a rejected draft they belong
    if placeholders.any() or count.min(initial=1) < 1 or count.max(initial=1) > len(columns):
        raise EngineError(f"step {result.step}: the device sent a placeholder, or nothing, where a token belongs")


def find_endings(table: SlotTable, slots: Int64Array, columns: Int64Array, num_tokens: Int32Array) -> Ending:
    """Apply end-of-sequence, stop token ids and the length limit to columns [W, N], the tokens drawn by `slots` [N]."""
    length = table.length[slots]
    room = table.limit[slots] - length
    kept = np.minimum(num_tokens, room).astype(np.int32)
    code = (kept == room).view(np.uint8)  # RUNS_ON or _TOO_LONG
    stops = columns == table.eos[slots]
    for ids in table.stop_ids.T:
        stops |= columns == ids[slots]
    if stops.any():
        order = _order(columns)
        stops &= order < kept
        stops &= length + order >= table.stop_from[slots]
        stopped = stops.any(axis=0).nonzero()[0]
        kept[stopped] = np.argmax(stops[:, stopped], axis=0) + 1
        code[stopped] = _STOPPED
    return Ending(kept, code, length)


def _order(columns: Int64Array) -> Int64Array:
    """[W, 1] the place of each row of columns [W, N] among the tokens of a step."""
    return np.arange(len(columns), dtype=np.int64)[:, None]
