"""Recorded routing: which experts a model's router asks for on a given text, step by step; for `bench --eplb`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.config.engine import resolve_settings
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import RequestError
from deepinfer_core.parallel.experts import DispatchedRows, LocalExperts, RowOrigin
from deepinfer_core.runtime.assembly import assemble_engine

__all__ = ["STEP_TOKENS", "record_routing"]

STEP_TOKENS = 512
_SETTINGS: dict[str, Any] = {
    "num_drafts": 0,
    "decoder_prefill": "full",
    "prefix_replay": "off",
    "quiet": True,
    "overlap": False,
}
_SETTINGS |= {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 1, "max_model_len": 2 * STEP_TOKENS}


def record_routing(text: str, num_steps: int, settings: dict[str, Any]) -> NDArray[np.int64]:
    """Tokens of each expert [T, L, E] in `num_steps` steps of 512 tokens of `text`, from its start again at its end.

    `settings`: of the model, as for `LLM`. Raises RequestError for a text of fewer tokens.
    """
    engine = assemble_engine(resolve_settings(settings | _SETTINGS).config)
    try:
        tokens = np.array(engine.tokenizer.encode(text), np.int64)
        if len(tokens) < STEP_TOKENS:
            raise RequestError(f"the text has {len(tokens)} tokens; give at least {STEP_TOKENS}")
        recorder = _Recorder(engine.model_config.num_hidden_layers, engine.model_config.n_routed_experts)
        engine.runner.backbone.exchange = recorder
        params = SamplingParams(max_tokens=1, temperature=0.0)
        steps: list[NDArray[np.int64]] = []
        for step in range(num_steps):
            start = step * STEP_TOKENS % (len(tokens) - STEP_TOKENS + 1)
            engine.scheduler.add(tokens[start : start + STEP_TOKENS], params, seed=step)
            while engine.loop.has_work:
                engine.loop.step()
            steps.append(recorder.take())
    finally:
        engine.close()
    return np.stack(steps)


class _Recorder(LocalExperts):
    """One process's exchange that counts."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int64)

    def dispatch(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, origin: RowOrigin) -> DispatchedRows:
        if layer < len(self._counts):  # draft stages follow
            self._counts[layer] += torch.bincount(ids.flatten().cpu(), minlength=self._counts.shape[1])
        return super().dispatch(layer, x, ids, weights, origin)

    def take(self) -> NDArray[np.int64]:
        """Counts [L, E] since the last time."""
        taken = self._counts.numpy().copy()
        self._counts.zero_()
        return taken
