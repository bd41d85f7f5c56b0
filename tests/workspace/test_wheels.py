"""Each package builds to a wheel that installs and imports alone, among the locked third-party packages.

The environments see the locked packages through links: nothing is downloaded, and the workspace's own editable installs
stay out of sight.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

from tests.workspace.conftest import ROOT, read_members

MEMBERS = {member.name: member for member in read_members()}
SITE = Path(sysconfig.get_path("purelib"))
WHEEL_LIMIT_BYTES = 11_000_000


@pytest.fixture(scope="session")
def wheels(uv: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All four wheels, by the package's name."""
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run(
        [uv, "build", "--all-packages", "--wheel", "--offline", "--quiet", "--out-dir", folder], cwd=ROOT, check=True
    )
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


@pytest.fixture
def install(uv: str, tmp_path: Path) -> Callable[..., Path]:
    """Make an environment of these wheels and the locked packages less those `hidden`; return its Python."""

    def make(*wheel_paths: Path, hidden: str = "") -> Path:
        environment, locked = tmp_path / "environment", tmp_path / "locked"
        locked.mkdir()
        own = "|".join(name for member in MEMBERS.values() for name in (member.name, member.import_name))
        out_of_sight = re.compile(rf"({own}).*|.*\.pth|_virtualenv.*" + (f"|{hidden}" if hidden else ""))
        for entry in SITE.iterdir():
            if not out_of_sight.fullmatch(entry.name):
                (locked / entry.name).symlink_to(entry)
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
        python = environment / "bin/python"
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--no-deps", "--offline", "--python", python, *wheel_paths], check=True
        )
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "locked.pth").write_text(f"{locked}\n", encoding="utf-8")
        return python

    return make


def run(python: Path, code: str) -> str:
    """The output of `code` in that environment, away from the repository and its sources."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [python, "-c", code], cwd=python.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_package_builds_to_one_pure_wheel(wheels: dict[str, Path]) -> None:
    assert set(wheels) == set(MEMBERS)
    for name, wheel in wheels.items():
        version = MEMBERS[name].pyproject["project"]["version"]
        assert wheel.name == f"{MEMBERS[name].import_name}-{version}-py3-none-any.whl"
        assert wheel.stat().st_size < WHEEL_LIMIT_BYTES


def test_a_wheel_carries_its_licence_and_metadata_and_nothing_else(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        member = MEMBERS[name]
        archive = zipfile.ZipFile(wheel)
        info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
        assert {path.split("/")[0] for path in archive.namelist()} == {member.import_name, info}
        assert f"{info}/licenses/LICENSE" in archive.namelist()
        assert f"{member.import_name}/py.typed" in archive.namelist()
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        assert metadata["Requires-Python"] == member.pyproject["project"]["requires-python"]
        assert metadata["License-Expression"] == member.pyproject["project"]["license"]


def test_core_and_the_nvidia_kernels_install_together_and_find_each_other(
    wheels: dict[str, Path], install: Callable[..., Path]
) -> None:
    python = install(wheels["deepinfer-core"], wheels["deepinfer-kernels-nvidia"])
    code = (
        "import deepinfer_core, sys\n"
        "from importlib.metadata import entry_points\n"
        "found = [entry.load().name for entry in entry_points(group='deepinfer.kernels')]\n"
        "print(deepinfer_core.__version__, *found, 'tilelang' in sys.modules)"
    )
    version = MEMBERS["deepinfer-core"].pyproject["project"]["version"]
    assert run(python, code) == f"{version} nvidia False"


def test_core_works_with_no_kernel_package(wheels: dict[str, Path], install: Callable[..., Path]) -> None:
    python = install(wheels["deepinfer-core"], hidden="tilelang.*|z3.*|tvm_ffi.*")
    code = (
        "import deepinfer_core, deepinfer_core.kernels\n"
        "from importlib.metadata import entry_points\n"
        "print(deepinfer_core.__file__, *entry_points(group='deepinfer.kernels'))"
    )
    assert run(python, code) == str(
        python.parents[1] / f"lib/{SITE.parent.name}/site-packages/deepinfer_core/__init__.py"
    )


def test_recipe_works_where_torch_and_the_engine_are_absent(
    wheels: dict[str, Path], install: Callable[..., Path]
) -> None:
    python = install(wheels["deepseek-recipe"], hidden="torch.*|functorch|numpy.*|PIL|pillow.*|fastapi.*")
    code = (
        "import importlib.util, deepseek_recipe\n"
        "absent = [importlib.util.find_spec(name) is None for name in ('torch', 'deepinfer_core')]\n"
        "print(deepseek_recipe.__provider__, deepseek_recipe.__version__, *absent)"
    )
    version = MEMBERS["deepseek-recipe"].pyproject["project"]["version"]
    assert run(python, code) == f"deepinfer {version} True True"
