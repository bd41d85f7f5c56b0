"""Sampling by its definition, one row at a time in plain Python and numpy: what the sampler is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from deepinfer_core.config.sampling import SamplingParams

MASK = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 after Random123's description, on Python integers."""
    words, (low, high) = list(counter), key
    for _ in range(10):
        left, right = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [right >> 32 ^ words[1] ^ low, right & MASK, left >> 32 ^ words[3] ^ high, left & MASK]
        low, high = (low + 0x9E3779B9) & MASK, (high + 0xBB67AE85) & MASK
    return words


def word(seed: int, position: int, token: int, stream: int = 0) -> int:
    counter = (token // 4, position & MASK, position >> 32, stream)
    return philox(counter, (seed & MASK, seed >> 32))[token % 4]


def noise(seed: int, position: int, num_ids: int, stream: int = 0) -> np.ndarray:
    values = [-math.log(-math.log((word(seed, position, v, stream) + 0.5) / 2**32)) for v in range(num_ids)]
    return np.array(values).astype(np.float32)


def adjusted(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """After bias and penalties."""
    x = logits.astype(np.float32).copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    for token in set(prompt) | set(output):
        penalty = np.float32(params.repetition_penalty)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= np.float32(params.presence_penalty)
        x[token] -= np.float32(params.frequency_penalty) * np.float32(list(output).count(token))
    return x


def filtered(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """After temperature, top-k, top-p and min-p; what is out is -inf."""
    x = x / np.float32(params.temperature)
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))
    if params.top_k:
        order = order[: params.top_k]
    weight = {v: math.exp(float(x[v]) - float(x[order[0]])) for v in order}
    if params.top_p < 1:
        wanted, kept, total = params.top_p * math.fsum(weight.values()), [], 0.0
        for v in order:
            kept.append(v)
            total += weight[v]
            if total >= wanted:
                break
        order = kept
    order = [v for v in order if weight[v] >= params.min_p]
    out = np.full_like(x, -np.inf)
    out[order] = x[order]
    return out


def draw(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], seed: int, position: int
) -> int:
    """The token at `position`."""
    x = adjusted(logits, params, prompt, output)
    if params.temperature == 0:
        return int(np.argmax(x))
    return int(np.argmax(filtered(x, params) + noise(seed, position, len(x))))
