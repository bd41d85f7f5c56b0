"""Muon for matrices, Adam for everything else.

    Muon    m <- 0.95 m + g;  W <- W - lr sqrt(max(1, out / in)) orthogonal(g + 0.95 m)     by Newton-Schulz, in batches
    Adam    beta 0.9, 0.98; embeddings, head, router, norms, mHC, sinks, Engram tables

Matrices are stacked by shape, so that a step is a few batched products whatever the number of layers and experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NOT_MUON = (
    "embed.weight",
    "head.weight",
    "gate.weight",
    "confidence_head.proj.weight",
    "weights_proj.weight",
    "q_weight",
    "k_weight",
)


def uses_muon(name: str, value: Tensor) -> bool:
    """Whether `name` is a matrix (or a stack of experts) of a linear layer."""
    return value.dim() >= 2 and name.endswith(".weight") and not name.endswith(_NOT_MUON)


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """[N, a, b] -> the nearest semi-orthogonal matrices, roughly (singular values 0.7 to 1.2), in bfloat16."""
    x = g.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    if wide:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if wide else x


class Muon:
    """Momentum with orthogonalized updates for the parameters of `uses_muon`."""

    def __init__(self, params: dict[str, Tensor], momentum: float = 0.95, decay: float = 0.01) -> None:
        self.momentum, self.decay = momentum, decay
        groups: dict[torch.Size, list[Tensor]] = {}
        for value in params.values():
            groups.setdefault(value.shape[-2:], []).append(value)
        self._groups = [(values, [torch.zeros_like(v) for v in values]) for values in groups.values()]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the gradients; parameters without one keep still."""
        for values, buffers in self._groups:
            pairs = [(v, m) for v, m in zip(values, buffers, strict=True) if v.grad is not None]
            if not pairs:
                continue
            rows, columns = values[0].shape[-2:]
            looked_ahead = [
                self._look_ahead(v.grad, m).reshape(-1, rows, columns) for v, m in pairs if v.grad is not None
            ]
            update = orthogonal(torch.cat(looked_ahead))
            step = lr * max(1.0, rows / columns) ** 0.5
            sizes = [v.numel() // (rows * columns) for v, _ in pairs]
            for (value, _), part in zip(pairs, update.split(sizes), strict=True):
                value.mul_(1.0 - lr * self.decay).add_(part.view_as(value).to(value.dtype), alpha=-step)

    def _look_ahead(self, gradient: Tensor, moment: Tensor) -> Tensor:
        """Update the moment in place; the gradient as Nesterov's momentum sees it."""
        moment.mul_(self.momentum).add_(gradient)
        return gradient + self.momentum * moment


class Optimizer:
    """Both, with one learning rate factor."""

    def __init__(self, params: dict[str, Tensor], *, muon_lr: float = 0.02, adam_lr: float = 3e-3) -> None:
        self.muon_lr = muon_lr
        self._muon = Muon({n: v for n, v in params.items() if uses_muon(n, v)})
        self._rest = [v for n, v in params.items() if not uses_muon(n, v)]
        self._adam = torch.optim.Adam(self._rest, lr=adam_lr, betas=(0.9, 0.98), eps=1e-10, fused=self._rest[0].is_cuda)
        self.adam_lr = adam_lr
        self._all = list(params.values())

    def step(self, factor: float) -> None:
        """One update at `factor` times the learning rates, then gradients are dropped."""
        torch.nn.utils.clip_grad_norm_(self._rest, 1.0)
        self._muon.step(self.muon_lr * factor)
        for group in self._adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self._adam.step()
        for value in self._all:
            value.grad = None
