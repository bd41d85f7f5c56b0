"""Ranks as Ray actors: one placement group, one actor a rank, and the same entry point as under torchrun.

    driver: front end, store ─► placement group, a bundle a rank ─► actor r: RANK, WORLD_SIZE, .. ─► serve_launched
            ◄──────────────── token, rank ── TCP ──────────────────

Ray only starts the processes and ends them; what the ranks say to each other and to the front end does not pass through
it. It is an optional extra (`pip install ray`), imported when it is asked for. Its calls are tested against a recording
fake made from its published signatures; it was never run.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any

from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.launch import Rendezvous, serve_store
from deepinfer_core.parallel.launched import accept_ranks
from deepinfer_core.parallel.workers import Worker, Workers

__all__ = ["RankActor", "ray_ranks"]


class RankActor:
    """What Ray runs for one rank. Its arguments and results are texts and numbers."""

    def node(self) -> str:
        """Id of the node that it landed on."""
        return str(importlib.import_module("ray").get_runtime_context().get_node_id())

    def serve(self, module: str, variables: dict[str, str], start_deadline_s: float) -> int:
        """Be the rank that `variables` say, until the front end ends; the exit status."""
        os.environ.update(variables)
        return int(importlib.import_module(module).serve_launched(start_deadline_s))


def ray_ranks(module: str, num_ranks: int, start_deadline_s: float, *, device: str) -> Workers:
    """Start all ranks on the Ray cluster that this process belongs to, or on one of this machine alone.

    module: has `serve_launched`. device: kind of device that each rank takes one of ("cuda", "npu"), or "cpu".
    Raises ParallelError without Ray, without room in the cluster, and if the ranks do not fill the nodes evenly.
    """
    try:
        ray: Any = importlib.import_module("ray")
        util: Any = importlib.import_module("ray.util")
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ParallelError("launcher is 'ray' and Ray is not installed: pip install ray") from error
    if not ray.is_initialized():
        ray.init()
    resources = {"cpu": {}, "cuda": {"GPU": 1.0}, "npu": {"NPU": 1.0}}[device]
    group = util.placement_group([{"CPU": 1.0, **resources}] * num_ranks, strategy="PACK")
    try:
        return _start(ray, util, strategies, group, module, num_ranks, start_deadline_s, resources)
    except BaseException:
        util.remove_placement_group(group)
        raise


def _start(
    ray: Any,
    util: Any,
    strategies: Any,
    group: Any,
    module: str,
    num_ranks: int,
    start_deadline_s: float,
    resources: dict[str, float],
) -> Workers:
    if not group.wait(start_deadline_s):
        raise ParallelError(
            f"the Ray cluster has no room for {num_ranks} ranks with {resources or {'CPU': 1.0}} each within "
            f"{start_deadline_s:g} s; `ray status` says what it has"
        )
    actors = [
        ray.remote(RankActor)
        .options(
            num_cpus=1,
            num_gpus=resources.get("GPU", 0),
            resources={name: amount for name, amount in resources.items() if name != "GPU"},
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        )
        .remote()
        for bundle in range(num_ranks)
    ]
    nodes = ray.get([actor.node.remote() for actor in actors], timeout=start_deadline_s)
    host = str(util.get_node_ip_address())
    store = serve_store(host)
    order = sorted(range(num_ranks), key=lambda bundle: nodes[bundle])  # ranks of a node are neighbours
    with socket.create_server((host, 0), backlog=num_ranks) as listener:
        for meeting, bundle in zip(_meetings([nodes[b] for b in order], host, store.port), order, strict=True):
            actors[bundle].serve.remote(module, meeting.variables(), start_deadline_s)
        channels = accept_ranks(listener, store, set(range(num_ranks)), start_deadline_s)
    workers = [Worker(rank, channel, None) for rank, channel in sorted(channels.items())]
    return Workers(workers, store, on_stop=lambda: util.remove_placement_group(group))


def _meetings(nodes: Sequence[str], host: str, port: int) -> list[Rendezvous]:
    """One a rank; `nodes` of ranks 0, 1, .. in order, those of a node side by side."""
    sizes = {node: nodes.count(node) for node in nodes}
    if len(set(sizes.values())) > 1:
        raise ParallelError(f"Ray placed {sorted(sizes.values())} ranks on its nodes; every node needs as many")
    per_node = next(iter(sizes.values()))
    return [Rendezvous(rank, len(nodes), rank % per_node, per_node, host, port) for rank in range(len(nodes))]
