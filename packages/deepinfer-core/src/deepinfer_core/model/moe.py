"""The MoE sublayer: route -> dispatch -> experts -> combine (docs/model.md: Experts).

Dispatch and combine belong to `parallel`: with one process they hand the rows through. Padding rows are not routed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.model.beside import beside
from deepinfer_core.model.params import MoeParams
from deepinfer_core.parallel.experts import ExpertExchange, RowOrigin

__all__ = ["moe", "serve_experts"]


def moe(
    x: Tensor,
    num_rows: int,
    is_image: Tensor | None,
    params: MoeParams,
    exchange: ExpertExchange,
    layer: int,
    origin: RowOrigin,
    config: ModelConfig,
    kernels: Kernels,
) -> Tensor:
    """x [P, D] normalized input, the first `num_rows` of it real -> [P, D], zero in padding rows."""
    real = x[:num_rows]
    bias = params.bias
    if is_image is not None:
        bias = is_image[:num_rows, None] * params.bias_vl + ~is_image[:num_rows, None] * params.bias
    shared = beside(
        lambda: kernels.shared_expert(x, params.shared_w13, params.shared_w2, config.swiglu_limit), x.device
    )
    ids, weights = kernels.route(real, params.gate, bias, params.num_chosen, config.routed_scaling_factor)
    pairs = _expert_outputs(real, ids, weights, params, exchange, layer, origin, config, kernels)
    y = kernels.combine_experts(pairs, shared.join()[:num_rows])
    return y if num_rows == x.shape[0] else F.pad(y, (0, 0, 0, x.shape[0] - num_rows))


def serve_experts(
    params: MoeParams, exchange: ExpertExchange, layer: int, config: ModelConfig, kernels: Kernels
) -> None:
    """Take part in the exchange of a layer without rows of one's own: run the local experts on those of others."""
    x = torch.empty(0, params.w13.shape[1], dtype=params.w13.dtype, device=params.gate.device)
    ids = torch.empty(0, params.num_chosen, dtype=torch.int64, device=x.device)
    weights = torch.empty(0, params.num_chosen, dtype=torch.float32, device=x.device)
    nobody = RowOrigin(ids[:, 0], ids[:, 0])
    _expert_outputs(x, ids, weights, params, exchange, layer, nobody, config, kernels)


def _expert_outputs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    params: MoeParams,
    exchange: ExpertExchange,
    layer: int,
    origin: RowOrigin,
    config: ModelConfig,
    kernels: Kernels,
) -> Tensor:
    """x [R, D], ids and weights [R, k] -> one output for each pair [R, k, D]."""
    sent = exchange.dispatch(layer, x, ids, weights, origin)
    if len(sent.rows):
        plan = kernels.plan_experts(sent.local_ids, params.w13.shape[0])
        pairs = kernels.run_experts(sent.rows, sent.weights, plan, params.w13, params.w2, config.swiglu_limit)
    else:
        pairs = sent.rows.new_empty(*sent.local_ids.shape, sent.rows.shape[1])
    return exchange.combine(sent, pairs)
