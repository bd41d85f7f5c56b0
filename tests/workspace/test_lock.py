"""uv.lock names no registry, agrees with the pyproject files, and tools/relock.py makes it so."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.workspace.conftest import ROOT
from tools import relock

LOCK = ROOT / "uv.lock"
DIGEST_A, DIGEST_B = "a" * 64, "b" * 64
# The shape that uv 0.13 writes; the host is made up.
FRESH = f"""version = 1
requires-python = "==3.12.*"

[[package]]
name = "idna"
version = "3.11"
source = {{ registry = "https://registry.example/simple" }}
sdist = {{ url = "https://files.example/ab/idna-3.11.tar.gz", hash = "sha256:{DIGEST_B}", size = 190, upload-time = "2026-01-01T00:00:00Z" }}
wheels = [
    {{ url = "https://files.example/cd/idna-3.11%2Bcpu-py3-none-any.whl", hash = "sha256:{DIGEST_A}", size = 71008, upload-time = "2026-01-01T00:00:00Z" }},
]

[[package]]
name = "member"
version = "0.1.0"
source = {{ editable = "packages/member" }}
"""  # noqa: E501  (one entry of a lock is one line)


def test_the_committed_lock_holds_no_address() -> None:
    text = LOCK.read_text(encoding="utf-8")
    assert "://" not in text
    assert relock.rewrite(text) == text


def test_every_locked_package_has_wheels_with_hashes() -> None:
    packages = tomllib.loads(LOCK.read_text(encoding="utf-8"))["package"]
    registry = [package for package in packages if "registry" in package["source"]]
    assert len(registry) > 50
    for package in registry:
        assert package["source"] == {"registry": "wheelhouse"}
        assert "sdist" not in package
        assert all(wheel["hash"].startswith("sha256:") for wheel in package["wheels"]), package["name"]


def test_torch_is_locked_at_the_release_that_torch_npu_and_vllm_accept() -> None:
    packages = tomllib.loads(LOCK.read_text(encoding="utf-8"))["package"]
    assert [package["version"] for package in packages if package["name"] == "torch"] == ["2.14.0"]


def test_the_lock_agrees_with_the_pyproject_files(uv: str) -> None:
    before = LOCK.read_bytes()
    check = subprocess.run([uv, "lock", "--check", "--offline"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
    assert LOCK.read_bytes() == before


def test_relock_keeps_versions_and_hashes_and_drops_addresses() -> None:
    package = tomllib.loads(relock.rewrite(FRESH))["package"][0]
    assert package == {
        "name": "idna",
        "version": "3.11",
        "source": {"registry": "wheelhouse"},
        "wheels": [{"path": "idna-3.11+cpu-py3-none-any.whl", "hash": f"sha256:{DIGEST_A}"}],
    }


def test_relock_twice_is_relock_once() -> None:
    once = relock.rewrite(FRESH)
    assert relock.rewrite(once) == once


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("wheels = [", "wheels-elsewhere = ["), "has no wheel"),
        ((f'hash = "sha256:{DIGEST_A}", ', ""), "not a file name with a sha256 hash"),
        (('editable = "packages/member"', 'git = "https://code.example/member"'), "still holds an address"),
    ],
)
def test_relock_refuses_what_it_cannot_make_free_of_addresses(change: tuple[str, str], reason: str) -> None:
    with pytest.raises(relock.LockError, match=reason):
        relock.rewrite(FRESH.replace(*change))


def test_relock_check_reports_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "uv.lock"
    lock.write_text(FRESH, encoding="utf-8")
    assert relock.main(["--check", str(lock)]) == 1
    assert lock.read_text(encoding="utf-8") == FRESH
    assert relock.main([str(lock)]) == 0
    assert relock.main(["--check", str(lock)]) == 0
    assert "names no registry" in capsys.readouterr().out
