"""`ModelConfig`: the architecture of one DeepSeek-V4.1-Flash checkpoint, read from its nested `config.json`.

    layer         0 1 | 2 . . . 7 | 8 . . . | 14 . . . | 20 21..23 | 24 ..  | 28 ..  | 32 ..  | 36 ..39 | mtp 0..2
    ratio         0   | 2                              | 1                                            | 0
    kv owner      -   | 2         | 8       | 14       | 20                                           | -
    index owner   -   | 2         | 8       | 14       | 20        | 24     | 28     | 32     | 36      | -

The owner of a layer is the largest source at or below it. Layers from `decoder_start` (the last KV source, 20 in the
release) on form the decoder half: they own no long-range KV but that one. Roles and formulas:
docs/model.md; names and values are those of config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from deepinfer_core.config.checks import check_integer, check_integers, shown
from deepinfer_core.config.model_rules import check_model_config
from deepinfer_core.errors import ConfigError, ModelNotFoundError

__all__ = ["LayerRole", "ModelConfig", "VisionConfig", "YarnConfig"]

_MAX_INT = 2**31 - 1
_MAX_CONFIG_BYTES = 4 << 20
_MAX_LIST = 4096

LayerRole = Literal["window", "source", "reindex", "reuse"]


@dataclass(frozen=True)
class YarnConfig:
    """Long-context rotary scaling of the layers with a compressed cache (docs/model.md: Attention)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower that name and shape its tensors; 0 layers = no vision tensors at all."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and schedules of one checkpoint. Field names are those of `text_config` in the released config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnConfig
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    dtype: str = "bfloat16"
    n_shared_experts: int = 1
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        check_model_config(self)

    # ---- schedules -----------------------------------------------------------------------------------------------

    @cached_property
    def decoder_start(self) -> int:
        """The cut layer: last KV source, where the decoder half begins. `num_hidden_layers` if there is none."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else self.num_hidden_layers

    def kv_owner(self, layer: int) -> int | None:
        """Layer whose compressed KV `layer` reads; None for window-only layers."""
        return None if self.compress_ratios[layer] == 0 else _owner(self.kv_source_layer_ids, layer)

    def index_owner(self, layer: int) -> int | None:
        """Layer whose selection `layer` reads; None for window-only layers."""
        return None if self.compress_ratios[layer] == 0 else _owner(self.index_source_layer_ids, layer)

    def role(self, layer: int) -> LayerRole:
        """What the layer does for the compressed cache: nothing, write and index, index only, or reuse."""
        if self.compress_ratios[layer] == 0:
            return "window"
        if layer in self.kv_source_layer_ids:
            return "source"
        return "reindex" if layer in self.index_source_layer_ids else "reuse"

    def uses_candidates(self, layer: int) -> bool:
        """Whether the layer's indexer keeps to the candidate blocks that `candidate_source_layer_id` published."""
        return (
            layer in self.index_source_layer_ids
            and layer > self.candidate_source_layer_id
            and self.kv_owner(layer) == self.kv_owner(self.candidate_source_layer_id)
        )

    @property
    def engram_columns(self) -> int:
        """Table rows that a token reads in one Engram layer: one for each n-gram size from 2 up and each head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @cached_property
    def exact_decoder_rows(self) -> int:
        """Rows of the decoder half that make the last row identical to a full pass: 1 + (layers - cut)(window - 1)."""
        return 1 + (self.num_hidden_layers - self.decoder_start) * (self.sliding_window - 1)

    @cached_property
    def global_kv_bytes_per_token(self) -> float:
        """Packed bytes a token: compressed KV (e2m1 + e4m3/16) and index keys (e2m1 + e8m0/32); 890 in the release."""
        entry = self.head_dim // 2 + self.head_dim // 16 + self.index_head_dim // 2 + self.index_head_dim // 32
        return sum(entry / self.compress_ratios[layer] for layer in self.kv_source_layer_ids)

    # ---- reading -------------------------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `folder/config.json`. Raises ModelNotFoundError or ConfigError, naming the file and the value."""
        path = Path(folder) / "config.json"
        try:
            if path.stat().st_size > _MAX_CONFIG_BYTES:
                raise ConfigError(
                    f"{path} has {path.stat().st_size} bytes; a config.json has at most {_MAX_CONFIG_BYTES}"
                )
            raw = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelNotFoundError(
                f"{path} cannot be read ({error.strerror}); name a folder that holds a DeepSeek-V4.1 config.json"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid JSON ({error}); fetch the file again") from error
        return cls.from_dict(raw, where=str(path))

    @classmethod
    def from_dict(cls, raw: Any, *, where: str = "config.json") -> ModelConfig:
        """Build from the parsed root object of config.json; `where` names it in errors."""
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: the root must be an object, not {type(raw).__name__}")
        root = cast("dict[str, Any]", raw)
        if root.get("model_type") not in ("deepseek_v41", None) or "text_config" not in root:
            raise ConfigError(
                f"{where}: model_type {shown(root.get('model_type'))} is not DeepSeek-V4.1 (want 'deepseek_v41' with a "
                "text_config); this engine runs that one architecture"
            )
        return cls(**_read_fields(root, where))


def _owner(sources: tuple[int, ...], layer: int) -> int | None:
    return max((source for source in sources if source <= layer), default=None)


# ---- parsing ------------------------------------------------------------------------------------------------------

_ROOT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "dtype")
_FIXED_VALUES: dict[str, Any] = {
    # Choices of the architecture that are not parameters of this implementation: another value is another model.
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
}
_FIXED_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def _read_fields(root: dict[str, Any], where: str) -> dict[str, Any]:
    text = _object(root["text_config"], f"{where}: text_config")
    _check_fixed(text, _FIXED_VALUES, f"{where}: text_config")
    if root.get("quantization_config") is not None:
        quantization = _object(root["quantization_config"], f"{where}: quantization_config")
        _check_fixed(quantization, _FIXED_QUANTIZATION, f"{where}: quantization_config")
    values: dict[str, Any] = {"vision": _vision(root.get("vision_config"), where)}
    for spec in fields(ModelConfig):
        if spec.name == "vision":
            continue
        source = root if spec.name in _ROOT_KEYS else text
        if spec.name not in source:
            if spec.name in ("dtype", "n_shared_experts"):
                continue
            raise ConfigError(f"{where}: the key {spec.name!r} is missing; it is part of every DeepSeek-V4.1 config")
        values[spec.name] = _convert(spec.name, str(spec.type), source[spec.name], where)
    return values


def _vision(section: Any, where: str) -> VisionConfig | None:
    if section is None:
        return None
    sizes = _object(section, f"{where}: vision_config")
    names = [spec.name for spec in fields(VisionConfig)]
    for name in names:
        if name not in sizes:
            raise ConfigError(f"{where}: vision_config lacks {name!r}")
    return VisionConfig(**{name: _convert(f"vision_config.{name}", "int", sizes[name], where) for name in names})


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {shown(value)}; it must be an object")
    return cast("dict[str, Any]", value)


def _check_fixed(section: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    for key, value in wanted.items():
        if section.get(key, value) != value:
            raise ConfigError(f"{where}: {key} is {shown(section[key])}; this architecture has {value!r}")


def _convert(name: str, kind: str, value: Any, where: str) -> Any:
    if kind == "int":
        return check_integer(f"{where}: {name}", value, 0, _MAX_INT, ConfigError)
    if kind == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30:
            raise ConfigError(f"{where}: {name} is {shown(value)}; it must be a number from 0 to below 1e30")
        return float(value)
    if kind == "str":
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {name} is {shown(value)}; it must be a string")
        return value
    if kind == "tuple[int, ...]":
        return check_integers(f"{where}: {name}", value, 0, _MAX_INT, _MAX_LIST, ConfigError)
    return _yarn(name, value, where)


def _yarn(name: str, value: Any, where: str) -> YarnConfig:
    section = _object(value, f"{where}: {name}")
    kind = section.get("rope_type", section.get("type", "yarn"))
    if kind != "yarn":
        raise ConfigError(f"{where}: {name} has the type {shown(kind)}; this architecture uses 'yarn'")
    parts: dict[str, Any] = {}
    for spec in fields(YarnConfig):
        if spec.name not in section:
            raise ConfigError(f"{where}: {name} lacks {spec.name!r}")
        parts[spec.name] = _convert(f"{name}.{spec.name}", str(spec.type), section[spec.name], where)
    return YarnConfig(**parts)
