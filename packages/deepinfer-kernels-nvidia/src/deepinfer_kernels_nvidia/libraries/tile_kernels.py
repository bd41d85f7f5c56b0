"""Operations on rows by tile-kernels 2.1 (module tile_kernels), SM100 and SM103.

    rms_norm       quant.norm_forward(x [R, D], w [D], eps) -> out, ..               x and w of one dtype, D <= 8,192
    mhc_collapse   mhc.mhc_pre_apply_mix_fwd(X [R, S, D], pre [R, S], out [R, D])
    mhc_expand     mhc.mhc_post_fwd(y [1, R, D], X [1, R, S, D], post [1, R, S, 1], C [1, R, S, S]) -> [1, R, S, D]
    engram_gate    engram.engram_gate_fwd(X [R, S, D], key_value [R, S + 1, D], qw kw [S, D], eps, least, mask [R])

Each is made of blocks that take one row at a time, so rows are independent. On SM90 they ran beside ours with the same
results and were not faster (benchmarks/gpu/peers.py, docs/kernels.md), so there ours stay; on SM100, where ours never
ran and theirs are at home, they are taken. **Never run by us there.** A shape that they do not take runs our kernel.

Not bound: its rotary embedding (in place, as ours is), its expert choice (takes logits, ours is one with the product),
its casts (other groups and scales than our records).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.ops.engram import engram_gate as own_engram_gate
from deepinfer_kernels_nvidia.ops.mhc_streams import mhc_collapse as own_mhc_collapse
from deepinfer_kernels_nvidia.ops.mhc_streams import mhc_expand as own_mhc_expand
from deepinfer_kernels_nvidia.ops.rms_norm import rms_norm as own_rms_norm

__all__ = ["NEEDS", "engram_gate", "mhc_collapse", "mhc_expand", "rms_norm"]

NEEDS = ("quant.norm_forward", "mhc.mhc_pre_apply_mix_fwd", "mhc.mhc_post_fwd", "engram.engram_gate_fwd")
_NORM_DIM_STEP, _NORM_LARGEST_DIM = 16, 8192
_STREAM_DIM_STEP = 128  # threads of a block of theirs
_GATE_DIM_STEP, _GATE_LEAST_DIM = 256, 512  # their smallest block of dims; a row has two at least
_LEAST_GATE = 1e-6  # below which the root of the gate's score is not taken


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]; see contract `rms_norm`."""
    dim = x.shape[-1]
    takes = x.dtype in (torch.bfloat16, torch.float32) and weight.dtype == x.dtype and x.numel() > 0
    if not takes or dim % _NORM_DIM_STEP or dim > _NORM_LARGEST_DIM:
        return own_rms_norm(x, weight, eps)
    rows = x.contiguous().view(-1, dim)
    return _library("quant").norm_forward(rows, weight.contiguous(), eps)[0].view(x.shape)


def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [R, S, D], pre [R, S] -> [R, D]; see contract `mhc_collapse`."""
    if not _takes_streams(streams):
        return own_mhc_collapse(streams, pre)
    out = streams.new_empty(streams.shape[0], streams.shape[2])
    _library("mhc").mhc_pre_apply_mix_fwd(streams.contiguous(), pre.float().contiguous(), out)
    return out


def mhc_expand(streams: Tensor, y: Tensor, post: Tensor, c: Tensor) -> Tensor:
    """streams [R, S, D], y [R, D], post [R, S], c [R, S, S] -> [R, S, D]; see contract `mhc_expand`."""
    if not _takes_streams(streams) or y.dtype != torch.bfloat16:
        return own_mhc_expand(streams, y, post, c)
    mixes = post.float().contiguous()[None, :, :, None], c.float().contiguous()[None]
    return _library("mhc").mhc_post_fwd(y.contiguous()[None], streams.contiguous()[None], *mixes)[0]


def engram_gate(
    streams: Tensor, key_value: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor, eps: float
) -> Tensor:
    """streams [R, S, D], key_value [R, (S + 1) D], q_weight and k_weight [S, D], dead [R] bool -> [R, S, D]; see
    contract `engram_gate`.
    """
    rows, s, dim = streams.shape
    takes = rows > 0 and streams.dtype == key_value.dtype == torch.bfloat16
    if not takes or dim % _GATE_DIM_STEP or dim < _GATE_LEAST_DIM:
        return own_engram_gate(streams, key_value, q_weight, k_weight, dead, eps)
    weight = (q_weight.float() * k_weight.float()).contiguous()
    both = key_value.contiguous().view(rows, s + 1, dim)
    return _library("engram").engram_gate_fwd(
        streams.contiguous(),
        both,
        weight,
        eps,
        _LEAST_GATE,
        save_for_backward=False,
        image_token_mask=dead.contiguous(),
    )[0]


def _takes_streams(streams: Tensor) -> bool:
    return streams.numel() > 0 and streams.dtype == torch.bfloat16 and streams.shape[2] % _STREAM_DIM_STEP == 0


def _library(part: str) -> Any:
    return getattr(import_module("tile_kernels"), part)
