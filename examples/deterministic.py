"""The same answer every time: alone, in a crowd, with and without drafts, from a warm cache, and from a file.

uv run examples/deterministic.py

An answer is a function of the weights, the prompt, the parameters and the seed (docs/determinism.md). A replay file
holds all of these; `deepinfer replay FILE` draws its answer again, on another day, in another process.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.cli.main import main as deepinfer

PROMPT = "The most important thing about the sea is"
CROWD = ["Once upon a time", "In the morning", "She opened the door and"] * 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Show that answers repeat.")
    parser.add_argument("--model", help="a checkpoint folder, a hub name, or tiny (the default on a CPU)")
    args = parser.parse_args()
    params = SamplingParams(temperature=1.0, seed=2026, max_tokens=32)
    answers: dict[str, list[int]] = {}
    with LLM(args.model, quiet=True) as llm:
        output = llm.generate(PROMPT, params, use_tqdm=False)[0]
        answers["alone"] = output.outputs[0].token_ids
        crowd = llm.generate([*CROWD, PROMPT], params, use_tqdm=False)
        answers["among 12 others"] = crowd[-1].outputs[0].token_ids
    with LLM(args.model, quiet=True, num_drafts=0, max_num_batched_tokens=4, max_num_seqs=2, overlap=False) as llm:
        answers["no drafts, 4 rows a step"] = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids

    print(PROMPT + output.outputs[0].text)
    for how, token_ids in answers.items():
        print(f"{'same' if token_ids == answers['alone'] else 'DIFFERENT':>10}  {how}")

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        print(f"\nreplay token {output.save_replay(file)}, {file.stat().st_size} bytes")
        raise SystemExit(deepinfer(["replay", str(file), *(["--model", args.model] if args.model else [])]))


if __name__ == "__main__":
    main()
