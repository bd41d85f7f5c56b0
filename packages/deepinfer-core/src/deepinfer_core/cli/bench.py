"""`deepinfer bench`: tokens a second of prefill and decode on this machine, for one model.

    prefill   N tokens / time of generate(max_tokens=1)
    decode    B (T - 1) tokens / (time of generate(max_tokens=T) - time of generate(max_tokens=1))

Prompts are random token ids of a fixed seed, answers are greedy and ignore the end token, times are the best of some
repeats. With --workload it serves a file of arrivals, or a made-up one, at several loads (cli/bench_workload.py):

    deepinfer bench --workload chat --loads 1,2,4 --output chat.json --plot chat.png

With --slice it times one rank of a cluster with random weights (cli/bench_slice.py):

    deepinfer bench --slice ep=64 --requests 256 --context 131072

With --eplb it plays recorded routing with and without the expert balancer (cli/bench_eplb.py):

    deepinfer bench --eplb --output eplb.json --plot eplb.png
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_core.cli.bench_eplb import add_eplb_flags, run_eplb
from deepinfer_core.cli.bench_slice import add_slice_flags, run_slice
from deepinfer_core.cli.console import console, table_of
from deepinfer_core.cli.options import add_setting_flags, settings_from
from deepinfer_core.cli.results import check_outputs, check_plot, write_json
from deepinfer_core.cli.workload import MADE_UP, made_up, read_workload, write_workload
from deepinfer_core.config.checks import check_integer, check_number
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_core.llm import LLM

__all__ = ["Measurement", "add_parser", "measure", "run"]

_MADE_UP_TOKENS = 4_096  # of the longest request in a made-up workload, unless max_model_len is given


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
    add_slice_flags(parser)
    add_eplb_flags(parser)
    served = parser.add_argument_group("serving a workload (format: python -m pydoc deepinfer_core.cli.workload)")
    served.add_argument(
        "--workload", help="a JSONL file, or a made-up one: chat, agent (a file of that name is ./chat)"
    )
    served.add_argument("--loads", default="1", help="how many times as fast as written, comma separated (1)")
    served.add_argument("--requests", help="of a made-up workload (100), or of a slice (256)")
    served.add_argument("--rate", type=float, default=4.0, help="requests a second of a made-up workload (4)")
    served.add_argument("--save-workload", type=Path, help="write the workload as JSONL")
    served.add_argument("--output", type=Path, help="write the results as JSON")
    served.add_argument("--plot", type=Path, help="write a PNG: throughput over per-user speed (deepinfer-core[bench])")
    add_setting_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.slice is not None:
        return run_slice(args)
    if args.eplb:
        return run_eplb(args)
    if args.workload is not None:
        return _serve(args)
    batches = [check_integer("--batch", _number(text), 1, 65_536, ConfigError) for text in args.batch.split(",")]
    prompt_tokens = check_integer("--prompt-tokens", args.prompt_tokens, 1, 2**24, ConfigError)
    output_tokens = check_integer("--output-tokens", args.output_tokens, 2, 2**24, ConfigError)
    repeats = check_integer("--repeats", args.repeats, 1, 1_000, ConfigError)
    from deepinfer_core.llm import LLM

    settings: dict[str, Any] = {"quiet": True} | settings_from(args)
    with LLM(**settings) as llm:
        found = [measure(llm, batch, prompt_tokens, output_tokens, repeats) for batch in batches]
    machine = _machine()
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


def _serve(args: argparse.Namespace) -> int:
    loads = [_load(text) for text in args.loads.split(",")]
    check_outputs(args.output, args.save_workload)
    check_plot(args.plot)
    settings: dict[str, Any] = {"quiet": True} | settings_from(args)
    if args.workload in MADE_UP:
        requests = check_integer("--requests", _number(args.requests or "100"), 1, 1_000_000, ConfigError)
        rate = check_number("--rate", args.rate, 0.0, 1e6, ConfigError, above_low=True)
        workload = made_up(args.workload, requests, rate, settings.get("max_model_len") or _MADE_UP_TOKENS)
    else:
        workload = read_workload(Path(args.workload))
    if args.save_workload is not None:
        write_workload(args.save_workload, workload)
    from deepinfer_core.cli.bench_workload import measure_load, plot

    progress = "quiet" not in settings_from(args)
    found = [measure_load(settings, workload, load, progress=progress) for load in loads]
    results = {"machine": _machine(), "workload": args.workload, "settings": settings, "loads": found}
    if args.output is not None:
        write_json(args.output, results)
    if args.plot is not None:
        plot(results, args.plot)
    if args.json:
        print(json.dumps(results, indent=1))
        return 0
    columns = ("load", "tokens/s", "tokens/s a user", "first token ms (median, 90th)", "hit tokens", "preemptions")
    rows = [
        (f"{one['load']:g}", f"{one['output_tokens_per_s']:,.0f}", _shown(one["user_tokens_per_s"]["p50"]),
         f"{_shown(one['first_token_ms']['p50'])}, {_shown(one['first_token_ms']['p90'])}",
         f"{one['hit_tokens']:,}", str(one["preemptions"]))
        for one in found
    ]  # fmt: skip
    console().print(table_of(f"{args.workload}, {len(workload)} requests; {_machine()}", columns, rows))
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


def _load(text: str) -> float:
    try:
        value: float | str = float(text)
    except ValueError:
        value = text
    return check_number("--loads", value, 0.0, 1e6, ConfigError, above_low=True)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _machine() -> str:
    import torch  # after the arguments have been found good

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.processor() or platform.machine()}, {cores} cores, torch {torch.__version__}"
