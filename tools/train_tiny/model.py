"""The backbone over whole sequences, differentiable: [B, T] tokens -> hidden states, DSpark features, index losses.

    tokens ─ embed ─► 4 streams ─► layers: (Engram) ─ mHC ─ attention ─ mHC ─ MoE ─► collapse ─ norm ─► hidden

The formulas are the engine's (deepinfer_core.kernels.reference); only the layout differs: rows of equal
length, masks instead of page tables. tests/tools/test_train_model.py checks it against the fixtures of nemo-automodel.
Gradients pass the cache roundings unchanged (straight-through). The indexer gets no gradient from the language model:
its inputs are detached, and its loss is the distance of its scores to the attention that the layers of its group pay to
the visible entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepinfer_core.checkpoint.engram_hash import EngramHash, engram_hashes
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.reference.compressor import pool_pairs
from deepinfer_core.kernels.reference.engram import DEAD_CLASS, engram_gate, engram_rows
from deepinfer_core.kernels.reference.indexer import candidate_blocks
from deepinfer_core.kernels.reference.norm_rope import apply_rope, rms_norm, rope_frequencies, rope_table
from deepinfer_core.kernels.reference.rounding import round_compressed, round_index, round_window
from tools.train_tiny import ops

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Mode:
    """How the forward runs."""

    sparse: bool = True  # attention to selected entries only; False: to all visible ones
    quantize: bool = True  # cache roundings
    index_targets: bool = False  # compute the indexer's loss and recall
    save_memory: bool = False  # recompute attention and scores in the backward pass (long samples)
    first_kept: Tensor | None = (
        None  # [B]: rows of the decoder half from here on see no older window key (bounded replay)
    )


@dataclass
class Output:
    """Results of one forward over R = B T rows."""

    hidden: Tensor  # [R, D] after the final norm
    features: Tensor  # [R, targets * D] for the drafter
    loads: dict[int, Tensor]  # rows per expert of each layer
    index_losses: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # by index source
    index_recall: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # share of attention that is selected
    index_best: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # the most that as many entries can hold
    streams: list[Tensor] = field(default_factory=list[Tensor])  # after each layer, only if asked for


class Geometry:
    """What depends on the config, the tokenizer and the length, not on weights."""

    def __init__(self, config: ModelConfig, token_classes: Tensor, length: int, device: torch.device | str) -> None:
        self.config, self.length = config, length
        self.window = config.sliding_window
        self.padded = -(-length // self.window) * self.window
        self.device = torch.device(device)
        self.token_classes = token_classes.to(self.device)
        positions = torch.arange(self.padded, device=self.device)
        plain = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, None)
        scaled = rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
        self.rope = {
            ratio: rope_table(positions, (scaled if ratio else plain).float().to(self.device)) for ratio in (0, 1, 2)
        }
        self.visible = {  # [T, entries]
            ratio: torch.arange(self.padded // ratio, device=self.device) < ((positions + 1) // ratio)[:, None]
            for ratio in (1, 2)
        }
        self.hashes = {
            layer: tuple(torch.tensor(v, device=self.device) for v in (h.multipliers, h.primes, h.offsets))
            for layer, h in _hashes(config).items()
        }

    def engram_rows(self, layer: int, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> table rows [B T, columns]."""
        c = self.config
        classes = self.token_classes[tokens]
        shifted = [
            F.pad(classes, (n, 0), value=DEAD_CLASS)[:, : classes.shape[1]] for n in range(c.engram_max_ngram_size)
        ]
        pad_class = int(self.token_classes[c.engram_pad_token_id])
        multipliers, primes, offsets = self.hashes[layer]
        history = torch.stack(shifted, -1).flatten(0, 1)
        return engram_rows(history, multipliers, primes, offsets, pad_class, c.engram_n_heads)


def _hashes(config: ModelConfig) -> dict[int, EngramHash]:
    return engram_hashes(config) if config.engram_layer_ids else {}


@dataclass
class _Shared:
    """What source layers leave for the layers after them."""

    entries: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # by KV source [B, N, D]
    index_keys: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # by KV source [B, N, Di]
    selected: dict[int, Tensor | None] = field(default_factory=dict[int, "Tensor | None"])  # by index source [B, T, N]
    scores: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # by index source [B, T, N]
    targets: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # by index source [B, T, N]
    candidates: Tensor | None = None  # [B, T, N] bool


def backbone(p: Params, geometry: Geometry, tokens: Tensor, mode: Mode, *, keep_streams: bool = False) -> Output:
    """tokens [B, T] with T = geometry.length. Rows beyond T up to a multiple of the window are computed and cut off."""
    config, length = geometry.config, geometry.length
    batch = tokens.shape[0]
    tokens = F.pad(tokens, (0, geometry.padded - length), value=config.pad_token_id)
    embedded = F.embedding(tokens.flatten(), p["embed.weight"])
    streams = embedded[:, None].repeat(1, config.hc_mult, 1)  # [R, S, D]
    pre = torch.zeros(streams.shape[:2], device=streams.device)
    pre[:, 0] = 1.0
    shared, output = _Shared(), Output(embedded, embedded, {})
    features: list[Tensor] = []
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}"
        if layer in config.engram_layer_ids:
            streams = _engram(p, geometry, layer, streams, tokens)
        if layer in config.dspark_target_layer_ids:
            features.append(streams.mean(1))
        attention = _attention_sublayer(p, geometry, layer, batch, mode, shared)
        streams, pre = sublayer(p, config, name, "attn", streams, pre, attention)
        streams, pre = sublayer(
            p, config, name, "ffn", streams, pre, lambda x, n=name, i=layer: _moe(p, config, n, i, x, output)
        )
        if keep_streams:
            output.streams.append(_cut(streams, batch, length))
    if mode.index_targets:
        _index_results(geometry, shared, output)
    output.hidden = _cut(rms_norm(ops.collapse(streams, pre), p["norm.weight"], config.rms_norm_eps), batch, length)
    output.features = _cut(torch.cat(features, -1), batch, length) if features else output.hidden
    return output


def _cut(rows: Tensor, batch: int, length: int) -> Tensor:
    return rows.unflatten(0, (batch, -1))[:, :length].flatten(0, 1)


def sublayer(
    p: Params, config: ModelConfig, name: str, part: str, streams: Tensor, pre: Tensor, run: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """mHC around one sublayer: streams [R, S, D], pre [R, S] of the one before -> streams, own pre."""
    new_pre, post, c = ops.mix(
        streams, p[f"{name}.hc_{part}_fn"], p[f"{name}.hc_{part}_base"], p[f"{name}.hc_{part}_scale"],
        config.hc_sinkhorn_iters, config.rms_norm_eps, config.hc_eps,
    )  # fmt: skip
    x = _norm(ops.collapse(streams, pre), p[f"{name}.{part}_norm.weight"], config.rms_norm_eps)
    return ops.expand(streams, run(x), post, c), new_pre


_norm = ops.fused(rms_norm)
_gate_streams = ops.fused(engram_gate)


def _engram(p: Params, geometry: Geometry, layer: int, streams: Tensor, tokens: Tensor) -> Tensor:
    name, config = f"layers.{layer}.engram", geometry.config
    rows = F.embedding(geometry.engram_rows(layer, tokens), p[f"{name}.embed.weight"]).flatten(1)
    key_value = F.linear(rows, p[f"{name}.wkv.weight"])
    dead = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    return _gate_streams(streams, key_value, p[f"{name}.q_weight"], p[f"{name}.k_weight"], dead, config.rms_norm_eps)


def _moe(p: Params, config: ModelConfig, name: str, layer: int, x: Tensor, output: Output) -> Tensor:
    draft = layer >= config.num_hidden_layers
    k = config.dspark_num_experts_per_tok if draft else config.num_experts_per_tok
    y, output.loads[layer] = moe(p, f"{name}.ffn", x, k, config.routed_scaling_factor, config.swiglu_limit)
    return y


def moe(p: Params, name: str, x: Tensor, k: int, scale: float, limit: float) -> tuple[Tensor, Tensor]:
    """x [R, D] -> output [R, D] and rows per expert [E]. The shared expert runs as one more expert of weight 1."""
    with torch.autocast(x.device.type, enabled=False):
        logits = F.linear(x.float(), p[f"{name}.gate.weight"])
    weights, load = ops.route(logits, p[f"{name}.gate.bias"], k, scale)
    w1, w3, w2 = (
        torch.cat([p[f"{name}.experts.{m}.weight"], p[f"{name}.shared_experts.{m}.weight"][None]])
        for m in ("w1", "w3", "w2")
    )
    return ops.experts(x, F.pad(weights, (0, 1), value=1.0), w1, w3, w2, limit), load


# ---- attention -------------------------------------------------------------------------------------------------------


@ops.fused
def _window_key(projected: Tensor, norm: Tensor, table: Tensor, eps: float, quantize: bool) -> Tensor:
    return _rounded(apply_rope(rms_norm(projected.float(), norm, eps), table), round_window, quantize)


@ops.fused
def _entry(latent: Tensor, table: Tensor, quantize: bool) -> Tensor:
    return _rounded(apply_rope(latent, table), round_compressed, quantize)


@ops.fused
def _index_vector(x: Tensor, table: Tensor, quantize: bool) -> Tensor:
    return _rounded(apply_rope(x.float(), table), round_index, quantize)


_rope = ops.fused(apply_rope)


def _rounded(x: Tensor, rounding: Callable[[Tensor], Tensor], quantize: bool) -> Tensor:
    return rounding(x).detach() + (x - x.detach()) if quantize else x  # exactly the rounded value


def _attention_sublayer(
    p: Params, geometry: Geometry, layer: int, batch: int, mode: Mode, shared: _Shared
) -> Callable[[Tensor], Tensor]:
    config, name = geometry.config, f"layers.{layer}.attn"
    ratio, length = config.compress_ratios[layer], geometry.padded
    decoder = layer >= config.decoder_start

    def run(x: Tensor) -> Tensor:
        table = geometry.rope[ratio].repeat(batch, 1, 1)  # [R, 2, rotary]
        query_latent = _norm(F.linear(x, p[f"{name}.wq_a.weight"]), p[f"{name}.q_norm.weight"], config.rms_norm_eps)
        q = _rope(
            F.linear(query_latent, p[f"{name}.wq_b.weight"]).unflatten(-1, (config.num_attention_heads, -1)), table
        )
        keys = _window_key(
            F.linear(x, p[f"{name}.wkv.weight"]), p[f"{name}.kv_norm.weight"], table, config.rms_norm_eps, mode.quantize
        )
        if layer in config.kv_source_layer_ids:
            _write_entries(p, geometry, layer, batch, mode, x, shared)
        if layer in config.index_source_layer_ids and (mode.sparse or mode.index_targets):
            _select(p, geometry, layer, batch, mode, x.detach(), query_latent.detach(), shared)
        seen = ops.window_mask(length, geometry.window, mode.first_kept if decoder else None, x.device)
        entries = visible = selected = owner = None
        if ratio:
            entries, visible, owner = (
                shared.entries[_owner(config.kv_owner(layer))],
                geometry.visible[ratio],
                config.index_owner(layer),
            )
            selected = shared.selected.get(_owner(owner)) if mode.sparse else None
        rows = (batch, length)
        out, target = _run(
            mode,
            ops.attend,
            q.unflatten(0, rows),
            keys.unflatten(0, rows),
            seen,
            p[f"{name}.attn_sink"],
            entries,
            visible,
            selected,
        )
        if mode.index_targets and target is not None and owner is not None:
            shared.targets[owner] = target + shared.targets[owner] if owner in shared.targets else target
        return project_out(p, config, name, out.flatten(0, 1), table)

    return run


def _run(mode: Mode, function: Callable[..., Any], *arguments: Any) -> Any:
    return checkpoint(function, *arguments, use_reentrant=False) if mode.save_memory else function(*arguments)


def _owner(layer: int | None) -> int:
    if layer is None:
        raise ValueError("a layer with a compressed cache has owners")  # ModelConfig guarantees it
    return layer


def project_out(p: Params, config: ModelConfig, name: str, out: Tensor, table: Tensor) -> Tensor:
    """out [R, H, D] -> [R, hidden]: inverse rope, grouped low-rank projection."""
    groups = config.o_groups
    grouped = _inverse_rope(out, table).flatten(1).unflatten(-1, (groups, -1))  # [R, G, H / G * D]
    wo_a = p[f"{name}.wo_a.weight"].unflatten(0, (groups, -1))  # [G, o_lora, H / G * D]
    low = torch.matmul(grouped.transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
    return F.linear(low, p[f"{name}.wo_b.weight"])


@ops.fused
def _inverse_rope(out: Tensor, table: Tensor) -> Tensor:
    """Inverse rotation of [R, H, D]."""
    return apply_rope(out, table, inverse=True)


def _write_entries(
    p: Params, geometry: Geometry, layer: int, batch: int, mode: Mode, x: Tensor, shared: _Shared
) -> None:
    config, name = geometry.config, f"layers.{layer}.attn"
    ratio, eps = config.compress_ratios[layer], config.rms_norm_eps
    with torch.autocast(x.device.type, enabled=False):
        latent = F.linear(x.float(), p[f"{name}.compressor.wkv.weight"])
        if ratio == 2:
            gate = F.linear(x.float(), p[f"{name}.compressor.wgate.weight"])
            pairs = torch.stack([latent, gate], 1).unflatten(0, (-1, 2))  # [R / 2, 2, (a, g), D]
            latent = pool_pairs(pairs[:, 0], pairs[:, 1])
        latent = _norm(latent, p[f"{name}.compressor.norm.weight"], eps)
        table = geometry.rope[ratio][::ratio].repeat(batch, 1, 1)
        key = _norm(F.linear(latent.detach(), p[f"{name}.indexer.wk.weight"]), p[f"{name}.indexer.k_norm.weight"], eps)
        shared.index_keys[layer] = _index_vector(key, table, mode.quantize).unflatten(0, (batch, -1))
        shared.entries[layer] = _entry(latent, table, mode.quantize).unflatten(0, (batch, -1))


def _select(
    p: Params, geometry: Geometry, layer: int, batch: int, mode: Mode, x: Tensor, query_latent: Tensor, shared: _Shared
) -> None:
    """Scores of one index source, and with `mode.sparse` its selection and, on the candidate source, the candidates."""
    config, name = geometry.config, f"layers.{layer}.attn.indexer"
    ratio, rows = config.compress_ratios[layer], (batch, geometry.padded)
    table = geometry.rope[ratio].repeat(batch, 1, 1)
    iq = F.linear(query_latent, p[f"{name}.wq_b.weight"]).unflatten(-1, (config.index_n_heads, -1))
    weights = F.linear(x, p[f"{name}.weights_proj.weight"]) * ops.index_scale(
        config.index_n_heads, config.index_head_dim
    )
    keys = shared.index_keys[_owner(config.kv_owner(layer))]
    iq = _index_vector(iq, table, mode.quantize).unflatten(0, rows)
    scores = _run(mode, ops.index_scores, iq, weights.unflatten(0, rows), keys)
    shared.scores[layer] = scores
    if not mode.sparse:
        return
    allowed = geometry.visible[ratio][None]
    masked = scores.detach().masked_fill(~allowed, float("-inf"))
    if config.uses_candidates(layer) and shared.candidates is not None:
        masked = masked.masked_fill(~shared.candidates, float("-inf"))
    shared.selected[layer] = top_mask(masked, config.index_topk)
    if layer == config.candidate_source_layer_id:
        num_visible = geometry.visible[ratio].sum(-1).repeat(batch)
        blocks = candidate_blocks(
            masked.flatten(0, 1), num_visible, config.candidate_block_size, config.candidate_topk_blocks
        )
        spread = blocks.repeat_interleave(config.candidate_block_size, 1)[:, : scores.shape[-1]]
        shared.candidates = spread.unflatten(0, rows)


def top_mask(scores: Tensor, k: int) -> Tensor:
    """scores [..., N] with -inf where not allowed -> bool mask of the k best (more where the k-th place is shared)."""
    threshold = torch.topk(scores, min(k, scores.shape[-1]), sorted=True).values[..., -1:]
    return (scores >= threshold) & (scores > float("-inf"))


def _index_results(geometry: Geometry, shared: _Shared, output: Output) -> None:
    config = geometry.config
    for layer, target in shared.targets.items():
        visible = geometry.visible[config.compress_ratios[layer]][None]
        output.index_losses[layer] = ops.index_loss(shared.scores[layer], target, visible)
        with torch.no_grad():
            selected = shared.selected.get(layer)
            if selected is None:
                selected = top_mask(shared.scores[layer].masked_fill(~visible, float("-inf")), config.index_topk)
            # Mean over the rows that see more entries than they may select.
            crowded = (visible.sum(-1) > config.index_topk).float()  # [1, T]
            rows = (crowded.sum() * len(target)).clamp_min(1.0)
            total = target.sum(-1).clamp_min(1e-12)  # [B, T]
            best = torch.topk(target, min(config.index_topk, target.shape[-1]), sorted=False).values.sum(-1)
            output.index_recall[layer] = ((target * selected).sum(-1) / total * crowded).sum() / rows
            output.index_best[layer] = (best / total * crowded).sum() / rows
