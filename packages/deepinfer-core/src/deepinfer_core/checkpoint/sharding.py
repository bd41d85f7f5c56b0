"""Who owns what when a model is spread over ranks: contiguous shares, the first ones larger by one where needed.

Experts of a layer and rows of an Engram table are split; everything else is held by every rank. Draft stage s is layer
number num_hidden_layers + s.
"""

from __future__ import annotations

from deepinfer_core.config.model import ModelConfig

__all__ = ["engram_shares", "expert_shares", "share"]


def share(total: int, rank: int, num_ranks: int) -> range:
    """Part `rank` of `range(total)` split into `num_ranks`; sizes differ by at most one."""
    size, larger = divmod(total, num_ranks)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


def expert_shares(config: ModelConfig, rank: int, num_ranks: int) -> dict[int, range]:
    """Routed experts of each layer that `rank` holds: the `experts` of `load_model_weights`."""
    layers = config.num_hidden_layers
    shares = {layer: share(config.n_routed_experts, rank, num_ranks) for layer in range(layers)}
    stages = range(layers, layers + config.num_nextn_predict_layers)
    return shares | {stage: share(config.dspark_n_routed_experts, rank, num_ranks) for stage in stages}


def engram_shares(config: ModelConfig, rank: int, num_ranks: int) -> dict[int, range]:
    """Table rows of each Engram layer that `rank` holds: the `engram_rows` of `load_model_weights`."""
    rows = zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
    return {layer: share(num_rows, rank, num_ranks) for layer, num_rows in rows}
