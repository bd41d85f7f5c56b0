r"""The pre-tokenizer of DeepSeek V3 to V4.1 as one regular expression of the standard library.

tokenizer.json splits text in three stages: digits in groups of up to three; runs U of ideographs and kana; and

    [ASCII punctuation][A-Za-z]+ | [^\r\n L P S]?[L M]+ | " "?[P S]+[\r\n]* | \s*[\r\n]+ | \s+(?!\S) | \s+

within what is left. A later stage does not see across the borders of an earlier one, so in one expression a digit or a
character of U counts as the end of the text for the others, and U has its own alternatives. What a character is (L, M,
N, P, S, white space) is settled for the blocks of `_SETTLED`; text with any other character is left to the backend,
so a new Unicode version cannot make the two disagree.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from deepseek_recipe.json_text import is_array, is_object

__all__ = ["Pretokenizer", "ascii_twin", "matches_pretokenizer"]

# Stage 3, with ⏎ for a carriage return and a line feed, which the file holds as they are.
_WORDS: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^⏎\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[⏎]*|\s*[⏎]+|\s+(?!\S)|\s+"
)
_STAGES: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _WORDS.replace("⏎", "\r\n"),
)
_UNION_RANGES: Final = ((0x4E00, 0x9FA6), (0x3040, 0x3100))
_SETTLED: Final = (
    (0x0020, 0x007F),  # ASCII
    (0x00A0, 0x00AD),  # Latin
    (0x00AE, 0x0250),
    (0x0300, 0x0363),  # combining marks
    (0x0391, 0x03A2),  # Greek
    (0x03A3, 0x03CF),
    (0x0400, 0x0482),  # Cyrillic
    (0x048A, 0x0510),
    (0x05D0, 0x05EB),  # Hebrew letters
    (0x0621, 0x064B),  # Arabic letters
    (0x0904, 0x093A),  # Devanagari letters
    (0x0E01, 0x0E3B),  # Thai
    (0x1E00, 0x1F00),  # Latin and Vietnamese
    (0x2010, 0x2028),  # dashes, quotation marks
    (0x2030, 0x205F),
    (0x2070, 0x2072),  # superscripts and subscripts
    (0x2074, 0x208F),
    (0x20A0, 0x20B6),  # currency
    (0x2100, 0x214C),  # letter-like symbols, number forms
    (0x2150, 0x2185),
    (0x2190, 0x23E9),  # arrows, mathematics, technical
    (0x2460, 0x269D),  # enclosed numbers, boxes, shapes, symbols
    (0x2701, 0x2705),  # dingbats
    (0x2706, 0x270A),
    (0x270C, 0x2728),
    (0x2729, 0x274C),
    (0x2758, 0x2795),
    (0x2798, 0x27B0),
    (0x27D0, 0x27E0),  # mathematics, brackets, arrows
    (0x27E6, 0x2B4D),
    (0x3000, 0x3030),  # CJK punctuation
    (0x3041, 0x3097),  # kana
    (0x3099, 0x3100),
    (0x4E00, 0x9FA6),  # ideographs
    (0xAC00, 0xD7A4),  # Hangul
    (0xFF01, 0xFFBF),  # full-width forms
    (0x1F300, 0x1F321),  # emoji
    (0x1F330, 0x1F336),
    (0x1F337, 0x1F37D),
    (0x1F380, 0x1F394),
    (0x1F3A0, 0x1F3C5),
    (0x1F3E0, 0x1F3F1),
    (0x1F400, 0x1F43F),
    (0x1F442, 0x1F4F8),
    (0x1F4F9, 0x1F4FD),
    (0x1F500, 0x1F53E),
    (0x1F600, 0x1F641),
    (0x1F680, 0x1F6C6),
)
_BREAKS: Final = "\r\n"
_BLANKS: Final = "\t\x0b\x0c \xa0\u3000"  # the settled white space that is no line break
_PUNCTUATION: Final = "!-/:-@\\[-`{-~"
_ASCII_PIECE: Final = (
    rf"[{_PUNCTUATION}][A-Za-z]+|[^\r\n!-~]?[A-Za-z]+|[0-9]{{1,3}}| ?[{_PUNCTUATION}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?![^\s0-9])|\s+"
)
_SAFE_BORDER: Final = re.compile(
    "[A-Za-z](?= [A-Za-z])|\n(?=[A-Za-z])|[A-Za-z](?=[0-9])|[\u4e00-\u9fa5](?=[\uff0c\u3002])"
)


def matches_pretokenizer(spec: Any) -> bool:
    """Whether the `pre_tokenizer` of a tokenizer.json is the one of this module."""
    splits = [
        {"type": "Split", "pattern": {"Regex": stage}, "behavior": "Isolated", "invert": False} for stage in _STAGES
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    if not is_object(spec) or spec.get("type") != "Sequence" or not is_array(spec.get("pretokenizers")):
        return False
    found = [{k: v for k, v in stage.items() if k != "trim_offsets"} for stage in spec["pretokenizers"]]
    return json.dumps(found, sort_keys=True) == json.dumps([*splits, byte_level], sort_keys=True)


def ascii_twin(backend: Backend) -> Backend:
    """A tokenizer of the same model that splits ASCII text alike, by one expression in place of three stages."""
    twin = Backend(backend.model)
    split = pre_tokenizers.Split(Regex(_ASCII_PIECE), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    twin.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return twin


class Pretokenizer:
    """Splits text into the pieces that byte-pair encoding works on."""

    def __init__(self) -> None:
        self._findall = _expression().findall

    def pieces(self, text: str) -> list[str] | None:
        """The pieces of `text` in order, or None when it holds a character that is not settled."""
        pieces: list[str] = self._findall(text)
        return pieces if "".join(pieces) == text else None

    def chunks(self, text: str, chunk_chars: int) -> Iterator[str]:
        """`text` in chunks of about `chunk_chars` characters, cut where no piece can cross.

        Such borders are: behind a letter, before a blank and a letter; behind a line break, before a letter; behind a
        letter, before a digit; behind an ideograph, before a comma or a full stop. Without any the text stays whole.
        """
        start = 0
        while len(text) - start > 2 * chunk_chars:
            border = _SAFE_BORDER.search(text, start + chunk_chars)
            if border is None:
                break
            yield text[start : border.end()]
            start = border.end()
        yield text[start:] if start else text


@lru_cache(maxsize=1)
def _expression() -> re.Pattern[str]:
    by_class: dict[str, list[int]] = {}
    for code in sorted(code for low, high in _SETTLED for code in range(low, high)):
        in_union = any(low <= code < high for low, high in _UNION_RANGES)
        kind = unicodedata.category(chr(code))[0]
        by_class.setdefault(("u" if in_union else "") + kind, []).append(code)

    def members(*classes: str) -> str:
        return _ranges(code for name in classes for code in by_class.get(name, ()))

    word, mark, digit = members("L", "M"), members("P", "S"), members("N")
    union_word, union_mark = members("uL", "uM"), members("uP", "uS")
    blank, union = _BLANKS, _ranges(code for low, high in _UNION_RANGES for code in range(low, high))
    return re.compile(
        "|".join(
            (
                f"[{_PUNCTUATION}][A-Za-z]+",
                f"[{blank}]?[{word}]+",
                f"[{digit}]{{1,3}}",
                f" ?[{mark}]+[{_BREAKS}]*",
                f"[{union_word}]+",
                f"[{union_mark}]+",
                f"[{blank}{_BREAKS}]*[{_BREAKS}]+",
                f"[{blank}{_BREAKS}]+(?![^{blank}{_BREAKS}{digit}{union}])",
                f"[{blank}{_BREAKS}]+",
            )
        )
    )


def _ranges(codes: Iterable[int]) -> str:
    """The inside of a character class."""
    out: list[str] = []
    ordered = sorted(codes)
    start = 0
    for index, code in enumerate(ordered):
        if index + 1 == len(ordered) or ordered[index + 1] != code + 1:
            first, last = re.escape(chr(ordered[start])), re.escape(chr(code))
            out.append(first if start == index else f"{first}-{last}")
            start = index + 1
    return "".join(out)
