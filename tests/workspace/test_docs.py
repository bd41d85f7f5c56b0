"""The documentation agrees with the code where a reader would rely on it: settings, variables, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer_core.config.engine import all_settings
from deepinfer_core.config.env import SETTING_OF_VARIABLE
from tests.workspace.conftest import ROOT

CONFIGURATION = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/*.md")])
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


def test_the_documented_settings_and_defaults_are_the_engines() -> None:
    documented = re.findall(r"^\| `([a-z_]+)` \| `([^`]*)` \|", CONFIGURATION, re.MULTILINE)
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
