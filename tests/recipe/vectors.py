"""The test vectors of the official codec: JSON, kept as .xz since its text repeats itself twenty times over."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures" / "recipe"


def load_cases(group: str) -> list[dict[str, Any]]:
    """The cases of one file of vectors (`xz -dk` shows it)."""
    return json.loads(lzma.decompress((FIXTURES / f"{group}.json.xz").read_bytes()))["cases"]
