"""Which released tensor fills which field of `ModelWeights`: one table a dataclass, for loader and writer.

Names are relative to the block's prefix, which the tables' users put together: `layers.{l}` or `mtp.{s}`, then `.attn`,
`.ffn`, ... Where a field's shape differs from the tensor's (wo_a by group, the confidence vector) the elements are in
the same order.
"""

from __future__ import annotations

__all__ = [
    "ATTENTION",
    "COMPRESSOR",
    "DRAFT_FIRST",
    "DRAFT_LAST",
    "ENGRAM",
    "EXPERT",
    "INDEXER",
    "INDEX_KEY",
    "MOE",
    "NORMS",
    "PRODUCTS",
    "TOP",
    "expert_name",
    "hyper",
    "layer_prefix",
    "scale_name",
]

TOP = {"embed": "embed.weight", "head": "head.weight", "norm": "norm.weight"}
NORMS = {"attn_norm": "attn_norm.weight", "ffn_norm": "ffn_norm.weight"}
ATTENTION = {
    "wq_a": "wq_a.weight",
    "q_norm": "q_norm.weight",
    "wq_b": "wq_b.weight",
    "wkv": "wkv.weight",
    "kv_norm": "kv_norm.weight",
    "wo_a": "wo_a.weight",
    "wo_b": "wo_b.weight",
    "sink": "attn_sink",
}
COMPRESSOR = {"wkv": "wkv.weight", "wgate": "wgate.weight", "norm": "norm.weight"}
INDEX_KEY = {"wk": "wk.weight", "k_norm": "k_norm.weight"}
INDEXER = {"wq_b": "wq_b.weight", "weights_proj": "weights_proj.weight"}
MOE = {
    "gate": "gate.weight",
    "bias": "gate.bias",
    "bias_vl": "gate.bias_vl",
    "shared_w1": "shared_experts.w1.weight",
    "shared_w3": "shared_experts.w3.weight",
    "shared_w2": "shared_experts.w2.weight",
}
EXPERT = ("w1", "w3", "w2")
# Fields of the tables above whose products kernels may take in packed form; and all of EXPERT.
PRODUCTS = frozenset(("wq_b", "wo_b", "shared_w1", "shared_w3", "shared_w2"))
ENGRAM = {"wkv": "wkv.weight", "q_weight": "q_weight", "k_weight": "k_weight"}
DRAFT_FIRST = {"main_proj": "main_proj.weight", "main_norm": "main_norm.weight"}  # of stage 0
DRAFT_LAST = {  # of the last stage
    "norm": "norm.weight",
    "markov_embed": "markov_head.embed.weight",
    "markov_head": "markov_head.head.weight",
    "confidence": "confidence_head.proj.weight",
}


def layer_prefix(layer: int, num_hidden_layers: int) -> str:
    """`layers.{l}` of a backbone layer, `mtp.{s}` of layer number num_hidden_layers + s."""
    return f"layers.{layer}" if layer < num_hidden_layers else f"mtp.{layer - num_hidden_layers}"


def hyper(sublayer: str) -> dict[str, str]:
    """Table of the mHC block of `attn` or `ffn`."""
    return {field: f"hc_{sublayer}_{field}" for field in ("fn", "base", "scale")}


def expert_name(prefix: str, expert: int, matrix: str) -> str:
    """Packed weight of one matrix of one routed expert."""
    return f"{prefix}.ffn.experts.{expert}.{matrix}.weight"


def scale_name(weight_name: str) -> str:
    """The e8m0 companion of a quantized weight."""
    return weight_name.removesuffix("weight") + "scale"
