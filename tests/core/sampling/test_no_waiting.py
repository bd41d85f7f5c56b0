"""Drawing asks the device for nothing: on fake tensors of a GPU, which have no values, every kind of request runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer_core.config.scheduler import Verification
from deepinfer_core.sampling import Sampler, SampleRows
from tests.core.sampling.helpers import EOS, admission
from tests.core.sampling.test_cuda import PARAMS

NUM_IDS = 500


@pytest.mark.parametrize("mode", ["coupled", "ratio"])
def test_drawing_and_drafting_read_nothing_from_the_device(mode: Verification, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # needs a driver
    starts, slots = np.array([0, 3, 4, 6, 9, 10, 12], np.int32), np.arange(6, dtype=np.int32)
    with FakeTensorMode():
        sampler = Sampler(NUM_IDS, 8, "cuda", mask_from=NUM_IDS - 10, eos_token_id=EOS, mode=mode)
        for slot, params in enumerate(PARAMS):
            sampler.admit(admission(slot, params))
        logits = torch.empty(12, NUM_IDS, device="cuda")
        position, token = (torch.zeros(12, dtype=torch.int64, device="cuda") for _ in range(2))
        masks = {2: np.full(-(-NUM_IDS // 32), 0xFFFFFFFF, np.uint32)}
        drawn = sampler.sample(SampleRows(logits, position, token, starts, slots, masks, logits.clone()))
        assert (drawn.tokens.shape, drawn.tokens.device.type) == ((6, 3), "cuda")
        noise = sampler.draft_noise(slots, position[:6], 2)
        assert noise.choose(1, logits[:6]).device.type == "cuda"
        with pytest.raises(Exception, match=r"_local_scalar_dense|data-dependent"):
            drawn.num_tokens[0].item()  # the test would see it
