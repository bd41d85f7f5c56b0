"""Trains the tiny checkpoint on one GPU within a time budget, in two resumable stages.

    backbone   progress 0 ............ 0.42 ............ 0.77 ............ 1      of --minutes, first step not counted
               all entries visible     selected only     + weight rounding        attention of compressed layers
               512 tokens              512               512, 2,048, 8,192        length of samples
               loss: language model + indexer; half of the sparse samples simulate bounded replay; router biases by load
    draft      frozen, rounded backbone; DSpark losses; weight rounding of the drafter in the last fifth

    python -m tools.train_tiny.train backbone --data build/train_tiny --out OUT --minutes 8 [--resume OUT]
    python -m tools.train_tiny.train draft --data build/train_tiny --out OUT --minutes 2 --resume OUT

Writes OUT/{stage}-{n}.safetensors (float32 weights in parts below 16 MB) and OUT/{stage}.json (log). A run that resumes
starts from the weights with a fresh optimizer.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepinfer_core.config.model import ModelConfig
from tools.train_tiny import draft as dspark
from tools.train_tiny import params
from tools.train_tiny.batches import Corpus
from tools.train_tiny.model import Geometry, Mode, Output, backbone
from tools.train_tiny.optim import Optimizer

_PART_BYTES = 15_000_000
_BIAS_STEP = 1e-3  # of the router biases
_INDEX_WEIGHT = 1.0
_SPARSE_FROM, _ROUND_FROM, _DECAY_FROM = 0.42, 0.77, 0.30


@dataclass(frozen=True)
class Plan:
    """Sizes of the batches; the defaults are those of the released checkpoint."""

    batch: int = 128
    length: int = 512
    long_batch: int = 32
    long_length: int = 2048
    longest: int = 8192
    anchors: int = 64  # per sample, draft stage
    log_every: int = 50
    held_samples: int = 256  # of each kind, for the held-out loss


class Trainer:
    """Weights, data and clock of one run."""

    def __init__(self, arguments: argparse.Namespace, plan: Plan) -> None:
        self.plan, self.out = plan, arguments.out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = ModelConfig.from_folder(arguments.data)
        with np.load(arguments.data / "token_tables.npz") as tables:
            self.classes = torch.from_numpy(tables["classes"])
            self.token_bytes = torch.from_numpy(tables["bytes"]).to(self.device)
        self.corpus = {split: Corpus.load(arguments.data, split, self.device) for split in ("train", "held")}
        self.weights = {n: v.to(self.device) for n, v in _start_values(self.config, arguments.resume).items()}
        self.generator = torch.Generator().manual_seed(arguments.seed)
        self.seconds = arguments.minutes * 60.0
        self.log: list[dict[str, float]] = []
        self._geometries: dict[int, Geometry] = {}
        self.start_clock()

    def start_clock(self) -> None:
        """The budget counts from here: called again after the first step, which compiles."""
        self._started = time.monotonic()

    def geometry(self, length: int) -> Geometry:
        """Tables for one sample length."""
        if length not in self._geometries:
            self._geometries[length] = Geometry(self.config, self.classes, length, self.device)
        return self._geometries[length]

    @property
    def progress(self) -> float:
        """Share of the time budget that is used, at most 1."""
        return min((time.monotonic() - self._started) / self.seconds, 1.0)

    def autocast(self) -> torch.autocast:
        """bfloat16 products on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def record(self, step: int, values: dict[str, float]) -> None:
        """One line of the log, printed too."""
        entry = {
            "step": step,
            "progress": round(self.progress, 4),
            "seconds": round(time.monotonic() - self._started, 1),
            **values,
        }
        self.log.append(entry)
        print(json.dumps(entry), flush=True)

    def save(self, stage: str, summary: dict[str, Any]) -> None:
        """Weights in parts, and the log."""
        self.out.mkdir(parents=True, exist_ok=True)
        part: dict[str, Tensor] = {}
        number = size = 0
        for name, value in self.weights.items():
            stored = value.detach().float().cpu().contiguous()
            if part and size + stored.numel() * 4 > _PART_BYTES:
                save_file(part, self.out / f"{stage}-{number}.safetensors")
                part, number, size = {}, number + 1, 0
            part[name] = stored
            size += stored.numel() * 4
        save_file(part, self.out / f"{stage}-{number}.safetensors")
        (self.out / f"{stage}.json").write_text(json.dumps({"summary": summary, "log": self.log}, indent=1))


def _start_values(config: ModelConfig, resume: Path | None) -> dict[str, Tensor]:
    """Fresh values, or those of the latest stage in `resume`."""
    if resume is None:
        return params.initial(config, seed=0)
    for stage in ("draft", "backbone"):
        parts = sorted(resume.glob(f"{stage}-*.safetensors"))
        if parts:
            values: dict[str, Tensor] = {}
            for path in parts:
                values |= load_file(path)
            return values
    raise FileNotFoundError(f"{resume} holds no backbone-*.safetensors to resume from")


def _is_draft(name: str) -> bool:
    return name.startswith("mtp.")


def _trainable(trainer: Trainer, draft: bool) -> dict[str, Tensor]:
    """The parameters of a stage; router biases are moved by load, not by gradients."""
    chosen = {
        n: v for n, v in trainer.weights.items() if _is_draft(n) == draft and not n.endswith((".bias", ".bias_vl"))
    }
    for value in chosen.values():
        value.requires_grad_(True)
    return chosen


@torch.no_grad()
def _balance(weights: dict[str, Tensor], prefix: str, loads: dict[int, Tensor]) -> Tensor:
    """Move every router bias towards equal loads; returns the mean over layers of largest load / mean load."""
    ratios = []
    for layer, load in loads.items():
        weights[f"{prefix}.{layer}.ffn.gate.bias"] += _BIAS_STEP * torch.sign(load.mean() - load)
        ratios.append(load.max() / load.mean())
    return torch.stack(ratios).mean()


def _schedule(progress: float, step: int) -> float:
    """Factor of the learning rates: warm-up over 50 steps, flat, then linear to 3 %."""
    return min(1.0, (step + 1) / 50) * (
        1.0 if progress < _DECAY_FROM else 1.0 - 0.97 * (progress - _DECAY_FROM) / (1.0 - _DECAY_FROM)
    )


# ---- stage 1: the backbone -------------------------------------------------------------------------------------------


def train_backbone(trainer: Trainer) -> None:
    """Language model and indexer."""
    plan, optimizer = trainer.plan, Optimizer(_trainable(trainer, draft=False))
    step = tokens_seen = 0
    while trainer.progress < 1.0:
        progress = trainer.progress
        rounding = progress >= _ROUND_FROM
        long = rounding and step % 4 == 0
        size, length = (plan.long_batch, plan.long_length) if long else (plan.batch, plan.length)
        loss, index_loss, output = _backward(trainer, size, length, sparse=progress >= _SPARSE_FROM, rounding=rounding)
        tokens_seen += size * length
        if rounding and step % 20 == 0:
            with torch.compiler.set_stance("force_eager"):  # a shape that is too rare to compile for
                _backward(trainer, 1, plan.longest, sparse=True, rounding=True, weight=0.125, save_memory=True)
            tokens_seen += plan.longest
        optimizer.step(_schedule(progress, step))
        balance = _balance(trainer.weights, "layers", output.loads)
        if step == 0:
            trainer.start_clock()
        if step % plan.log_every == 0:
            recall = {f"recall_{layer}": round(share.item(), 4) for layer, share in output.index_recall.items()}
            values = {
                "loss": round(loss.item(), 4),
                "index_loss": round(index_loss.item(), 4),
                "balance": round(balance.item(), 3),
            }
            trainer.record(step, {"length": length, **values, **recall, "tokens": tokens_seen})
        step += 1
    for name, value in trainer.weights.items():
        if name.endswith(".bias_vl"):  # no image was seen: image tokens are routed as text is
            value.copy_(trainer.weights[name.removesuffix("_vl")])
    trainer.save("backbone", {"steps": step, "tokens": tokens_seen, "held_out": evaluate(trainer)})


def _backward(
    trainer: Trainer,
    size: int,
    length: int,
    *,
    sparse: bool,
    rounding: bool,
    weight: float = 1.0,
    save_memory: bool = False,
) -> tuple[Tensor, Tensor, Output]:
    inputs, targets = trainer.corpus["train"].batch(size, length, trainer.generator)
    first_kept = (
        torch.randint(0, 2 * length, (size,), generator=trainer.generator).to(trainer.device) if sparse else None
    )
    mode = Mode(sparse=sparse, index_targets=True, first_kept=first_kept, save_memory=save_memory)
    weights = params.straight_through(trainer.weights, trainer.config) if rounding else trainer.weights
    with trainer.autocast():
        output = backbone(weights, trainer.geometry(length), inputs, mode)
        loss = _token_loss(output.hidden, weights["head.weight"], targets.flatten()).mean()
        index_loss = torch.stack(list(output.index_losses.values())).mean()
    ((loss + _INDEX_WEIGHT * index_loss) * weight).backward()
    return loss.detach(), index_loss.detach(), output


def _token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every row, in pieces whose logits are not kept: [R]."""

    def piece(h: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, head).float(), t, reduction="none")

    pieces = zip(hidden.split(16_384), targets.split(16_384), strict=True)
    return torch.cat([torch.as_tensor(checkpoint(piece, h, t, use_reentrant=False)) for h, t in pieces])


# ---- stage 2: the drafter --------------------------------------------------------------------------------------------


def train_draft(trainer: Trainer) -> None:
    """DSpark stages on features of the rounded, frozen backbone."""
    plan, optimizer = trainer.plan, Optimizer(_trainable(trainer, draft=True))
    frozen = _frozen(trainer)
    step = 0
    while trainer.progress < 1.0:
        progress = trainer.progress
        own = {n: v for n, v in trainer.weights.items() if _is_draft(n)}
        if progress >= _ROUND_FROM:
            own = params.straight_through(own, trainer.config)
        values, loads = _draft_losses(trainer, frozen | own, plan.batch)
        values["draft_loss"].backward()
        optimizer.step(_schedule(progress, step))
        balance = _balance(trainer.weights, "mtp", loads)
        if step == 0:
            trainer.start_clock()
        if step % plan.log_every == 0:
            trainer.record(
                step, {**{k: round(v.item(), 4) for k, v in values.items()}, "balance": round(balance.item(), 3)}
            )
        step += 1
    for name, value in trainer.weights.items():
        if _is_draft(name) and name.endswith(".bias_vl"):
            value.copy_(trainer.weights[name.removesuffix("_vl")])
    trainer.save("draft", {"steps": step, "anchors_per_step": plan.batch * plan.anchors})


@torch.no_grad()
def _frozen(trainer: Trainer) -> dict[str, Tensor]:
    kinds = params.slots(trainer.config)
    return {n: params.rounded(v, kinds[n].format) for n, v in trainer.weights.items() if not _is_draft(n)}


def _draft_losses(
    trainer: Trainer, weights: dict[str, Tensor], size: int
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    plan, block = trainer.plan, trainer.config.dspark_block_size
    inputs, targets = trainer.corpus["train"].batch(size, plan.length, trainer.generator)
    anchors = torch.randint(1, plan.length - block, (size, plan.anchors), generator=trainer.generator).to(
        trainer.device
    )
    at = anchors[..., None] + torch.arange(
        block, device=anchors.device
    )  # [B, A, K] rows whose logits the block predicts
    with trainer.autocast():
        with torch.no_grad():
            output = backbone(weights, trainer.geometry(plan.length), inputs, Mode())
            hidden = output.hidden.unflatten(0, inputs.shape)
            batch = torch.arange(size, device=anchors.device)[:, None, None]
            target_logits = F.linear(hidden[batch, at], weights["head.weight"]).flatten(0, 1)
        drafted = dspark.draft(weights, trainer.config, output.features.unflatten(0, inputs.shape), inputs, anchors)
    return dspark.losses(drafted, target_logits, targets[batch, at].flatten(0, 1)), drafted.loads


# ---- held-out loss ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Bits per byte of the held-out split by kind, with weights as trained and as stored."""
    versions = {
        "float": trainer.weights,
        "rounded": {n: v for n, v in trainer.weights.items() if _is_draft(n)} | _frozen(trainer),
    }
    with torch.compiler.set_stance("force_eager"):
        return {
            kind: {name: round(_bits_per_byte(trainer, weights, kind), 4) for name, weights in versions.items()}
            for kind in trainer.corpus["held"].ids
        }


def _bits_per_byte(trainer: Trainer, weights: dict[str, Tensor], kind: str) -> float:
    nats = size = 0.0
    for inputs, targets in _pieces(trainer, kind):
        with trainer.autocast():
            output = backbone(weights, trainer.geometry(inputs.shape[1]), inputs, Mode())
            nats += _token_loss(output.hidden, weights["head.weight"], targets.flatten()).sum().item()
        size += trainer.token_bytes[targets].sum().item()
    return nats / math.log(2) / size


def _pieces(trainer: Trainer, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = trainer.corpus["held"].in_order(kind, trainer.plan.length)
    chosen, size = trainer.plan.held_samples, trainer.plan.batch
    yield from zip(inputs[:chosen].split(size), targets[:chosen].split(size), strict=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("backbone", "draft"))
    parser.add_argument("--data", type=Path, default=Path("build/train_tiny"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50, metavar="STEPS")
    parser.add_argument(
        "--compile-cache", type=Path, help="compiled code of an earlier run, read if it is there and written at the end"
    )
    parser.add_argument("--small", action="store_true", help="batches for a trial on a CPU")
    arguments = parser.parse_args()
    sizes = (
        {
            "batch": 1,
            "length": 128,
            "long_batch": 1,
            "long_length": 256,
            "longest": 384,
            "anchors": 4,
            "held_samples": 1,
        }
        if arguments.small
        else {}
    )
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # one function meets many fixed shapes here
    cache = arguments.compile_cache
    if cache is not None and cache.exists():
        torch.compiler.load_cache_artifacts(cache.read_bytes())
    trainer = Trainer(arguments, Plan(**sizes, log_every=arguments.log_every))
    (train_backbone if arguments.stage == "backbone" else train_draft)(trainer)
    if cache is not None and (artifacts := torch.compiler.save_cache_artifacts()) is not None:
        cache.write_bytes(artifacts[0])


if __name__ == "__main__":
    main()
