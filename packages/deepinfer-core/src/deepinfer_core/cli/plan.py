"""`deepinfer plan`: what a checkpoint needs and what fits, from config.json and headers: no weights, no device."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from deepinfer_core.checkpoint.folder import INDEX_NAME, SINGLE_SHARD_NAME, open_checkpoint, read_weight_map
from deepinfer_core.checkpoint.manifest import check_against_manifest
from deepinfer_core.checkpoint.memory_plan import (
    DEFAULT_MEMORY_FRACTION,
    DEFAULT_STEP_ROWS,
    Form,
    MemoryPlan,
    RankMemory,
    Workload,
    kv_bytes_per_token,
    part_sizes,
    plan_memory,
)
from deepinfer_core.checkpoint.resolve import resolve_model
from deepinfer_core.cli import plan_cluster
from deepinfer_core.cli.console import console
from deepinfer_core.cluster.hardware import DEVICES, Device, device_named
from deepinfer_core.cluster.model_work import ModelWork
from deepinfer_core.cluster.speed import SpeedEstimate, estimate_speed
from deepinfer_core.config.engine import EngramStorage
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import ConfigError

__all__ = ["add_parser", "run"]

_GB = 10**9
_KV_FORMS: tuple[Form, ...] = ("packed", "plain")
_HELD = {"experts": "split by expert", "draft": "experts split", "engram_table": "split by row"}
_CACHES_HELD = {
    "blocks": "of its sequences",
    "windows": "of its sequences",
    "pairs and history": "of its sequences",
    "step scratch": "replicated",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `plan` command."""
    parser = subparsers.add_parser(
        "plan",
        help="what fits: memory by part and rank, largest context and batch",
        description="Memory of a checkpoint by part and by rank, and the largest context and batch that fit, from "
        "config.json and safetensors headers alone. Exit status 1 when it does not fit. GB are 10^9 bytes.",
    )
    parser.add_argument("--model", help="a checkpoint folder (config.json is enough), a hub name, or 'tiny'")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--cluster", metavar="FILE",
        help="simulate the cluster of FILE (TOML or JSON, docs/cluster.md) instead; --model unset: the released model",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="PNG", help="with --cluster: draw throughput over per-user speed")
    _add_memory_flags(parser)
    parser.set_defaults(run=run)


def _add_memory_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a plan of one machine; those that are given with --cluster are refused."""
    flags = parser.add_argument_group("one machine, or one group of devices")
    actions = [
        flags.add_argument(
            "--device", choices=tuple(DEVICES), help="the kind of device: sets --memory, and adds an estimate of speed"
        ),
        flags.add_argument(
            "--devices", type=int, default=1, help="ranks that experts and sequences are spread over (1)"
        ),
        flags.add_argument(
            "--memory", type=float, metavar="GB", help="memory of one device; nothing is limited without it"
        ),
        flags.add_argument("--host-memory", type=float, metavar="GB", help="memory of the host"),
        flags.add_argument(
            "--memory-fraction", type=float, default=DEFAULT_MEMORY_FRACTION,
            help=f"share of device memory to plan with ({DEFAULT_MEMORY_FRACTION})",
        ),
        flags.add_argument("--context", type=int, help="tokens of each sequence (the model's limit)"),
        flags.add_argument("--sequences", type=int, default=1, help="sequences at once, over all devices (1)"),
        flags.add_argument(
            "--step-rows", type=int, default=DEFAULT_STEP_ROWS, help=f"rows of the largest step ({DEFAULT_STEP_ROWS})"
        ),
        flags.add_argument("--drafts", type=int, help="draft length (the checkpoint's)"),
        flags.add_argument(
            "--engram", choices=get_args(EngramStorage), default="memory", help="where Engram tables live (memory)"
        ),
        flags.add_argument(
            "--form", choices=get_args(Form), default="bfloat16",
            help="weights as released (packed), as an accelerator holds them (bfloat16, or all products or the experts "
            "among them packed; float8 with float8_products), or as the CPU does (plain: float32) (bfloat16)",
        ),
    ]  # fmt: skip
    parser.set_defaults(memory_flags={action.dest: action.default for action in actions})


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, else 1. Raises DeepInferError for what cannot be planned."""
    if args.cluster is not None:
        given = [name for name, default in args.memory_flags.items() if getattr(args, name) != default]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ConfigError(f"{flags}: not with --cluster; the FILE says what the cluster is")
        return plan_cluster.run(args, console())
    if args.plot is not None:
        raise ConfigError("--plot draws a cluster; give --cluster FILE")
    device = None if args.device is None else device_named(args.device)
    folder = resolve_model(args.model, weights=False)
    config = ModelConfig.from_folder(folder)
    checked = _check_files(folder, config)
    workload = Workload(
        context_tokens=config.max_position_embeddings if args.context is None else args.context,
        num_sequences=args.sequences,
        num_devices=args.devices,
        device_bytes=_device_bytes(args.memory, device),
        host_bytes=_bytes("--host-memory", args.host_memory),
        memory_fraction=args.memory_fraction,
        engram_storage=args.engram,
        form=args.form,
        step_rows=args.step_rows,
        num_drafts=args.drafts,
    )
    plan = plan_memory(config, workload)
    speed = None if device is None else _speed(config, workload, device)
    if args.json:
        print(json.dumps(_as_json(plan, config, folder, checked, speed), indent=1))
    else:
        _show(console(), plan, config, folder, checked)
        if device is not None and speed is not None:
            console().print(_speed_sentence(speed, device), highlight=False, markup=False)
    return 0 if plan.fits else 1


def _device_bytes(gigabytes: float | None, device: Device | None) -> int | None:
    if gigabytes is None and device is not None:
        return int(device.memory.value)
    return _bytes("--memory", gigabytes)


def _speed(config: ModelConfig, workload: Workload, device: Device) -> SpeedEstimate:
    return estimate_speed(
        ModelWork.of(config),
        device,
        num_devices=workload.num_devices,
        num_sequences=workload.num_sequences,
        context_tokens=workload.context_tokens,
        num_drafts=_drafts(config, workload),
        step_rows=workload.step_rows,
    )


def _drafts(config: ModelConfig, workload: Workload) -> int:
    if not config.num_nextn_predict_layers:
        return 0
    return config.dspark_block_size if workload.num_drafts is None else workload.num_drafts


def _bytes(name: str, gigabytes: float | None) -> int | None:
    if gigabytes is None:
        return None
    if not 0 < gigabytes < 1e9:
        raise ConfigError(f"{name} is {gigabytes:g} GB; it must be above 0 and below 10^9")
    return int(gigabytes * _GB)


def _check_files(folder: Path, config: ModelConfig) -> str:
    """Compare config.json with as much of the checkpoint as is there; what that was."""
    weight_map = read_weight_map(folder)
    files = set(weight_map.values()) if weight_map else {SINGLE_SHARD_NAME}
    present = [name for name in files if (folder / name).is_file()]
    if len(present) == len(files):
        open_checkpoint(folder, config)
        return f"the headers of {len(files)} shard(s) hold the tensors that config.json asks for"
    if weight_map is None:
        return "config.json alone: there is neither an index nor a shard to check it against"
    check_against_manifest(config, dict.fromkeys(weight_map, ("", ())), str(folder / INDEX_NAME))
    absent = f"{len(files) - len(present)} of {len(files)} shards are not here"
    return f"{INDEX_NAME} names the tensors that config.json asks for; {absent}"


# ---- output ----------------------------------------------------------------------------------------------------------


def _as_json(
    plan: MemoryPlan, config: ModelConfig, folder: Path, checked: str, speed: SpeedEstimate | None
) -> dict[str, Any]:
    return {
        "model": str(folder),
        "checked": checked,
        "fits": plan.fits,
        "workload": dataclasses.asdict(plan.workload),
        "budget_bytes": plan.workload.budget_bytes,
        "limits": None if plan.limits is None else dataclasses.asdict(plan.limits),
        "checkpoint": [dataclasses.asdict(size) for size in part_sizes(config)],
        "kv_bytes_per_token": {form: kv_bytes_per_token(config, form) for form in _KV_FORMS},
        "window_ring_slots": plan.ring_slots,
        "host_bytes": plan.host_bytes,
        "disk_bytes": plan.disk_bytes,
        "ranks": [dataclasses.asdict(rank) | {"total": rank.total} for rank in plan.ranks],
        "speed_estimate": None if speed is None else dataclasses.asdict(speed),
    }


def _show(out: Console, plan: MemoryPlan, config: ModelConfig, folder: Path, checked: str) -> None:
    out.print(f"{folder}: {checked}.", highlight=False, markup=False)
    out.print(_checkpoint_table(config))
    out.print(_rank_table(plan))
    for line in _sentences(plan, config):
        out.print(line, highlight=False, markup=False)


def _checkpoint_table(config: ModelConfig) -> Table:
    table = _table("Checkpoint", "part", "parameters", "packed", "plain float32")
    sizes = part_sizes(config)
    for size in sizes:
        table.add_row(size.part, f"{size.num_parameters:,}", _shown(size.packed_bytes), _shown(size.plain_bytes))
    table.add_section()
    totals = (
        sum(s.num_parameters for s in sizes),
        sum(s.packed_bytes for s in sizes),
        sum(s.plain_bytes for s in sizes),
    )
    table.add_row("all", f"{totals[0]:,}", _shown(totals[1]), _shown(totals[2]))
    return table


def _rank_table(plan: MemoryPlan) -> Table:
    table = _table(f"Device memory by rank ({plan.workload.form})", "part", "held", *map(_rank_name, plan.ranks))
    for part in plan.ranks[0].weights:
        table.add_row(part, _HELD.get(part, "replicated"), *(_shown(rank.weights[part]) for rank in plan.ranks))
    table.add_section()
    for cache in plan.ranks[0].caches:
        table.add_row(cache, _CACHES_HELD[cache], *(_shown(rank.caches[cache]) for rank in plan.ranks))
    table.add_row("activations", "estimate", *(_shown(rank.activations) for rank in plan.ranks))
    table.add_section()
    table.add_row("all", "", *(_shown(rank.total) for rank in plan.ranks))
    return table


def _sentences(plan: MemoryPlan, config: ModelConfig) -> list[str]:
    work = plan.workload
    per_token = ", ".join(f"{kv_bytes_per_token(config, form):,.0f} B {form}" for form in _KV_FORMS)
    sentences = [
        f"Long-range KV a token: {per_token}. Window rings: {plan.ring_slots} slots a sequence and layer.",
        _engram_sentence(plan),
    ]
    asked = f"Sequences: {work.num_sequences} of {work.context_tokens:,} tokens on {work.num_devices} device(s)"
    if work.budget_bytes is None or plan.limits is None:
        return [
            *sentences,
            f"{asked} take {_shown(plan.ranks[0].total)} on the fullest device. Give --memory to see what fits.",
        ]
    fit = "fit" if plan.fits else "do NOT fit"
    sentences.append(
        f"{asked} {fit}: {_shown(plan.ranks[0].total)} on the fullest of {_shown(work.budget_bytes)} "
        f"({work.memory_fraction:.0%} of {_shown(work.device_bytes or 0)})."
    )
    if work.form == "bfloat16" and (plan.ranks[0].total > work.budget_bytes or _fills_half(plan)):
        sentences.append(
            "Counted with weights in bfloat16. NVIDIA kernels can hold FP8 and FP4 weights packed, and do where "
            "bfloat16 takes more than half of a device (weight_form): see --form experts and --form products."
        )
    if work.host_bytes is not None and plan.host_bytes > work.host_bytes:
        sentences.append(f"The host has {_shown(work.host_bytes)}; --engram disk or device needs less of it.")
    limits = plan.limits
    sentences.append(
        f"Largest context of {work.num_sequences} sequence(s): {limits.context_tokens:,} tokens. "
        f"Most sequences of {work.context_tokens:,} tokens: {limits.num_sequences:,}. "
        f"Fewest devices: {limits.num_devices or 'no number of them is enough'}."
    )
    return sentences


def _fills_half(plan: MemoryPlan) -> bool:
    """Whether the weights alone take more than half of a device, as far as `weight_form=auto` lets them."""
    return 2 * sum(plan.ranks[0].weights.values()) > (plan.workload.device_bytes or 0)


def _engram_sentence(plan: MemoryPlan) -> str:
    if plan.workload.tables_on_device:
        return "Engram tables: in device memory, rows split over the ranks."
    if plan.disk_bytes:
        return f"Engram tables: {_shown(plan.disk_bytes)} stay on disk; only looked-up rows are read."
    return f"Engram tables: {_shown(plan.host_bytes)} of host memory, one copy for all ranks."


def _speed_sentence(speed: SpeedEstimate, device: Device) -> str:
    def shown(values: tuple[float, float], scale: float = 1.0) -> str:
        least, most = (f"{value * scale:,.3g}" if value * scale < 100 else f"{value * scale:,.0f}" for value in values)
        return least if least == most else f"{least} to {most}"

    return (
        f"Speed on {device.name}, an ESTIMATE: {shown(speed.user_tokens_per_s)} tokens/s a sequence, "
        f"{shown(speed.decode_tokens_per_s)} in all ({shown(speed.step_s, 1e3)} ms a step of "
        f"{shown(speed.tokens_a_step)} tokens a sequence); prefill: {shown(speed.prefill_tokens_per_s)} tokens/s. "
        "From the sizes of the model and the peaks of the device, calibrated on curves published for SM100; the share "
        "of the peaks that is reached is assumed to be the same here. docs/cluster.md."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        text = number == 0 or column == "held"
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    return table


def _rank_name(rank: RankMemory) -> str:
    return f"rank {rank.first_rank}" + (f" to {rank.last_rank}" if rank.last_rank > rank.first_rank else "")


def _shown(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"
