"""`deepinfer bench`: tokens a second of prefill and decode on this machine, for one model.

    prefill   N tokens / time of generate(max_tokens=1)
    decode    B (T - 1) tokens / (time of generate(max_tokens=T) - time of generate(max_tokens=1))

Prompts are random token ids of a fixed seed, answers are greedy and ignore the end token, times are the best of some
repeats.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_core.cli.console import console, table_of
from deepinfer_core.cli.options import add_setting_flags, settings_from
from deepinfer_core.config.checks import check_integer
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_core.llm import LLM

__all__ = ["Measurement", "add_parser", "measure", "run"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One batch size. Seconds are the best of the repeats."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens of all requests a second."""
        return self.batch * self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens of all requests a second, the first of each left out."""
        return self.batch * (self.output_tokens - 1) / self.decode_s


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `bench` command."""
    parser = subparsers.add_parser(
        "bench", help="prefill and decode speed", description="Prefill and decode tokens a second, by batch size."
    )
    parser.add_argument("--batch", default="1,8", help="batch sizes, comma separated (1,8)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of each prompt (128)")
    parser.add_argument("--output-tokens", type=int, default=32, help="tokens of each answer (32)")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many counts (3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_setting_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    batches = [check_integer("--batch", _number(text), 1, 65_536, ConfigError) for text in args.batch.split(",")]
    prompt_tokens = check_integer("--prompt-tokens", args.prompt_tokens, 1, 2**24, ConfigError)
    output_tokens = check_integer("--output-tokens", args.output_tokens, 2, 2**24, ConfigError)
    repeats = check_integer("--repeats", args.repeats, 1, 1_000, ConfigError)
    import torch

    from deepinfer_core.llm import LLM

    settings: dict[str, Any] = {"quiet": True} | settings_from(args)
    with LLM(**settings) as llm:
        found = [measure(llm, batch, prompt_tokens, output_tokens, repeats) for batch in batches]
    machine = (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    if args.json:
        rows = [
            asdict(one)
            | {"prefill_tokens_per_s": one.prefill_tokens_per_s, "decode_tokens_per_s": one.decode_tokens_per_s}
            for one in found
        ]
        print(json.dumps({"machine": machine, "repeats": repeats, "results": rows}, indent=1))
        return 0
    columns = ("batch", "prompt tokens", "output tokens", "prefill tokens/s", "decode tokens/s")
    rows = [
        (str(one.batch), str(one.prompt_tokens), str(one.output_tokens),
         f"{one.prefill_tokens_per_s:,.0f}", f"{one.decode_tokens_per_s:,.0f}")
        for one in found
    ]  # fmt: skip
    console().print(table_of(machine, columns, rows))
    return 0


def measure(llm: LLM, batch: int, prompt_tokens: int, output_tokens: int, repeats: int) -> Measurement:
    """Time one batch size; a first run of each length is not counted."""
    ids = np.random.default_rng(0).integers(0, llm.tokenizer.num_tokens, (batch, prompt_tokens)).tolist()

    def best(max_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        times: list[float] = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    prefill_s = best(1)
    whole_s = best(output_tokens)
    if whole_s <= prefill_s:
        raise ConfigError(f"--output-tokens is {output_tokens}, too few to time decoding beside prefill; ask for more")
    return Measurement(batch, prompt_tokens, output_tokens, prefill_s, whole_s - prefill_s)


def _number(text: str) -> int | str:
    return int(text) if text.strip().isascii() and text.strip().isdigit() else text
