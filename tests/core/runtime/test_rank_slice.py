"""One rank of a cluster with random weights: what it holds, and that its steps run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import CapacityError
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.runtime.rank_slice import RankSlice, SliceSize, release_config, tokens_a_step
from tests.core.model_configs import release_json, small_config

GREEDY = SamplingParams(temperature=0)


def slice_of(**changes: Any) -> RankSlice:
    size = replace(SliceSize(ranks=3, requests=4, context=300, num_drafts=2, step_rows=64), **changes)
    config = small_config(n_routed_experts=6, dspark_n_routed_experts=3, engram_num_embeddings=[5000])
    return RankSlice(config, size, REFERENCE, "cpu", torch.float32)


def test_a_rank_holds_its_share_of_the_experts_and_of_the_engram_rows() -> None:
    part = slice_of()
    for layer in part.params.layers:
        assert layer.ffn.w13.shape[0] == 2
        assert layer.ffn.gate.shape[1] == 6
    assert part.params.draft is not None
    assert [stage.ffn.w2.shape[0] for stage in part.params.draft.stages] == [1, 1]
    full, own = small_config(engram_num_embeddings=[5000]), part.config
    assert own.engram_vocab_size == full.engram_vocab_size // 3
    part.close()


def test_decode_and_prefill_steps_run() -> None:
    part = slice_of()
    seconds = part.decode_seconds(3, GREEDY, 4)
    assert len(seconds) == 3
    assert all(second > 0 for second in seconds)
    assert part.prefill_seconds(150, keep=40) > 0
    # 150 rows in chunks of 64, twice; the layers from the cut on ran the last 40 alone.
    rows = part.runner.stats.rows_per_layer
    decoded = (3 + 2 + 4) * 3 * 3
    assert (rows[0], rows[-1]) == (decoded + 2 * 150, decoded + 2 * 40)
    part.close()


def test_layers_may_share_sets_of_expert_weights() -> None:
    part = slice_of(expert_sets=2)
    assert len({id(layer.ffn.w13) for layer in part.params.layers}) == 2
    part.close()


def test_tokens_a_step_at_three_drafts_accepted_at_three_quarters() -> None:
    assert tokens_a_step(3, 0.75) == pytest.approx(2.734375)


def test_the_packaged_configuration_is_that_of_the_release() -> None:
    assert release_config() == ModelConfig.from_dict(release_json())


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 4}, "experts don't divide among 4 ranks"),
        ({"requests": 0}, "requests is 0; a slice needs at least 1"),
    ],
)
def test_sizes_that_make_no_rank_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        slice_of(**changes)
