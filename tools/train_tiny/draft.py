"""The DSpark stages over many anchors at once, and their losses (docs/model.md: Drafter).

    anchor a: features of positions < a are known, y = tokens[a] is the anchor, the block is [y, noise x 4]
    q_k  = softmax(U_k + markov(tokens[a + k - 1])) predicts tokens[a + k], k = 1 .. 5;  p_k: the backbone there
    loss = sum_k w_k (0.1 CE(tokens[a + k], q_k) + 0.9 |q_k - p_k|_1 + BCE(c_k, 1 - |q_k - p_k|_1 / 2))
    w_k  = exp(-(k - 1) / 4), normalized to sum 1

The Markov head sees the true tokens (teacher forcing).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.reference.norm_rope import apply_rope, rms_norm, rope_frequencies, rope_table
from deepinfer_core.kernels.reference.rounding import round_window
from tools.train_tiny import ops
from tools.train_tiny.model import Params, moe, project_out, sublayer

_POSITION_DECAY = 4.0
_CE, _L1, _CONFIDENCE = 0.1, 0.9, 1.0


@dataclass
class Draft:
    """What one pass over the blocks gives; N blocks of K positions."""

    logits: Tensor  # [N, K, V] after the Markov bias
    confidence: Tensor  # [N, K] logit
    loads: dict[int, Tensor]  # rows per expert, by stage


def draft(p: Params, config: ModelConfig, features: Tensor, tokens: Tensor, anchors: Tensor) -> Draft:
    """features [B, T, targets * D], tokens [B, >= max anchor + K], anchors [B, A] with 1 <= a <= T -> B A blocks."""
    block, last = config.dspark_block_size, f"mtp.{config.num_nextn_predict_layers - 1}"
    main_x = rms_norm(
        F.linear(features, p["mtp.0.main_proj.weight"]), p["mtp.0.main_norm.weight"], config.rms_norm_eps
    )  # [B, T, D]
    steps = torch.arange(block, device=tokens.device)
    positions = (anchors[..., None] + steps).flatten()  # [R], R = B A K
    previous = tokens.gather(1, (anchors[..., None] + steps).flatten(1)).flatten()  # tokens[a + k - 1]
    inputs = torch.where(steps == 0, previous.view(-1, block), config.dspark_noise_token_id).flatten()
    streams = F.embedding(inputs, p["embed.weight"])[:, None].repeat(1, config.hc_mult, 1)
    pre = torch.zeros(streams.shape[:2], device=streams.device)
    pre[:, 0] = 1.0
    context = _Context(config, main_x, anchors, positions)
    loads: dict[int, Tensor] = {}
    for stage in range(config.num_nextn_predict_layers):
        streams, pre, loads[stage] = _stage(p, config, stage, streams, pre, context)
    hidden = ops.collapse(streams, pre)  # [R, D] un-normalized
    base = F.linear(rms_norm(hidden, p[f"{last}.norm.weight"], config.rms_norm_eps), p["head.weight"])
    embedded = F.embedding(previous, p[f"{last}.markov_head.embed.weight"])
    logits = base.float() + F.linear(embedded, p[f"{last}.markov_head.head.weight"]).float()
    with torch.autocast(hidden.device.type, enabled=False):
        confidence = F.linear(
            torch.cat([hidden.float(), embedded.float()], -1), p[f"{last}.confidence_head.proj.weight"]
        )
    return Draft(logits.unflatten(0, (-1, block)), confidence.view(-1, block), loads)


class _Context:
    """The ring of every anchor: the window of positions before it."""

    def __init__(self, config: ModelConfig, main_x: Tensor, anchors: Tensor, positions: Tensor) -> None:
        self.main_x = main_x
        window, device = config.sliding_window, main_x.device
        at = anchors[..., None] - window + torch.arange(window, device=device)  # [B, A, W]
        self.visible = F.pad((at >= 0).flatten(0, 1), (0, config.dspark_block_size), value=True)  # [N, W + K]
        self.index = at.clamp_min(0)
        frequencies = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, None).float().to(device)
        self.context_rope = rope_table(torch.arange(main_x.shape[1], device=device), frequencies).repeat(
            main_x.shape[0], 1, 1
        )
        self.block_rope = rope_table(positions, frequencies)

    def ring(self, keys: Tensor) -> Tensor:
        """keys [B, T, D] -> [N, W, D]."""
        batch = torch.arange(keys.shape[0], device=keys.device)[:, None, None]
        return keys[batch, self.index].flatten(0, 1)


def _stage(
    p: Params, config: ModelConfig, stage: int, streams: Tensor, pre: Tensor, context: _Context
) -> tuple[Tensor, Tensor, Tensor]:
    name, loads = f"mtp.{stage}", []

    def attention(x: Tensor) -> Tensor:
        return _attention(p, config, f"{name}.attn", x, context)

    def feed_forward(x: Tensor) -> Tensor:
        y, load = moe(
            p, f"{name}.ffn", x, config.dspark_num_experts_per_tok, config.routed_scaling_factor, config.swiglu_limit
        )
        loads.append(load)
        return y

    streams, pre = sublayer(p, config, name, "attn", streams, pre, attention)
    streams, pre = sublayer(p, config, name, "ffn", streams, pre, feed_forward)
    return streams, pre, loads[0]


def _key(p: Params, name: str, x: Tensor, table: Tensor, eps: float) -> Tensor:
    key = apply_rope(rms_norm(F.linear(x, p[f"{name}.wkv.weight"]).float(), p[f"{name}.kv_norm.weight"], eps), table)
    return round_window(key).detach() + (key - key.detach())


def _attention(p: Params, config: ModelConfig, name: str, x: Tensor, context: _Context) -> Tensor:
    eps, block = config.rms_norm_eps, config.dspark_block_size
    latent = rms_norm(F.linear(x, p[f"{name}.wq_a.weight"]), p[f"{name}.q_norm.weight"], eps)
    q = apply_rope(
        F.linear(latent, p[f"{name}.wq_b.weight"]).unflatten(-1, (config.num_attention_heads, -1)), context.block_rope
    )
    ring = _key(p, name, context.main_x.flatten(0, 1), context.context_rope, eps).unflatten(0, context.main_x.shape[:2])
    own = _key(p, name, x, context.block_rope, eps)
    keys = torch.cat([context.ring(ring), own.unflatten(0, (-1, block))], 1).to(q.dtype)  # [N, W + K, D]
    scaled = (q * q.shape[-1] ** -0.5).view(len(keys), -1, q.shape[-1])  # [N, K H, D]
    logits = torch.bmm(scaled, keys.transpose(1, 2)).float().unflatten(1, (block, -1))  # [N, K, H, W + K]
    logits = logits.masked_fill(~context.visible[:, None, None], float("-inf"))
    sink = p[f"{name}.attn_sink"][None, None, :, None].expand(*logits.shape[:3], 1)
    weights = torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1].to(q.dtype)
    out = torch.bmm(weights.flatten(1, 2), keys).view(q.shape)
    return project_out(p, config, name, out, context.block_rope)


def losses(drafted: Draft, target_logits: Tensor, next_tokens: Tensor) -> dict[str, Tensor]:
    """target_logits [N, K, V] of the backbone, next_tokens [N, K] -> the total, its parts, the accepted length."""
    block = next_tokens.shape[1]
    weight = torch.exp(-torch.arange(block, device=next_tokens.device) / _POSITION_DECAY)
    weight = weight / weight.sum()
    log_q = torch.log_softmax(drafted.logits, -1)
    distance = (log_q.exp() - torch.softmax(target_logits.float(), -1)).abs().sum(-1)  # [N, K]
    accepted = (1.0 - 0.5 * distance).detach()
    ce = -log_q.gather(-1, next_tokens[..., None])[..., 0]
    bce = F.binary_cross_entropy_with_logits(drafted.confidence, accepted, reduction="none")
    total = ((_CE * ce + _L1 * distance + _CONFIDENCE * bce) * weight).sum(-1).mean()
    agree = (drafted.logits.argmax(-1) == target_logits.argmax(-1)).float()
    return {
        "draft_loss": total,
        "draft_ce": ce.mean().detach(),
        "draft_acceptance": accepted.mean(),
        "draft_agreement": agree.mean(),
        "draft_length": 1.0 + agree.cumprod(-1).sum(-1).mean(),
    }
