"""`deepinfer kernels`: which operation comes from where, and why; `--warm` compiles everything ahead."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from deepinfer_core.cli.console import console, table_of
from deepinfer_core.config.engine import all_settings
from deepinfer_core.config.env import read_text

if TYPE_CHECKING:
    from deepinfer_core.config.model import ModelConfig
    from deepinfer_core.kernels.registry import KernelChoice

__all__ = ["add_parser", "run"]

_MOST_EXPERTS = 1 << 16


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
    parser.add_argument(
        "--warm", action="store_true", help="compile every kernel of the model ahead, into DEEPINFER_JIT_CACHE_DIR"
    )
    parser.add_argument(
        "--local-experts",
        type=int,
        metavar="N",
        help=f"with --warm: experts a layer that one process holds, 1 .. {_MOST_EXPERTS} (all)",
    )
    parser.add_argument(
        "--float8-products",
        action="store_true",
        help="with --warm: the kernels of the setting float8_products, too",
    )
    parser.add_argument(
        "--weight-form", choices=("experts", "packed"), help="with --warm: the kernels of this form of weights, too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the providers and the table of operations. Raises KernelError, ConfigError."""
    import torch

    from deepinfer_core.checkpoint.resolve import resolve_model
    from deepinfer_core.config.model import ModelConfig
    from deepinfer_core.kernels.contract import Capability
    from deepinfer_core.kernels.registry import build_kernels, choose_provider, native_status, provider_statuses

    statuses = provider_statuses()
    choice = choose_provider(args.accelerator or read_text("DEEPINFER_ACCELERATOR"), statuses)
    config = ModelConfig.from_folder(resolve_model(args.model, accelerator=choice.name, weights=False))
    if args.warm:
        _warm(choice, config, args)
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
            "operations": [{"op": s.op, "from": s.provider, "library": s.library, "reason": s.reason} for s in sources],
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


def _warm(choice: KernelChoice, config: ModelConfig, args: argparse.Namespace) -> None:
    """Compile what the chosen provider runs for this model, with a bar on stderr. Raises KernelError, ConfigError."""
    from tqdm import tqdm

    from deepinfer_core.errors import ConfigError, KernelError
    from deepinfer_core.kernels.contract import TakesPacked
    from deepinfer_core.runtime.weight_form import PACKINGS

    local_experts: int | None = args.local_experts
    if local_experts is not None and not 1 <= local_experts <= _MOST_EXPERTS:
        raise ConfigError(f"--local-experts is {local_experts}; 1 .. {_MOST_EXPERTS} can be held by a process")
    warm = getattr(choice.provider, "warm", None)
    if warm is None:
        raise KernelError(f"--warm has no kernels to compile ahead on {choice.name} ({choice.reason})")
    forms: dict[str, bool | str] = {}
    if args.float8_products:
        if choice.provider is None or not choice.provider.coded_ops:
            raise KernelError(f"--float8-products: {choice.name} has no kernels of that form; leave it out")
        forms["coded"] = True
    if args.weight_form is not None:
        if not isinstance(choice.provider, TakesPacked):
            raise KernelError(
                f"--weight-form: {choice.name} has no kernels that take {args.weight_form!r}; leave it out"
            )
        forms["packed"] = PACKINGS[args.weight_form]
    with tqdm(desc="Compiling", unit="kernel", disable=args.json) as bar:

        def show(done: int, total: int, name: str) -> None:
            bar.total, bar.n = total, done
            bar.set_postfix_str(name)

        warm(config, show, local_experts, **forms)
