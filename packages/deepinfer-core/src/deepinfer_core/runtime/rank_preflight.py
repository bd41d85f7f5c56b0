"""What a rank finds out about itself for the preflight of all ranks (`parallel/preflight.py`), before it loads."""

from __future__ import annotations

import hashlib

import msgspec
import torch
from torch._C._distributed_c10d import Store  # not exported to type checkers by the public name

from deepinfer_core.checkpoint.fingerprint import weights_fingerprint
from deepinfer_core.checkpoint.folder import open_checkpoint
from deepinfer_core.checkpoint.memory_plan import Form
from deepinfer_core.checkpoint.resolve import resolve_model
from deepinfer_core.config.engine import EngineConfig, flat_settings
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.registry import choose_provider
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.parallel.preflight import local_report, meet
from deepinfer_core.runtime.memory import available_bytes, weights_bytes

__all__ = ["check_before_loading"]

# May differ between ranks: where things are, not what they are; weights are compared by their fingerprint.
_LOCAL_SETTINGS = frozenset({"quiet", "jit_cache_dir", "model", "tokenizer"})


def check_before_loading(config: EngineConfig, store: Store, meeting: Rendezvous, device: torch.device) -> None:
    """Meet all ranks. Raises ParallelError that names what keeps them from working together, and who is missing."""
    choice = choose_provider(config.accelerator)
    form: Form = "plain" if choice.provider is None else choice.provider.cache_form
    folder = resolve_model(
        config.model, accelerator=choice.name, revision=config.revision, progress=False, weights=False
    )
    model = ModelConfig.from_folder(folder)
    settings = {name: value for name, value in flat_settings(config).items() if name not in _LOCAL_SETTINGS}
    has_weights = any(folder.glob("*.safetensors"))  # else they are still on the hub, under one name for all
    report = local_report(
        meeting,
        device,
        settings=hashlib.blake2b(msgspec.json.encode(settings, order="sorted"), digest_size=8).hexdigest(),
        fingerprint=weights_fingerprint(open_checkpoint(folder, model)) if has_weights else "not fetched yet",
        free_bytes=available_bytes(device.type),
        needed_bytes=weights_bytes(config, model, form),
    )
    meet(store, report, meeting, config.parallel.start_deadline_s)
