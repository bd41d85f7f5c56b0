"""One rank of a cluster on its own: the released model's work at real dimensions, without the other ranks.

    attention, router, shared expert, head, DSpark     whole, as on every rank
    routed experts                                     E / ranks a layer, each with its share of all ranks' rows
    Engram tables                                      1 / ranks of the rows; as many look-ups as own rows need
    weights, cache contents                            random: time does not depend on what comes out
    communication                                      left out, the time of dispatch, combine and look-ups elsewhere

Balanced experts are assumed: of R own rows with k choices each, R k pairs are run here, spread evenly over the local
experts, since as many come from the other ranks as go to them.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.checkpoint.random_weights import random_weights
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.config.scheduler import BLOCK_TOKENS, IN_FLIGHT_STEPS
from deepinfer_core.errors import CapacityError
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference.coded import CodedWeight, Weight, code_columns
from deepinfer_core.kernels.reference.packed import FP4_ROWS, Packing, pack_columns
from deepinfer_core.model.params import Arrange, LayerParams, ModelParams, build_params
from deepinfer_core.parallel.experts import DispatchedRows, RowOrigin
from deepinfer_core.runtime.pending import PendingResult
from deepinfer_core.runtime.runner import Runner, RunnerConfig
from deepinfer_core.scheduling.plan import Admission, Content, RowKind, StepPlan, TokenSource, Writes

__all__ = ["RankSlice", "SliceSize", "release_config", "tokens_a_step"]

_CHUNK_ROWS = 1 << 17  # rows of random cache contents written at once


def release_config() -> ModelConfig:
    """The released model's configuration."""
    return ModelConfig.from_dict(
        json.loads(resources.files("deepinfer_core.config").joinpath("release.json").read_text())
    )


def tokens_a_step(num_drafts: int, acceptance: float) -> float:
    """Expected tokens of a request in one step: 1 + a + a^2 + .. + a^n, each draft accepted if those before it were."""
    return sum(acceptance**n for n in range(num_drafts + 1))


@dataclass(frozen=True)
class SliceSize:
    """What the rank holds and serves."""

    ranks: int  # that share the experts
    requests: int
    context: int  # tokens of each request
    num_drafts: int
    step_rows: int  # rows of the largest step
    expert_sets: int | None = None  # so many sets of weights, shared by the layers in turn; None = one a layer
    float8_products: bool = False  # as the engine's setting
    packed: Packing = "none"

    def __post_init__(self) -> None:
        for name in ("ranks", "requests", "context", "step_rows"):
            if getattr(self, name) < 1:
                raise CapacityError(f"{name} is {getattr(self, name)}; a slice needs at least 1")


class BalancedExperts:
    """`ExpertExchange` of a rank whose experts get an even share of the pairs; nothing moves."""

    def __init__(self, local: dict[int, int]) -> None:
        self._local = local  # layer -> experts held here
        self._turns: dict[tuple[int, torch.Size], Tensor] = {}  # experts, shape -> ids; made once: no work of a step

    def dispatch(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, origin: RowOrigin) -> DispatchedRows:
        """Own rows stand for those that come, with local experts in turn."""
        key = self._local[layer], ids.shape
        if key not in self._turns:
            self._turns[key] = torch.arange(ids.numel(), device=ids.device).view(ids.shape) % self._local[layer]
        return DispatchedRows(x, self._turns[key], weights)

    def combine(self, sent: DispatchedRows, pairs: Tensor) -> Tensor:
        """Own outputs stand for those that come back."""
        return pairs


class RankSlice:
    """A runner over random weights and a full cache."""

    def __init__(
        self,
        config: ModelConfig,
        size: SliceSize,
        kernels: Kernels,
        device: str,
        dtype: torch.dtype,
        arrange: Arrange | None = None,
    ) -> None:
        """`arrange` lays out what `size.packed` names, as the provider's kernels read it."""
        self.size = size
        self.config = _own_share(config, size.ranks)
        local = _local_experts(config, size.ranks)
        weights = random_weights(self.config, 0, dtype, device, with_experts=False, packed=size.packed)
        params = build_params(weights, self.config, coded=size.float8_products, arrange=arrange, consume=True)
        self.params = _with_experts(params, local, size.expert_sets, None if size.packed == "none" else arrange)
        # Positions go on for some steps beyond the context.
        self.blocks_a_request = -(-size.context // BLOCK_TOKENS) + 1
        on_accelerator = device != "cpu"
        self.runner = Runner(
            self.config,
            self.params,
            kernels,
            RunnerConfig(
                num_slots=size.requests,
                num_blocks=size.requests * self.blocks_a_request,
                max_step_rows=size.step_rows,
                num_drafts=size.num_drafts,
            ),
            cache_form="packed" if on_accelerator else "plain",
            exchange=BalancedExperts(local),
        )
        self._fill_caches()
        order = np.random.default_rng(0).permutation(size.requests * self.blocks_a_request)
        self.block_tables = order.reshape(size.requests, -1).astype(np.int32)

    @torch.inference_mode()
    def _fill_caches(self) -> None:
        """Random records in every cache row, so that selections spread as real ones do."""
        state, kernels = self.runner.state, self.runner.kernels
        dims = self.config.head_dim, self.config.index_head_dim
        pairs = [(cache, kernels.write_window, dims[0]) for cache in state.window + state.draft_window]
        pairs += [(cache, kernels.write_entries, dims[0]) for cache in state.entries.values()]
        pairs += [(cache, kernels.write_index_keys, dims[1]) for cache in state.index_keys.values()]
        for cache, write, dim in pairs:
            for start in range(0, len(cache), _CHUNK_ROWS):
                rows = torch.arange(start, min(start + _CHUNK_ROWS, len(cache)), device=cache.device)
                write(cache, rows, torch.randn(len(rows), dim, device=cache.device, dtype=self.runner.dtype))
        # A step may go from here on as if the requests had just been prefilled.
        state.held_tokens.random_(0, self.config.vocab_size)
        state.held_position.fill_(self.size.context - 1 - self.size.num_drafts)

    def close(self) -> None:
        """End the runner's worker thread."""
        self.runner.close()

    # ---- decode -----------------------------------------------------------------------------------------------------

    def decode_plan(self, requests: int, params: SamplingParams, *, first: bool) -> StepPlan:
        """All requests verify their drafts and want new ones. `first`: they are admitted with it."""
        drafts = self.size.num_drafts
        rows, tokens = requests * (1 + drafts), np.tile(np.arange(1 + drafts), requests)
        one = np.zeros(1, np.int64)
        return StepPlan(
            step=0,
            row_position=self.size.context + tokens,  # at most
            row_token=tokens,
            row_source=np.full(rows, TokenSource.HELD, np.uint8),
            row_kind=np.where(tokens == 0, np.uint8(RowKind.DECODE), np.uint8(RowKind.DRAFT)),
            row_content=np.full(rows, Content.TEXT, np.uint8),
            row_writes=np.full(rows, Writes.GLOBAL | Writes.WINDOW, np.uint8),
            row_sample=np.ones(rows, np.bool_),
            segment_start=np.arange(requests + 1, dtype=np.int32) * (1 + drafts),
            segment_slot=np.arange(requests, dtype=np.int32),
            segment_generation=np.zeros(requests, np.int32),
            segment_window_from=np.zeros(requests, np.int64),
            segment_decoder_from=np.zeros(requests, np.int64),
            segment_num_drafts=np.full(requests, drafts, np.int32),
            block_tables=self.block_tables[:requests],
            admissions=tuple(Admission(slot, 0, slot, one, 1, 0, params, slot) for slot in range(requests) if first),
        )

    def decode_seconds(self, requests: int, params: SamplingParams, steps: int) -> list[float]:
        """Seconds of each of `steps` steps, as the overlapped engine runs them: the next one is queued meanwhile."""
        self.runner.state.held_position.fill_(self.size.context - 1 - self.size.num_drafts)
        for warm in range(3):  # eager, captured, replayed
            self.runner.run(self.decode_plan(requests, params, first=warm == 0))
        plan = self.decode_plan(requests, params, first=False)
        launched: deque[Future[PendingResult]] = deque(self.runner.launch(plan) for _ in range(IN_FLIGHT_STEPS))
        done = [time.perf_counter()]
        for _ in range(steps):
            self.runner.wait(launched.popleft())
            done.append(time.perf_counter())
            launched.append(self.runner.launch(plan))
        while launched:
            self.runner.wait(launched.popleft())
        return [after - before for before, after in pairwise(done[1:])]  # the first one waits for the queue to fill

    # ---- prefill ----------------------------------------------------------------------------------------------------

    def prefill_seconds(self, tokens: int, keep: int) -> float:
        """Seconds to prefill one prompt in chunks of the largest step; the decoder half runs its last `keep` rows."""
        self.prefill(tokens, keep)  # compiles and allocates
        start = time.perf_counter()
        self.prefill(tokens, keep)
        return time.perf_counter() - start

    def prefill(self, tokens: int, keep: int) -> None:
        """Run the steps that `prefill_seconds` times."""
        for plan in self._prefill_plans(tokens, keep):
            self.runner.run(plan)

    def _prefill_plans(self, tokens: int, keep: int) -> Iterator[StepPlan]:
        ids = np.random.default_rng(1).integers(0, self.config.vocab_size, tokens)
        for start in range(0, tokens, self.size.step_rows):
            rows = min(self.size.step_rows, tokens - start)
            sampled = np.arange(start, start + rows) == tokens - 1
            admission = Admission(0, 0, 0, ids, tokens, 0, SamplingParams(temperature=0), 0)
            yield StepPlan(
                step=0,
                row_position=np.arange(start, start + rows),
                row_token=ids[start : start + rows],
                row_source=np.full(rows, TokenSource.GIVEN, np.uint8),
                row_kind=np.full(rows, RowKind.PREFILL, np.uint8),
                row_content=np.full(rows, Content.TEXT, np.uint8),
                row_writes=np.full(rows, Writes.GLOBAL | Writes.WINDOW, np.uint8),
                row_sample=sampled,
                segment_start=np.array([0, rows], np.int32),
                segment_slot=np.zeros(1, np.int32),
                segment_generation=np.zeros(1, np.int32),
                segment_window_from=np.zeros(1, np.int64),
                segment_decoder_from=np.full(1, max(0, tokens - keep), np.int64),
                segment_num_drafts=np.full(1, self.size.num_drafts if sampled.any() else 0, np.int32),
                block_tables=self.block_tables[:1, : -(-(start + rows) // BLOCK_TOKENS)],
                admissions=(admission,) if start == 0 else (),
            )


def _own_share(config: ModelConfig, ranks: int) -> ModelConfig:
    """The same model with this rank's part of the Engram tables, so that hashes fall into it."""
    vocabulary = max(2, config.engram_vocab_size // ranks)
    rows = [-(-count // ranks) + config.engram_columns * 1024 for count in config.engram_num_embeddings]
    return dataclasses.replace(config, engram_vocab_size=vocabulary, engram_num_embeddings=tuple(rows))


def _local_experts(config: ModelConfig, ranks: int) -> dict[int, int]:
    """Layer or draft stage -> experts held here."""
    layers = dict.fromkeys(range(config.num_hidden_layers), config.n_routed_experts)
    stages = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    experts = layers | dict.fromkeys(stages, config.dspark_n_routed_experts)
    for total in set(experts.values()):
        if total % ranks:
            raise CapacityError(f"{total} experts don't divide among {ranks} ranks; take a divisor")
    return {layer: total // ranks for layer, total in experts.items()}


def _with_experts(
    params: ModelParams, local: dict[int, int], num_sets: int | None, arrange: Arrange | None = None
) -> ModelParams:
    """`params` with random routed experts; of `num_sets` sets each serves many layers."""
    made: dict[tuple[int, int], tuple[Weight, Weight]] = {}

    def random(like: Weight, experts: int, scale: float, *, halves: bool = False) -> Weight:
        _, inner, columns = like.shape
        drawn = torch.randn(experts, inner, columns, dtype=like.dtype, device=params.embed.device)
        drawn.mul_(scale * inner**-0.5)
        if arrange is not None:
            return arrange(pack_columns(drawn, FP4_ROWS), halves)
        return code_columns(drawn) if isinstance(like, CodedWeight) else drawn

    def changed(layer: int, old: LayerParams) -> LayerParams:
        key = (local[layer], layer if num_sets is None else layer % num_sets)
        if key not in made:
            w13 = random(old.ffn.w13, local[layer], 1.0, halves=True)
            made[key] = w13, random(old.ffn.w2, local[layer], 0.1)
        w13, w2 = made[key]
        return dataclasses.replace(old, ffn=dataclasses.replace(old.ffn, w13=w13, w2=w2))

    layers = tuple(changed(layer, old) for layer, old in enumerate(params.layers))
    draft = params.draft
    if draft is not None:
        stages = tuple(changed(len(layers) + stage, old) for stage, old in enumerate(draft.stages))
        draft = dataclasses.replace(draft, stages=stages)
    return dataclasses.replace(params, layers=layers, draft=draft)
