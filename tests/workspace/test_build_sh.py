"""build.sh: quick when nothing is to do, one clear sentence when something is wrong, checks before it installs."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workspace.conftest import ROOT

SECOND_RUN_LIMIT_S = 5.0
BACKEND = '[build-system]\nrequires = ["uv_build>=0.13,<0.14"]\nbuild-backend = "uv_build"\n'
LEAF_PROJECT = f'[project]\nname = "leaf"\nversion = "1.0"\nrequires-python = ">=3.12"\n\n{BACKEND}'
ROOT_PROJECT = """[project]
name = "checkout"
version = "0.0.0"
requires-python = "==3.12.*"
dependencies = ["leaf"]

[tool.uv]
package = false
"""
LOCK = """version = 1
revision = 5
requires-python = "==3.12.*"

[[package]]
name = "checkout"
version = "0.0.0"
source = {{ virtual = "." }}
dependencies = [
    {{ name = "leaf" }},
]

[package.metadata]
requires-dist = [{{ name = "leaf" }}]

[[package]]
name = "leaf"
version = "1.0"
source = {{ registry = "wheelhouse" }}
wheels = [
    {{ path = "{wheel}", hash = "sha256:{digest}" }},
]
"""


def build(*arguments: str, root: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run build.sh with no network and without this process's own choice of Python and uv."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"UV", "UV_PYTHON", "VIRTUAL_ENV", "DEEPINFER_ACCELERATOR", "CUDA_HOME", "CUDA_PATH"}
        and not name.startswith("ASCEND_")
    }
    return subprocess.run(
        ["/bin/bash", root / "build.sh", *arguments],
        cwd="/",
        env=inherited | {"UV_OFFLINE": "1"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def fake_nvcc(folder: Path, release: str) -> Path:
    executable(folder / "bin/nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.88'")
    return folder


def fake_cann(folder: Path, version: str) -> Path:
    info = folder / "x86_64-linux/ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100R001\n", encoding="utf-8")
    return folder


def cpu_time_of_children_s() -> float:
    """Time on a processor, not on the clock: one step follows the other, and what else the machine does counts not."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture
def checkout(uv: str, tmp_path: Path) -> Path:
    """A small checkout with this build.sh: one locked package, whose wheel lies in wheelhouse/."""
    package, root = tmp_path / "leaf", tmp_path / "checkout"
    (package / "src/leaf").mkdir(parents=True)
    (package / "src/leaf/__init__.py").write_text("", encoding="utf-8")
    (package / "pyproject.toml").write_text(LEAF_PROJECT, encoding="utf-8")
    (root / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "build.sh", root)
    (root / "tools/what_runs.py").write_text("import leaf\nprint('leaf is there')\n", encoding="utf-8")
    (root / "pyproject.toml").write_text(ROOT_PROJECT, encoding="utf-8")
    subprocess.run(
        [uv, "build", "--quiet", "--offline", "--wheel", package, "--out-dir", root / "wheelhouse"], check=True
    )
    (wheel,) = (root / "wheelhouse").glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (root / "uv.lock").write_text(LOCK.format(wheel=wheel.name, digest=digest), encoding="utf-8")
    return root


def last_sentence(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_a_second_run_is_quick_needs_no_network_and_leaves_the_lock_alone() -> None:
    lock = (ROOT / "uv.lock").read_bytes()
    before_s = cpu_time_of_children_s()
    done = build()
    elapsed_s = cpu_time_of_children_s() - before_s
    assert done.returncode == 0, done.stderr
    assert "already as locked" in done.stdout
    assert "nvidia" in done.stdout
    assert "ascend" in done.stdout
    assert elapsed_s < SECOND_RUN_LIMIT_S
    assert (ROOT / "uv.lock").read_bytes() == lock


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "accelerator", "sentence"),
    [
        ((), "amd", "DEEPINFER_ACCELERATOR is 'amd': it must be cpu, nvidia or ascend (unset means cpu)"),
        ((), "cpu nvidia", "DEEPINFER_ACCELERATOR is 'cpu nvidia': it must be cpu, nvidia or ascend (unset means cpu)"),
        (("--fast",), "cpu", "unknown argument '--fast'"),
    ],
)
def test_a_wrong_choice_is_named(arguments: tuple[str, ...], accelerator: str, sentence: str) -> None:
    done = build(*arguments, DEEPINFER_ACCELERATOR=accelerator)
    assert done.returncode == 1
    assert last_sentence(done) == f"build.sh: {sentence}"


def test_nvidia_wants_nvcc_13(tmp_path: Path) -> None:
    old = build("--check", DEEPINFER_ACCELERATOR="nvidia", CUDA_HOME=str(fake_nvcc(tmp_path / "old", "12.8")))
    new = build("--check", DEEPINFER_ACCELERATOR="nvidia", CUDA_HOME=str(fake_nvcc(tmp_path / "new", "13.1")))
    assert old.returncode == 1
    assert f"nvcc is 12.8  {tmp_path}/old/bin/nvcc: CUDA toolkit 13 is needed" in old.stdout
    assert last_sentence(old).startswith("build.sh: DEEPINFER_ACCELERATOR=nvidia needs what is missing above")
    assert new.returncode == 0, new.stdout
    assert f"13.1  {tmp_path}/new/bin/nvcc" in new.stdout


def test_an_old_gcc_is_only_a_warning(tmp_path: Path) -> None:
    executable(tmp_path / "bin/g++", "echo 'g++ (Debian 12.2.0-14) 12.2.0'")
    done = build(
        "--check",
        DEEPINFER_ACCELERATOR="nvidia",
        CUDA_HOME=str(fake_nvcc(tmp_path, "13.0")),
        PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stdout
    assert f"warning: g++ is 12.2  {tmp_path}/bin/g++: deepinfer-gemm and deepinfer-ep need 13" in done.stdout


def test_ascend_wants_cann_9_2(tmp_path: Path) -> None:
    none = build("--check", DEEPINFER_ACCELERATOR="ascend", HOME=str(tmp_path))
    old = build("--check", DEEPINFER_ACCELERATOR="ascend", ASCEND_HOME_PATH=str(fake_cann(tmp_path / "a", "8.5.0")))
    new = build("--check", DEEPINFER_ACCELERATOR="ascend", ASCEND_HOME_PATH=str(fake_cann(tmp_path / "b", "9.2.RC1")))
    assert (none.returncode, old.returncode, new.returncode) == (1, 1, 0)
    assert "CANN was not found: install CANN 9.2" in none.stdout
    assert f"CANN is 8.5  {tmp_path}/a: CANN 9.2 or newer is needed" in old.stdout
    assert f"9.2  {tmp_path}/b" in new.stdout


def test_a_python_that_pyenv_has_but_does_not_select_is_found(tmp_path: Path) -> None:
    unselected = "echo 'pyenv: python3.12: command not found' >&2; exit 127"
    for name in ("python3.12", "python3", "python"):
        executable(tmp_path / "shims" / name, unselected)
    found = tmp_path / "versions/3.12.99/bin/python"
    found.parent.mkdir(parents=True)
    found.symlink_to(sys.executable)
    done = build(
        "--check",
        PATH=f"{tmp_path}/shims:/usr/bin:/bin",
        PYENV_ROOT=str(tmp_path),
        UV_PROJECT_ENVIRONMENT=str(tmp_path / "no-environment-yet"),
    )
    assert done.returncode == 0, done.stderr
    assert os.path.realpath(sys.executable) in done.stdout


def test_a_missing_python_is_named_with_ways_to_get_it(tmp_path: Path) -> None:
    for name in ("dirname", "cat"):
        executable(tmp_path / "bin" / name, f'exec /usr/bin/{name} "$@"')
    nowhere = {"HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path), "UV_PROJECT_ENVIRONMENT": str(tmp_path / "none")}
    done = build(PATH=f"{tmp_path}/bin", **nowhere)
    assert done.returncode == 1
    assert last_sentence(done).startswith("build.sh: Python 3.12 was not found: install it ('pyenv install 3.12'")


def test_a_fresh_checkout_is_set_up_without_a_network_from_a_wheelhouse(checkout: Path) -> None:
    lock = (checkout / "uv.lock").read_bytes()
    first, second = build(root=checkout), build(root=checkout)
    assert first.returncode == second.returncode == 0, first.stderr
    assert "installed from uv.lock" in first.stdout
    assert "already as locked" in second.stdout
    assert "leaf is there" in second.stdout
    assert (checkout / "uv.lock").read_bytes() == lock


def test_a_wheel_that_is_not_the_locked_one_is_refused(checkout: Path, tmp_path: Path) -> None:
    lock = checkout / "uv.lock"
    text = lock.read_text(encoding="utf-8")
    digest = text.split("sha256:")[1][:64]
    lock.write_text(text.replace(digest, "0" * 64), encoding="utf-8")
    done = build(root=checkout, UV_CACHE_DIR=str(tmp_path / "empty cache"))
    assert done.returncode == 1
    assert "Hash mismatch" in done.stderr
    assert last_sentence(done).startswith("build.sh: the locked packages are not all there")


def test_a_lock_that_disagrees_with_the_project_is_named(checkout: Path) -> None:
    project = checkout / "pyproject.toml"
    project.write_text(ROOT_PROJECT.replace('"leaf"', '"leaf>=2"'), encoding="utf-8")
    done = build(root=checkout)
    assert done.returncode == 1
    assert last_sentence(done).startswith("build.sh: uv.lock does not agree with the pyproject files")


def test_an_environment_of_another_kind_is_not_cleared(checkout: Path) -> None:
    theirs = checkout / ".venv/somebody's file"
    theirs.parent.mkdir()
    theirs.touch()
    done = build(root=checkout)
    assert done.returncode == 1
    assert "the environment .venv could not be made" in last_sentence(done)
    assert theirs.exists()
