"""Every error that a user of the engine can meet: one class a cause, one sentence that says what to do.

All derive from `DeepInferError`. Those that report a bad value also derive from `ValueError`, those that report a
missing file from `FileNotFoundError`, so that callers who don't know this module can still tell them apart.
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeepInferError",
    "EngineError",
    "GrammarError",
    "KernelError",
    "ModelNotFoundError",
    "ParallelError",
    "PeerError",
    "QueueFullError",
    "ReplayError",
    "RequestError",
]


class DeepInferError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(DeepInferError, ValueError):
    """A setting, a config.json value or a combination of settings is not usable."""


class ModelNotFoundError(DeepInferError, FileNotFoundError):
    """The named model could not be found or fetched."""


class CheckpointError(DeepInferError, ValueError):
    """A checkpoint's files are damaged, incomplete or of another architecture."""


class CapacityError(DeepInferError):
    """The model, its cache or a request does not fit the memory or the limits that were given."""


class RequestError(DeepInferError, ValueError):
    """A request (prompt, token ids, sampling parameters) is not valid."""


class QueueFullError(RequestError):
    """The waiting queue is at its limit; the request was not accepted."""


class GrammarError(RequestError):
    """A schema, regular expression or grammar cannot be compiled or cannot be enforced."""


class KernelError(DeepInferError):
    """A kernel provider was asked for that cannot run here, or one of its operations failed."""


class EngineError(DeepInferError):
    """A step of the engine failed; the message names the requests that were affected."""


class AbortedError(DeepInferError):
    """The request was aborted before it finished."""


class ReplayError(DeepInferError, ValueError):
    """A replay file is damaged, or belongs to other weights or settings."""


class ParallelError(DeepInferError):
    """A rank is missing, late, or disagrees with the others. `late_ranks`: those it comes from, where known."""

    def __init__(self, message: str, late_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.late_ranks = late_ranks


class PeerError(EngineError):
    """A step failed on another rank, so it counts on no rank; requests of this one are computed again."""
