r"""`rules_to_lark`: rules over characters as llguidance's Lark dialect, with exactly the language that they had.

llguidance splits text with a lexer that takes the longest lexeme, then parses lexemes. A grammar over characters knows
no lexemes, so they are chosen such that "longest" never makes a difference:

    root ::= [a-z]+ "b"               no recursion: the whole grammar is one lexeme, a regular expression
    root ::= "(" root ")" | [0-9]+    [0-9]+ would be taken at its longest: split, one lexeme a character
                                      "(" and ")" stay lexemes

A set of lexemes is safe if no word of one is a proper prefix of a word of another or of the same. Starting with the
largest regular parts, those that break the rule are split until none does; single characters never break it.
"""

from __future__ import annotations

from typing import Final

from deepinfer_core.errors import GrammarError
from deepinfer_core.structured.automaton import Automaton, AutomatonTooLarge, has_proper_prefix
from deepinfer_core.structured.limits import MAX_NESTING
from deepinfer_core.structured.rules import (
    Chars,
    Choice,
    Expression,
    Reference,
    Repeat,
    Rules,
    Sequence,
    children,
    num_fixed,
    references_in,
)

__all__ = ["rules_to_lark"]

_MAX_INLINED: Final = 20_000  # parts of a regular expression with its references written out
_EMPTY: Final = Sequence(())


def rules_to_lark(rules: Rules) -> tuple[str, int]:
    """Lark text with a rule "start", and how many characters a lexeme may fix.

    Raises GrammarError if no finite text can be derived from "root".
    """
    rules = _productive(rules)
    regular = _regular_rules(rules)
    if "root" in regular:
        return f"start: {_LexemeText().of(regular['root'])}\n", num_fixed(regular["root"])
    split: set[Expression] = set()
    while True:
        writer = _Writer(rules, regular, split)
        text = writer.text()
        clashes = _clashes(list(writer.lexemes))
        if not clashes:
            return text, max(map(num_fixed, writer.lexemes))
        split |= clashes


def _productive(rules: Rules) -> Rules:
    """Without the alternatives that never come to an end."""
    known: set[str] = set()

    def ends(expression: Expression) -> bool:
        match expression:
            case Reference(name):
                return name in known
            case Choice(options):
                return any(ends(option) for option in options)
            case Repeat(item, low):
                return low == 0 or ends(item)
            case _:
                return all(ends(child) for child in children(expression))

    def pruned(expression: Expression) -> Expression:
        match expression:
            case Choice(options):
                return Choice(tuple(pruned(option) for option in options if ends(option)))
            case Sequence(items):
                return Sequence(tuple(pruned(item) for item in items))
            case Repeat(item, low, high):
                return Repeat(pruned(item), low, high) if ends(item) else _EMPTY
            case _:
                return expression

    pending = list(rules)
    while True:
        left: list[str] = []
        for name in reversed(pending):  # back and forth: chains are followed in one round
            if ends(rules[name]):
                known.add(name)
            else:
                left.append(name)
        if len(left) == len(pending):
            break
        pending = left
    if "root" not in known:
        raise GrammarError("structured.grammar never comes to an end: every text that root derives is endless")
    return {name: pruned(body) for name, body in rules.items() if name in known}


def _regular_rules(rules: Rules) -> dict[str, Expression]:
    """Rules that use no recursion, with their references written out, as far as they stay small."""
    regular: dict[str, Expression] = {}
    sizes: dict[str, int] = {}
    users: dict[str, set[str]] = {}
    missing = {name: set(references_in(body)) for name, body in rules.items()}
    for name, used in missing.items():
        for other in used:
            users.setdefault(other, set()).add(name)
    ready = [name for name, used in missing.items() if not used]
    while ready:
        name = ready.pop()
        sizes[name] = _size(rules[name], sizes)
        if sizes[name] > _MAX_INLINED:
            continue
        regular[name] = _inlined(rules[name], regular)
        for user in users.get(name, ()):
            missing[user].discard(name)
            if not missing[user]:
                ready.append(user)
    return regular


def _size(expression: Expression, sizes: dict[str, int]) -> int:
    if isinstance(expression, Reference):
        return sizes[expression.name]
    return 1 + sum(_size(child, sizes) for child in children(expression))


def _inlined(expression: Expression, regular: dict[str, Expression]) -> Expression:
    match expression:
        case Reference(name):
            return regular[name]
        case Sequence(items):
            return Sequence(tuple(_inlined(item, regular) for item in items))
        case Choice(options):
            return Choice(tuple(_inlined(option, regular) for option in options))
        case Repeat(item, low, high):
            return Repeat(_inlined(item, regular), low, high)
        case Chars():
            return expression


def _clashes(lexemes: list[Expression]) -> set[Expression]:
    """Lexemes that go on where a lexeme, themselves included, could end: they have to be split."""
    automata: dict[Expression, Automaton] = {}
    clashes = {lexeme for lexeme in lexemes if _may_be_empty(lexeme)}
    if clashes:  # the empty text is a prefix of everything, so the others can't be judged yet
        return clashes
    for lexeme in lexemes:
        try:
            automata[lexeme] = Automaton(lexeme)
        except AutomatonTooLarge:
            clashes.add(lexeme)
    for longer, automaton in automata.items():
        try:
            if not isinstance(longer, Chars) and any(has_proper_prefix(a, automaton) for a in automata.values()):
                clashes.add(longer)
        except AutomatonTooLarge:
            clashes.add(longer)
    return clashes


def _may_be_empty(expression: Expression) -> bool:
    match expression:
        case Chars() | Reference():
            return False
        case Choice(options):
            return any(_may_be_empty(option) for option in options)
        case Repeat(item, low):
            return low == 0 or _may_be_empty(item)
        case Sequence(items):
            return all(_may_be_empty(item) for item in items)


class _Writer:
    """Writes rules; collects the regular parts that it wrote as lexemes."""

    def __init__(self, rules: Rules, regular: dict[str, Expression], split: set[Expression]) -> None:
        self._rules, self._regular, self._split = rules, regular, split
        self._names = {name: f"r{index}" for index, name in enumerate(rules)}
        self._wanted: list[str] = []
        self.lexemes: dict[Expression, str] = {}

    def text(self) -> str:
        lines = [f"start: {self._of(Reference('root'))}"]
        done = 0
        while done < len(self._wanted):
            name = self._wanted[done]
            lines.append(f"{self._names[name]}: {self._of(self._rules[name])}")
            done += 1
        lines += [f"{name}: {_LexemeText().of(lexeme)}" for lexeme, name in self.lexemes.items()]
        return "\n".join(lines) + "\n"

    def _of(self, expression: Expression) -> str:
        lexeme = self._lexeme(expression)
        if lexeme is not None:
            return lexeme
        match expression:
            case Reference(name):
                if name not in self._wanted:
                    self._wanted.append(name)
                return self._names[name]
            case Sequence(items):
                return f"({' '.join(self._of(item) for item in items)})" if items else '""'
            case Choice(options):
                return f"({' | '.join(self._of(option) for option in options)})"
            case Repeat(item, low, high):
                return f"({self._of(item)}){_quantifier(low, high)}"
            case Chars():
                raise ValueError("a character is always a lexeme")

    def _lexeme(self, expression: Expression) -> str | None:
        """The name of the lexeme that stands for `expression`; None if it has to be written as a rule."""
        if any(name not in self._regular for name in references_in(expression)):
            return None
        written_out = _inlined(expression, self._regular)
        if written_out in self._split or written_out == _EMPTY:
            return None
        return self.lexemes.setdefault(written_out, f"T{len(self.lexemes)}")


def _quantifier(low: int, high: int | None) -> str:
    if high is None and low < 2:
        return "+" if low else "*"
    return f"{{{low},{'' if high is None else high}}}"


class _LexemeText:
    """A regular expression as llguidance writes it, `/.../`."""

    def of(self, expression: Expression) -> str:
        return f"/{self._of(expression, 0)}/"

    def _of(self, expression: Expression, depth: int) -> str:
        if depth > 4 * MAX_NESTING:
            raise GrammarError("structured.grammar refers to rules through too many others; flatten it")
        match expression:
            case Chars(ranges):
                return "[" + "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in ranges) + "]"
            case Sequence(items):
                return "".join(self._of(item, depth + 1) for item in items)
            case Choice(options):
                return "(?:" + "|".join(self._of(option, depth + 1) for option in options) + ")"
            case Repeat(item, low, high):
                return f"(?:{self._of(item, depth + 1)}){_quantifier(low, high)}"
            case Reference(name):
                raise ValueError(f"{name} is a reference")
