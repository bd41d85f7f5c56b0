"""The small checkpoints of the tests. Their tensors are kept as .xz, a fifth smaller, and unpacked once a machine.

tests/fixtures/models/NAME/*.xz  ->  TMPDIR/deepinfer-fixtures-UID-DIGEST/NAME/*    DIGEST: of all files' bytes

Packed by `xz --lzma2=preset=9e,lc=2,lp=2,pb=2`: numbers of four bytes.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["FIXTURES"]

_PACKED = Path(__file__).parent / "fixtures" / "models"


def _unpacked() -> Path:
    """The folder of unpacked models; made by whoever comes first, a second process keeps what it finds."""
    files = sorted(path for path in _PACKED.rglob("*") if path.is_file())
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(str(path.relative_to(_PACKED)).encode() + path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"deepinfer-fixtures-{os.getuid()}-{digest.hexdigest()}"
    if folder.is_dir():
        return folder
    fresh = Path(tempfile.mkdtemp(prefix="deepinfer-fixtures-"))
    for path in files:
        target = fresh / path.relative_to(_PACKED)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".xz":
            target.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copyfile(path, target)
    try:
        fresh.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(fresh)
    return folder


FIXTURES = _unpacked()
