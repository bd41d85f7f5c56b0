"""Does the engine give the same tokens in any company, and the logits of the CPU, end to end on a GPU?

    benchmarks/gpu/on_device.sh python3 benchmarks/gpu/e2e.py --out $OUT/e2e.json [--only tokens,logits]

tokens   64 requests of the bundled checkpoint, greedy and sampled, answered alone and together, with and without
         drafts, graphs and overlap: how many answers differ from those of one batch of 64 with everything on.
logits   teacher-forced: float32 on the CPU is the reference; a bfloat16 run on the CPU has the same rounding points as
         the GPU's. Compared are the checkpoint, the fixtures and four random layers at the release's head sizes:
         argmax wherever the reference's two largest logits are more than 1.0 apart, and the median difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.cache import CacheLayout, ModelState
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.random_weights import random_weights
from deepinfer_core.checkpoint.weights import ModelWeights
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.kernels.registry import build_kernels, choose_provider
from deepinfer_core.model import Backbone, build_batch, build_params
from deepinfer_core.runtime.assembly import AssembledEngine
from deepinfer_core.runtime.rank_slice import release_config
from deepinfer_core.scheduling.plan import RowKind, StepPlan, TokenSource, Writes
from tests.fixture_models import FIXTURES

ROOT = Path(__file__).parents[2]
TINY = ROOT / "packages/deepinfer-core/src/deepinfer_core/models/tiny"
GAP = 1.0  # of the two largest logits, from which on the argmax must agree
REQUESTS, OUTPUT_TOKENS, ALONE = 64, 48, 12


# ---- tokens ---------------------------------------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    """Lengths from 3 to 700: within a window, beyond it, with more entries than are selected."""
    random = np.random.default_rng(5)
    return [random.integers(11, 3000, int(length)).tolist() for length in random.integers(3, 700, REQUESTS)]


def params() -> list[SamplingParams]:
    """Greedy, plain sampling and filters in turn."""
    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9})
    return [
        SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=i, **kinds[i % len(kinds)])
        for i in range(REQUESTS)
    ]


def answers(llm: LLM, ids: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(prompt_token_ids=ids, sampling_params=sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare_tokens(accelerator: str, report: dict[str, Any]) -> bool:
    """Every way to run the requests against one batch of all of them."""
    ids, sampling = prompts(), params()
    base: dict[str, Any] = {"accelerator": accelerator, "model": str(TINY), "quiet": True, "engram_storage": "device"}
    ways: dict[str, dict[str, Any]] = {
        "together": {},
        "again": {},
        "eager": {"enforce_eager": True},
        "one step after the other": {"overlap": False},
        "without drafts": {"num_drafts": 0},
        "small batches": {"max_num_seqs": 5, "max_num_batched_tokens": 96},
    }
    found: dict[str, list[list[int]]] = {}
    for name, settings in ways.items():
        start = time.perf_counter()
        with LLM(**base | settings) as llm:
            found[name] = answers(llm, ids, sampling)
            if name == "together":
                report["operations_from_the_reference"] = [
                    source.op
                    for source in cast(AssembledEngine, llm._engine).op_sources
                    if source.provider == "reference"
                ]
                alone = [answers(llm, [ids[i]], [sampling[i]])[0] for i in range(ALONE)]
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    wanted = found["together"]
    differing = {name: sum(a != b for a, b in zip(got, wanted, strict=True)) for name, got in found.items()}
    differing["alone"] = sum(a != b for a, b in zip(alone, wanted[:ALONE], strict=True))
    report["differing_answers"] = differing
    report["answers"] = {"requests": REQUESTS, "tokens": OUTPUT_TOKENS, "alone": ALONE}
    print(json.dumps(differing), flush=True)
    return not any(differing.values())


# ---- logits ---------------------------------------------------------------------------------------------------------


def prefill_plan(ids: np.ndarray) -> StepPlan:
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


@torch.inference_mode()
def teacher_forced(
    weights: ModelWeights, config: ModelConfig, kernels: Kernels, ids: np.ndarray, form: str, dtype: torch.dtype
) -> Tensor:
    """Logits [R, V] float32 on the CPU of every position."""
    model = build_params(weights, config)
    layout = CacheLayout(config, 1, -(-len(ids) // 128), len(ids), 12, form="packed" if form == "packed" else "plain")
    state = ModelState.allocate(layout, device=model.embed.device, dtype=dtype)
    batch = build_batch(prefill_plan(ids), state, model, kernels)
    out = Backbone(config, model, kernels).forward(batch, state)
    if out.logits is None:
        raise RuntimeError("no row was sampled")
    return out.logits.cpu()


def moved(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Weights on another device, matrices in another dtype; what is kept in float32 stays."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.dtype == torch.float32 and value.dim() > 1 else value.dtype)
    if isinstance(value, torch.device):
        return torch.device(device)
    if isinstance(value, torch.dtype):
        return dtype
    if isinstance(value, tuple):
        return tuple(moved(item, device, dtype) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = ("fn", "base", "scale", "bias", "bias_vl", "sink", "confidence")
        return type(value)(**{
            field.name: moved(item, device, torch.float32 if field.name in kept else dtype)
            for field in dataclasses.fields(value)
            for item in [getattr(value, field.name)]
        })  # fmt: skip
    return value


def own_texts() -> list[np.ndarray]:
    """What the bundled checkpoint says itself, as token ids: text of the kind that it was trained on."""
    openings = ["Once upon a time", "It was a fine morning, and Elizabeth", "In the beginning", "The module provides"]
    sampling = [SamplingParams(max_tokens=400, ignore_eos=True, seed=i) for i in range(len(openings))]
    with LLM(model=str(TINY), accelerator="cpu", quiet=True) as llm:
        outputs = llm.generate(openings, sampling, use_tqdm=False)
    return [np.array([*output.prompt_token_ids, *output.outputs[0].token_ids]) for output in outputs]


def random_texts(vocab_size: int) -> list[np.ndarray]:
    """Two sequences of random ids, longer than the window and than what an index selects at ratio 1."""
    return [np.random.default_rng(seed).integers(11, vocab_size - 11, 700) for seed in (3, 4)]


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


def compare_logits(accelerator: str, report: dict[str, Any]) -> bool:
    """Each checkpoint: float32 and bfloat16 on the CPU, bfloat16 on the accelerator."""
    choice = choose_provider(accelerator)
    good = True
    report["logits"] = {}
    for name in ("tiny", *sorted(folder.name for folder in FIXTURES.iterdir()), "four layers"):
        if name == "four layers":
            config = four_layers()
            weights = random_weights(config)
            # Logits of a random head are small; larger ones have clear winners.
            weights = dataclasses.replace(weights, head=weights.head * 8)
        else:
            folder = TINY if name == "tiny" else FIXTURES / name
            config = ModelConfig.from_folder(folder)
            weights = load_model_weights(folder, config, dtype=torch.float32, device="cpu", progress=False)
        sequences = own_texts() if name == "tiny" else random_texts(config.vocab_size)
        kernels, sources = build_kernels(choice, config, torch.bfloat16)
        form = "plain" if choice.provider is None else choice.provider.cache_form
        rounded = moved(weights, "cpu", torch.bfloat16), moved(weights, choice.device, torch.bfloat16)

        def over_all(
            chosen: ModelWeights,
            table: Kernels,
            form: str,
            dtype: torch.dtype,
            config: ModelConfig = config,
            sequences: list[np.ndarray] = sequences,
        ) -> Tensor:
            return torch.cat([teacher_forced(chosen, config, table, ids, form, dtype) for ids in sequences])

        reference = over_all(weights, REFERENCE, "plain", torch.float32)
        cpu = over_all(rounded[0], REFERENCE, "plain", torch.bfloat16)
        gpu = over_all(rounded[1], kernels, form, torch.bfloat16)
        top = reference.topk(2, -1).values
        sure = top[:, 0] - top[:, 1] > GAP
        row = {
            "positions": len(reference),
            "sure": int(sure.sum()),
            "argmax_differs": int((gpu.argmax(-1) != reference.argmax(-1))[sure].sum()),
            "cpu_bfloat16_argmax_differs": int((cpu.argmax(-1) != reference.argmax(-1))[sure].sum()),
            "median_difference": float((gpu - reference).abs().median()),
            "cpu_bfloat16_median_difference": float((cpu - reference).abs().median()),
            "reference_operations": [source.op for source in sources if source.provider == "reference"],
        }
        report["logits"][name] = row
        print(name, json.dumps(row), flush=True)
        good &= not row["argmax_differs"] and row["median_difference"] <= row["cpu_bfloat16_median_difference"]
    return good


def main() -> int:
    """Run what is asked for; the exit status says whether all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="tokens,logits", help="parts, separated by commas")
    parser.add_argument("--accelerator", default="nvidia", help="provider (nvidia); cpu runs the script on itself")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    if torch.cuda.is_available():
        report["device"] = torch.cuda.get_device_name()
    good = True
    parts = {"tokens": compare_tokens, "logits": compare_logits}
    for name in arguments.only.split(","):
        good &= parts[name](arguments.accelerator, report)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
