"""What the checkpoint is worth, measured through the engine on the CPU, on the held-out split.

bits per byte        prompt log-probabilities of the checkpoint as shipped, 512-token samples, by kind of text; and,
                     through the training forward, without cache rounding and with the weights before rounding
selection recall     attention of a group of layers that falls on the selected entries, of the most that as many
                     entries could hold; rows that must choose
accepted length      tokens a step at temperature 0 with five drafts, on the model's own continuations
samples              greedy continuations

python -m tools.train_tiny.evaluate --data build/train_tiny --run OUT --to FILE
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.config.model import ModelConfig
from tools.train_tiny import params
from tools.train_tiny.batches import Corpus
from tools.train_tiny.kinds import KINDS
from tools.train_tiny.model import Geometry, Mode, backbone

_LENGTH = 512
_PROMPT_TOKENS, _NEW_TOKENS = 64, 128
_SAMPLE_PROMPTS = (
    "Once upon a time",
    "It was a fine morning, and Elizabeth",
    "In the beginning",
    "The module provides",
)


class Evaluation:
    """Engine, training forward and held-out data."""

    def __init__(self, data: Path, run: Path, num_samples: int) -> None:
        self.llm = LLM("tiny", quiet=True, draft_schedule="fixed")
        self.config = ModelConfig.from_folder(data)
        self.corpus = Corpus.load(data, "held", "cpu")
        with np.load(data / "token_tables.npz") as tables:
            self.token_bytes, self.classes = torch.from_numpy(tables["bytes"]), torch.from_numpy(tables["classes"])
        self.trained: dict[str, Tensor] = {}
        for path in sorted(run.glob("draft-*.safetensors")):
            self.trained |= load_file(path)
        kinds = params.slots(self.config)
        self.stored = {name: params.rounded(value, kinds[name].format) for name, value in self.trained.items()}
        self.num_samples = num_samples

    def pieces(self, kind: str, length: int = _LENGTH) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens [n, length], spread over the held-out text of a kind."""
        inputs, targets = self.corpus.in_order(kind, length)
        chosen = torch.linspace(0, len(inputs) - 1, min(self.num_samples, len(inputs))).round().long()
        return inputs[chosen], targets[chosen]

    def shipped_bits(self, kind: str) -> float:
        """Bits per byte through the engine. The last token of a piece is left out: it is not part of the prompt."""
        inputs, _ = self.pieces(kind)
        outputs = self.llm.generate(
            prompt_token_ids=inputs.tolist(),
            sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=1),
            use_tqdm=False,
        )
        nats = sum(
            -entry[token].logprob
            for output, tokens in zip(outputs, inputs.tolist(), strict=True)
            for entry, token in zip(output.prompt_logprobs or [], tokens, strict=True)
            if entry is not None
        )
        return nats / math.log(2) / int(self.token_bytes[inputs[:, 1:]].sum())

    @torch.no_grad()
    def trained_bits(self, kind: str, weights: dict[str, Tensor], *, quantize: bool) -> float:
        """Bits per byte through the training forward."""
        inputs, targets = self.pieces(kind)
        geometry = Geometry(self.config, self.classes, _LENGTH, "cpu")
        nats = 0.0
        for tokens, following in zip(inputs.split(4), targets.split(4), strict=True):
            hidden = backbone(weights, geometry, tokens, Mode(quantize=quantize)).hidden
            logits = torch.log_softmax(hidden @ weights["head.weight"].T, -1)[:-1]
            keep = torch.arange(len(following.flatten()))[:-1] % _LENGTH != _LENGTH - 1  # as in shipped_bits
            nats -= float(logits.gather(1, following.flatten()[:-1, None])[:, 0][keep].sum())
        return nats / math.log(2) / int(self.token_bytes[targets[:, :-1]].sum())

    @torch.no_grad()
    def recall(self, length: int) -> dict[str, dict[str, float]]:
        """By index source: share of the attention that is selected, and of the best choice of as many entries."""
        inputs, _ = self.corpus.in_order("prose", length)
        geometry = Geometry(self.config, self.classes, length, "cpu")
        mode = Mode(index_targets=True)
        output = backbone(self.stored, geometry, inputs[: max(1, 4096 // length)], mode)
        return {
            str(layer): {"share": round(float(share), 4), "of_best": round(float(share / output.index_best[layer]), 4)}
            for layer, share in output.index_recall.items()
        }

    def accepted_length(self, kind: str) -> float:
        """Tokens a step at temperature 0, five drafts, on own continuations of held-out prompts."""
        prompts = self.pieces(kind)[0][:, :_PROMPT_TOKENS].tolist()
        before = self._statistics()
        sampling = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
        self.llm.generate(prompt_token_ids=prompts, sampling_params=sampling, use_tqdm=False)
        after = self._statistics()
        verified, accepted = (after[name] - before[name] for name in ("verified_drafts", "accepted_drafts"))
        return 1.0 + accepted / verified * self.config.dspark_block_size

    def _statistics(self) -> dict[str, Any]:
        return self.llm._engine.statistics()  # the counters are public on Engine only, which is asynchronous

    def samples(self, prompts: Iterable[str]) -> dict[str, str]:
        """Greedy continuations."""
        outputs = self.llm.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=80), use_tqdm=False)
        return {str(output.prompt): output.outputs[0].text for output in outputs}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/train_tiny"))
    parser.add_argument("--run", type=Path, required=True, help="folder with draft-*.safetensors")
    parser.add_argument("--to", type=Path, required=True, help="JSON file with the results")
    parser.add_argument("--samples", type=int, default=32, help="pieces of each kind")
    arguments = parser.parse_args()
    evaluation = Evaluation(arguments.data, arguments.run, arguments.samples)
    results: dict[str, Any] = {"samples": evaluation.samples(_SAMPLE_PROMPTS)}
    for kind in KINDS:
        results[kind] = {
            "bits_per_byte": round(evaluation.shipped_bits(kind), 4),
            "bits_per_byte_without_cache_rounding": round(
                evaluation.trained_bits(kind, evaluation.stored, quantize=False), 4
            ),
            "bits_per_byte_without_any_rounding": round(
                evaluation.trained_bits(kind, evaluation.trained, quantize=False), 4
            ),
            "accepted_length": round(evaluation.accepted_length(kind), 3),
        }
        print(kind, results[kind], flush=True)
    results["selection"] = {str(length): evaluation.recall(length) for length in (512, 2048)}
    arguments.to.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(results["selection"]))


if __name__ == "__main__":
    main()
