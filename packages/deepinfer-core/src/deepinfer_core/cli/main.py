"""`deepinfer COMMAND`: one module a command, each with `add_parser(subparsers)` and `run(args) -> exit status`.

0  done          1  the answer is no (plan: does not fit; doctor: something is broken)
2  bad usage, or an error of `deepinfer_core.errors`, printed in one line          130  interrupted
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from deepinfer_core import __version__
from deepinfer_core.cli import bench, calibrate, doctor, generate, grammar, kernels, launch, plan, replay
from deepinfer_core.errors import DeepInferError

__all__ = ["main"]

_COMMANDS = (generate, launch, plan, doctor, kernels, grammar, replay, bench, calibrate)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="deepinfer", description="Run DeepSeek-V4.1-Flash, plan for it, and look at what runs it."
    )
    parser.add_argument("--version", action="version", version=f"deepinfer-core {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; `argv` None = the command line. Returns the exit status."""
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: no character may cost the whole answer
    try:
        return int(args.run(args))
    except DeepInferError as error:
        print(f"deepinfer {args.command}: {error}", *getattr(error, "__notes__", ()), sep="\n  ", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`). Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
