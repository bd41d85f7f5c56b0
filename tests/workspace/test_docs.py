"""The documentation agrees with the code where a reader would rely on it: settings, variables, links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_core.cli.main import build_parser
from deepinfer_core.config.engine import all_settings
from deepinfer_core.config.env import SETTING_OF_VARIABLE
from tests.workspace.conftest import ROOT

CONFIGURATION = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/*.md")])
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
READMES = [ROOT / "README.md", *(ROOT / f"packages/{name}/README.md" for name in ("deepinfer-core", "deepseek-recipe"))]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
SECTION_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]*)#([^)]+)\)")
POINTER = re.compile(r"docs/([a-z_]+\.md): ([A-Z][a-z ]+)[.)]")  # in a docstring: the page, the name of its section
SOURCES = sorted(
    path for folder in ("packages", "tools", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")
)


def _headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def _anchor(heading: str) -> str:
    """The name that a link gives to a heading: lowercase, hyphens for spaces, no punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_documented_settings_and_defaults_are_the_engines() -> None:
    documented = re.findall(r"^\| `([a-z0-9_]+)` \| `([^`]*)` \|", CONFIGURATION, re.MULTILINE)
    assert documented == [(setting.name, str(setting.default)) for setting in all_settings().values()]


def test_every_choice_of_a_setting_is_documented() -> None:
    for setting in all_settings().values():
        (row,) = re.findall(rf"^\| `{setting.name}` \|.*$", CONFIGURATION, re.MULTILINE)
        takes = row.split("|")[3]
        assert [choice for choice in setting.choices if f"`{choice}`" not in takes] == [], setting.name


def test_the_documented_variables_are_those_that_are_read() -> None:
    documented = re.findall(r"^\| `(DEEPINFER_[A-Z_]+)` \| `([a-z_]+)` \|", CONFIGURATION, re.MULTILINE)
    assert dict(documented) == dict(SETTING_OF_VARIABLE)
    assert len(documented) == len(SETTING_OF_VARIABLE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_links_only_to_files_that_exist(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_a_link_to_a_section_finds_its_heading() -> None:
    dangling: list[str] = []
    for page in PAGES:
        for target, anchor in SECTION_LINK.findall(page.read_text(encoding="utf-8")):
            aim = page.parent / target if target else page
            if anchor not in map(_anchor, _headings(aim)):
                dangling.append(f"{page.name}: {target}#{anchor}")
    assert dangling == []


def test_a_docstring_points_to_a_section_that_exists() -> None:
    pointers = {pointer for path in SOURCES for pointer in POINTER.findall(path.read_text(encoding="utf-8"))}
    assert len(pointers) >= 7
    assert [f"{page}: {section}" for page, section in pointers if section not in _headings(ROOT / "docs" / page)] == []


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_example_of_a_readme_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    (snippet,) = SNIPPET.findall(page.read_text(encoding="utf-8"))
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_readme_links_to_every_page_of_the_documentation() -> None:
    targets = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")} <= targets


def test_the_readme_names_every_command() -> None:
    named = re.findall(r"^\| `deepinfer ([a-z]+)`", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    (commands,) = [action.choices for action in build_parser()._actions if action.dest == "command"]
    assert commands is not None
    assert set(named) == set(commands)
