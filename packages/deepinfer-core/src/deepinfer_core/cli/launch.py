"""`deepinfer launch`: another command, or a script, on one process a rank. Writes the torchrun command and runs it.

    deepinfer launch generate "The sea" --expert-parallel-size 8
    deepinfer launch --nodes 2 --node-rank 0 --master 10.0.0.1:29500 bench --expert-parallel-size 16
    deepinfer launch --nodes 2 --master 10.0.0.1:29500 --print generate "The sea" --expert-parallel-size 16
    deepinfer launch --ranks 4 my_script.py --its-own-flags

The number of ranks follows from the sizes among the command's settings; a script has to be told. With --print the
command lines of all nodes are printed and nothing is run. Nodes that do not appear within --wait seconds are named.
On one node plain `deepinfer generate` starts its ranks by itself; `launch` is for several nodes, and for scripts that
bring their own LLM.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deepinfer_core.cli.options import add_setting_flags, settings_from
from deepinfer_core.config.checks import check_integer, check_number, shown
from deepinfer_core.config.engine import resolve_settings
from deepinfer_core.errors import ConfigError
from deepinfer_core.parallel.roll_call import call_roll

__all__ = ["add_parser", "run", "torchrun_command"]

_COMMANDS = ("generate", "bench", "replay", "calibrate")
_MAX_NODES = 4_096
_MAX_RANKS = 65_536


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `launch` command."""
    parser = subparsers.add_parser(
        "launch",
        help="run a command on several nodes",
        description="Run a deepinfer command or a Python script on one process a rank, with torchrun.",
        allow_abbrev=False,  # flags of the command that begin like these are its own
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that take part (1)")
    parser.add_argument("--node-rank", type=int, metavar="N", help="number of this machine, from 0")
    parser.add_argument("--master", metavar="HOST:PORT", help="where the ranks meet: node 0, as the others reach it")
    parser.add_argument("--wait", type=float, default=60.0, metavar="S", help="longest wait for the other nodes (60)")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks in all (from the command's settings)")
    parser.add_argument("--print", action="store_true", help="print the command of each node, run nothing")
    parser.add_argument(
        "what", nargs=argparse.REMAINDER, metavar="COMMAND", help=f"{', '.join(_COMMANDS)} or script.py, and its flags"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything, then become torchrun; returns only after --print."""
    what = list(args.what)
    num_ranks = _num_ranks(what, args.ranks)
    check_number("--wait", args.wait, 1, 86_400, ConfigError)
    num_nodes = check_integer("--nodes", args.nodes, 1, _MAX_NODES, ConfigError)
    if num_ranks % num_nodes:
        ranks = "1 rank does" if num_ranks == 1 else f"{num_ranks} ranks do"
        raise ConfigError(
            f"{ranks} not fill {num_nodes} nodes evenly; change --nodes, a size of the command, such as "
            f"--expert-parallel-size {num_nodes}, or --ranks of a script"
        )
    if num_nodes > 1 and args.master is None:
        raise ConfigError(f"--nodes is {num_nodes}; say with --master HOST:PORT where they meet")
    if not args.print:
        if args.node_rank is None and num_nodes > 1:
            raise ConfigError(f"--nodes is {num_nodes}; say with --node-rank which one this is, 0 to {num_nodes - 1}")
        node = check_integer("--node-rank", args.node_rank or 0, 0, num_nodes - 1, ConfigError)
        if args.master is not None:
            call_roll(*_address(args.master), node, num_nodes, args.wait)
        _become(torchrun_command(what, num_nodes, num_ranks // num_nodes, node, args.master))
    for node in range(num_nodes):
        print(shlex.join(torchrun_command(what, num_nodes, num_ranks // num_nodes, node, args.master)))
    return 0


def _become(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 - no shell is involved, and signals go to torchrun itself


def torchrun_command(
    what: Sequence[str], num_nodes: int, ranks_per_node: int, node: int, master: str | None
) -> list[str]:
    """The command line of one node. Raises ConfigError for a `master` that is no HOST:PORT."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_nodes}"]
    command += [f"--nproc-per-node={ranks_per_node}", "--max-restarts=0"]
    if master is None:
        command += ["--standalone"]
    else:
        host, port = _address(master)
        command += [f"--node-rank={node}", f"--master-addr={host}", f"--master-port={port}"]
    # Behind "--" torchrun looks for no flags of its own: it would take --n for the beginning of several.
    return [*command, *(["-m", "--", "deepinfer_core.cli"] if what[0] in _COMMANDS else ["--"]), *what]


def _address(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"--master is {shown(master)}; it must be HOST:PORT, such as 10.0.0.1:29500")
    return host, int(port)


def _num_ranks(what: Sequence[str], given: int | None) -> int:
    if not what:
        raise ConfigError(f"say what to launch: one of {', '.join(_COMMANDS)}, or a script")
    if what[0] in _COMMANDS:
        num_ranks = _ranks_of_settings(what[1:])
        if given not in (None, num_ranks):
            raise ConfigError(f"--ranks is {given}, and the settings of {what[0]} ask for {num_ranks}; leave it out")
        return num_ranks
    if not Path(what[0]).is_file():
        raise ConfigError(f"{shown(what[0])} is no command ({', '.join(_COMMANDS)}) and no file")
    if given is None:
        raise ConfigError(f"{what[0]} is a script; say with --ranks how many ranks its settings ask for")
    return check_integer("--ranks", given, 1, _MAX_RANKS, ConfigError)


def _ranks_of_settings(flags: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_setting_flags(parser)
    known, _ = parser.parse_known_args(flags)
    return resolve_settings(settings_from(known)).config.parallel.topology().world_size
