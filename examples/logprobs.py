"""How sure the model is: log-probabilities of a prompt, and of every token it could have written instead.

uv run examples/logprobs.py "The sun rises in the"
"""

from __future__ import annotations

import argparse
import math

from deepinfer_core import LLM, Logprob, SamplingParams


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show log-probabilities of a prompt and of its continuation.")
    parser.add_argument("prompt", nargs="?", default="The sun rises in the")
    parser.add_argument("--model", help="a checkpoint folder, a hub name, or tiny (the default on a CPU)")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--top", type=int, default=3, help="alternatives to show at each position")
    return parser.parse_args()


def show(token_id: int, table: dict[int, Logprob]) -> str:
    """One line: the token, its probability and rank, and the likeliest ones."""
    own = table[token_id]
    best = sorted(table.values(), key=lambda one: one.rank)
    others = "  ".join(f"{one.decoded_token!r} {math.exp(one.logprob):.3f}" for one in best)
    return f"{own.decoded_token!r:>18}  p={math.exp(own.logprob):.3f}  rank {own.rank:<5} | {others}"


def main() -> None:
    args = parse_arguments()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, logprobs=args.top, prompt_logprobs=args.top)
    with LLM(args.model) as llm:
        (output,) = llm.generate(args.prompt, params)

    scored = [
        (token, table)
        for token, table in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        if table
    ]
    print("Prompt (the first token follows nothing and has no probability):")
    for token, table in scored:
        print(show(token, table))
    nats = -sum(table[token].logprob for token, table in scored) / max(1, len(scored))
    print(f"perplexity {math.exp(nats):.1f} over {len(scored)} tokens")

    answer = output.outputs[0]
    print("\nContinuation:")
    for token, table in zip(answer.token_ids, answer.logprobs or [], strict=True):
        print(show(token, table))
    print(f"sum of log-probabilities {answer.cumulative_logprob:.3f}")


if __name__ == "__main__":
    main()
