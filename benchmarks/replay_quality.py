"""What do `compact` prefill and `bounded` replay cost in quality, and what do they save in rows?

    .venv/bin/python benchmarks/replay_quality.py --output benchmarks/results/replay_quality.json

    full, exact, compact     a cold prompt, by decoder_prefill                 compared with `full`
    hit exact, hit bounded   all but 40 tokens are cached, by prefix_replay    compared with a cold run of `compact`

Prompts are text of this repository's documents, the model the bundled one, drawing is greedy. For each way: rows that
a layer computes for the prompt, summed over layers, and the share saved; cosine between the logits of both runs at the
first token and over the tokens that both share; and of 32 tokens those before the first difference. `exact` must give
cosine 1 to the bit and no difference: the script fails otherwise.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measuring import write_results
from torch import Tensor

from deepinfer_core.config.engine import resolve_settings
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.runtime.assembly import assemble_engine
from deepinfer_core.sampling import SampledBatch, SampleRows

ROOT = Path(__file__).parents[1]
NEW_TOKENS = 40  # of a prompt whose beginning is cached
ANSWER_TOKENS = 32
WAYS: dict[str, dict[str, Any]] = {
    "full": {"decoder_prefill": "full", "prefix_replay": "off"},
    "exact": {"decoder_prefill": "exact", "prefix_replay": "off"},
    "compact": {"decoder_prefill": "compact", "prefix_replay": "off"},
    "hit exact": {"decoder_prefill": "compact", "prefix_replay": "exact"},
    "hit bounded": {"decoder_prefill": "compact", "prefix_replay": "bounded", "deterministic": False},
}
REFERENCE = {"exact": "full", "compact": "full", "hit exact": "compact", "hit bounded": "compact"}


class Run:
    """One greedy answer: its tokens, the logits that each was drawn from, rows of the prompt by layer."""

    def __init__(self, tokens: list[int], logits: Tensor, prompt_rows: list[int], hit_tokens: int) -> None:
        self.tokens, self.logits, self.prompt_rows, self.hit_tokens = tokens, logits, prompt_rows, hit_tokens


class Engine:
    """An engine whose logits can be seen."""

    def __init__(self, settings: dict[str, Any]) -> None:
        common = {"model": "tiny", "quiet": True, "num_drafts": 0, "overlap": False, "max_num_seqs": 1}
        self._engine = assemble_engine(resolve_settings(common | settings, {}).config)
        self._logits: list[Tensor] = []
        sampler = self._engine.runner.sampler
        sample = sampler.sample

        def seen(rows: SampleRows) -> SampledBatch:
            self._logits.append(rows.logits.detach().clone())
            return sample(rows)

        sampler.sample = seen

    def encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text)

    def run(self, prompt: list[int]) -> Run:
        scheduler, stats = self._engine.scheduler, self._engine.runner.stats
        self._logits.clear()
        before, hits = list(stats.rows_per_layer), scheduler.stats.hit_tokens
        scheduler.add(prompt, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True), seed=0)
        tokens: list[int] = []
        prompt_rows: list[int] = []
        while self._engine.loop.has_work:
            for _, new in self._engine.loop.step():
                tokens += new
            if tokens and not prompt_rows:
                prompt_rows = [now - then for now, then in zip(stats.rows_per_layer, before, strict=True)]
        return Run(tokens, torch.cat(self._logits), prompt_rows, scheduler.stats.hit_tokens - hits)


def compare(run: Run, reference: Run) -> dict[str, float]:
    """Cosines and the tokens before the first difference."""
    pairs = enumerate(zip(run.tokens, reference.tokens, strict=True))
    same = next((i for i, (mine, other) in pairs if mine != other), ANSWER_TOKENS)
    shared = min(same + 1, ANSWER_TOKENS)  # logits of the first token that differs still have the same history
    cosine = torch.cosine_similarity(run.logits[:shared].double(), reference.logits[:shared].double(), dim=1)
    return {
        "first_cosine": float(cosine[0]),
        "least_cosine": float(cosine.min()),
        "first_token_same": float(same > 0),
        "tokens_same": float(same),
    }


def measure(engines: dict[str, Engine], texts: list[list[int]], length: int) -> list[dict[str, Any]]:
    """One prompt length over all texts."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in REFERENCE}
    rows: dict[str, int] = {}
    for text in texts:
        prompt = text[:length]
        runs: dict[str, Run] = {}
        for way, engine in engines.items():
            if way.startswith("hit"):
                engine.run(prompt[:-NEW_TOKENS] + prompt[:5])  # leaves all but the end in the cache
            runs[way] = engine.run(prompt)
            rows[way] = sum(runs[way].prompt_rows)
            assert way.startswith("hit") == (runs[way].hit_tokens > 0), (way, length, runs[way].hit_tokens)
        for way, reference in REFERENCE.items():
            found[way].append(compare(runs[way], runs[reference]))
            if "exact" in way:
                assert torch.equal(runs[way].logits, runs[reference].logits), f"{way} is not exact at {length} tokens"
    return [
        {
            "prompt_tokens": length,
            "way": way,
            "compared_with": REFERENCE[way],
            "layer_rows": rows[way],
            "saved_of_full": 1 - rows[way] / rows["full"],
            "first_cosine": sum(one["first_cosine"] for one in ones) / len(ones),
            "least_cosine": min(one["least_cosine"] for one in ones),
            "first_token_same": sum(one["first_token_same"] for one in ones) / len(ones),
            "tokens_same": sum(one["tokens_same"] for one in ones) / len(ones),
        }
        for way, ones in found.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """As a table for docs/performance.md."""
    print("| prompt | way | layer-rows | saved | cosine, first token | least | first token | of 32 tokens the same |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in rows:
        print(
            f"| {one['prompt_tokens']:,} | {one['way']} | {one['layer_rows']:,} | {one['saved_of_full']:.0%} "
            f"| {one['first_cosine']:.4f} | {one['least_cosine']:.4f} | {one['first_token_same']:.0%} "
            f"| {one['tokens_same']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--texts", type=int, default=8)
    args = parser.parse_args()
    engines = {way: Engine(settings) for way, settings in WAYS.items()}
    documents = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")])
    ids = engines["full"].encode("\n\n".join(file.read_text(encoding="utf-8") for file in documents))
    stride = (len(ids) - max(args.lengths)) // args.texts
    if stride < 1:
        parser.error(f"the documents have {len(ids)} tokens; ask for shorter prompts")
    texts = [ids[i * stride : i * stride + max(args.lengths)] for i in range(args.texts)]
    rows = [row for length in args.lengths for row in measure(engines, texts, length)]
    show(rows)
    write_results(args.output, {"texts": args.texts, "results": rows})


if __name__ == "__main__":
    main()
