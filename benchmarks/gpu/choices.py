"""A run's discrete choices, recorded and forced on another run: teacher forcing inside the model.

    recording    a table that keeps each layer's experts, candidate blocks and selected entries, in the order of calls
    forcing      a table that takes them from there; the weights of the experts stay its own

Where two experts have nearly the same score, the last bit decides which one a row sees, and the row goes another way.
With the choices of the reference what remains between two runs is rounding alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference.elementwise import softplus

__all__ = ["Choices", "forcing", "recording"]


@dataclass
class Choices:
    """Of one run over some texts."""

    experts: list[Tensor] = field(default_factory=list[Tensor])  # [R, k] of each routed layer
    entries: list[Tensor] = field(default_factory=list[Tensor])  # [R, k] of each index source that had to select
    candidates: list[Tensor] = field(default_factory=list[Tensor])  # [R, NB] bool


def recording(kernels: Kernels, into: Choices) -> Kernels:
    """`kernels`, whose choices are appended to `into`."""

    def route(x: Tensor, gate: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        ids, weights = kernels.route(x, gate, bias, k, scale)
        into.experts.append(ids)
        return ids, weights

    def select_entries(scores: Tensor, k: int) -> Tensor:
        into.entries.append(kernels.select_entries(scores, k))
        return into.entries[-1]

    def candidate_blocks(scores: Tensor, num_visible: Tensor, block: int, top_blocks: int) -> Tensor:
        into.candidates.append(kernels.candidate_blocks(scores, num_visible, block, top_blocks))
        return into.candidates[-1]

    return replace(kernels, route=route, select_entries=select_entries, candidate_blocks=candidate_blocks)


def forcing(kernels: Kernels, choices: Choices, *, entries: bool) -> Kernels:
    """`kernels` with the experts of `choices`, and with `entries` its candidates and selections, too."""
    experts = iter(choices.experts)

    def route(x: Tensor, gate: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        ids = next(experts).to(x.device)
        chosen = torch.sqrt(softplus(x.float() @ gate.float())).gather(1, ids)
        return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale

    if not entries:
        return replace(kernels, route=route)
    selected, candidates = iter(choices.entries), iter(choices.candidates)
    return replace(
        kernels,
        route=route,
        select_entries=lambda scores, k: next(selected).to(scores.device),
        candidate_blocks=lambda scores, *rest: next(candidates).to(scores.device),
    )
