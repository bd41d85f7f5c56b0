"""Many requests at once, each an asynchronous stream; one of them is given up half way.

uv run examples/streaming.py

    ready  prompt tokens, those found in the cache      text  new tokens and their text      finish  reason, usage
"""

from __future__ import annotations

import argparse
import asyncio
import time

from deepinfer_core import Engine, SamplingParams

PROMPTS = ["Once upon a time", "The old man looked at the sea and", "In the morning", "She opened the door and"]


async def read(engine: Engine, prompt: str, params: SamplingParams, give_up_after: int | None = None) -> None:
    """Print a line for each stream: when its first text came, how it ended, and the text."""
    start, first_text_s, text, num_tokens = time.perf_counter(), 0.0, "", 0
    stream = engine.add_request(prompt, params)
    async for chunk in stream:
        if chunk.kind == "text":
            first_text_s = first_text_s or time.perf_counter() - start
            text += chunk.text
            num_tokens += len(chunk.token_ids)
        if chunk.kind == "finish":
            print(f"[{chunk.finish_reason}, {num_tokens} tokens, first text after {first_text_s * 1e3:.0f} ms]")
            print(f"  {prompt}{text!r}")
        if give_up_after is not None and num_tokens >= give_up_after:
            await stream.aclose()  # the request is aborted, its memory free after the running step
            print(f"[given up after {num_tokens} tokens]\n  {prompt}{text!r}")


async def main() -> None:
    parser = argparse.ArgumentParser(description="Stream several answers at once.")
    parser.add_argument("--model", help="a checkpoint folder, a hub name, or tiny (the default on a CPU)")
    parser.add_argument("--max-tokens", type=int, default=40)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=args.max_tokens)
    async with Engine(args.model, quiet=True) as engine:
        readers = [read(engine, prompt, params) for prompt in PROMPTS]
        await asyncio.gather(*readers, read(engine, "This will never be read", params, give_up_after=5))
        statistics = engine.statistics()
    print(f"\n{statistics['output_tokens']} tokens in {statistics['steps']} steps, {statistics['finished']}")


if __name__ == "__main__":
    asyncio.run(main())
