"""`Matcher`: where one request stands in its grammar. Total: every call is allowed at any time.

    advance(token) -> legal?      rollback(n)      mask() -> allowed tokens      forced() -> tokens without alternative

    running ── end token, where the grammar is complete ──► ended: only the end token is allowed from here on

The end token is kept outside of llguidance, so that a rollback across it is a rollback like any other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.compiler import CompiledGrammar
from deepinfer_core.structured.engine import check_matcher

__all__ = ["Matcher"]

type UInt32Mask = NDArray[np.uint32]  # [ceil(V / 32)], bit v % 32 of word v // 32 = token v is allowed


class Matcher:
    """The state of one sequence; a copy costs about 10 µs."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._state = grammar.matcher.deep_copy()
        self._num_ends = 0  # end tokens taken

    def clone(self) -> Matcher:
        """An independent matcher in the same state."""
        copy = Matcher.__new__(Matcher)
        copy._grammar, copy._state, copy._num_ends = self._grammar, self._state.deep_copy(), self._num_ends
        return copy

    @property
    def is_ended(self) -> bool:
        """Whether the end token was taken."""
        return self._num_ends > 0

    @property
    def is_complete(self) -> bool:
        """Whether the text so far satisfies the grammar, so that it may end here."""
        return self.is_ended or self._state.is_accepting()

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing but the end can follow."""
        return self.is_ended or (self._state.is_stopped() and self._state.is_accepting())

    def advance(self, token: int) -> bool:
        """Take a token. False, and nothing changed, if it is not allowed here."""
        if token == self._grammar.vocabulary.eos_token_id:
            if not self.is_complete:
                return False
            self._num_ends += 1
            return True
        if self.is_ended or not 0 <= token < len(self._grammar.vocabulary):
            return False
        taken = self._state.try_consume_tokens([token]) == 1
        check_matcher(self._state)
        return taken

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` that were taken. Raises GrammarError for more than that."""
        ends = min(num_tokens, self._num_ends)
        self._num_ends -= ends
        if num_tokens > ends and not self._state.rollback(num_tokens - ends):
            raise GrammarError(f"{num_tokens} tokens were to be undone, more than were taken")

    def mask(self) -> UInt32Mask:
        """Allowed tokens [ceil(V / 32)], read-only; never empty. Raises GrammarError if they cost too much to find."""
        if self.is_exhausted:
            return self._only_the_end()
        mask = np.frombuffer(self._state.compute_bitmask(), np.uint32)  # llguidance's may be a word longer
        check_matcher(self._state)
        return mask[: self._grammar.vocabulary.num_mask_words]

    def forced(self) -> list[int]:
        """Tokens that must follow, split as the tokenizer would split their text; the end token if nothing else can."""
        if self.is_exhausted:
            return [self._grammar.vocabulary.eos_token_id]
        tokens = list(self._state.compute_ff_tokens())
        check_matcher(self._state)
        return tokens

    def _only_the_end(self) -> UInt32Mask:
        mask = np.zeros(self._grammar.vocabulary.num_mask_words, np.uint32)
        token = self._grammar.vocabulary.eos_token_id
        mask[token // 32] = np.uint32(1 << (token % 32))
        return mask
