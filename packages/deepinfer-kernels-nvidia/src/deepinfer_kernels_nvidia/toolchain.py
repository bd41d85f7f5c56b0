"""What the NVIDIA kernels need to compile: nvcc 13, looked for in $CUDA_HOME, $CUDA_PATH, PATH and /usr/local/cuda.

Standard library only, so that build.sh can run this file before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

REQUIRED_NVCC_MAJOR = 13
# deepinfer-gemm and deepinfer-ep (DeepGEMM and DeepEP) include <format>; our own kernels don't.
LIBRARIES_GCC_MAJOR = 13
_ASK_TIMEOUT_S = 20


class Compiler(NamedTuple):
    """A compiler that answered, and its version."""

    path: Path
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.version[0]}.{self.version[1]}  {self.path}"


def find_nvcc() -> Compiler | None:
    """Return the first nvcc that answers, in the order above; None where there is none."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    on_path = shutil.which("nvcc")
    candidates = [Path(root, "bin", "nvcc") for root in roots if root]
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((nvcc for path in candidates if (nvcc := _ask(path, r"release (\d+)\.(\d+)"))), None)


def nvcc_problem() -> str | None:
    """Say why kernels can't be compiled here, in one sentence; None when they can."""
    nvcc = find_nvcc()
    if nvcc is None:
        return f"nvcc was not found: install the CUDA toolkit {REQUIRED_NVCC_MAJOR} and set CUDA_HOME to it"
    if nvcc.version[0] != REQUIRED_NVCC_MAJOR:
        return f"nvcc is {nvcc}: CUDA toolkit {REQUIRED_NVCC_MAJOR} is needed; install it and set CUDA_HOME to it"
    return None


def gcc_warning() -> str | None:
    """Say what an old or missing gcc rules out; None when it rules out nothing."""
    gxx = shutil.which("g++")
    gcc = _ask(Path(gxx), r"\) (\d+)\.(\d+)") if gxx else None
    if gcc is not None and gcc.version[0] >= LIBRARIES_GCC_MAJOR:
        return None
    what = f"g++ is {gcc}" if gcc else "g++ was not found"
    return f"{what}: deepinfer-gemm and deepinfer-ep need {LIBRARIES_GCC_MAJOR} or newer; everything else works"


def _ask(path: Path, version_pattern: str) -> Compiler | None:
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(version_pattern, answer)
    return Compiler(path, (int(match[1]), int(match[2]))) if match else None


def main() -> int:
    """Print what was checked; exit status 1 when kernels can't be compiled."""
    problem, warning = nvcc_problem(), gcc_warning()
    print(f"  {'nvcc':<10} {problem or find_nvcc()}")
    print(f"  {'g++':<10} {f'warning: {warning}' if warning else 'new enough for deepinfer-gemm and deepinfer-ep'}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
