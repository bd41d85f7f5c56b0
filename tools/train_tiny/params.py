"""Trainable parameters, named as in the release, one tensor for all experts of a layer; start values and rounding.

    layers.3.attn.wq_a.weight                       [64, 128]       e4m3 in 32 x 32 blocks
    layers.3.ffn.experts.w1.weight                  [16, 64, 128]   e2m1, a scale for 32 columns of a row
    layers.1.engram.embed.weight                    [12_xxx, 32]    e4m3, a scale for 32 columns of a row

`straight_through` gives the values that the checkpoint will hold, with the gradient of the identity.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepinfer_core.checkpoint.manifest import TensorSpec, manifest
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.reference.rounding import ceil_power_of_two, round_e2m1, round_e4m3

Format = Literal["blocks", "fp4", "rows", "bf16", "f32"]
_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123]\.weight)")
_BLOCK = 32


@dataclass(frozen=True)
class Slot:
    """One parameter: shape of the values and the format in which the checkpoint stores them."""

    name: str
    shape: tuple[int, ...]
    format: Format


def slots(config: ModelConfig) -> dict[str, Slot]:
    """Every parameter of the model, by name."""
    result: dict[str, Slot] = {}
    for spec in manifest(config):
        if spec.name.endswith(".scale") or spec.deferred:
            continue
        match = _EXPERT.fullmatch(spec.name)
        if match is None:
            result[spec.name] = Slot(spec.name, spec.shape, _format(spec))
            continue
        name = f"{match[1]}.{match[3]}"
        experts = int(match[2]) + 1  # ascending, so the last one counts
        result[name] = Slot(name, (experts, spec.shape[0], spec.shape[1] * 2), "fp4")
    return result


def _format(spec: TensorSpec) -> Format:
    if spec.dtype == "F8_E4M3":
        return "rows" if spec.name.endswith("engram.embed.weight") else "blocks"
    return "bf16" if spec.dtype == "BF16" else "f32"


# ---- start values ----------------------------------------------------------------------------------------------------


def initial(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Start values in float32: fan-in scaled matrices, smaller ones into the streams, norms 1, mHC near identity."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _start(slot, config, generator) for name, slot in slots(config).items()}


def _start(slot: Slot, config: ModelConfig, generator: torch.Generator) -> Tensor:
    name, shape = slot.name, slot.shape
    leaf = name.rsplit(".", 2)[-2] if name.endswith(".weight") else name.rsplit(".", 1)[-1]
    noise = torch.randn(shape, generator=generator)
    if "norm" in leaf or leaf in ("q_weight", "k_weight"):
        return torch.ones(shape)
    if leaf in ("attn_sink", "bias", "bias_vl"):
        return torch.zeros(shape)
    if leaf in ("hc_attn_scale", "hc_ffn_scale"):
        return torch.full(shape, 0.3)
    if leaf in ("hc_attn_base", "hc_ffn_base"):
        return _mixing_base(config.hc_mult, noise)
    if leaf in ("hc_attn_fn", "hc_ffn_fn"):
        return noise * 0.02
    if leaf == "embed":
        return noise * (0.1 if "engram" in name or "markov" in name else 0.5)
    scale = 1.0 / math.sqrt(shape[-1])
    if leaf in ("wo_b", "w2"):
        scale /= math.sqrt(2 * config.num_hidden_layers)
    elif name == "head.weight" or "markov" in name or "confidence" in name:
        scale *= 0.1
    return noise * scale


def _mixing_base(streams: int, noise: Tensor) -> Tensor:
    """pre about 1 / streams, post about 1, combination near the identity, a little different to part the streams."""
    pre = torch.full((streams,), -math.log(streams - 1.0)) + 0.3 * noise[:streams]
    post = 0.3 * noise[streams : 2 * streams]
    combination = 4.0 * torch.eye(streams).flatten() + 0.1 * noise[2 * streams :]
    return torch.cat([pre, post, combination])


# ---- rounding --------------------------------------------------------------------------------------------------------


def rounded(value: Tensor, fmt: Format) -> Tensor:
    """`value` as the checkpoint stores it, float32."""
    if fmt == "blocks":
        return _round_blocks(value)
    if fmt == "bf16":
        return value.to(torch.bfloat16).float()
    if fmt == "f32":
        return value
    groups = value.unflatten(-1, (-1, _BLOCK))  # one row, 32 columns
    largest = 6.0 if fmt == "fp4" else 448.0
    scale = _scale(groups.abs().amax(-1, keepdim=True), largest)
    return ((round_e2m1 if fmt == "fp4" else round_e4m3)(groups / scale) * scale).flatten(-2)


def _round_blocks(value: Tensor) -> Tensor:
    rows, columns = value.shape
    padded = torch.nn.functional.pad(value, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))  # [R / 32, 32, C / 32, 32]
    scale = _scale(blocks.abs().amax((1, 3), keepdim=True), 448.0)
    return (round_e4m3(blocks / scale) * scale).flatten(2).flatten(0, 1)[:rows, :columns]


def _scale(amax: Tensor, largest: float) -> Tensor:
    """Smallest power of two that brings `amax` within +-largest."""
    return ceil_power_of_two(amax.clamp_min(2.0**-100) / largest)


def straight_through(values: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """FP8 and FP4 parameters rounded in the forward pass, untouched in the backward pass; others as they are."""
    kinds = slots(config)
    return {
        name: value
        if kinds[name].format in ("bf16", "f32")
        else rounded(value, kinds[name].format).detach() + (value - value.detach())
        for name, value in values.items()
    }
