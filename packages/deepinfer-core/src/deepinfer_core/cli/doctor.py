"""`deepinfer doctor`: what is there, what is missing, what to do about it. Exit status 1 if something is broken."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from deepinfer_core.cli.console import console, table_of
from deepinfer_core.config.env import read_text, unknown_variables
from deepinfer_core.errors import DeepInferError

__all__ = ["Finding", "add_parser", "examine", "run"]

_PYTHON = (3, 12)
_NEEDED = ("torch", "numpy", "tokenizers", "safetensors", "huggingface-hub", "llguidance", "msgspec", "rich", "tqdm")
_CACHE_VARIABLE = "DEEPINFER_JIT_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    state: Literal["ok", "note", "warning", "broken"]
    detail: str
    advice: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `doctor` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what works here, what does not, what to do",
        description="Looks at Python, torch, devices, toolchains, kernel packages, settings and the model's folder.",
    )
    parser.add_argument("--model", help="the model to look at: a folder, a hub name, or 'tiny'")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings."""
    findings = list(examine(args.model))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        rows = [(one.what, one.state, one.detail, one.advice) for one in findings]
        console().print(table_of("", ("checked", "state", "found", "what to do"), rows))
    return 1 if any(finding.state == "broken" for finding in findings) else 0


def examine(model: str | None) -> Iterator[Finding]:
    """All findings, in the order of what rests on what. A check that itself fails is a finding, never an exception."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("Python", _python),
        ("packages", _packages),
        ("machine", _machine),
        ("torch", _torch),
        ("toolchain", _toolchain),
        ("kernels", _kernels),
        ("variables", _variables),
        ("kernel cache", _kernel_cache),
        ("model", lambda: _model(model)),
    ]
    for what, check in checks:
        try:
            yield from check()
        except DeepInferError as error:
            yield Finding(what, "broken", str(error))
        except Exception as error:  # whatever is wrong with the machine is what the command is for
            yield Finding(what, "broken", f"{type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < _PYTHON:
        yield Finding("Python", "broken", found, "use Python 3.12 or later (./build.sh makes an environment)")
    else:
        yield Finding("Python", "ok", found)


def _packages() -> Iterator[Finding]:
    found: list[str] = []
    for name in ("deepinfer-core", *_NEEDED):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", "broken", f"{name} is not installed", "run ./build.sh again")
    yield Finding("packages", "ok", ", ".join(found))
    yield _recipe()


def _recipe() -> Finding:
    try:
        import deepseek_recipe
    except ImportError:
        return Finding("deepseek-recipe", "note", "not installed", "chat needs it: install deepinfer-core[chat]")
    provider = getattr(deepseek_recipe, "__provider__", None)
    if provider != "deepinfer":
        return Finding(
            "deepseek-recipe",
            "warning",
            f"{deepseek_recipe.__file__} is the official wheel, which has the same name",
            "chat needs ours: uninstall it, then install deepinfer-core[chat]",
        )
    return Finding("deepseek-recipe", "ok", f"{version('deepseek-recipe')} of this project")


def _machine() -> Iterator[Finding]:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page / 1e9 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", "ok", f"{platform.machine()}, {cores} cores, {total:.0f} GB memory, {free:.0f} GB unused")


def _torch() -> Iterator[Finding]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads, {capability} on the CPU")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            one = torch.cuda.get_device_properties(index)
            arch = f"sm_{one.major}{one.minor}"
            yield Finding(f"cuda:{index}", "ok", f"{one.name}, {arch}, {one.total_memory / 1e9:.0f} GB")
    elif torch.version.cuda is not None and shutil.which("nvidia-smi"):
        yield Finding(
            "cuda", "warning", f"nvidia-smi is there, but torch (CUDA {torch.version.cuda}) sees no device",
            "check the driver with nvidia-smi; it must be new enough for this CUDA version",
        )  # fmt: skip
    else:
        yield Finding("cuda", "note", "no NVIDIA device", "the CPU runs everything")


def _toolchain() -> Iterator[Finding]:
    for program, needed_for in (
        ("nvcc", "the nvidia kernels compile with CUDA 13"),
        ("gcc", "a C compiler makes the CPU kernels; deepinfer-gemm, -ep: >= 13"),
    ):
        path = shutil.which(program)
        if path is None:
            yield Finding(program, "note", "not on PATH", needed_for)
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
        lines = [line for line in done.stdout.splitlines() if "release" in line] or done.stdout.splitlines()
        yield Finding(program, "ok", f"{lines[0] if lines else 'no version'} at {path}")


def _kernels() -> Iterator[Finding]:
    from deepinfer_core.kernels.contract import Unavailable
    from deepinfer_core.kernels.registry import choose_provider, native_status, provider_statuses

    statuses = provider_statuses()
    for status in [native_status(), *statuses]:
        if isinstance(status.result, Unavailable):
            yield Finding(f"kernels: {status.name}", "note", "cannot run here", status.result.reason)
        else:
            yield Finding(f"kernels: {status.name}", "ok", status.result.summary)
    requested = read_text("DEEPINFER_ACCELERATOR")
    choice = choose_provider(requested, statuses)
    why = "no accelerator can run here" if choice.provider is None and requested is None else choice.reason
    yield Finding("device in use", "ok", f"{choice.name}: {why}")


def _variables() -> Iterator[Finding]:
    from deepinfer_core.config.engine import resolve_settings

    for sentence in unknown_variables():
        yield Finding("variables", "warning", sentence, "correct or unset it")
    resolved = resolve_settings({})
    set_here = [f"{name}={value}" for name, value, source in resolved.rows() if source != "default"]
    yield Finding("variables", "ok", "set by the environment: " + (", ".join(set_here) or "nothing"))


def _kernel_cache() -> Iterator[Finding]:
    folder = read_text(_CACHE_VARIABLE)
    if folder is None:
        return
    nearest = next(parent for parent in (Path(folder), *Path(folder).absolute().parents) if parent.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        yield Finding("kernel cache", "ok", f"{folder}, {shutil.disk_usage(nearest).free / 1e9:.0f} GB free")
    else:
        yield Finding("kernel cache", "broken", f"{nearest} cannot be written", f"point {_CACHE_VARIABLE} elsewhere")


def _model(model: str | None) -> Iterator[Finding]:
    from deepinfer_core.checkpoint.folder import missing_shards, open_checkpoint
    from deepinfer_core.checkpoint.resolve import BUNDLED_MODEL, resolve_model
    from deepinfer_core.config.model import ModelConfig
    from deepinfer_core.kernels.registry import choose_provider
    from deepinfer_core.text import Tokenizer

    choice = choose_provider(read_text("DEEPINFER_ACCELERATOR"))
    if model is None and read_text("DEEPINFER_HF_MODEL_DIR") is None and choice.name != "cpu":
        yield Finding("model", "note", "none is named; the released weights would be fetched", "name one with --model")
        return
    # Of a model on the hub what is small; its shards are fetched when it runs.
    folder = resolve_model(model, accelerator=choice.name, weights=False)
    config = ModelConfig.from_folder(folder)
    try:
        tokenizer = Tokenizer.from_path(folder, bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)
        token_ids = f"{len(tokenizer)} token ids"
    except DeepInferError as error:  # the shards may be missing, too
        token_ids = "no tokenizer"
        yield Finding("tokenizer", "broken", str(error))
    is_of_hub = model not in (None, BUNDLED_MODEL) and Path(model).expanduser() != folder
    missing = missing_shards(folder) if is_of_hub else []
    if missing:
        yield Finding(
            "model", "note",
            f"{folder}: {config.num_hidden_layers} layers, {token_ids}, context "
            f"{config.max_position_embeddings}; {len(missing)} shards are not here, the first is {missing[0]}",
            "they are fetched when the model first runs",
        )  # fmt: skip
        return
    checkpoint = open_checkpoint(folder, config)
    yield Finding(
        "model", "ok",
        f"{folder}: {config.num_hidden_layers} layers, {len(checkpoint.tensors)} tensors in {len(checkpoint.headers)} "
        f"shards, {token_ids}, context {config.max_position_embeddings}",
    )  # fmt: skip
