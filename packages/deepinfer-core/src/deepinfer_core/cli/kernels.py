"""`deepinfer kernels`: which operation comes from where, and why."""

from __future__ import annotations

import argparse
import json

from deepinfer_core.cli.console import console, table_of
from deepinfer_core.config.engine import all_settings
from deepinfer_core.config.env import read_text

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `kernels` command."""
    parser = subparsers.add_parser(
        "kernels",
        help="which operation comes from where",
        description="The kernel packages that are installed, the one that is used, and the source of every operation.",
    )
    parser.add_argument("--model", help="the model whose shapes count: a folder, a hub name, or 'tiny'")
    parser.add_argument("--accelerator", choices=all_settings()["accelerator"].choices, help="as the setting")
    parser.add_argument(
        "--cpu-kernels", choices=all_settings()["cpu_kernels"].choices, default="auto", help="as the setting (auto)"
    )
    parser.add_argument("--dtype", choices=all_settings()["dtype"].choices, help="as the setting")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the providers and the table of operations."""
    import torch

    from deepinfer_core.checkpoint.resolve import resolve_model
    from deepinfer_core.config.model import ModelConfig
    from deepinfer_core.kernels.contract import Capability
    from deepinfer_core.kernels.registry import build_kernels, choose_provider, native_status, provider_statuses

    statuses = provider_statuses()
    choice = choose_provider(args.accelerator or read_text("DEEPINFER_ACCELERATOR"), statuses)
    config = ModelConfig.from_folder(resolve_model(args.model, accelerator=choice.name, weights=False))
    dtype = args.dtype or ("float32" if choice.device == "cpu" else "bfloat16")
    _, sources = build_kernels(choice, config, getattr(torch, dtype), cpu_kernels=args.cpu_kernels)
    providers = [
        (status.name, True, status.result.summary)
        if isinstance(status.result, Capability)
        else (status.name, False, status.result.reason)
        for status in [native_status(), *statuses]
    ]
    if args.json:
        value = {
            "provider": choice.name,
            "device": choice.device,
            "reason": choice.reason,
            "installed": [{"name": name, "runs": runs, "detail": detail} for name, runs, detail in providers],
            "operations": [{"op": s.op, "from": s.provider, "reason": s.reason} for s in sources],
        }
        print(json.dumps(value, indent=1))
        return 0
    out = console()
    installed = [(name, "yes" if runs else "no", detail) for name, runs, detail in providers]
    out.print(table_of("Kernel packages", ("package", "runs here", "with, or why not"), installed))
    out.print(f"Used: {'the CPU' if choice.provider is None else choice.name}.", markup=False, highlight=False)
    operations = [(source.op, source.provider, source.reason) for source in sources]
    out.print(table_of("Operations", ("operation", "from", "why"), operations))
    return 0
