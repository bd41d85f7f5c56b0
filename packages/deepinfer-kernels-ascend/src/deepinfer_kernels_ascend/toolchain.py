"""What the Ascend kernels need to compile and run: CANN 9.2 or newer.

Looked for in $ASCEND_HOME_PATH, $ASCEND_TOOLKIT_HOME, /usr/local/Ascend and ~/Ascend; the version is the line
`version=` of <root>/<architecture>-linux/ascend_toolkit_install.info.

Standard library only, so that build.sh can run this file before anything is installed: torch-npu, once installed,
breaks `import torch` where CANN is absent.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

REQUIRED_CANN = (9, 2)
_INFO_FILE = "ascend_toolkit_install.info"
_VERSION = re.compile(r"^version=(\d+)\.(\d+)\b", re.MULTILINE)
_MAX_INFO_BYTES = 65536


class Cann(NamedTuple):
    """A CANN toolkit and its version."""

    path: Path
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.version[0]}.{self.version[1]}  {self.path}"


def find_cann() -> Cann | None:
    """Return the first CANN toolkit that states its version, in the order above; None where there is none."""
    named = [os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME")]
    roots = [Path(root) for root in named if root]
    for base in (Path("/usr/local/Ascend"), Path.home() / "Ascend"):
        roots += [base / "cann", base / "ascend-toolkit" / "latest"]
    for root in roots:
        for path in (root / _INFO_FILE, *sorted(root.glob(f"*-linux/{_INFO_FILE}"))):
            version = _read_version(path)
            if version:
                return Cann(root, version)
    return None


def cann_problem() -> str | None:
    """Say why kernels can't be compiled here, in one sentence; None when they can."""
    wanted = f"CANN {REQUIRED_CANN[0]}.{REQUIRED_CANN[1]}"
    cann = find_cann()
    if cann is None:
        return f"CANN was not found: install {wanted} and source its set_env.sh (it sets ASCEND_HOME_PATH)"
    if cann.version < REQUIRED_CANN:
        return f"CANN is {cann}: {wanted} or newer is needed; install it and source its set_env.sh"
    return None


def _read_version(path: Path) -> tuple[int, int] | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            match = _VERSION.search(file.read(_MAX_INFO_BYTES))
    except OSError:
        return None
    return (int(match[1]), int(match[2])) if match else None


def main() -> int:
    """Print what was checked; exit status 1 when kernels can't be compiled."""
    problem = cann_problem()
    print(f"  {'CANN':<10} {problem or find_cann()}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
