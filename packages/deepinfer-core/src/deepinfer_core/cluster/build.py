"""From a plan to a simulation: step costs, memory, and the groups that are simulated.

pool of D devices = D / EP groups of EP ranks;  scale S = s1 · s2:  1 in s1 groups, of each 1 in s2 ranks
room for KV on a decode rank = memory · fraction - dense weights - its experts - window rings of its requests
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from deepinfer_core.cluster.balance import balance_by_phase
from deepinfer_core.cluster.decode_pool import DecodeGroup
from deepinfer_core.cluster.drafting import DraftTable, draft_table
from deepinfer_core.cluster.hardware import device_named
from deepinfer_core.cluster.model_work import ModelWork
from deepinfer_core.cluster.plan_file import ClusterPlan, DecodeSettings, PrefillSettings
from deepinfer_core.cluster.prefill_pool import PrefillGroup
from deepinfer_core.cluster.prefix_store import BLOCK_TOKENS, PrefixStore
from deepinfer_core.cluster.published import Reading, calibrate
from deepinfer_core.cluster.simulation import ClusterSimulation
from deepinfer_core.cluster.step_cost import StepCost
from deepinfer_core.errors import CapacityError, ConfigError

__all__ = ["Cluster", "simulated_groups"]

_MAX_REQUESTS = 500_000  # of a run: half a minute and 200 MB
_BACKTRACK = 12  # window ring slots beyond the window: 2 steps of 5 drafts and an anchor
_CONTEXT_STEP = 1.05  # tables are made for contexts on a grid of this ratio


def simulated_groups(pool: PrefillSettings | DecodeSettings, scale_down: int) -> tuple[int, int]:
    """(groups, ranks of each) that stand for the pool."""
    groups = pool.devices // pool.expert_parallel
    of_groups = math.gcd(groups, scale_down)
    return groups // of_groups, pool.expert_parallel // (scale_down // of_groups)


class Cluster:
    """The costs of a plan under one reading of the published acceptance."""

    def __init__(self, plan: ClusterPlan, work: ModelWork, reading: Reading) -> None:
        """Raises CapacityError for weights that do not fit, ConfigError for a run that would take too long."""
        self.plan = plan
        self.work = work
        fit = calibrate(reading)
        self.prefill_cost = StepCost(work, device_named(plan.prefill.device), plan.prefill.expert_parallel, fit)
        self.decode_cost = StepCost(work, device_named(plan.decode.device), plan.decode.expert_parallel, fit)
        num_slots, ranks = work.num_experts + plan.balance.spare_slots, plan.decode.expert_parallel
        if num_slots < ranks:
            raise ConfigError(
                f"decode.expert_parallel is {ranks} and a layer has {num_slots} expert slots, one a rank at least; "
                f"make it at most {num_slots}, or balance.spare_slots at least {ranks - work.num_experts}"
            )
        self.decode_balance = balance_by_phase(plan.balance, plan.decode.expert_parallel, work.num_experts)
        prefill_balance = balance_by_phase(
            replace(plan.balance, spare_slots=0), plan.prefill.expert_parallel, work.num_experts
        )
        self.prefill_balance = sum(prefill_balance) / len(prefill_balance)
        self.kv_tokens = self._kv_tokens_of_a_decode_rank()
        self._check_prefill_memory()
        self._check_length()
        self._tables = lru_cache(maxsize=4_096)(self._table)

    def simulation(self) -> ClusterSimulation:
        """A fresh simulation of the plan."""
        plan, scale = self.plan, self.plan.cluster.scale_down
        num_prefill, prefill_ranks = simulated_groups(plan.prefill, scale)
        num_decode, decode_ranks = simulated_groups(plan.decode, scale)
        prefill = [
            PrefillGroup(
                prefill_ranks, plan.prefill.chunk_tokens, plan.prefill.keep_tokens, plan.prefill.balanced_context,
                self.prefill_seconds,
            )
            for _ in range(num_prefill)
        ]  # fmt: skip
        decode = [
            DecodeGroup(
                decode_ranks, plan.decode.max_requests, self.kv_tokens, self.table_near,
                interval_steps=plan.balance.interval_steps, move_seconds=plan.balance.move_seconds,
            )
            for _ in range(num_decode)
        ]  # fmt: skip
        block_bytes = BLOCK_TOKENS * self.work.kv_bytes_per_token
        store = PrefixStore(int(plan.store.terabytes * 1e12 / block_bytes / scale))
        return ClusterSimulation(
            plan, prefill, decode, store,
            max_tokens=min(self.work.max_tokens, self.kv_tokens),
            kv_bytes_per_token=self.work.kv_bytes_per_token,
        )  # fmt: skip

    def prefill_seconds(self, rows: float, kept_rows: float, context_tokens: float) -> float:
        """A step of a prefill group."""
        return self.prefill_cost.prefill_seconds(rows, kept_rows, context_tokens, self.prefill_balance)

    def table_near(self, context_tokens: float, phase: int) -> DraftTable:
        """Drafts and seconds of decode steps at about this mean context, in a phase between two rearrangements."""
        return self._tables(round(math.log(context_tokens, _CONTEXT_STEP)), phase)

    def _table(self, context_exponent: int, phase: int) -> DraftTable:
        plan = self.plan
        return draft_table(
            self.decode_cost, plan.drafts, plan.decode.max_requests, _CONTEXT_STEP**context_exponent,
            self.decode_balance[phase],
        )  # fmt: skip

    # ---- memory and time ---------------------------------------------------------------------------------------------

    def _kv_tokens_of_a_decode_rank(self) -> int:
        w, pool = self.work, self.plan.decode
        slots = w.layers * (w.num_experts + self.plan.balance.spare_slots) + w.draft.stages * w.draft.num_experts
        weights = w.dense_bytes + slots / pool.expert_parallel * w.expert_bytes
        ring = (w.layers + w.draft.stages) * (w.window + _BACKTRACK) * w.window_bytes
        room = device_named(pool.device).memory.value * pool.memory_fraction - weights - pool.max_requests * ring
        tokens = int(room / w.kv_bytes_per_token)
        if tokens < BLOCK_TOKENS:
            raise CapacityError(
                f"a decode rank ({pool.device}, EP{pool.expert_parallel}) has no room for KV: weights take "
                f"{weights / 1e9:.0f} GB; use a larger decode.expert_parallel or fewer decode.max_requests"
            )
        return tokens

    def _check_prefill_memory(self) -> None:
        w, pool = self.work, self.plan.prefill
        weights = w.dense_bytes + w.layers * w.num_experts / pool.expert_parallel * w.expert_bytes
        memory = device_named(pool.device).memory.value * pool.memory_fraction
        if weights > memory:
            raise CapacityError(
                f"weights of EP{pool.expert_parallel} take {weights / 1e9:.0f} GB of a prefill rank, which has "
                f"{memory / 1e9:.0f} GB; use a larger prefill.expert_parallel"
            )

    def _check_length(self) -> None:
        c = self.plan.cluster
        rate = sum(t.requests_per_s for t in self.plan.traffic) * c.load / c.scale_down
        requests = rate * (c.seconds + c.warmup_seconds)
        if self.plan.trace is not None:
            requests += self.plan.trace.num_requests / c.scale_down
        if requests > _MAX_REQUESTS:
            raise ConfigError(
                f"the run would have {requests:,.0f} requests; at most {_MAX_REQUESTS:,} are simulated. "
                "Raise cluster.scale_down or lower cluster.seconds"
            )
