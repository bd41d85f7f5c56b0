"""Configurations unlike the release: every schedule that the config allows must run and stay batch-invariant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.checkpoint.random_weights import random_weights
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.model import Backbone, build_params
from tests.core.harness import Chunk, TinyModel, plan_of
from tests.core.model.test_batch_invariance import run_in_company, sequences
from tests.core.model_configs import small_config

WINDOWS_ONLY = {
    "num_hidden_layers": 2,
    "compress_ratios": [0, 0, 0, 0],
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": 0,
    "dspark_target_layer_ids": [0, 1],
}
SHAPES: dict[str, dict[str, Any]] = {
    "widths that are no multiples of 32": {},
    "odd window": {"sliding_window": 7},
    "window of one": {"sliding_window": 1},
    "no engram": {"engram_layer_ids": [], "engram_num_embeddings": []},
    "engram in the decoder half": {"engram_layer_ids": [0, 3], "engram_num_embeddings": [100, 140]},
    "bigrams only": {"engram_max_ngram_size": 2},
    "two streams": {"hc_mult": 2},
    "one stream": {"hc_mult": 1},
    "one expert a token": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 6},
    "candidates narrower than the selection": {"candidate_block_size": 3, "candidate_topk_blocks": 1},
    "one entry selected": {"index_topk": 1},
    "reindex before the candidate source": {
        "num_hidden_layers": 6,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 2, 4, 5],
        "candidate_source_layer_id": 4,
    },
    "windows only": WINDOWS_ONLY,
    "no draft stages": {"num_nextn_predict_layers": 0, "compress_ratios": [0, 2, 1, 1]},
    "a window layer between compressed ones": {
        "num_hidden_layers": 5,
        "compress_ratios": [0, 2, 0, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "candidate_source_layer_id": 3,
        "dspark_target_layer_ids": [1, 3],
    },
    "cut at a ratio-2 layer": {"compress_ratios": [0, 1, 2, 2, 0, 0]},
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_schedule_runs_and_stays_invariant(name: str) -> None:
    config = small_config(**SHAPES[name])
    weights = random_weights(config)
    params = build_params(weights, config)
    model = TinyModel(Path(), config, weights, params, Backbone(config, params, REFERENCE), {}, {})
    requests, cuts = sequences(model, 1, 20, 75), [0, 10, 50]
    whole = [model.logits(tokens) for tokens in requests]
    assert all(bool(torch.isfinite(logits).all()) for logits in whole)
    for one, other in zip(whole, run_in_company(model, requests, seed=3), strict=True):
        assert torch.equal(one, other)
    if config.decoder_start < config.num_hidden_layers:
        kept = [
            model.step(model.state(), plan_of([Chunk(0, 0, tokens, cut)])).logits
            for tokens, cut in zip(requests, cuts, strict=True)
        ]
        for one, other in zip(kept, run_in_company(model, requests, seed=4, decoder_from=cuts), strict=True):
            assert one is not None
            assert torch.equal(one, other)
