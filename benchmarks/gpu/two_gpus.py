"""`LLM` over two GPUs of one host that share requests, experts and Engram, against one GPU: the same tokens?

    python3 benchmarks/gpu/two_gpus.py --out two_gpus.json

Sixteen prompts of the tiny checkpoint, half greedy, half at temperature 0.8. A first call compiles kernels and captures
graphs and is not timed. Ends with status 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer_core import LLM, SamplingParams

OUTPUT_TOKENS = 40
OPENINGS = ("Once upon a time", "The old man looked at the sea and", "In the morning the king said to", "She opened it")
PROMPTS = [opening for opening in OPENINGS for _ in range(4)]
SETTINGS: dict[str, Any] = {
    "quiet": True,
    "accelerator": "nvidia",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_blocks": 64,
    "max_model_len": 512,
    "draft_schedule": "fixed",
}
TWO = {"data_parallel_size": 2, "expert_parallel_size": 2, "engram_parallel_size": 2}


def answers(**sizes: Any) -> tuple[list[list[int]], float]:
    """Token ids of each answer, and tokens a second."""
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    with LLM("tiny", **SETTINGS, **sizes) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    return [list(output.outputs[0].token_ids) for output in outputs], len(PROMPTS) * OUTPUT_TOKENS / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    one, one_rate = answers()
    two, two_rate = answers(**TWO)
    equal = sum(a == b for a, b in zip(one, two, strict=True))
    report = {"equal_answers": equal, "of": len(one), "tokens_per_s": {"one": one_rate, "two": two_rate}}
    print(json.dumps(report, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if equal == len(one) else 1


if __name__ == "__main__":
    sys.exit(main())
