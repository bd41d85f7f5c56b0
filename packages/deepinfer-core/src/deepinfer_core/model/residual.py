"""The residual of single-pass mHC on its way through the sublayers (docs/model.md: Residual streams).

streams X ─► mix ─► pre, post, C          sublayer(x) = y          X' = expand(X, y, post, C)
x of the next sublayer = its norm of (sum_i pre_i X'_i): with X' in hand it costs no further pass, so `mhc_next`
makes both where the next norm is known, and x travels along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepinfer_core.config.model import ModelConfig
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.model.beside import beside
from deepinfer_core.model.params import LayerParams

__all__ = ["Residual", "run_sublayers"]

type _Sublayer = Callable[[Tensor], Tensor]  # normalized input [P, D] -> output [P, D]


@dataclass(frozen=True, eq=False)
class Residual:
    """Between two sublayers."""

    streams: Tensor  # [P, S, D]
    pre: Tensor  # [P, S] float32: how the next sublayer mixes its input from the streams
    x: Tensor | None = None  # [P, D] that input, normalized, where the sublayer before has made it

    @classmethod
    def of_embeddings(cls, embedded: Tensor, num_streams: int) -> Residual:
        """embedded [P, D] in every stream; the first sublayer reads the first of them."""
        pre = torch.zeros(embedded.shape[0], num_streams, device=embedded.device)
        pre[:, 0] = 1.0
        return cls(embedded[:, None].expand(-1, num_streams, -1).contiguous(), pre)

    def input(self, norm: Tensor, eps: float, kernels: Kernels) -> Tensor:
        """x [P, D], made now where it is not there. norm [D]: weight of the sublayer's norm."""
        if self.x is not None:
            return self.x
        return kernels.rms_norm(kernels.mhc_collapse(self.streams, self.pre), norm, eps)


def run_sublayers(
    residual: Residual,
    layer: LayerParams,
    following: Tensor | None,
    attend: _Sublayer,
    experts: _Sublayer,
    config: ModelConfig,
    kernels: Kernels,
) -> Residual:
    """Both sublayers of a layer or draft stage with their mHC mixes; each sublayer's input uses the mix of the one
    before. following [D]: weight of the norm of the sublayer after these, None = its input is made later.
    """
    eps, streams, pre = config.rms_norm_eps, residual.streams, residual.pre
    x = residual.input(layer.attn_norm, eps, kernels)
    for hyper, sublayer, norm in ((layer.hc_attn, attend, layer.ffn_norm), (layer.hc_ffn, experts, following)):
        make_mix = partial(
            kernels.mhc_mix,
            streams,
            hyper.fn,
            hyper.base,
            hyper.scale,
            iterations=config.hc_sinkhorn_iters,
            norm_eps=eps,
            eps=config.hc_eps,
        )
        mixes = beside(make_mix, streams.device)
        y = sublayer(x)
        pre, post, mix = mixes.join()
        if norm is None:
            return Residual(kernels.mhc_expand(streams, y, post, mix), pre)
        streams, x = kernels.mhc_next(streams, y, post, mix, pre, norm, eps)
    return Residual(streams, pre, x)
