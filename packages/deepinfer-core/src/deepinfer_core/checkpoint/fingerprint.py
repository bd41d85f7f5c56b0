"""A short name for a set of weights: blake2b over config, index, all headers and samples of all shards.

It goes into cache keys and replay files, so that state of one checkpoint is never used with another. Sampling reads at
most 192 KiB a shard; `full=True` reads every byte.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from deepinfer_core.checkpoint.folder import INDEX_NAME, Checkpoint
from deepinfer_core.errors import CheckpointError

__all__ = ["weights_fingerprint"]

_SAMPLE_BYTES = 64 << 10
_CHUNK_BYTES = 8 << 20


def weights_fingerprint(checkpoint: Checkpoint, *, full: bool = False) -> str:
    """32 hexadecimal digits. Samples are the first, middle and last 64 KiB of a payload; `full` gives another name."""
    digest = hashlib.blake2b(digest_size=16, person=b"di-weights-full" if full else b"di-weights")
    try:
        for name in ("config.json", INDEX_NAME):
            path = checkpoint.folder / name
            _add(digest, path.read_bytes() if path.exists() else b"")
        for header in checkpoint.headers:
            _add(digest, header.path.name.encode())
            _add(digest, header.raw)
            _add_payload(digest, header.path, len(header.raw), full)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror}); fetch it again") from error
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little"))  # so that the borders between parts count
    digest.update(data)


def _add_payload(digest: hashlib.blake2b, path: Path, start: int, full: bool) -> None:
    with path.open("rb") as file:
        end = file.seek(0, 2)
        if full:
            file.seek(start)
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            return
        middle = start + (end - start) // 2
        for offset in (start, middle, max(start, end - _SAMPLE_BYTES)):
            file.seek(offset)
            _add(digest, file.read(_SAMPLE_BYTES))
