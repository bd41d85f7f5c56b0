"""`GrammarConstraint`: one request's grammar on its way through the scheduler: masks and drafts out, tokens in.

    prompt | I  think  . . .  </think> | {  "a"  :  1  }   <until>  and so on
           | WAITING: free             | INSIDE: masked    | DONE: free
                      `after` is found in the tokens, wherever in a block of drafts it falls

    rows     anchor      draft 1     draft 2      draft 3
    masks    mask(a)     mask(a,1)   mask(a,1,2)  draft 3 is illegal after 1, 2: cut there, forced tokens may follow

`rows` looks ahead and undoes it; `observe` is the only place where the state moves, at the scheduler's commit point.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import EngineError
from deepinfer_core.scheduling.plan import UInt32Mask
from deepinfer_core.scheduling.request import ConstrainedRows, Stop, TokenWatcher
from deepinfer_core.structured.compiler import CompiledGrammar
from deepinfer_core.structured.matcher import Matcher
from deepinfer_core.structured.trigger import Trigger

__all__ = ["GrammarConstraint", "WatcherChain"]


class _Phase(Enum):
    WAITING = "before the trigger"
    INSIDE = "in the grammar"
    DONE = "after the end of the constrained part"


class GrammarConstraint:
    """Implements `Constraint` and `TokenWatcher` of `scheduling/request.py`.

    prompt: the request's prompt; a prompt that ends with `structured.after` starts the grammar at once.
    With `until` the constrained part ends with that token, otherwise with the end of the answer.
    """

    def __init__(self, grammar: CompiledGrammar, structured: StructuredOutput, prompt: Sequence[int] = ()) -> None:
        self._eos = grammar.vocabulary.eos_token_id
        self._until = None if structured.until == self._eos else structured.until
        self._matcher = Matcher(grammar)
        self._trigger = Trigger(structured.after or ())
        self._progress = self._trigger.progress_of(prompt)
        self._phase = _Phase.INSIDE if self._trigger.is_complete(self._progress) else _Phase.WAITING
        self._num_fed: int = 0  # tokens that the matcher has taken
        self._num_tokens = 0

    # ---- Constraint -------------------------------------------------------------------------------------------------

    def rows(self, drafts: Sequence[int], room: int) -> ConstrainedRows:
        """Drafts up to the first illegal one, then forced tokens, `room` at most; a mask for each row."""
        before = self._phase, self._progress, self._num_fed
        kept: list[int] = []
        masks = [self._mask()]
        try:
            self._walk(drafts[:room], kept, masks)
            while len(kept) < room and self._walk(self._forced()[: room - len(kept)], kept, masks):
                pass  # the end token may be forced behind the last forced text
        finally:
            self._phase, self._progress, num_fed = before
            self._matcher.rollback(self._num_fed - num_fed)
            self._num_fed = num_fed
        return ConstrainedRows(kept, masks)

    def _walk(self, tokens: Sequence[int], kept: list[int], masks: list[UInt32Mask | None]) -> int:
        """Take `tokens` as far as they are legal; returns how many. After the end token there is nothing to draft."""
        num_before = len(kept)
        for token in tokens:
            if self._has_ended or not self._take(token):
                break
            kept.append(token)
            masks.append(self._mask())
        return len(kept) - num_before

    def _forced(self) -> list[int]:
        if self._phase is not _Phase.INSIDE or self._has_ended:
            return []
        forced = self._matcher.forced()
        return [self._until] if forced == [self._eos] and self._until is not None else forced

    # ---- TokenWatcher -----------------------------------------------------------------------------------------------

    def observe(self, tokens: Sequence[int]) -> Stop | None:
        """Commit tokens. The end token ends the answer even where `ignore_eos` is set: nothing else could follow."""
        for count, token in enumerate(tokens, 1):
            if not self._take(token):
                raise EngineError(
                    f"output token {self._num_tokens} is {token}, which the grammar does not allow there; its mask was "
                    "not applied"
                )
            self._num_tokens += 1
            if self._has_ended:
                return Stop(count, self._eos)
        return None

    # ---- one token --------------------------------------------------------------------------------------------------

    def _take(self, token: int) -> bool:
        """Move by one token. False, and nothing changed, if it is not allowed."""
        if self._phase is _Phase.WAITING:
            self._progress = self._trigger.advance(self._progress, token)
            if self._trigger.is_complete(self._progress):
                self._phase = _Phase.INSIDE
            return True
        if self._phase is _Phase.DONE:
            return True
        if self._until is not None and token == self._eos:
            return False
        if token == self._until and self._matcher.is_complete:  # before, it is a token like any other
            self._phase = _Phase.DONE
            return True
        taken = self._matcher.advance(token)
        self._num_fed += int(taken)
        return taken

    @property
    def _has_ended(self) -> bool:
        return self._phase is _Phase.INSIDE and self._matcher.is_ended

    def _mask(self) -> UInt32Mask | None:
        """Allowed tokens of the next row, None = all."""
        if self._phase is not _Phase.INSIDE:
            return None
        mask = self._matcher.mask()
        if self._until is None:
            return mask
        mask = mask.copy()
        mask[self._eos // 32] &= np.uint32(~(1 << (self._eos % 32)) & 0xFFFFFFFF)
        if self._matcher.is_complete:
            mask[self._until // 32] |= np.uint32(1 << (self._until % 32))
        return mask


class WatcherChain:
    """Several watchers as one: each sees every token; the earliest stop counts."""

    def __init__(self, watchers: Sequence[TokenWatcher]) -> None:
        self._watchers = watchers

    def observe(self, tokens: Sequence[int]) -> Stop | None:
        """See `TokenWatcher`."""
        earliest: Stop | None = None
        for watcher in self._watchers:
            stop = watcher.observe(tokens)
            if stop is not None:
                earliest, tokens = stop, tokens[: stop.num_tokens]
        return earliest
