"""`RankPart`: which part of the model one rank holds, and what it exchanges for the rest.

    experts   slots of the rank's member in its expert group      all_to_all a layer
    Engram    a contiguous share of every table                   all_to_all a step
    the rest  whole on every rank

One process without a world holds everything and exchanges nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.checkpoint.sharding import engram_shares
from deepinfer_core.config.engine import EngineConfig, ExpertBalanceConfig
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.parallel import ExpertTransport
from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.model.params import ModelParams
from deepinfer_core.parallel.communicator import Communicator, GroupCommunicator
from deepinfer_core.parallel.deepep import DeepEpExperts, why_no_deepep
from deepinfer_core.parallel.expert_balancer import ExpertBalancer
from deepinfer_core.parallel.experts import SharedExperts
from deepinfer_core.parallel.lockstep import Lockstep
from deepinfer_core.parallel.owned import SharedEngram
from deepinfer_core.parallel.placement_tables import first_placements, held_experts, placement_tables
from deepinfer_core.parallel.world import World
from deepinfer_core.runtime.context_group import ContextGroup
from deepinfer_core.runtime.rank_runner import RankRunner
from deepinfer_core.runtime.runner import Runner, RunnerConfig
from deepinfer_core.scheduling.expert_balance import BalancePolicy
from deepinfer_core.scheduling.expert_placement import ExpertTopology, Placement

__all__ = ["RankPart"]


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """Of one rank. `experts`, `engram_rows`: arguments of `load_model_weights`, None = everything."""

    world: World | None
    placements: tuple[Placement, Placement] | None  # of layers and draft stages; None: not shared
    experts: Mapping[int, list[int]] | None
    engram_rows: Mapping[int, range] | None
    transport: ExpertTransport = "torch"
    balance: ExpertBalanceConfig = field(default_factory=ExpertBalanceConfig)

    @classmethod
    def of(cls, world: World | None, model: ModelConfig, config: EngineConfig) -> RankPart:
        """The part that a rank starts with. Raises ConfigError where there are too many ranks for the experts."""
        if world is None or world.size == 1:
            return cls(None, None, None, None)
        expert, engram = world.along("expert"), world.along("engram")
        placements = None
        if expert.size > 1:
            placements = first_placements(model, expert.size, config.experts.num_extra_experts)
        return cls(
            world,
            placements,
            None if placements is None else held_experts(placements, expert.rank),
            None if engram.size == 1 else engram_shares(model, engram.rank, engram.size),
            config.parallel.expert_transport,
            config.experts,
        )

    @property
    def steps_together(self) -> bool:
        """Whether steps of this rank need those of other requests."""
        return self.placements is not None or self.engram_rows is not None

    def smallest(self, value: int) -> int:
        """The smallest `value` of any rank; all ranks call it."""
        return -int(self.largest(-value))

    def largest(self, value: float) -> float:
        """The largest `value` of any rank; all ranks call it."""
        if self.world is None:
            return value
        return float(self.world.control.all_reduce_max(torch.tensor([value], dtype=torch.float64), "agreement")[0])

    def require_alike(self, experts: Mapping[int, tuple[Tensor, ...]]) -> None:
        """experts: layer -> tensors [slots, ..] that move from rank to rank. Raises KernelError, on all ranks, where
        one holds them in another form; all ranks call it.
        """
        forms = [(layer, [(held.dtype, held.shape[1:]) for held in tensors]) for layer, tensors in experts.items()]
        digest = int.from_bytes(blake2b(repr(forms).encode(), digest_size=6).digest())  # exact in float64
        if self.smallest(digest) != self.largest(digest):
            raise KernelError(
                "experts of one layer are packed on some ranks and decoded on others, as those with a scale that the "
                "kernels do not take are, so they cannot be moved; take weight_form='bfloat16', or "
                "expert_rearrangement_interval=0"
            )

    def runner(
        self, model: ModelConfig, params: ModelParams, kernels: Kernels, config: RunnerConfig, **named: Any
    ) -> Runner:
        """The runner of this rank's steps."""
        world = self.world
        if world is None or (world.along("context").size == 1 and not self.steps_together):
            return Runner(model, params, kernels, config, **named)
        expert, engram = world.along("expert"), world.along("engram")
        exchange = None if self.placements is None else self._exchange(expert, self.placements, model, config)
        return RankRunner(
            model,
            params,
            kernels,
            config,
            lockstep=Lockstep(world.control if self.steps_together else world.plans, world.begin_step),
            group=ContextGroup(world.along("context"), world.plans) if world.along("context").size > 1 else None,
            exchange=exchange,
            balancer=None if exchange is None else self._balancer(world, exchange, params),
            engram=None if self.engram_rows is None else SharedEngram(engram, params.engram_tables()),
            pads=params.embed.device.type != "cpu",  # a CPU has no graphs, and computes what it is padded with
            **named,
        )

    def _exchange(
        self,
        comm: Communicator,
        placements: tuple[Placement, Placement],
        model: ModelConfig,
        config: RunnerConfig,
    ) -> SharedExperts:
        tables = placement_tables(placements, comm.device)
        if self.transport == "torch":
            return SharedExperts(comm, tables, config.num_slots)
        reason = why_no_deepep(comm.device)
        if reason is not None or not isinstance(comm, GroupCommunicator):
            raise KernelError(f"expert_transport is 'deepep' and that cannot be used: {reason}; take 'torch'")
        return DeepEpExperts(
            comm,
            tables,
            config.num_slots,
            group=comm.group,
            most_rows=max(config.max_step_rows, config.num_slots * model.dspark_block_size),
            num_chosen=max(model.num_experts_per_tok, model.dspark_num_experts_per_tok),
            hidden_size=model.hidden_size,
        )

    def _balancer(self, world: World, exchange: SharedExperts, params: ModelParams) -> ExpertBalancer | None:
        if self.placements is None or not self.balance.expert_rearrangement_interval:
            return None
        weights = {
            index: (*_tensors_of(layer.ffn.w13), *_tensors_of(layer.ffn.w2))
            for index, layer in enumerate(params.layers)
        }
        self.require_alike(weights)
        size, per_node = exchange.comm.size, world.topology.ranks_per_node
        num_nodes = size // per_node if per_node and size % per_node == 0 else 1
        topology = ExpertTopology(num_devices=size, num_nodes=num_nodes)
        policy = BalancePolicy(topology, self.balance.expert_rearrangement_interval)
        return ExpertBalancer(exchange, world.moves, self.placements[0], weights, self.balance, policy)


def _tensors_of(weight: Any) -> tuple[Tensor, ...]:
    """What a weight consists of: itself, or codes and scales."""
    if isinstance(weight, Tensor):
        return (weight,)
    values = (getattr(weight, spec.name) for spec in dataclasses.fields(weight))
    return tuple(value for value in values if isinstance(value, Tensor))
