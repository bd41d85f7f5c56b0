"""The definition holds on every backend: words, noise and draws of a GPU are those of the CPU for the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.sampling import Sampler, SampleRows
from deepinfer_core.sampling.philox import gumbel_noise, random_words
from deepinfer_core.sampling.streams import Stream
from tests.core.sampling.helpers import EOS, admission

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

NUM_ROWS, NUM_IDS = 24, 5_000
PARAMS = [
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(seed=1, top_k=50),
    SamplingParams(seed=2, top_p=0.9, temperature=0.7),
    SamplingParams(seed=3, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(seed=4, logit_bias={7: 3.0}, min_tokens=16),
    SamplingParams(seed=5),
]


def test_words_are_equal() -> None:
    seed, position = torch.arange(NUM_ROWS) * 977 - 5, torch.arange(NUM_ROWS) + 2**32 - 3
    on_gpu = random_words(seed.cuda(), position.cuda(), NUM_IDS, Stream.TOKEN)
    assert torch.equal(on_gpu.cpu(), random_words(seed, position, NUM_IDS, Stream.TOKEN))


def test_noise_is_equal_up_to_one_rounding_in_a_million_ids() -> None:
    seed, position = torch.arange(200), torch.arange(200)
    on_gpu = gumbel_noise(seed.cuda(), position.cuda(), NUM_IDS).cpu()
    on_cpu = gumbel_noise(seed, position, NUM_IDS)
    assert int((on_gpu != on_cpu).sum()) <= 1
    assert torch.allclose(on_gpu, on_cpu, rtol=2e-7, atol=1e-7)


def test_draws_are_equal() -> None:
    logits = torch.randn(NUM_ROWS, NUM_IDS, generator=torch.Generator().manual_seed(0)) * 3
    tokens: list[torch.Tensor] = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(NUM_IDS, NUM_ROWS, device, mask_from=NUM_IDS - 9, eos_token_id=EOS)
        for slot in range(NUM_ROWS):
            sampler.admit(admission(slot, PARAMS[slot % len(PARAMS)], [5, 6, 7, 7], 2))
        rows = SampleRows(
            logits.to(device),
            torch.full((NUM_ROWS,), 3, device=device),
            torch.full((NUM_ROWS,), 7, device=device),
            np.arange(NUM_ROWS + 1, dtype=np.int32),
            np.arange(NUM_ROWS, dtype=np.int32),
        )
        batch = sampler.sample(rows)
        assert len(batch.logprobs_on_host()) == NUM_ROWS // len(PARAMS)
        tokens.append(batch.tokens.cpu())
    assert torch.equal(*tokens)
