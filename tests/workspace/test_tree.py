"""The tracked tree: small, free of registry hosts, licensed, and with versions that agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.workspace.conftest import ROOT, Member, read_members

MIB = 1 << 20
TREE_LIMIT_BYTES = 17 * MIB
FIXTURES_LIMIT_BYTES = 6_000_000
# Put together here, so that this file is not the one that names them.
REGISTRY_HOSTS = [
    f"{name}.org" for name in ("pypi", "pythonhosted", "npmjs", "deb.debian", "packages.debian", "crates", "anaconda")
]
MEMBERS = read_members()
LICENSES = {
    "deepseek-recipe": "MIT",
    "deepinfer-core": "Apache-2.0",
    "deepinfer-kernels-nvidia": "Apache-2.0",
    "deepinfer-kernels-ascend": "Apache-2.0",
}


def total_bytes(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def test_the_tracked_tree_is_under_its_limit(tracked_files: list[Path]) -> None:
    largest = sorted(tracked_files, key=lambda path: path.stat().st_size)[-5:]
    assert total_bytes(tracked_files) < TREE_LIMIT_BYTES, f"largest: {largest}"


def test_the_fixtures_are_under_their_limit(tracked_files: list[Path]) -> None:
    fixtures = [path for path in tracked_files if path.is_relative_to(ROOT / "tests/fixtures")]
    assert total_bytes(fixtures) <= FIXTURES_LIMIT_BYTES


def test_no_tracked_file_names_a_package_registry(tracked_files: list[Path]) -> None:
    hosts = [host.encode() for host in REGISTRY_HOSTS]
    named = [path for path in tracked_files if any(host in path.read_bytes() for host in hosts)]
    assert named == []


def test_the_workspace_has_the_four_packages_and_no_module_named_deepinfer() -> None:
    assert {member.name for member in MEMBERS} == set(LICENSES)
    for member in MEMBERS:
        assert [path.name for path in (member.folder / "src").iterdir() if path.is_dir()] == [member.import_name]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_package_carries_readme_changelog_licence_and_type_marker(member: Member) -> None:
    assert member.pyproject["project"]["license"] == LICENSES[member.name]
    licence = (member.folder / "LICENSE").read_text(encoding="utf-8")
    assert ("MIT License" if LICENSES[member.name] == "MIT" else "Apache License") in licence
    assert (member.source / "py.typed").is_file()
    version = member.pyproject["project"]["version"]
    assert f"## {version}" in (member.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert member.name in (member.folder / "README.md").read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_package_states_one_version(member: Member) -> None:
    root_module = (member.source / "__init__.py").read_text(encoding="utf-8")
    stated = re.search(r'^__version__ = "(.+)"$', root_module, re.MULTILINE)
    assert stated is not None
    assert stated[1] == member.pyproject["project"]["version"]
