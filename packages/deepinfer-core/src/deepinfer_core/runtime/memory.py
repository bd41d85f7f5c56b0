"""Memory: what a device has, and what the weights of one rank take."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from deepinfer_core.checkpoint.memory_plan import Form, Workload, plan_memory
from deepinfer_core.config.engine import EngineConfig
from deepinfer_core.config.model import ModelConfig

__all__ = ["available_bytes", "total_bytes", "weights_bytes"]


def weights_bytes(config: EngineConfig, model: ModelConfig, form: Form) -> int:
    """Of the rank that holds the most."""
    num_ranks = config.parallel.expert_parallel_size  # Engram may be shared otherwise, but takes no device by default
    workload = Workload(
        context_tokens=1,
        step_rows=1,
        num_devices=num_ranks,
        num_sequences=num_ranks,
        engram_storage=config.engram_storage,
        form=form,
    )
    parts = dict(plan_memory(model, workload).ranks[0].weights)
    if config.speculation.num_drafts == 0:
        parts.pop("draft", None)
    return sum(parts.values())


def total_bytes(device: str) -> int:
    """Memory that `device` has, used or not."""
    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(torch.get_device_module(device).mem_get_info()[1])


def available_bytes(device: str) -> int:
    """What programs can still get: of a CPU, free memory and what the page cache would give back."""
    if device != "cpu":
        return int(torch.get_device_module(device).mem_get_info()[0])
    with suppress(OSError):  # not Linux
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
