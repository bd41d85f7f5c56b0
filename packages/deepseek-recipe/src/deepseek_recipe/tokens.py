"""The special tokens of the prompt format and a table of their spellings that a caller may change."""

from __future__ import annotations

from deepseek_recipe import protocol_data
from deepseek_recipe.checks import require_instance, require_str
from deepseek_recipe.enums import NamedEnum

__all__ = ["DEFAULT_SPECIAL_TOKENS", "SpecialToken", "SpecialTokens"]


class SpecialToken(NamedEnum):
    """The role of a special token in a prompt."""

    Bos = "bos"
    Eos = "eos"
    ThinkingStart = "thinking_start"
    ThinkingEnd = "thinking_end"
    System = "system"
    User = "user"
    Assistant = "assistant"
    LatestReminder = "latest_reminder"
    Dsml = "dsml"
    Image = "image"
    Ref = "ref"
    RefEnd = "ref_end"
    Box = "box"
    BoxEnd = "box_end"
    Point = "point"
    PointEnd = "point_end"
    Polygon = "polygon"
    PolygonEnd = "polygon_end"

    def default_str(self) -> str:
        """The spelling that the released models use."""
        return protocol_data.SPECIAL_TOKEN_SPELLINGS[self.name]


class SpecialTokens:
    """An immutable table role → spelling. A spelling that is not given is the default one."""

    __slots__ = ("_spellings",)

    def __init__(
        self,
        *,
        bos: str | None = None,
        eos: str | None = None,
        thinking_start: str | None = None,
        thinking_end: str | None = None,
        system: str | None = None,
        user: str | None = None,
        assistant: str | None = None,
        latest_reminder: str | None = None,
        dsml: str | None = None,
        image: str | None = None,
        ref: str | None = None,
        ref_end: str | None = None,
        box: str | None = None,
        box_end: str | None = None,
        point: str | None = None,
        point_end: str | None = None,
        polygon: str | None = None,
        polygon_end: str | None = None,
    ) -> None:
        given = locals()
        spellings: dict[SpecialToken, str] = {}
        for token in SpecialToken:
            spelling = given[token.value]
            require_str(token.value, spelling, optional=True)
            spellings[token] = token.default_str() if spelling is None else spelling
        self._spellings = spellings

    def token(self, token: SpecialToken) -> str:
        """The spelling of `token` in this table."""
        return self._spellings[require_instance("token", token, SpecialToken)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecialTokens) and self._spellings == other._spellings

    def __hash__(self) -> int:
        return hash(tuple(self._spellings.values()))

    def __repr__(self) -> str:
        changed = [f"{t.value}={s!r}" for t, s in self._spellings.items() if s != t.default_str()]
        return f"SpecialTokens({', '.join(changed)})"


DEFAULT_SPECIAL_TOKENS = SpecialTokens()
