"""The text of a message built from parts: joined by a blank line, images as placeholders."""

from __future__ import annotations

from typing import Any

from deepseek_recipe.images.sources import ImageSource
from deepseek_recipe.tokens import SpecialToken

__all__ = ["ContentBuilder"]

_JOINT = "\n\n"
_DEFAULT_IMAGE = SpecialToken.Image.default_str()


class ContentBuilder:
    """Collects the parts of one message.

    The places of the placeholders are known, so a literal spelling of the image token in a text part stays text.
    """

    __slots__ = ("_image", "_length", "_offsets", "_parts", "sources")

    def __init__(self, image: str) -> None:
        self._image = image
        self._parts: list[str] = []
        self._length = 0
        self._offsets: list[int] = []
        self.sources: list[ImageSource] = []

    def add_text(self, text: str) -> None:
        """Adds a text part."""
        self._length += len(text) + (len(_JOINT) if self._parts else 0)
        self._parts.append(text)

    def add_image(self, source: ImageSource) -> None:
        """Adds an image part."""
        self.add_text(self._image)
        self._offsets.append(self._length - len(self._image))
        self.sources.append(source)

    @property
    def text(self) -> str:
        """The joined text."""
        return self._parts[0] if len(self._parts) == 1 else _JOINT.join(self._parts)

    @property
    def placeholders(self) -> dict[str, Any]:
        """Arguments that say where the placeholders are, as far as the defaults do not: spelling and offsets."""
        if not self.sources:
            return {}
        is_default = self._image == _DEFAULT_IMAGE
        has_more = self.text.count(self._image) != len(self.sources)
        return {
            "image_token": None if is_default else self._image,
            "image_offsets": self._offsets if has_more else None,
        }
