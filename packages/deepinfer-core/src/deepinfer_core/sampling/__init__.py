"""From logits to tokens: counter-based noise, logit processors, sampler, verification of drafts, log-probabilities."""

from __future__ import annotations

from deepinfer_core.sampling.draft_noise import DraftNoise
from deepinfer_core.sampling.filters import to_device
from deepinfer_core.sampling.logprobs import PromptLogprobs, prompt_logprobs
from deepinfer_core.sampling.sampler import SampledBatch, Sampler, SampleRows
from deepinfer_core.sampling.seeds import fork_seed, request_seed

__all__ = [
    "DraftNoise",
    "PromptLogprobs",
    "SampleRows",
    "SampledBatch",
    "Sampler",
    "fork_seed",
    "prompt_logprobs",
    "request_seed",
    "to_device",
]
