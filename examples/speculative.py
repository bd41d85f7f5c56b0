"""What drafting does: the same answer in fewer steps, and where in a block drafts are accepted.

uv run examples/speculative.py

The drafter proposes up to five tokens a step; the target accepts those that it would have drawn itself, so the answer
does not change. How many are worth verifying is decided each step from their confidence and from measured costs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, cast

from deepinfer_core import LLM, SamplingParams

PROMPT = "Once upon a time"
WAYS: dict[str, dict[str, Any]] = {
    "no drafts": {"num_drafts": 0},
    "3 drafts": {"num_drafts": 3, "draft_schedule": "fixed"},
    "5 drafts": {"num_drafts": 5, "draft_schedule": "fixed"},
    "scheduled": {"num_drafts": 5, "draft_schedule": "scheduled"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare drafting with plain decoding.")
    parser.add_argument("--model", help="a checkpoint folder, a hub name, or tiny (the default on a CPU)")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    texts: set[str] = set()
    for way, settings in WAYS.items():
        with LLM(args.model, quiet=True, max_num_seqs=8, **settings) as llm:
            llm.generate(PROMPT, SamplingParams(max_tokens=4), use_tqdm=False)  # the first step allocates
            before, start = llm.statistics(), time.perf_counter()
            output = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
            seconds, after = time.perf_counter() - start, llm.statistics()
        texts.add(output.text)
        steps = cast("int", after["steps"]) - cast("int", before["steps"])
        shares = cast("list[float | None]", after["acceptance_by_position"])
        accepted = " ".join("-" if share is None else f"{share:.2f}" for share in shares) or "none drafted"
        rate = len(output.token_ids) / seconds
        print(f"{way:>10}: {steps:3} steps, {rate:5.0f} tokens/s, accepted by place: {accepted}")
    print(f"\n{len(texts)} answer in {len(WAYS)} ways: {PROMPT}{texts.pop()}")


if __name__ == "__main__":
    main()
