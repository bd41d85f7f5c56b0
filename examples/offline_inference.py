"""The main job: a handful of prompts, their answers, and the speed.

uv run examples/offline_inference.py --model tiny           the small model that ships with the package
DEEPINFER_HF_MODEL_DIR=/models/v41 uv run examples/offline_inference.py --temperature 0.6 --top-p 0.95
"""

from __future__ import annotations

import argparse
import time

from deepinfer_core import LLM, SamplingParams

PROMPTS = [
    "Once upon a time",
    "The most important thing about the sea is",
    "She opened the door and",
    "In the morning",
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answer a handful of prompts.")
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="in place of the built-in ones")
    parser.add_argument("--model", help="a checkpoint folder, a hub name, or tiny (the default on a CPU)")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, help="the answers repeat exactly with the same one")
    parser.add_argument("--drafts", type=int, default=5, help="draft tokens a step, 0 = no speculation")
    parser.add_argument("--stats", action="store_true", help="print the engine's counters")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens, seed=args.seed)
    with LLM(args.model, num_drafts=args.drafts) as llm:
        start = time.perf_counter()
        outputs = llm.generate(args.prompts, params)
        seconds = time.perf_counter() - start
        statistics = llm.statistics()

    for output in outputs:
        answer = output.outputs[0]
        print(f"\n--- {output.prompt!r}  ({answer.finish_reason}, seed {answer.seed})")
        print(f"{output.prompt}{answer.text}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if args.stats:
        print(*(f"{name}: {value}" for name, value in statistics.items()), sep="\n")
    print(f"\n{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
