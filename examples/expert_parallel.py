"""Two ranks on this machine that share the experts and the Engram tables, and answer as one process would.

    uv run examples/expert_parallel.py [--ranks 4] [--model tiny]

Each rank serves its own requests with its own cache; in every layer, rows travel to the ranks that hold their experts.
"""

from __future__ import annotations

import argparse

from deepinfer_core import LLM, SamplingParams

PROMPTS = ["The sea was", "Once upon a time", "The old clock", "In the garden", "A letter came", "The last train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a folder, a name on the hub, or tiny")
    parser.add_argument("--ranks", type=int, default=2, help="processes that share the work (default 2)")
    parser.add_argument("--max-tokens", type=int, default=24, help="of each answer (default 24)")
    args = parser.parse_args()
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=args.max_tokens)
    sharing = {
        "data_parallel_size": args.ranks,
        "expert_parallel_size": args.ranks,
        "engram_parallel_size": args.ranks,
    }

    with LLM(args.model, quiet=True, **sharing) as llm:
        outputs = llm.generate(PROMPTS, params)
        counters = llm.statistics()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(repr(prompt + output.outputs[0].text))
    for rank, counted in counters.items():
        if isinstance(counted, dict):
            print(f"{rank}: {counted['output_tokens']} tokens in {counted['steps']} steps")

    with LLM(args.model, quiet=True) as llm:
        alone = llm.generate(PROMPTS, params, use_tqdm=False)
    same = all(
        together.outputs[0].token_ids == one.outputs[0].token_ids for together, one in zip(outputs, alone, strict=True)
    )
    if not same:
        raise SystemExit("one process gives other tokens")
    print("one process gives the same tokens")


if __name__ == "__main__":
    main()
