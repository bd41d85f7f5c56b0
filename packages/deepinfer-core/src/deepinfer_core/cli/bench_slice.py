"""`deepinfer bench --slice ep=64`: one rank of 64 of the released model, random weights, no communication.

    step       seconds of a decode step: every request verifies n drafts and gets n new ones; median of --steps
    tokens/s   requests (1 + a + .. + a^n) / step, a = --acceptance: what the step yields at that acceptance
    prefill    tokens / seconds of one prompt, in chunks of --chunk rows, decoder half of its last 140 rows

runtime/rank_slice.py says what the rank holds and what is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_core.cli.console import console, table_of
from deepinfer_core.cli.options import settings_from
from deepinfer_core.cli.results import check_outputs, write_json
from deepinfer_core.config.checks import check_integer, check_number, shown
from deepinfer_core.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from deepinfer_core.config.sampling import SamplingParams
    from deepinfer_core.runtime.rank_slice import RankSlice, SliceSize

__all__ = ["SliceResult", "add_slice_flags", "decode_results", "measure_slice", "prefill_results", "run_slice"]

_KEEP_ROWS = 140  # of the release's decoder prefill
_MOST = 2**20


@dataclass(frozen=True)
class SliceResult:
    """One number of requests."""

    requests: int
    context: int
    rows: int
    step_ms: float  # median
    slowest_step_ms: float
    tokens_a_step: float
    tokens_per_s: float
    device_gb: float  # largest use of memory so far


def add_slice_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a slice; --requests is shared with workloads."""
    group = parser.add_argument_group("one rank of a cluster, random weights, no communication; needs an accelerator")
    group.add_argument("--slice", metavar="ep=N", help="one of N ranks that share the experts")
    group.add_argument("--context", type=int, default=131_072, help="tokens of each request (131072)")
    group.add_argument("--drafts", type=int, default=3, help="drafts a step (3)")
    group.add_argument("--acceptance", type=float, default=0.75, help="of each draft, given those before it (0.75)")
    group.add_argument("--slice-temperature", type=float, default=1.0, help="of the requests, 0 = greedy (1.0)")
    group.add_argument("--steps", type=int, default=20, help="timed steps (20)")
    group.add_argument("--prefill", help="time prefills of so many tokens, comma separated, in place of decoding")
    group.add_argument("--chunk", type=int, default=8_192, help="rows of a prefill step (8192)")
    group.add_argument("--expert-sets", type=int, help="sets of expert weights that the layers share (one a layer)")


def run_slice(args: argparse.Namespace) -> int:
    """Measure and print."""
    ranks = _ranks(args.slice)
    context = check_integer("--context", args.context, 256, _MOST, ConfigError)
    drafts = check_integer("--drafts", args.drafts, 1, 5, ConfigError)
    acceptance = check_number("--acceptance", args.acceptance, 0.0, 1.0, ConfigError)
    temperature = check_number("--slice-temperature", args.slice_temperature, 0.0, 100.0, ConfigError)
    steps = check_integer("--steps", args.steps, 3, 10_000, ConfigError)
    requests = _numbers("--requests", args.requests or "256")
    prompts = _numbers("--prefill", args.prefill) if args.prefill else []
    chunk = check_integer("--chunk", args.chunk, 128, _MOST, ConfigError)
    sets = None if args.expert_sets is None else check_integer("--expert-sets", args.expert_sets, 1, 64, ConfigError)
    check_outputs(args.output)
    settings = settings_from(args)
    from deepinfer_core.runtime.rank_slice import SliceSize
    from deepinfer_core.runtime.weight_form import PACKINGS

    float8 = bool(settings.get("float8_products", False))
    packed = PACKINGS.get(settings.get("weight_form", "bfloat16"), "none")
    if prompts:
        size = SliceSize(ranks, 1, max(*prompts, 256), drafts, chunk, sets, float8, packed)
    else:
        size = SliceSize(ranks, max(requests), context, drafts, max(requests) * (1 + drafts), sets, float8, packed)
    found = measure_slice(size, [] if prompts else requests, prompts, acceptance, temperature, steps)
    if args.output is not None:
        write_json(args.output, found)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    _show(found)
    return 0


def measure_slice(
    size: SliceSize,
    requests: list[int],
    prompts: list[int],
    acceptance: float,
    temperature: float,
    steps: int,
) -> dict[str, Any]:
    """Time decode steps of each number of requests and prefills of each length."""
    import torch

    from deepinfer_core.config.sampling import SamplingParams
    from deepinfer_core.kernels.contract import TakesPacked
    from deepinfer_core.kernels.registry import build_kernels, choose_provider
    from deepinfer_core.runtime.rank_slice import RankSlice, release_config

    choice = choose_provider(None)
    if choice.device == "cpu":
        raise CapacityError(f"a slice of the released model needs an accelerator: {choice.reason}")
    config = release_config()
    kernels, sources = build_kernels(choice, config, torch.bfloat16)
    arrange = None
    if size.packed != "none":
        if size.float8_products or not isinstance(choice.provider, TakesPacked):
            raise ConfigError(f"weight_form keeps {size.packed} packed, which neither float8_products nor every "
                              f"kernel package takes ({choice.name} is used); leave it out")  # fmt: skip
        arrange = choice.provider.arranged
    part = RankSlice(config, size, kernels, choice.device, torch.bfloat16, arrange)
    decoded = decode_results(part, requests, SamplingParams(temperature=temperature), acceptance, steps)
    filled = prefill_results(part, prompts)
    part.close()
    return {
        "slice": asdict(size),
        "device": choice.reason,
        "temperature": temperature,
        "acceptance": acceptance,
        "communication": "left out",
        "reference_operations": [source.op for source in sources if source.provider == "reference"],
        "decode": decoded,
        "prefill": filled,
        "device_gb": torch.get_device_module(choice.device).max_memory_reserved() / 1e9,
    }


def decode_results(
    part: RankSlice, requests: list[int], params: SamplingParams, acceptance: float, steps: int
) -> list[dict[str, Any]]:
    """One entry for each number of requests: `SliceResult` as a dictionary."""
    import torch

    from deepinfer_core.runtime.rank_slice import tokens_a_step

    tokens = tokens_a_step(part.size.num_drafts, acceptance)
    found: list[dict[str, Any]] = []
    for count in requests:
        seconds = part.decode_seconds(count, params, steps)
        step_s = statistics.median(seconds)
        result = SliceResult(
            requests=count,
            context=part.size.context,
            rows=count * (1 + part.size.num_drafts),
            step_ms=step_s * 1e3,
            slowest_step_ms=max(seconds) * 1e3,
            tokens_a_step=tokens,
            tokens_per_s=count * tokens / step_s,
            device_gb=torch.get_device_module(part.runner.device).max_memory_reserved() / 1e9,
        )
        found.append(asdict(result))
    return found


def prefill_results(part: RankSlice, prompts: list[int]) -> list[dict[str, float]]:
    """One entry for each length."""
    seconds = [(tokens, part.prefill_seconds(tokens, _KEEP_ROWS)) for tokens in prompts]
    return [{"tokens": tokens, "seconds": taken, "tokens_per_s": tokens / taken} for tokens, taken in seconds]


def _show(found: dict[str, Any]) -> None:
    title = f"one rank of {found['slice']['ranks']}, communication left out; {found['device']}"
    if found["decode"]:
        rows = [
            (str(one["requests"]), f"{one['context']:,}", f"{one['step_ms']:.1f}", f"{one['tokens_a_step']:.2f}",
             f"{one['tokens_per_s']:,.0f}", f"{one['device_gb']:.0f}")
            for one in found["decode"]
        ]  # fmt: skip
        console().print(table_of(title, ("requests", "context", "step ms", "tokens a step", "tokens/s", "GB"), rows))
    if found["prefill"]:
        rows = [
            (f"{one['tokens']:,}", f"{one['seconds'] * 1e3:,.0f}", f"{one['tokens_per_s']:,.0f}")
            for one in found["prefill"]
        ]
        console().print(table_of(title, ("prompt tokens", "ms", "tokens/s"), rows))


def _ranks(text: str) -> int:
    name, _, number = text.partition("=")
    if name != "ep" or not number.isascii() or not number.isdigit():
        raise ConfigError(f"--slice is {shown(text)}; give ep=N, N ranks that share the experts")
    return check_integer("--slice ep", int(number), 1, 384, ConfigError)


def _numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"{flag} is {shown(text)}; give positive integers with commas between them")
    return [check_integer(flag, int(part), 1, _MOST, ConfigError) for part in parts]
