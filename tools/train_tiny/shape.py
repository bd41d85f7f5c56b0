"""The shape of the tiny checkpoint: every mechanism of the release at 1/80,000 of its size.

    layer  0    1        2       3      4           5                   6 7    8        9      10       11 | mtp 0 1 2
    ratio  0    0        2       2      2           1                   1 1    1        1      1        1  | 0
    role   win  win+Eng  source  reuse  source+Eng  source, candidates  reuse  reindex  reuse  reindex  reuse

The text context is 8,192 tokens; 64 of up to 8,192 entries are selected, from 256 candidates in the reindex layers.
"""

from __future__ import annotations

from typing import Any

from deepinfer_core.checkpoint.engram_hash import engram_hashes
from deepinfer_core.config.model import ModelConfig

VOCAB_SIZE = 3072
MAX_POSITION = 8192
_ENGRAM_LAYERS, _ENGRAM_START, _MAX_NGRAM, _ENGRAM_HEADS = [1, 4], 2000, 4, 2
_LAYERS, _STAGES = 12, 3


def config_json(token_ids: dict[str, int], num_token_classes: int) -> dict[str, Any]:
    """The released form of config.json; `token_ids` holds bos, eos, pad, image, noise."""
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": _LAYERS,
        "num_nextn_predict_layers": _STAGES,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "max_position_embeddings": MAX_POSITION,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": MAX_POSITION // 16,
        },
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2] + [1] * (_LAYERS - 5) + [0] * _STAGES,
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 8, 10],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": _ENGRAM_LAYERS,
        "engram_num_embeddings": [1 << 30] * len(_ENGRAM_LAYERS),  # set below, once the primes are known
        "engram_max_ngram_size": _MAX_NGRAM,
        "engram_vocab_size": _ENGRAM_START,
        "engram_n_heads": _ENGRAM_HEADS,
        "engram_head_dim": 32,
        "engram_pad_token_id": token_ids["pad"],
        "engram_compressed_vocab_size": num_token_classes,
        "dspark_block_size": 5,
        "dspark_noise_token_id": token_ids["noise"],
        "dspark_target_layer_ids": [_LAYERS - 3, _LAYERS - 2, _LAYERS - 1],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 3,
    }
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": token_ids["bos"],
        "eos_token_id": token_ids["eos"],
        "pad_token_id": token_ids["pad"],
        "image_token_id": token_ids["image"],
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": 0,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "patch_size": 14,
            "rope_theta": 10000.0,
            "downsample_ratio": 3,
            "max_image_tokens": 1024,
            "min_pixels": 295936,
            "max_wh_ratio": None,
        },
    }
    hashes = engram_hashes(ModelConfig.from_dict(config))
    text["engram_num_embeddings"] = [sum(hashes[layer].primes) for layer in _ENGRAM_LAYERS]
    return config
