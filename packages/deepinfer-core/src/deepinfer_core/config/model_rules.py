"""Rules that tie the values of a `ModelConfig` together (docs/model.md); a ConfigError names what fails.

Bounds exist so that a damaged config.json is refused here, instead of exhausting memory or time in what is built from
it. They leave a factor of ten or more above the release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_core.config.model import ModelConfig

__all__ = ["check_model_config"]

_MAX_INT = 2**31 - 1
_RANGES: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (2, 1 << 17),
    "num_hidden_layers": (1, 1024),
    "num_nextn_predict_layers": (0, 64),
    "num_attention_heads": (1, 4096),
    "head_dim": (32, 1 << 14),
    "qk_rope_head_dim": (2, 1 << 14),
    "q_lora_rank": (1, 1 << 17),
    "o_lora_rank": (1, 1 << 17),
    "o_groups": (1, 4096),
    "moe_intermediate_size": (2, 1 << 20),
    "n_routed_experts": (1, 1 << 14),
    "num_experts_per_tok": (1, 1024),
    "max_position_embeddings": (1, _MAX_INT),
    "sliding_window": (1, 1 << 20),
    "index_n_heads": (1, 4096),
    "index_head_dim": (32, 1 << 14),
    "index_topk": (1, 1 << 20),
    "candidate_topk_blocks": (1, 1 << 24),
    "candidate_block_size": (1, 1 << 16),
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 1000),
    "engram_max_ngram_size": (2, 16),
    "engram_n_heads": (1, 256),
    "engram_head_dim": (1, 1 << 14),
    "engram_vocab_size": (1, _MAX_INT),
    "engram_compressed_vocab_size": (1, 1 << 24),
}
_DRAFT_RANGES: dict[str, tuple[int, int]] = {
    "dspark_block_size": (1, 256),
    "dspark_markov_rank": (1, 1 << 17),
    "dspark_n_routed_experts": (1, 1 << 14),
    "dspark_num_experts_per_tok": (1, 1024),
}
_VISION_RANGES: dict[str, tuple[int, int]] = {
    "num_hidden_layers": (0, 1024),
    "hidden_size": (1, 1 << 17),
    "num_attention_heads": (1, 4096),
    "intermediate_size": (1, 1 << 20),
    "patch_size": (1, 4096),
    "downsample_ratio": (1, 64),
}
_DTYPES = ("bfloat16", "float16", "float32")


def check_model_config(c: ModelConfig) -> None:
    """Raise ConfigError for the first rule that `c` breaks."""
    _check_ranges(c, _RANGES, "")
    if c.vision is not None:
        _check_ranges(c.vision, _VISION_RANGES, "vision_config.")
    if c.dtype not in _DTYPES:
        raise ConfigError(f"config.json: dtype is {c.dtype!r}; it must be one of {', '.join(_DTYPES)}")
    _check_numbers(c)
    _check_widths(c)
    _check_lengths(c)
    _check_schedule(c)
    _check_draft(c)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "engram_pad_token_id"):
        if not 0 <= getattr(c, name) < c.vocab_size:
            raise ConfigError(f"config.json: {name} is {getattr(c, name)}; the vocabulary has {c.vocab_size} entries")


def _check_ranges(values: object, ranges: dict[str, tuple[int, int]], prefix: str) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(values, name)
        if not low <= value <= high:
            raise ConfigError(f"config.json: {prefix}{name} is {value}; it must be from {low} to {high}")


def _check_numbers(c: ModelConfig) -> None:
    if c.rope_theta <= 1 or c.compress_rope_theta <= 1:
        raise ConfigError(
            f"config.json: rope_theta {c.rope_theta} and compress_rope_theta {c.compress_rope_theta} must be over 1"
        )
    yarn = c.rope_scaling
    if yarn.factor < 1 or yarn.beta_fast <= 0 or yarn.beta_slow <= 0 or yarn.original_max_position_embeddings < 1:
        raise ConfigError(
            f"config.json: rope_scaling {yarn} needs factor >= 1, betas > 0 and a positive original length"
        )


def _check_widths(c: ModelConfig) -> None:
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > min(c.head_dim, c.index_head_dim):
        raise ConfigError(
            f"config.json: qk_rope_head_dim is {c.qk_rope_head_dim}; it must be even and at most "
            f"head_dim {c.head_dim} and index_head_dim {c.index_head_dim}"
        )
    # Caches quantize whole groups of 32 channels; packed FP4 rows hold two columns a byte.
    for name, step in (("head_dim", 32), ("index_head_dim", 32), ("hidden_size", 2), ("moe_intermediate_size", 2)):
        if getattr(c, name) % step:
            raise ConfigError(
                f"config.json: {name} is {getattr(c, name)}; the quantized layout needs a multiple of {step}"
            )
    if c.num_attention_heads % c.o_groups:
        raise ConfigError(f"config.json: {c.num_attention_heads} heads do not divide into o_groups {c.o_groups}")
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}"
        )


def _check_lengths(c: ModelConfig) -> None:
    needed = c.num_hidden_layers + c.num_nextn_predict_layers
    if len(c.compress_ratios) != needed:
        raise ConfigError(
            f"config.json: compress_ratios has {len(c.compress_ratios)} entries; {c.num_hidden_layers} layers and "
            f"{c.num_nextn_predict_layers} draft stages need {needed}"
        )
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        raise ConfigError(
            f"config.json: engram_num_embeddings has {len(c.engram_num_embeddings)} entries; engram_layer_ids "
            f"{list(c.engram_layer_ids)} needs one each"
        )
    for rows in c.engram_num_embeddings:
        if not 1 <= rows <= _MAX_INT:
            raise ConfigError(f"config.json: engram_num_embeddings holds {rows}; it must be from 1 to {_MAX_INT}")


def _check_schedule(c: ModelConfig) -> None:
    layers = c.num_hidden_layers
    if any(ratio not in (0, 1, 2) for ratio in c.compress_ratios) or any(c.compress_ratios[layers:]):
        raise ConfigError(
            f"config.json: compress_ratios {list(c.compress_ratios)} may hold 0, 1, 2, and 0 for draft stages"
        )
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids: tuple[int, ...] = getattr(c, name)
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < layers for i in ids):
            raise ConfigError(
                f"config.json: {name} {list(ids)} must ascend strictly from 0 to below num_hidden_layers {layers}"
            )
    for layer in range(layers):
        _check_layer(c, layer)
    if c.index_source_layer_ids and c.candidate_source_layer_id not in c.index_source_layer_ids:
        raise ConfigError(
            f"config.json: candidate_source_layer_id {c.candidate_source_layer_id} is not one of "
            f"index_source_layer_ids {list(c.index_source_layer_ids)}"
        )


def _check_layer(c: ModelConfig, layer: int) -> None:
    ratio = c.compress_ratios[layer]
    if ratio == 0:
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            if layer in getattr(c, name):
                raise ConfigError(f"config.json: {name} holds {layer}, which has 0 in compress_ratios and no cache")
        return
    owner, selector = c.kv_owner(layer), c.index_owner(layer)
    if owner is None or selector is None or selector < owner:
        raise ConfigError(
            f"config.json: layer {layer} has {ratio} in compress_ratios, but kv_source_layer_ids and "
            "index_source_layer_ids do not both have a source for it, the index source not before the KV source"
        )
    if c.compress_ratios[owner] != ratio:
        raise ConfigError(
            f"config.json: layer {layer} and its source {owner} of kv_source_layer_ids differ in compress_ratios"
        )


def _check_draft(c: ModelConfig) -> None:
    if c.num_nextn_predict_layers == 0:
        return
    _check_ranges(c, _DRAFT_RANGES, "")
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        raise ConfigError(
            f"config.json: dspark_num_experts_per_tok {c.dspark_num_experts_per_tok} exceeds dspark_n_routed_experts "
            f"{c.dspark_n_routed_experts}"
        )
    if not 0 <= c.dspark_noise_token_id < c.vocab_size:
        raise ConfigError(
            f"config.json: dspark_noise_token_id {c.dspark_noise_token_id} is outside the vocabulary {c.vocab_size}"
        )
    targets = c.dspark_target_layer_ids
    # The drafter's input is put together while the layers run, so their order is the only one.
    if not targets or list(targets) != sorted(set(targets)) or any(not 0 <= i < c.num_hidden_layers for i in targets):
        raise ConfigError(
            f"config.json: dspark_target_layer_ids {list(targets)} must name existing layers, at least one, ascending"
        )
