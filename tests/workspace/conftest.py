"""What the tests of the workspace share: the repository, its members, and the uv that manages them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Member(NamedTuple):
    """One of the packages in packages/."""

    folder: Path
    pyproject: dict[str, Any]

    @property
    def name(self) -> str:
        return self.pyproject["project"]["name"]

    @property
    def import_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.import_name


def read_members() -> list[Member]:
    return [
        Member(path.parent, tomllib.loads(path.read_text(encoding="utf-8")))
        for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
    ]


@pytest.fixture(scope="session")
def uv() -> str:
    """The uv that runs these tests, else one that starts here (pyenv's shim of an unselected version does not)."""
    for candidate in (os.environ.get("UV", ""), str(ROOT / ".uv/bin/uv"), "uv"):
        path = shutil.which(candidate)
        if path and subprocess.run([path, "--version"], cwd=ROOT, capture_output=True, check=False).returncode == 0:
            return path
    pytest.fail("uv was not found: run ./build.sh, or `uv run pytest`")


@pytest.fixture(scope="session")
def tracked_files() -> list[Path]:
    """Every file that git tracks and that exists, as absolute paths."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]
