"""The DSpark drafter: context keys from target features, one block a step, two heads (docs/model.md: Drafter).

context  main_x = main_norm(main_proj(features)); per stage: key = kv_norm(main_x wkv), rope, e4m3 -> stage's ring
block    [anchor, noise, .. noise] at positions a .. a + n - 1; every query sees the ring (a window of positions
         below a) and the whole block, in both directions
heads    left to right: logits_k = U_k + markov(x_{k-1}); x_k is drawn with the noise that will verify it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.cache.state import ModelState
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.model.attention import project_output
from deepinfer_core.model.backbone import Backbone
from deepinfer_core.model.batch import Batch
from deepinfer_core.model.beside import all_joined
from deepinfer_core.model.moe import moe
from deepinfer_core.model.params import AttentionParams, DraftParams
from deepinfer_core.model.residual import Residual, run_sublayers
from deepinfer_core.parallel.experts import RowOrigin

__all__ = ["DraftBlock", "DraftOutput", "DraftStates", "DraftTrace", "Drafter", "DrawToken"]

type DrawToken = Callable[[int, Tensor], Tensor]  # number k of the proposal, logits [S, V] -> tokens [S]


@dataclass(frozen=True, eq=False)
class DraftStates:
    """What the stages make of S blocks."""

    hidden: Tensor  # [S, n, D]
    normalized: Tensor  # [S, m, D] of the first m positions, what the head takes


@dataclass(frozen=True, eq=False)
class DraftBlock:
    """S blocks with everything that does not depend on what is drawn."""

    hidden: Tensor  # [S, n, D]
    base_logits: Tensor  # [S, m, V] float32 of the first m positions, without Markov bias


@dataclass(frozen=True, eq=False)
class DraftOutput:
    """Proposals for S segments."""

    tokens: Tensor  # [S, m]
    logits: tuple[Tensor, ...]  # m of [S, V] float32, Markov bias included
    confidence_logits: Tensor  # [S, m] float32, before calibration


@dataclass
class DraftTrace:
    """Intermediate values for tests; filled only if it is passed on."""

    streams: list[Tensor]  # after each stage [S * n, S', D]
    hidden: Tensor | None = None
    normalized: Tensor | None = None
    base_logits: Tensor | None = None


class Drafter:
    """Holds no state; context keys live in `ModelState.draft_window`."""

    def __init__(self, backbone: Backbone, params: DraftParams) -> None:
        self.backbone, self.params = backbone, params
        self.config: ModelConfig = backbone.config
        self.kernels: Kernels = backbone.kernels
        self.block = self.config.dspark_block_size

    def main_input(self, features: Tensor) -> Tensor:
        """features [P, T * D] -> [P, D], the input that all stages share."""
        projected = self.kernels.linear(features, self.params.main_proj)
        return self.kernels.rms_norm(projected, self.params.main_norm, self.config.rms_norm_eps)

    def store_context(self, features: Tensor, batch: Batch, state: ModelState) -> None:
        """Context keys of the decoder rows of a step. Rows of drafts that are rejected later are overwritten by the
        right ones.
        """
        rows = batch.decoder
        if rows is None:
            return
        main_x = self.main_input(features)
        # Ring and scratch rows have the same numbers in the layout of a backbone layer.
        for number, (stage, cache) in enumerate(zip(self.params.stages, state.draft_window, strict=True)):
            self.kernels.write_window(cache, rows.scratch, self._context_key(main_x, stage.attn, rows.rope))
            if rows.tail_share is not None:
                rows.tail_share.run((cache,), f"context keys of draft stage {number}")
            self.kernels.copy_rows(cache, rows.commit.destination, rows.commit.source)

    def make_block(
        self,
        anchor: Tensor,
        anchor_position: Tensor,
        slot: Tensor,
        visible_from: Tensor,
        state: ModelState,
        num_steps: int | None = None,
        trace: DraftTrace | None = None,
    ) -> DraftBlock:
        """Everything before the first draw. anchor tokens [S] at anchor_position [S] of slot [S]; context below
        visible_from [S] does not exist. The first `num_steps` proposals are prepared, None = the whole block.
        """
        block = self.with_logits(self.run_stages(anchor, anchor_position, slot, visible_from, state, num_steps, trace))
        if trace is not None:
            trace.base_logits = block.base_logits
        return block

    def with_logits(self, states: DraftStates) -> DraftBlock:
        """Run the head."""
        logits = self.backbone.head(states.normalized.flatten(0, 1))
        return DraftBlock(states.hidden, logits.view(*states.normalized.shape[:2], -1))

    @all_joined()
    def run_stages(
        self,
        anchor: Tensor,
        anchor_position: Tensor,
        slot: Tensor,
        visible_from: Tensor,
        state: ModelState,
        num_steps: int | None = None,
        trace: DraftTrace | None = None,
    ) -> DraftStates:
        """The part of `make_block` before the head; arguments as there."""
        config, kernels, backbone, n = self.config, self.kernels, self.backbone, self.block
        segments = anchor.shape[0]
        tokens = torch.full((segments, n), config.dspark_noise_token_id, dtype=torch.int64, device=anchor.device)
        tokens[:, 0] = anchor
        block_position = anchor_position[:, None] + torch.arange(n, device=anchor.device)  # [S, n]
        embedded = backbone.vocabulary.lookup(backbone.params.embed, tokens.flatten())
        residual = Residual.of_embeddings(self._pad(embedded), config.hc_mult)
        num_rows = residual.streams.shape[0]
        rope = kernels.rope_table(self._pad(block_position.flatten()), backbone.params.frequencies)
        scratch = state.layout.draft_window.scratch_start + torch.arange(num_rows, device=anchor.device)
        plan = kernels.plan_keys(self._key_rows(anchor_position, slot, visible_from, state, num_rows))
        origin = RowOrigin(slot.repeat_interleave(n), block_position.flatten())
        for number, stage in enumerate(self.params.stages):
            cache = state.draft_window[number]

            def attend(x: Tensor, weights: AttentionParams = stage.attn, cache: Tensor = cache) -> Tensor:
                return self._attention(x, weights, rope, scratch, plan, cache)

            def experts(x: Tensor, number: int = number) -> Tensor:
                weights, layer = self.params.stages[number].ffn, config.num_hidden_layers + number
                return moe(x, segments * n, None, weights, backbone.exchange, layer, origin, config, kernels)

            following = None if stage is self.params.stages[-1] else self.params.stages[number + 1].attn_norm
            residual = run_sublayers(residual, stage, following, attend, experts, config, kernels)
            if trace is not None:
                trace.streams.append(residual.streams[: segments * n])
        hidden = kernels.mhc_collapse(residual.streams, residual.pre)
        normalized = kernels.rms_norm(hidden, self.params.norm, config.rms_norm_eps)
        hidden = hidden[: segments * n].view(segments, n, -1)
        wanted = n if num_steps is None else num_steps
        if trace is not None:
            trace.hidden, trace.normalized = hidden, normalized[: segments * n]
        return DraftStates(hidden, normalized[: segments * n].view(segments, n, -1)[:, :wanted])

    def draw_block(self, block: DraftBlock, anchor: Tensor, draw: DrawToken) -> DraftOutput:
        """Draw from left to right, each proposal with the Markov bias of the one before it."""
        previous = anchor
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        confidence: list[Tensor] = []
        for k in range(block.base_logits.shape[1]):
            step_logits, z = self.kernels.markov_step(
                block.base_logits[:, k],
                block.hidden[:, k],
                previous,
                self.params.markov_embed,
                self.params.markov_head,
                self.params.confidence,
            )
            previous = draw(k, step_logits)
            tokens.append(previous)
            logits.append(step_logits)
            confidence.append(z)
        return DraftOutput(torch.stack(tokens, 1), tuple(logits), torch.stack(confidence, 1))

    # ---- attention of a stage ------------------------------------------------------------------------------------

    def _attention(
        self, x: Tensor, params: AttentionParams, rope: Tensor, scratch: Tensor, plan: object, cache: Tensor
    ) -> Tensor:
        kernels, eps = self.kernels, self.config.rms_norm_eps
        parts = kernels.linear(x, params.input_proj).split(params.input_widths, 1)
        latent = kernels.rms_norm(parts[0], params.q_norm, eps)
        q = kernels.linear(latent, params.query_proj).unflatten(1, (self.config.num_attention_heads, -1))
        key = kernels.apply_rope(kernels.rms_norm(parts[1], params.kv_norm, eps), rope, in_place=True)
        kernels.write_window(cache, scratch, key)
        q = kernels.apply_rope(q, rope, in_place=True)
        out = kernels.attend(q, cache, plan, None, None, params.sink)
        return project_output(out, rope, params, kernels)

    def _context_key(self, main_x: Tensor, params: AttentionParams, rope: Tensor) -> Tensor:
        # wkv is the second part of the joined input projection
        start = params.input_widths[0]
        wkv = params.input_proj[:, start : start + params.input_widths[1]].contiguous()
        key = self.kernels.rms_norm(self.kernels.linear(main_x, wkv), params.kv_norm, self.config.rms_norm_eps)
        return self.kernels.apply_rope(key, rope, in_place=True)

    def _key_rows(
        self, anchor_position: Tensor, slot: Tensor, visible_from: Tensor, state: ModelState, padded: int
    ) -> Tensor:
        """[P, W + n]: ring rows of the W positions before the anchor, then the block's scratch rows; -1 = invisible."""
        ring, n = state.layout.draft_window, self.block
        position = anchor_position[:, None] + torch.arange(-self.config.sliding_window, 0, device=slot.device)  # [S, W]
        rows = slot[:, None] * ring.capacity + position % ring.capacity
        rows = rows.masked_fill(position < visible_from.clamp_min(0)[:, None], -1)
        block = ring.scratch_start + torch.arange(len(slot) * n, device=slot.device).view(-1, n)
        both = torch.cat([rows, block], 1).repeat_interleave(n, 0)
        return torch.nn.functional.pad(both, (0, 0, 0, padded - both.shape[0]), value=-1)

    def _pad(self, rows: Tensor) -> Tensor:
        """rows [R, ...] with zero rows up to the multiple that the kernels want."""
        missing = -rows.shape[0] % self.kernels.row_multiple
        return torch.nn.functional.pad(rows, [0, 0] * (rows.dim() - 1) + [0, missing]) if missing else rows
