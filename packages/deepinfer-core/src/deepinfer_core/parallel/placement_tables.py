"""A placement of experts as the tensors that a step looks it up in.

    expert id ──bounds, slots──► slot of one replica ──owner, local──► member of the group, its own slot

    replica of (request, position): the i with bounds[i-1] <= u < bounds[i],
    u = (start(request) + position · step) mod 2^32

The same numbers as `scheduling.expert_load.choose_slots`, on the device of the rows. A table is never changed: a
rearrangement makes a new one, and all members take it at the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.scheduling.expert_load import REPLICA_ONE, REPLICA_STEP, TokenSplit, split_tokens
from deepinfer_core.scheduling.expert_placement import ExpertTopology, Placement, plan

__all__ = ["PlacementTable", "first_placements", "held_experts", "placement_table", "placement_tables"]


@dataclass(frozen=True, eq=False)
class PlacementTable:
    """Where the E experts of one layer lie in its S slots."""

    slots: Tensor  # [E, R] slots of each replica, anything beyond an expert's replicas
    bounds: Tensor  # [E, R] replica i takes u < bounds[i]; 2^32 from the last one on
    owner: Tensor  # [S] member of the group
    local: Tensor  # [S] the slot's place at its owner

    def locate(self, ids: Tensor, start: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [R, k] of rows with replica starts [R] and positions [R] -> owner [R, k], local slot [R, k]."""
        if self.slots.shape[1] == 1:
            slot = self.slots[ids, 0]
        else:
            u = (start + position * REPLICA_STEP) & (REPLICA_ONE - 1)  # below 2^32 + 2^26 · 2^32: no overflow
            replica = (self.bounds[ids] <= u[:, None, None]).sum(-1, keepdim=True)  # [R, k, 1]
            slot = self.slots[ids].gather(-1, replica)[..., 0]
        return self.owner[slot], self.local[slot]


def first_placements(config: ModelConfig, num_members: int, num_extra_experts: int) -> tuple[Placement, Placement]:
    """Of the layers and of the draft stages, before anything is known of the load: experts in order, extra slots spread
    by the planner. Draft stages have no extra slots, and members beyond their experts hold none of them.

    Raises ConfigError where a member would hold no expert of the layers.
    """
    topology = ExpertTopology(num_devices=num_members)
    num_slots = config.n_routed_experts + num_extra_experts
    if num_slots < num_members:
        raise ConfigError(
            f"expert_parallel_size is {num_members}; a layer of this model has {config.n_routed_experts} experts and "
            f"num_extra_experts is {num_extra_experts}: at most {num_slots} ranks can share them"
        )
    layers = _in_order(config.num_hidden_layers, config.n_routed_experts, topology)
    if num_extra_experts:
        even = np.ones((config.num_hidden_layers, config.n_routed_experts))
        layers = plan(even, None, topology, num_slots).placement
    return layers, _in_order(config.num_nextn_predict_layers, config.dspark_n_routed_experts, topology)


def _in_order(num_layers: int, num_experts: int, topology: ExpertTopology) -> Placement:
    """Expert e in slot e."""
    rows = np.broadcast_to(np.arange(num_experts), (num_layers, num_experts))
    return Placement(rows, topology.slot_start(num_experts), num_experts)


def held_experts(placements: Sequence[Placement], member: int) -> dict[int, list[int]]:
    """Experts in the slots of `member`, by layer: the `experts` of `load_model_weights`. Stages follow the layers."""
    held: dict[int, list[int]] = {}
    for placement in placements:
        start, stop = placement.slot_start[member : member + 2]
        for row in placement.expert_of_slot[:, start:stop].tolist():
            held[len(held)] = row
    return held


def placement_tables(
    placements: Sequence[Placement], device: torch.device, splits: Mapping[int, TokenSplit] | None = None
) -> dict[int, PlacementTable]:
    """Layer -> table; the layers of the second placement follow those of the first. `splits`: by placement, else even
    shares.
    """
    tables: dict[int, PlacementTable] = {}
    for index, placement in enumerate(placements):
        num_layers = len(placement.expert_of_slot)
        split = (splits or {}).get(index)
        if split is None:
            split = split_tokens(np.zeros((num_layers, placement.num_experts)), placement)
        for layer in range(num_layers):
            tables[len(tables)] = placement_table(placement, layer, split, device)
    return tables


def placement_table(placement: Placement, layer: int, split: TokenSplit, device: torch.device) -> PlacementTable:
    """The table of one layer of a placement."""
    owner = placement.device_of_slot
    return PlacementTable(
        torch.from_numpy(np.maximum(split.slots[layer], 0)).to(device),
        torch.from_numpy(split.bounds[layer].copy()).to(device),
        torch.from_numpy(owner).to(device),
        torch.from_numpy(np.arange(len(owner)) - placement.slot_start[owner]).to(device),
    )
