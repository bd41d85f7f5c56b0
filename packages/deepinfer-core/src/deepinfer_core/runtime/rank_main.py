"""One rank as a process: `python -m deepinfer_core.runtime.rank_main --channel FD`, started by `parallel.workers`.

    settings from the front end ─► preflight with the other ranks ─► join them ─► load this rank's part ─► serve

`serve_launched` is what the process of a launcher does on every rank but 0 (`runtime/start.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch

from deepinfer_core.config.engine import EngineConfig
from deepinfer_core.errors import ParallelError
from deepinfer_core.kernels.registry import choose_provider
from deepinfer_core.parallel.channel import Channel, Inbox, Outbox
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.parallel.launched import join_front_end
from deepinfer_core.parallel.world import World
from deepinfer_core.runtime.assembly import assemble_engine
from deepinfer_core.runtime.rank_engine import RankEngine
from deepinfer_core.runtime.rank_messages import Failed, Start, decode_command, encode
from deepinfer_core.runtime.rank_preflight import check_before_loading

__all__ = ["main", "serve_launched", "serve_rank"]

_START_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The process; its exit status."""
    parser = argparse.ArgumentParser(prog="deepinfer rank")
    parser.add_argument("--channel", type=int, required=True, help="file descriptor of the connection to the front end")
    args = parser.parse_args(arguments)
    meeting = Rendezvous.from_environment()
    if meeting is None:
        parser.error("no launcher has set RANK and WORLD_SIZE")
    return serve_rank(meeting, Inbox(Channel.from_descriptor(args.channel, "the front end")))


def serve_launched(start_deadline_s: float) -> int:
    """Be the rank that a launcher has made this process, until the front end, elsewhere, ends; the exit status."""
    meeting = Rendezvous.from_environment()
    if meeting is None:
        raise ParallelError("no launcher has set RANK and WORLD_SIZE")
    channel = join_front_end(meeting.connect(start_deadline_s), meeting)
    return serve_rank(meeting, Inbox(channel))


def serve_rank(meeting: Rendezvous, inbox: Inbox) -> int:
    """Take the settings from the front end, join the others, load, serve. What goes wrong is told to the front end."""
    outbox = Outbox(inbox.channel)
    try:
        config = _settings(inbox, meeting.rank)
        device = _device(config, meeting)
        parallel = config.parallel
        store = meeting.connect(parallel.start_deadline_s)
        check_before_loading(config, store, meeting, device)
        topology = parallel.topology(meeting.local_world_size)
        with World(store, meeting.rank, topology, device, parallel.collective_deadline_s) as world:
            engine = assemble_engine(config, world)
            try:
                RankEngine(engine, inbox, outbox).serve()
            finally:
                engine.close()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        blamed = list(error.late_ranks) if isinstance(error, ParallelError) else []
        with suppress(ParallelError):  # the front end may be what failed
            outbox.send(encode(Failed(f"{type(error).__name__}: {error}", blamed)))
        return 1
    finally:
        outbox.close()
        inbox.close()
    return 0


def _settings(inbox: Inbox, rank: int) -> EngineConfig:
    messages = inbox.take(_START_S)
    if len(messages) != 1:
        raise ParallelError(f"the front end sent {len(messages)} messages where its settings were due")
    start = decode_command(messages[0])
    if not isinstance(start, Start):
        raise ParallelError(f"the front end sent {type(start).__name__} where its settings were due")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in start.settings.items()}
    config = EngineConfig.from_settings(**values)
    return dataclasses.replace(config, quiet=config.quiet or rank > 0)


def _device(config: EngineConfig, meeting: Rendezvous) -> torch.device:
    kind = choose_provider(config.accelerator).device
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    device = torch.device(kind, meeting.local_rank if module.device_count() > 1 else 0)  # some show each rank its own
    module.set_device(device)
    return device


if __name__ == "__main__":
    sys.exit(main())
