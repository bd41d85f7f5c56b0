"""Root objects of config.json for tests: the release's and a small one of another shape."""

from __future__ import annotations

import copy
from typing import Any

from deepinfer_core.config.model import ModelConfig

RELEASE: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_nextn_predict_layers": 3,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 16000000,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}

# Widths that are no multiples of 32 (partial quantization blocks), two KV sources, one Engram layer, two draft stages.
_SMALL_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_lora_rank": 20,
    "o_groups": 2,
    "moe_intermediate_size": 36,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 2,
    "engram_layer_ids": [0],
    "engram_num_embeddings": [60],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 16,
    "engram_vocab_size": 10,
    "engram_compressed_vocab_size": 50,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": [1, 3],
    "dspark_markov_rank": 12,
    "dspark_n_routed_experts": 3,
    "dspark_num_experts_per_tok": 1,
}


def release_json() -> dict[str, Any]:
    """A fresh copy of the release's config.json."""
    return copy.deepcopy(RELEASE)


def small_json(**text: Any) -> dict[str, Any]:
    """A small config.json without vision; `text` replaces values of text_config."""
    root = release_json()
    del root["vision_config"]
    root["image_token_id"] = 8
    root["text_config"] |= copy.deepcopy(_SMALL_TEXT) | text
    return root


def release_config() -> ModelConfig:
    """The release."""
    return ModelConfig.from_dict(release_json())


def small_config(**text: Any) -> ModelConfig:
    """The small model."""
    return ModelConfig.from_dict(small_json(**text))
