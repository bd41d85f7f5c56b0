"""Every example runs on the CPU as it stands, with no network, and says something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workspace.conftest import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIMIT_S = 300
LONG = ("deterministic", "expert_parallel", "speculative")  # with several engines or processes each


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else []) for path in EXAMPLES],
)
def test_an_example_runs_as_it_stands(example: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    done = subprocess.run(
        [sys.executable, example],
        cwd=tmp_path,  # an example must not depend on where it is started
        env=environment | {"HF_HUB_OFFLINE": "1", "DEEPINFER_ACCELERATOR": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
