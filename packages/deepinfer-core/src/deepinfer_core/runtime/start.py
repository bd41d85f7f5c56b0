"""`start_engine`: the engine that the settings ask for, in this process or over many ranks.

one rank                       assembled here
more, nobody launched us       local processes, one a rank; this process is their front end
more, launcher "ray"           actors of a Ray cluster, one a rank; this process is their front end
more, torchrun launched us     the process of rank 0 is the front end and starts its rank as a child; the others are
                               ranks: they serve here until the front end closes, then exit
"""

from __future__ import annotations

from deepinfer_core.config.engine import EngineConfig, flat_settings
from deepinfer_core.errors import ConfigError
from deepinfer_core.kernels.registry import choose_provider
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.parallel.launched import launched_ranks
from deepinfer_core.parallel.ray_launch import ray_ranks
from deepinfer_core.parallel.workers import Workers
from deepinfer_core.runtime.assembly import assemble_engine
from deepinfer_core.runtime.front_end import FrontEnd
from deepinfer_core.runtime.rank_main import serve_launched
from deepinfer_core.runtime.running import RunningEngine

__all__ = ["start_engine"]

_RANK_MODULE = "deepinfer_core.runtime.rank_main"
_MOST_WAITING = 2**24  # of a rank: its front end keeps the queue short


def start_engine(config: EngineConfig) -> RunningEngine:
    """Load, or have loaded. Raises an error of `errors` for whatever is missing, damaged or too large."""
    topology = config.parallel.topology()
    meeting = Rendezvous.from_environment()
    if meeting is not None and meeting.world_size != topology.world_size:
        raise ConfigError(
            f"{meeting.world_size} processes were launched and the settings ask for {topology.world_size} ranks "
            f"(data_parallel_size {topology.data_parallel_size} x context_parallel_size "
            f"{topology.context_parallel_size}); launch as many, or unset RANK and WORLD_SIZE"
        )
    if topology.world_size == 1:
        return assemble_engine(config)
    settings = flat_settings(config) | {"max_num_waiting": _MOST_WAITING}
    leaders = range(0, topology.world_size, topology.context_parallel_size)
    if config.parallel.launcher == "ray":
        device = choose_provider(config.accelerator).device
        ranks = ray_ranks(_RANK_MODULE, topology.world_size, config.parallel.start_deadline_s, device=device)
    elif meeting is None:
        ranks = Workers.local(_RANK_MODULE, topology.world_size, show_output=not config.quiet)
    else:
        wait_s = config.parallel.start_deadline_s
        if meeting.rank > 0:
            raise SystemExit(serve_launched(wait_s))
        ranks = launched_ranks(_RANK_MODULE, meeting.connect(wait_s), meeting, wait_s, show_output=not config.quiet)
    return FrontEnd.connect(config, ranks, leaders, settings)
