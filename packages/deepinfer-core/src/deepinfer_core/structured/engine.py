"""The only module that touches llguidance: its tokenizer, its limits, and a matcher from a converted grammar.

llguidance never raises for what a user wrote: a matcher enters an error state, which `start_matcher` turns into a
GrammarError. It is imported when the first grammar is compiled.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from deepinfer_core.errors import GrammarError
from deepinfer_core.structured import limits
from deepinfer_core.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["build_tokenizer", "check_matcher", "rehearse", "start_matcher"]

_MAX_REASON_CHARS = 400


class _TokenSource:
    """The shape in which llguidance takes a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self.eos_token_id = vocabulary.eos_token_id
        self.bos_token_id = None
        self.encode: Callable[[str], list[int]] | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        if self.encode is None or not isinstance(text, str):  # llguidance tries bytes first
            raise TypeError("text is a str, once the encoder is set")
        return self.encode(text)


def build_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None = None) -> LLTokenizer:
    """llguidance's view of a vocabulary. encode: how the model's tokenizer splits text, for forced tokens; None = the
    longest token first.

    Takes about 0.7 s for 129,280 tokens.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    source = _TokenSource(vocabulary)
    tokenizer = LLTokenizer(TokenizerWrapper(source), n_vocab=len(vocabulary), eos_token=vocabulary.eos_token_id)
    source.encode = tokenizer.greedy_tokenize if encode is None else encode
    return tokenizer


def start_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of `grammar`, with its first mask computed. Raises GrammarError with the reason."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(
        tokenizer,
        grammar,
        log_level=0,
        limits=LLParserLimits(
            max_items_in_row=limits.MAX_EARLEY_ROW,
            initial_lexer_fuel=limits.MAX_LEXER_FUEL,
            step_lexer_fuel=limits.MAX_LEXER_FUEL_A_MASK,
            step_max_items=limits.MAX_EARLEY_ITEMS_A_MASK,
            max_lexer_states=limits.MAX_LEXER_STATES,
            max_grammar_size=limits.MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        ),
    )
    check_matcher(matcher)
    matcher.compute_bitmask()
    check_matcher(matcher)
    return matcher


def rehearse(matcher: LLMatcher, vocabulary: Vocabulary) -> None:
    """Walk a copy of `matcher` along random allowed tokens. Raises GrammarError for a dead end, or if it takes long."""
    copy = matcher.deep_copy()
    started_s = time.thread_time()
    rng = np.random.default_rng(0)
    for _ in range(limits.REHEARSED_TOKENS):
        if copy.is_stopped():
            break
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(copy.compute_bitmask(), np.uint8), bitorder="little"))
        check_matcher(copy)
        allowed = allowed[allowed != vocabulary.eos_token_id]
        if len(allowed) == 0:
            break
        copy.consume_token(int(rng.choice(allowed)))
        check_matcher(copy)
        if time.thread_time() - started_s > limits.MAX_REHEARSAL_S:
            raise GrammarError(
                f"the grammar takes more than {limits.MAX_REHEARSAL_S / limits.REHEARSED_TOKENS * 1e3:.0f} ms a token, "
                "and all requests would wait for it; make it less ambiguous, or its counts smaller"
            )


def check_matcher(matcher: LLMatcher) -> None:
    """Raise GrammarError if the matcher is in its error state."""
    if matcher.is_error():
        reason = re.sub(r"\s+", " ", cast("Any", matcher.get_error())).strip()
        if "coerce_one_of" in reason:  # an option of llguidance that nobody can set here
            reason = "branches of oneOf may overlap; make them exclusive, by a type or a const, or use anyOf"
        elif reason.startswith("NoExtensionBias"):
            reason = "no text satisfies it"
        if len(reason) > _MAX_REASON_CHARS:  # what is wrong stands at the end, after the text it is wrong in
            reason = f"{reason[: _MAX_REASON_CHARS // 2]} ... {reason[-_MAX_REASON_CHARS // 2 :]}"
        raise GrammarError(f"the grammar cannot be enforced: {reason}")
