"""What is asked of Ray, against a recording fake with its published signatures; Ray itself was never run.

ray.init(), ray.is_initialized(), ray.remote(cls).options(..).remote(), ray.get(refs, *, timeout)
ray.get_runtime_context().get_node_id()
ray.util.placement_group(bundles, strategy), PlacementGroup.wait(timeout_seconds), remove_placement_group(group)
ray.util.get_node_ip_address()
ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deepinfer_core.config.engine import EngineConfig
from deepinfer_core.errors import ParallelError
from deepinfer_core.parallel.channel import Channel
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.parallel.launched import join_front_end
from deepinfer_core.parallel.ray_launch import RankActor, ray_ranks
from deepinfer_core.runtime.start import start_engine


class FakeRay:
    """Actors are threads; `nodes[bundle]` is where Ray puts a bundle."""

    def __init__(self, nodes: list[str], has_room: bool = True) -> None:
        self.nodes, self.has_room = nodes, has_room
        self.calls: list[tuple[str, Any]] = []
        self.variables: dict[int, dict[str, str]] = {}
        self.channels: dict[int, Channel] = {}

    def modules(self) -> dict[str, ModuleType]:
        ray, util = ModuleType("ray"), ModuleType("ray.util")
        strategies = ModuleType("ray.util.scheduling_strategies")
        vars(ray).update(
            is_initialized=lambda: False,
            init=lambda: self.calls.append(("init", None)),
            remote=self.remote,
            get=lambda refs, *, timeout: [ref() for ref in refs],
        )
        vars(util).update(
            placement_group=self.placement_group,
            remove_placement_group=lambda group: self.calls.append(("remove_placement_group", group)),
            get_node_ip_address=lambda: "127.0.0.1",
        )
        vars(strategies).update(
            PlacementGroupSchedulingStrategy=lambda *, placement_group, placement_group_bundle_index: (
                placement_group,
                placement_group_bundle_index,
            )
        )
        return {"ray": ray, "ray.util": util, "ray.util.scheduling_strategies": strategies}

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.calls.append(("placement_group", (bundles, strategy)))
        return SimpleNamespace(wait=lambda timeout_seconds: self.has_room)

    def remote(self, cls: type) -> Any:
        assert cls is RankActor

        def options(*, num_cpus: int, num_gpus: float, resources: dict[str, float], scheduling_strategy: Any) -> Any:
            self.calls.append(("options", (num_cpus, num_gpus, resources, scheduling_strategy[1])))
            return SimpleNamespace(remote=lambda: self.actor(scheduling_strategy[1]))

        return SimpleNamespace(options=options)

    def actor(self, bundle: int) -> Any:
        def serve(module: str, variables: dict[str, str], start_deadline_s: float) -> None:
            self.variables[bundle] = variables
            meeting = Rendezvous.from_environment(variables)
            assert meeting is not None
            threading.Thread(target=self.call, args=(meeting, start_deadline_s), daemon=True).start()

        return SimpleNamespace(
            node=SimpleNamespace(remote=lambda: lambda: self.nodes[bundle]), serve=SimpleNamespace(remote=serve)
        )

    def call(self, meeting: Rendezvous, start_deadline_s: float) -> None:
        self.channels[meeting.rank] = join_front_end(meeting.connect(start_deadline_s), meeting)
        self.channels[meeting.rank].send(b"rank %d" % meeting.rank)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeRay], FakeRay]:
    def put(fake: FakeRay) -> FakeRay:
        for name, module in fake.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        return fake

    return put


def test_one_actor_a_rank_and_neighbours_share_a_node(install: Callable[[FakeRay], FakeRay]) -> None:
    fake = install(FakeRay(["b", "a", "b", "a"]))
    ranks = ray_ranks("some.module", 4, 10.0, device="cuda")
    found: dict[int, bytes] = {}
    while len(found) < 4:
        found |= dict(ranks.receive(5.0))
    assert found == {rank: b"rank %d" % rank for rank in range(4)}
    assert ("placement_group", ([{"CPU": 1.0, "GPU": 1.0}] * 4, "PACK")) in fake.calls
    assert [call for name, call in fake.calls if name == "options"] == [(1, 1.0, {}, bundle) for bundle in range(4)]
    where = {int(fake.variables[b]["RANK"]): (fake.nodes[b], int(fake.variables[b]["LOCAL_RANK"])) for b in range(4)}
    assert [where[rank] for rank in range(4)] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert {variables["LOCAL_WORLD_SIZE"] for variables in fake.variables.values()} == {"2"}
    for channel in fake.channels.values():
        channel.close()
    ranks.stop(2.0)
    assert fake.calls[-1][0] == "remove_placement_group"
    assert [name for name, _ in fake.calls].count("remove_placement_group") == 1


def test_a_rank_that_ends_is_named(install: Callable[[FakeRay], FakeRay]) -> None:
    fake = install(FakeRay(["a", "a"]))
    ranks = ray_ranks("some.module", 2, 10.0, device="cpu")
    found: dict[int, bytes] = {}
    while len(found) < 2:
        found |= dict(ranks.receive(5.0))
    fake.channels[1].close()
    with pytest.raises(ParallelError, match=r"rank 1 at .* has ended; the launcher's output there says why"):
        ranks.receive(5.0)
    fake.channels[0].close()
    ranks.stop(1.0)


@pytest.mark.bad_input
def test_a_cluster_without_room_and_uneven_nodes_are_refused(install: Callable[[FakeRay], FakeRay]) -> None:
    fake = install(FakeRay(["a"] * 8, has_room=False))
    with pytest.raises(ParallelError, match=r"no room for 8 ranks with \{'GPU': 1.0\} each within 1 s"):
        ray_ranks("some.module", 8, 1.0, device="cuda")
    assert fake.calls[-1][0] == "remove_placement_group"
    install(FakeRay(["a", "a", "b"]))
    with pytest.raises(ParallelError, match=r"Ray placed \[1, 2\] ranks on its nodes; every node needs as many"):
        ray_ranks("some.module", 3, 1.0, device="cpu")


@pytest.mark.bad_input
def test_without_ray_its_installation_is_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = EngineConfig.from_settings(model="tiny", expert_parallel_size=2, launcher="ray", quiet=True)
    with pytest.raises(ParallelError, match="launcher is 'ray' and Ray is not installed: pip install ray"):
        start_engine(config)
