"""The models whose logits are compared, and how: one forward pass over a whole text, every position's logits.

Subject      a model in bfloat16-exact weights, and the texts that it reads
subjects     the bundled checkpoint over its own words, the fixtures and four random layers over random ids
Agreement    of two runs' logits, by the measure of docs/kernels.md: clear argmaxes and the median difference
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.cache import CacheLayout, ModelState
from deepinfer_core.checkpoint.dequantize import dequantize_fp4, dequantize_fp8_blocks
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.quantize import quantize_fp4, quantize_fp8_blocks
from deepinfer_core.checkpoint.random_weights import random_weights
from deepinfer_core.checkpoint.weights import (
    AttentionWeights,
    DraftWeights,
    EngramWeights,
    IndexerWeights,
    ModelWeights,
    MoeWeights,
)
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.model import Backbone, build_batch, build_params
from deepinfer_core.model.params import ModelParams
from deepinfer_core.runtime.rank_slice import release_config
from deepinfer_core.scheduling.plan import RowKind, StepPlan, TokenSource, Writes
from tests.fixture_models import FIXTURES

__all__ = ["GAP", "TINY", "Agreement", "Subject", "cast_weights", "four_layers", "lost_positions", "subjects"]

ROOT = Path(__file__).parents[2]
TINY = ROOT / "packages/deepinfer-core/src/deepinfer_core/models/tiny"
FOUR_LAYERS = "four layers"
GAP = 1.0  # of the two largest logits, from which on the argmax must agree
# What the model keeps in float32 whatever it computes in.
_KEPT = ("fn", "base", "scale", "bias", "bias_vl", "sink", "confidence")
_FP8: Mapping[type, tuple[str, ...]] = {
    AttentionWeights: ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"),
    IndexerWeights: ("wq_b",),
    MoeWeights: ("shared_w1", "shared_w2", "shared_w3"),
    EngramWeights: ("wkv",),
    DraftWeights: ("main_proj",),
}
_FP4: Mapping[type, tuple[str, ...]] = {MoeWeights: ("w1", "w2", "w3")}


@dataclass(frozen=True)
class Subject:
    """One model and what it reads. `weights` are float32 whose matrices bfloat16 holds exactly."""

    name: str
    config: ModelConfig
    weights: ModelWeights
    texts: tuple[np.ndarray, ...]

    def params(self, dtype: torch.dtype, device: str = "cpu", *, coded: bool = False) -> ModelParams:
        """What a forward pass in `dtype` reads. `coded`: with float8_products."""
        return build_params(cast_weights(self.weights, device, dtype), self.config, coded=coded)

    @torch.inference_mode()
    def logits(self, params: ModelParams, kernels: Kernels, cache_form: Literal["plain", "packed"] = "plain") -> Tensor:
        """[R, V] float32 on the CPU: every position of every text, each in one piece."""
        found: list[Tensor] = []
        for ids in self.texts:
            layout = CacheLayout(self.config, 1, -(-len(ids) // 128), len(ids), 12, form=cache_form)
            state = ModelState.allocate(layout, device=params.embed.device, dtype=params.embed.dtype)
            batch = build_batch(_prefill_plan(ids), state, params, kernels)
            out = Backbone(self.config, params, kernels).forward(batch, state)
            if out.logits is None:
                raise RuntimeError("no row was sampled")
            found.append(out.logits.cpu())
        return torch.cat(found)


@dataclass(frozen=True)
class Agreement:
    """One run's logits beside the reference's. Clear: the reference's two largest are more than GAP apart."""

    positions: int
    clear: int
    other_argmax: int  # of the clear ones
    lost: tuple[int, ...]  # those positions
    widest_gap_lost: float  # largest gap among those, 0 where there is none
    median: float  # of |difference|, over all positions and ids
    mean: float

    @classmethod
    def of(cls, reference: Tensor, run: Tensor) -> Agreement:
        """Both [R, V]."""
        gap, lost = _gaps(reference), lost_positions(reference, run)
        difference = (run - reference).abs()
        return cls(
            positions=len(reference),
            clear=int((gap > GAP).sum()),
            other_argmax=int(lost.sum()),
            lost=tuple(lost.nonzero().flatten().tolist()),
            widest_gap_lost=round(float(torch.where(lost, gap, 0.0).max()), 3),
            median=round(float(difference.median()), 5),
            mean=round(float(difference.mean()), 5),
        )


def lost_positions(reference: Tensor, run: Tensor) -> Tensor:
    """[R] bool: clear in the reference, and another argmax in the run."""
    return (_gaps(reference) > GAP) & (run.argmax(-1) != reference.argmax(-1))


def _gaps(logits: Tensor) -> Tensor:
    """[R, V] -> [R] between the two largest."""
    top = logits.topk(2, -1).values
    return top[:, 0] - top[:, 1]


def subjects(names: tuple[str, ...] = ()) -> Iterator[Subject]:
    """All, or those named."""
    for name in ("tiny", *sorted(folder.name for folder in FIXTURES.iterdir()), FOUR_LAYERS):
        if names and name not in names:
            continue
        if name == FOUR_LAYERS:
            config = four_layers()
            weights = _as_released(random_weights(config))
            # Logits of a random head are small; larger ones have clear winners.
            weights = dataclasses.replace(weights, head=weights.head * 8)
        else:
            folder = TINY if name == "tiny" else FIXTURES / name
            config = ModelConfig.from_folder(folder)
            weights = load_model_weights(folder, config, dtype=torch.float32, device="cpu", progress=False)
        weights = cast_weights(cast_weights(weights, "cpu", torch.bfloat16), "cpu", torch.float32)
        yield Subject(name, config, weights, _own_texts() if name == "tiny" else _random_texts(config.vocab_size))


def cast_weights(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Weights on another device, matrices in another dtype; what is kept in float32 and what has no dtype stays."""
    if isinstance(value, Tensor):
        matrix = value.dim() > 1 and value.dtype in (torch.float32, torch.bfloat16)
        return value.to(device, dtype if matrix else value.dtype)
    if isinstance(value, torch.device):
        return torch.device(device)
    if isinstance(value, torch.dtype):
        return dtype
    if isinstance(value, list | tuple):
        return type(value)(cast_weights(item, device, dtype) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{
            field.name: cast_weights(item, device, torch.float32 if field.name in _KEPT else dtype)
            for field in dataclasses.fields(value)
            for item in [getattr(value, field.name)]
        })  # fmt: skip
    return value


def _as_released(value: Any) -> Any:
    """Weights as a checkpoint stores them: FP8 and FP4 where the release has these."""
    if isinstance(value, list | tuple):
        return type(value)(_as_released(item) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    changes = {field.name: _as_released(getattr(value, field.name)) for field in dataclasses.fields(value)}
    for name in _FP8.get(type(value), ()):
        changes[name] = dequantize_fp8_blocks(*quantize_fp8_blocks(changes[name]))
    for name in _FP4.get(type(value), ()):
        changes[name] = dequantize_fp4(*quantize_fp4(changes[name]))
    return type(value)(**changes)


def four_layers() -> ModelConfig:
    """Four layers of the release's head sizes, hidden 512: window, compressed source, decoder source, re-index."""
    return dataclasses.replace(
        release_config(), vocab_size=8192, hidden_size=512, num_hidden_layers=4, num_nextn_predict_layers=1,
        q_lora_rank=256, o_lora_rank=128, moe_intermediate_size=256, n_routed_experts=16, num_experts_per_tok=6,
        compress_ratios=(0, 2, 1, 1, 0), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2, candidate_topk_blocks=96, engram_layer_ids=(0,), engram_num_embeddings=(30_000,),
        engram_vocab_size=1000, engram_compressed_vocab_size=4000, dspark_target_layer_ids=(3,),
        dspark_n_routed_experts=8, dspark_noise_token_id=7, image_token_id=8, vision=None,
    )  # fmt: skip


def _own_texts() -> tuple[np.ndarray, ...]:
    """What the bundled checkpoint says itself, as token ids: text of the kind that it was trained on."""
    openings = ["Once upon a time", "It was a fine morning, and Elizabeth", "In the beginning", "The module provides"]
    sampling = [SamplingParams(max_tokens=400, ignore_eos=True, seed=i) for i in range(len(openings))]
    with LLM(model=str(TINY), accelerator="cpu", quiet=True) as llm:
        outputs = llm.generate(openings, sampling, use_tqdm=False)
    return tuple(np.array([*output.prompt_token_ids, *output.outputs[0].token_ids]) for output in outputs)


def _random_texts(vocab_size: int) -> tuple[np.ndarray, ...]:
    """Two sequences of random ids, longer than the window and than what an index selects at ratio 1."""
    return tuple(np.random.default_rng(seed).integers(11, vocab_size - 11, 700) for seed in (3, 4))


def _prefill_plan(ids: np.ndarray) -> StepPlan:
    """One request, all rows sampled."""
    rows = len(ids)
    return StepPlan(
        step=0,
        row_position=np.arange(rows),
        row_token=ids,
        row_source=np.full(rows, TokenSource.GIVEN, np.uint8),
        row_kind=np.full(rows, RowKind.PREFILL, np.uint8),
        row_content=np.zeros(rows, np.uint8),
        row_writes=np.full(rows, Writes.GLOBAL | Writes.WINDOW, np.uint8),
        row_sample=np.ones(rows, np.bool_),
        segment_start=np.array([0, rows], np.int32),
        segment_slot=np.zeros(1, np.int32),
        segment_generation=np.zeros(1, np.int32),
        segment_window_from=np.zeros(1, np.int64),
        segment_decoder_from=np.zeros(1, np.int64),
        segment_num_drafts=np.zeros(1, np.int32),
        block_tables=np.arange(-(-rows // 128), dtype=np.int32)[None],
    )
