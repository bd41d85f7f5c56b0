"""The constraint of a request: masks and drafts out, tokens in, and nothing but commits moves it."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import EngineError, GrammarError
from deepinfer_core.scheduling.request import ConstrainedRows, Stop
from deepinfer_core.structured import GrammarCompiler, GrammarConstraint, Matcher, WatcherChain
from deepinfer_core.text import Tokenizer
from tests.core.structured.driver import allowed_ids

_EOS = 256  # of the byte vocabulary
_THINK_END = [ord("]"), ord("]"), ord(")")]


def _constraint(compiler: GrammarCompiler, structured: StructuredOutput, prompt: bytes = b"") -> GrammarConstraint:
    return GrammarConstraint(compiler.compile(structured), structured, list(prompt))


def _allowed(rows: ConstrainedRows, row: int) -> list[int] | None:
    mask = rows.masks[row]
    return None if mask is None else allowed_ids(mask, 257).tolist()


def test_every_draft_row_has_the_mask_of_what_comes_before_it(byte_grammars: GrammarCompiler) -> None:
    constraint = _constraint(byte_grammars, StructuredOutput(choice=["abc", "abd", "xyz"]))
    rows = constraint.rows(list(b"ab"), 2)
    assert list(rows.drafts) == list(b"ab")
    assert [_allowed(rows, row) for row in range(3)] == [[*b"ax"], [*b"b"], [*b"cd"]]


def test_drafts_are_cut_at_the_first_illegal_one_and_forced_tokens_follow(byte_grammars: GrammarCompiler) -> None:
    constraint = _constraint(byte_grammars, StructuredOutput(choice=["abc", "xyz"]))
    rows = constraint.rows(list(b"aqqqq"), 5)
    assert list(rows.drafts) == [*b"abc", _EOS]
    assert [_allowed(rows, row) for row in range(5)] == [[*b"ax"], [*b"b"], [*b"c"], [_EOS], [_EOS]]
    assert list(constraint.rows(list(b"aqqqq"), 2).drafts) == list(b"ab")


def test_without_room_there_is_only_the_mask_of_the_anchor(byte_grammars: GrammarCompiler) -> None:
    rows = _constraint(byte_grammars, StructuredOutput(choice=["abc"])).rows([], 0)
    assert list(rows.drafts) == []
    assert _allowed(rows, 0) == [*b"a"]


def test_looking_ahead_changes_nothing(byte_grammars: GrammarCompiler) -> None:
    structured = StructuredOutput(json={"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}})
    constraint = _constraint(byte_grammars, structured)
    for _ in range(3):
        before = [_allowed(constraint.rows([], 0), 0)]
        rows = constraint.rows([*b'{"a":"x"}', _EOS, _EOS], 20)
        assert list(rows.drafts) == [*b'{"a":"x"}', _EOS]
        assert [_allowed(constraint.rows([], 0), 0)] == before
    assert constraint.observe(list(b'{"a":"yy"}')) is None
    assert list(constraint.rows([], 3).drafts) == [_EOS]


def test_the_grammar_starts_after_the_trigger_wherever_in_the_drafts_it_falls(byte_grammars: GrammarCompiler) -> None:
    structured = StructuredOutput(choice=["yes"], after=_THINK_END)
    for lead in (b"", b"h", b"]]", b"]]]"):
        constraint = _constraint(byte_grammars, structured)
        rows = constraint.rows(list(lead + b"]])yes!"), 20)
        assert list(rows.drafts) == [*(lead + b"]])yes"), _EOS]
        free = len(lead) + 3
        assert all(_allowed(rows, row) is None for row in range(free))
        assert _allowed(rows, free) == [*b"y"]


def test_the_trigger_may_arrive_over_several_commits(byte_grammars: GrammarCompiler) -> None:
    constraint = _constraint(byte_grammars, StructuredOutput(choice=["yes"], after=_THINK_END))
    for token in b"x]]]":
        assert constraint.observe([token]) is None
        assert _allowed(constraint.rows([], 0), 0) is None
    assert constraint.observe([ord(")"), ord("y")]) is None
    assert _allowed(constraint.rows([], 0), 0) == [*b"e"]


@pytest.mark.parametrize(
    ("prompt", "starts"), [(b"", False), (b"a]])", True), (b"a]])b", False), (b"]]) and ]]", False)]
)
def test_a_prompt_that_ends_with_the_trigger_starts_the_grammar(
    prompt: bytes, starts: bool, byte_grammars: GrammarCompiler
) -> None:
    constraint = _constraint(byte_grammars, StructuredOutput(choice=["yes"], after=_THINK_END), prompt)
    assert _allowed(constraint.rows([], 0), 0) == ([*b"y"] if starts else None)


def test_a_trigger_that_the_prompt_began_goes_on_in_the_answer(byte_grammars: GrammarCompiler) -> None:
    constraint = _constraint(byte_grammars, StructuredOutput(choice=["yes"], after=_THINK_END), b"x]]")
    constraint.observe([ord(")")])
    assert _allowed(constraint.rows([], 0), 0) == [*b"y"]


def test_the_bound_token_ends_the_constrained_part(byte_grammars: GrammarCompiler) -> None:
    bound = ord("#")
    constraint = _constraint(byte_grammars, StructuredOutput(regex="a+", until=bound))
    assert _allowed(constraint.rows([], 0), 0) == [*b"a"]
    constraint.observe([*b"aa"])
    assert _allowed(constraint.rows([], 0), 0) == sorted([bound, *b"a"])
    rows = constraint.rows(list(b"a#free"), 9)
    assert list(rows.drafts) == list(b"a#free")
    assert [_allowed(rows, row) is None for row in range(7)] == [False, False, True, True, True, True, True]
    assert constraint.observe([bound, *b"text", _EOS]) is None
    assert _allowed(constraint.rows([], 0), 0) is None


def test_the_bound_token_may_be_part_of_the_grammar_and_ends_it_where_it_is_complete(
    byte_grammars: GrammarCompiler,
) -> None:
    bound = ord(".")
    constraint = _constraint(byte_grammars, StructuredOutput(regex='"[a.]*"[.a]*', until=bound))
    rows = constraint.rows(list(b'".a."..'), 9)
    assert list(rows.drafts) == list(b'".a."..')
    assert [_allowed(rows, row) is None for row in range(8)] == [False] * 6 + [True] * 2
    assert constraint.observe([*b'".a."']) is None
    assert _allowed(constraint.rows([], 0), 0) == sorted(b".a")
    assert constraint.observe([bound, *b"free"]) is None
    assert _allowed(constraint.rows([], 0), 0) is None


def test_the_bound_token_is_forced_where_nothing_else_can_come(byte_grammars: GrammarCompiler) -> None:
    constraint = _constraint(byte_grammars, StructuredOutput(choice=["ab"], until=ord("#")))
    assert list(constraint.rows([], 5).drafts) == list(b"ab#")
    constraint.observe([*b"ab"])
    rows = constraint.rows([], 5)
    assert list(rows.drafts) == [ord("#")]
    assert _allowed(rows, 0) == [ord("#")]


def test_the_end_token_ends_the_answer(byte_grammars: GrammarCompiler) -> None:
    constraint = _constraint(byte_grammars, StructuredOutput(regex="a+"))
    assert constraint.observe([*b"aa", _EOS, *b"junk"]) == Stop(3, _EOS)
    assert _allowed(constraint.rows(list(b"a"), 1), 0) == [_EOS]


def test_a_token_against_the_grammar_is_an_error(byte_grammars: GrammarCompiler) -> None:
    constraint = _constraint(byte_grammars, StructuredOutput(regex="ab"))
    with pytest.raises(EngineError, match="output token 1 is 99"):
        constraint.observe([*b"ac"])


def test_a_matcher_can_be_used_after_its_end_and_rolled_back_across_it(byte_grammars: GrammarCompiler) -> None:
    matcher = Matcher(byte_grammars.compile(StructuredOutput(regex="ab?")))
    assert [matcher.advance(token) for token in (ord("a"), _EOS, ord("b"), _EOS, 9_999)] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert matcher.forced() == [_EOS]
    assert allowed_ids(matcher.mask(), 257).tolist() == [_EOS]
    matcher.rollback(2)
    assert allowed_ids(matcher.mask(), 257).tolist() == [ord("b"), _EOS]
    copy = matcher.clone()
    assert copy.advance(ord("b"))
    assert not copy.advance(ord("b"))
    assert allowed_ids(matcher.mask(), 257).tolist() == [ord("b"), _EOS]
    with pytest.raises(GrammarError, match="more than were taken"):
        matcher.rollback(5)


def test_special_tokens_never_stand_for_their_spelling(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    control = tokenizer.decode([0], skip_special_tokens=False)
    constraint = GrammarConstraint(
        compiler.compile(StructuredOutput(choice=[control])), StructuredOutput(choice=[control])
    )
    tokens: list[int] = []
    while (stop := constraint.observe(tokens[-1:])) is None:
        mask = constraint.rows([], 0).masks[0]
        assert mask is not None
        tokens.append(int(allowed_ids(mask, tokenizer.num_tokens)[0]))
    assert stop.num_tokens == 1
    assert not tokenizer.special_ids & set(tokens[:-1])
    assert tokenizer.decode(tokens) == control


def test_forced_tokens_are_split_as_the_tokenizer_splits_them(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structured = StructuredOutput(json={"const": {"Hello": "the world"}})
    drafts = list(GrammarConstraint(compiler.compile(structured), structured).rows([], 99).drafts)
    assert drafts[-1] == tokenizer.eos_token_id
    assert drafts[:-1] == tokenizer.encode(tokenizer.decode(drafts[:-1]), add_bos=False)


def test_masks_are_as_wide_as_the_vocabulary(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structured = StructuredOutput(json_object=True)
    mask = GrammarConstraint(compiler.compile(structured), structured).rows([], 0).masks[0]
    assert mask is not None
    assert (mask.dtype, mask.shape) == (np.uint32, ((tokenizer.num_tokens + 31) // 32,))


class _StopsAt:
    def __init__(self, token: int) -> None:
        self.token, self.seen = token, list[int]()

    def observe(self, tokens: list[int]) -> Stop | None:
        self.seen += tokens
        return Stop(tokens.index(self.token) + 1, "found") if self.token in tokens else None


def test_of_several_watchers_the_earliest_stop_counts() -> None:
    first, second = _StopsAt(7), _StopsAt(5)
    chain = WatcherChain([first, second])
    assert chain.observe([1, 2]) is None
    assert chain.observe([4, 5, 6, 7, 8]) == Stop(2, "found")
    assert first.seen == [1, 2, 4, 5, 6, 7, 8]
    assert second.seen == [1, 2, 4, 5, 6, 7]
