"""The backbone: embedding, layers, cut, final norm and head (docs/model.md: Layers).

streams X [P, S, D] = embedding copied S times, pre-mix (1, 0, ..)
layer: Engram? -> mHC(attention) -> mHC(MoE);   from the cut layer on only the decoder rows go through
at the cut the KV and index keys are still written for every row, from the layer's normalized input
logits [N, V] = head(norm(collapse(X))) of the sample rows; DSpark features = stream means entering the target layers
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_core.cache.state import ModelState
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.model.attention import Selections, attention, write_global_entries
from deepinfer_core.model.batch import Batch, RowSet
from deepinfer_core.model.beside import all_joined
from deepinfer_core.model.moe import moe
from deepinfer_core.model.params import EngramParams, LayerParams, ModelParams
from deepinfer_core.model.residual import Residual, run_sublayers
from deepinfer_core.parallel.experts import ExpertExchange, LocalExperts, RowOrigin
from deepinfer_core.parallel.owned import EngramSource, LocalEngram, OwnedRange

__all__ = ["Backbone", "ForwardOutput", "GivenEmbeddings", "LayerTrace"]


@dataclass
class LayerTrace:
    """Intermediate values for tests and debugging; filled only if it is passed to `forward`."""

    streams: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # after each layer [P, S, D]
    expert_ids: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    expert_weights: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    selections: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    candidates: Tensor | None = None
    engram_rows: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


@dataclass(frozen=True, eq=False)
class GivenEmbeddings:
    """Inputs of rows that don't come from the embedding table: image spans."""

    rows: Tensor  # [m] rows of the step
    values: Tensor  # [m, D]

    def put_into(self, embedded: Tensor, batch: Batch) -> Tensor:
        """embedded [P, D] of the rows that are computed here -> [P, D]."""
        values = self.values.to(embedded.dtype)
        if batch.local_rows is None:
            return embedded.index_copy(0, self.rows, values)
        longer = torch.cat([embedded, embedded[:1]])  # rows that are computed elsewhere go into the last one
        return longer.index_copy_(0, batch.local_rows[self.rows], values)[:-1]


@dataclass(frozen=True, eq=False)
class ForwardOutput:
    """Of one step."""

    normalized: (
        Tensor | None
    )  # [N, D] of the sample rows, what `head` takes; None if none went through the decoder half
    logits: Tensor | None  # [N, V] float32 of them, where they are asked for
    features: Tensor | None  # [P', T * D] of the decoder rows, for the drafter
    rows_per_layer: tuple[int, ...]  # real rows that each layer's attention and MoE computed


class Backbone:
    """The causal encoder-decoder. Holds no state: `forward` reads and writes the `ModelState` that it is given."""

    def __init__(
        self,
        config: ModelConfig,
        params: ModelParams,
        kernels: Kernels,
        exchange: ExpertExchange | None = None,
        engram: EngramSource | None = None,
    ) -> None:
        self.config, self.params, self.kernels = config, params, kernels
        self.exchange: ExpertExchange = exchange or LocalExperts()
        self.engram: EngramSource = engram or LocalEngram(params.engram_tables())
        self.vocabulary = OwnedRange.whole(config.vocab_size)

    @all_joined()
    def forward(
        self,
        batch: Batch,
        state: ModelState,
        trace: LayerTrace | None = None,
        given: GivenEmbeddings | None = None,
        *,
        with_logits: bool = True,
    ) -> ForwardOutput:
        """Run one step's rows. Writes the caches of `state`. `given` replaces the token embedding of some rows."""
        config, kernels = self.config, self.kernels
        self.engram.fetch(self._engram_rows(batch, trace))
        embedded = self.vocabulary.lookup(self.params.embed, batch.tokens)
        if given is not None:
            embedded = given.put_into(embedded, batch)
        residual = Residual.of_embeddings(embedded, config.hc_mult)
        rows, selections = batch.encoder, Selections()
        features: list[Tensor] = []
        counts: list[int] = []
        for index, layer in enumerate(self.params.layers):
            if layer.engram is not None:
                residual = Residual(self._engram(residual.streams, index, layer.engram, batch), residual.pre)
            if index in config.dspark_target_layer_ids:
                mean = kernels.mhc_collapse(residual.streams, torch.full_like(residual.pre, 1 / config.hc_mult))
                features.append(_to_decoder_rows(mean, batch) if rows is batch.encoder else mean)
            x = residual.input(layer.attn_norm, config.rms_norm_eps, kernels)
            residual = Residual(residual.streams, residual.pre, x)
            if layer.attn.compressor_proj is not None:
                write_global_entries(x, index, layer.attn, batch, state, config, kernels)
            if index == config.decoder_start:
                if batch.decoder is None:
                    counts += [0] * (config.num_hidden_layers - index)
                    break
                if batch.decoder_rows is not None:
                    kept = (_to_decoder_rows(part, batch) for part in (residual.streams, residual.pre))
                    residual = Residual(*kept)  # x is made again: that costs less than moving it between ranks
                rows, selections = batch.decoder, Selections()
            residual = self._layer(residual, index, layer, rows, batch, state, selections, trace)
            counts.append(rows.num_rows)
        self._commit_history(batch, state)
        return self._output(residual, batch, features, tuple(counts), with_logits)

    def _layer(
        self,
        residual: Residual,
        index: int,
        layer: LayerParams,
        rows: RowSet,
        batch: Batch,
        state: ModelState,
        selections: Selections,
        trace: LayerTrace | None,
    ) -> Residual:
        def attend(x: Tensor) -> Tensor:
            return attention(x, index, layer.attn, rows, batch, state, selections, self.config, self.kernels)

        def experts(x: Tensor) -> Tensor:
            if trace is not None:
                self._trace_router(x, index, layer, rows, trace)
            origin = RowOrigin(rows.slot, rows.position)
            return moe(
                x, rows.num_rows, rows.is_image, layer.ffn, self.exchange, index, origin, self.config, self.kernels
            )

        following = self._norm_after(index)
        residual = run_sublayers(residual, layer, following, attend, experts, self.config, self.kernels)
        if trace is not None:
            trace.streams[index] = residual.streams[: rows.num_rows]
            if index in selections.chosen:
                trace.selections[index] = selections.chosen[index][: rows.num_rows]
            trace.candidates = selections.candidates
        return residual

    def _norm_after(self, index: int) -> Tensor | None:
        """Weight of the norm that the streams of layer `index` go through next; None where an Engram changes them, and
        before the cut: where some rows end there the others' x is made anew, and it must be made the same way in steps
        without such rows, since a fused operation may round otherwise.
        """
        if index + 1 == self.config.num_hidden_layers:
            return self.params.norm
        after = self.params.layers[index + 1]
        return None if after.engram is not None or index + 1 == self.config.decoder_start else after.attn_norm

    def _engram_rows(self, batch: Batch, trace: LayerTrace | None) -> dict[int, Tensor]:
        """Table rows of every Engram layer. They follow from the tokens: they can be fetched before the first layer."""
        wanted: dict[int, Tensor] = {}
        for index, layer in enumerate(self.params.layers):
            if layer.engram is None:
                continue
            table_rows = self.kernels.engram_rows(
                self._engram_history(index, batch),
                layer.engram.multipliers,
                layer.engram.primes,
                layer.engram.offsets,
                self.params.pad_class,
                self.config.engram_n_heads,
            )
            if trace is not None:
                trace.engram_rows[index] = table_rows[: batch.encoder.num_rows]
            wanted[index] = table_rows.flatten()
        return wanted

    def _engram_history(self, index: int, batch: Batch) -> Tensor:
        """[P, N] of the rows that go through layer `index`."""
        if index <= self.config.decoder_start:
            return batch.engram_history
        return batch.engram_history[:0] if batch.decoder is None else _to_decoder_rows(batch.engram_history, batch)

    def _engram(self, streams: Tensor, index: int, engram: EngramParams, batch: Batch) -> Tensor:
        kernels, history = self.kernels, self._engram_history(index, batch)
        values = self.engram.take(index).view(history.shape[0], -1)
        key_value = kernels.linear(values, engram.wkv)
        dead = history[:, 0] < 0
        return kernels.engram_gate(streams, key_value, engram.q_weight, engram.k_weight, dead, self.config.rms_norm_eps)

    def _commit_history(self, batch: Batch, state: ModelState) -> None:
        commit = batch.history_commit
        state.history.index_copy_(0, commit.destination, state.history.index_select(0, commit.source))

    def _output(
        self, residual: Residual, batch: Batch, features: list[Tensor], counts: tuple[int, ...], with_logits: bool
    ) -> ForwardOutput:
        if batch.decoder is None:
            return ForwardOutput(None, None, None, counts)
        normalized = logits = None
        if len(batch.sample_rows.take):
            x = residual.input(self.params.norm, self.config.rms_norm_eps, self.kernels)
            normalized = batch.sample_rows.of(x, "sampled rows")
            logits = self.head(normalized) if with_logits else None
        joined = torch.cat(features, -1) if features else None
        return ForwardOutput(normalized, logits, joined, counts)

    def head(self, normalized: Tensor) -> Tensor:
        """normalized [N, D] -> float32 logits [N, V]."""
        return self.kernels.head_logits(normalized, self.params.head)

    def _trace_router(self, x: Tensor, index: int, layer: LayerParams, rows: RowSet, trace: LayerTrace) -> None:
        ids, weights = self.kernels.route(
            x[: rows.num_rows], layer.ffn.gate, layer.ffn.bias, layer.ffn.num_chosen, self.config.routed_scaling_factor
        )
        trace.expert_ids[index], trace.expert_weights[index] = ids, weights


def _to_decoder_rows(x: Tensor, batch: Batch) -> Tensor:
    return x if batch.decoder_rows is None else batch.decoder_rows.of(x, "rows at the cut")
