"""The environment, read in one place: `DEEPINFER_*` variables as text, and which setting each of them fills.

An empty variable counts as unset. Names and meanings are those of the original DeepInfer, so that its users can move
over. `deepinfer_core.config.engine` turns the texts into typed settings.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = [
    "PREFIX",
    "SETTING_OF_VARIABLE",
    "VARIABLES",
    "read_launcher",
    "read_text",
    "read_variables",
    "unknown_variables",
    "worker_environment",
]

PREFIX: Final = "DEEPINFER_"

SETTING_OF_VARIABLE: Final[Mapping[str, str]] = MappingProxyType({
    "DEEPINFER_ACCELERATOR": "accelerator",
    "DEEPINFER_BATCH_INVARIANT": "batch_invariant",
    "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE": "confidence_temperatures",
    "DEEPINFER_ENABLE_MTP_VARLEN": "draft_schedule",
    "DEEPINFER_ENFORCE_EAGER": "enforce_eager",
    "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE": "engram_storage",
    "DEEPINFER_EXPERT_COUNT_WINDOW_SIZE": "expert_count_window",
    "DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL": "expert_rearrangement_interval",
    "DEEPINFER_HF_MODEL_DIR": "model",
    "DEEPINFER_JIT_CACHE_DIR": "jit_cache_dir",
    "DEEPINFER_MAX_BACKTRACKING_TOKENS": "max_backtracking_tokens",
    "DEEPINFER_MOE_LB_STAT_INTERVAL": "expert_stat_interval",
    "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS": "num_extra_experts",
    "DEEPINFER_USE_NEXTN_DECODE": "num_drafts",
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "keep_tokens",
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "decoder_prefill",
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "overlap",
})  # fmt: skip

VARIABLES: Final = tuple(SETTING_OF_VARIABLE)

# What torchrun tells each rank (and Ray actors and local workers are told alike).
_LAUNCHER_VARIABLES: Final = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def read_text(variable: str) -> str | None:
    """The value of one of `VARIABLES` without surrounding white space; None where it is unset or empty."""
    if variable not in SETTING_OF_VARIABLE:
        raise KeyError(f"{variable} is no variable of this package; add it to SETTING_OF_VARIABLE")
    return os.environ.get(variable, "").strip() or None


def read_variables() -> dict[str, str]:
    """All of `VARIABLES` that are set."""
    return {variable: text for variable in VARIABLES if (text := read_text(variable)) is not None}


def unknown_variables() -> tuple[str, ...]:
    """One sentence for each `DEEPINFER_*` variable that is set and means nothing here."""
    sentences: list[str] = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in SETTING_OF_VARIABLE:
            close = difflib.get_close_matches(name, VARIABLES, 1, 0.8)
            hint = f"; {close[0]} is near" if close else ""
            sentences.append(f"{name} is not a variable of this engine and has no effect{hint}")
    return tuple(sentences)


def read_launcher() -> dict[str, str]:
    """What a launcher of ranks has set, by its names; empty in a process that nobody launched."""
    return {name: text for name in _LAUNCHER_VARIABLES if (text := os.environ.get(name, "").strip())}


def worker_environment(changes: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child: `changes` replace what is there, `defaults` do not."""
    return {**defaults, **os.environ, **changes}
