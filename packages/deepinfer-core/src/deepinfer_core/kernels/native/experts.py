"""Experts, Engram and DSpark heads: contract functions over the C library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.kernels.native.dense import rows_of
from deepinfer_core.kernels.native.library import Library, failure

__all__ = ["ExpertOps", "ExpertPlan"]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlan:
    """Which local expert each pair goes to; the C function sorts them."""

    ids: Tensor  # [R, k] int64
    num_experts: int


class ExpertOps:
    """Methods are named as in the contract."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._route = library.function("route")
        self._run_experts = library.function("run_experts")
        self._shared_expert = library.function("shared_expert")
        self._combine = library.function("combine_experts")
        self._engram_rows = library.function("engram_rows")
        self._engram_gate = library.function("engram_gate")
        self._markov_step = library.function("markov_step")

    # ---- experts -----------------------------------------------------------------------------------------------------

    def route(self, x: Tensor, gate: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        """x [R, D], gate [D, E], bias [E] or [R, E] -> ids [R, k] ascending, weights [R, k]."""
        x, gate, bias = rows_of(x), gate.contiguous(), bias.contiguous()
        rows, dim = x.shape
        ids, weights = torch.empty(rows, k, dtype=torch.int64), x.new_empty(rows, k)
        status = self._route(
            x.data_ptr(), x.stride()[0], gate.data_ptr(), bias.data_ptr(), bias.shape[1] if bias.dim() == 2 else 0,
            ids.data_ptr(), weights.data_ptr(), rows, dim, gate.shape[1], k, scale,
        )  # fmt: skip
        if status:
            raise failure(status, "route")
        return ids, weights

    def plan_experts(self, ids: Tensor, num_experts: int) -> ExpertPlan:
        """ids [R, k] local expert ids."""
        return ExpertPlan(ids.contiguous(), num_experts)

    def run_experts(
        self, x: Tensor, weights: Tensor, plan: ExpertPlan, w13: Tensor, w2: Tensor, limit: float
    ) -> Tensor:
        """x [R, D], weights [R, k], w13 [E, D, 2 I], w2 [E, I, D] -> one output for each pair [R, k, D]."""
        x, weights, w13, w2 = rows_of(x), weights.contiguous(), w13.contiguous(), w2.contiguous()
        rows, k = weights.shape
        experts, width, dim = w2.shape
        out = x.new_empty(rows, k, dim)
        threads = self._library.threads_for(3 * rows * k * dim * width)
        status = self._run_experts(
            x.data_ptr(), x.stride()[0], weights.data_ptr(), plan.ids.data_ptr(), w13.data_ptr(), w2.data_ptr(),
            out.data_ptr(), rows, k, experts, dim, width, limit, threads,
        )  # fmt: skip
        if status:
            raise failure(status, "run_experts")
        return out

    def shared_expert(self, x: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
        """x [R, D], w13 [D, 2 I], w2 [I, D] -> [R, D]."""
        x, w13, w2 = rows_of(x), w13.contiguous(), w2.contiguous()
        rows, dim = x.shape
        width = w2.shape[0]
        out = x.new_empty(rows, dim)
        threads = self._library.threads_for(3 * rows * dim * width)
        status = self._shared_expert(
            x.data_ptr(), x.stride()[0], w13.data_ptr(), w2.data_ptr(), out.data_ptr(), rows, dim, width, limit, threads
        )
        if status:
            raise failure(status, "shared_expert")
        return out

    def combine_experts(self, pairs: Tensor, shared: Tensor) -> Tensor:
        """pairs [R, k, D] in ascending expert id, shared [R, D] -> [R, D]."""
        pairs, shared = pairs.contiguous(), shared.contiguous()
        rows, k, dim = pairs.shape
        out = shared.new_empty(rows, dim)
        status = self._combine(pairs.data_ptr(), shared.data_ptr(), out.data_ptr(), rows, k, dim)
        if status:
            raise failure(status, "combine_experts")
        return out

    # ---- engram, dspark ----------------------------------------------------------------------------------------------

    def engram_rows(
        self, history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_class: int, heads: int
    ) -> Tensor:
        """history [R, N] -> table rows [R, (N - 1) * heads]."""
        history, multipliers = history.contiguous(), multipliers.contiguous()
        primes, offsets = primes.contiguous(), offsets.contiguous()
        rows, n = history.shape
        out = history.new_empty(rows, (n - 1) * heads)
        status = self._engram_rows(
            history.data_ptr(), multipliers.data_ptr(), primes.data_ptr(), offsets.data_ptr(), pad_class, heads,
            out.data_ptr(), rows, n,
        )  # fmt: skip
        if status:
            raise failure(status, "engram_rows")
        return out

    def engram_gate(
        self, streams: Tensor, key_value: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor, eps: float
    ) -> Tensor:
        """streams [R, S, D], key_value [R, (S + 1) * D], q_weight and k_weight [S, D], dead [R] bool -> streams."""
        streams, key_value, dead = streams.contiguous(), key_value.contiguous(), dead.contiguous()
        q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
        rows, s, dim = streams.shape
        out = torch.empty_like(streams)
        status = self._engram_gate(
            streams.data_ptr(), key_value.data_ptr(), q_weight.data_ptr(), k_weight.data_ptr(), dead.data_ptr(),
            out.data_ptr(), rows, s, dim, eps,
        )  # fmt: skip
        if status:
            raise failure(status, "engram_gate")
        return out

    def markov_step(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        previous: Tensor,
        markov_embed: Tensor,
        markov_head: Tensor,
        confidence: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """base_logits [S, V], hidden [S, D], previous [S] -> logits [S, V], confidence logit [S]."""
        base, hidden, previous = rows_of(base_logits), rows_of(hidden), previous.contiguous()
        markov_embed, markov_head = markov_embed.contiguous(), markov_head.contiguous()
        rows, vocabulary = base.shape
        logits, z = base.new_empty(rows, vocabulary), base.new_empty(rows)
        status = self._markov_step(
            base.data_ptr(), base.stride()[0], hidden.data_ptr(), hidden.stride()[0], previous.data_ptr(),
            markov_embed.data_ptr(), markov_head.data_ptr(), confidence.contiguous().data_ptr(), logits.data_ptr(),
            z.data_ptr(), rows, vocabulary, hidden.shape[1], markov_embed.shape[1],
        )  # fmt: skip
        if status:
            raise failure(status, "markov_step")
        return logits, z
