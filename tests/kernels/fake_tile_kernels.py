"""tile-kernels 2.1.0's operations on rows: signatures and checks of its wheel's CUDA path, calls recorded.

Read in quant/norm_forward_kernel.py, mhc/post_kernel.py, mhc/pre_apply_mix_cuda.py, engram/engram_gate_fwd_kernel.py
and engram_gate_fwd_cuda.py. Each body computes what the docstrings and torch references of the wheel define.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor


@dataclass
class FakeTileKernels:
    """Stands for the module tile_kernels: `calls` holds names in order."""

    calls: list[str] = field(default_factory=list)

    @property
    def modules(self) -> dict[str, SimpleNamespace]:
        """The attributes of the package that are used."""
        return {
            "quant": SimpleNamespace(norm_forward=self.norm_forward),
            "mhc": SimpleNamespace(mhc_pre_apply_mix_fwd=self.mhc_pre_apply_mix_fwd, mhc_post_fwd=self.mhc_post_fwd),
            "engram": SimpleNamespace(engram_gate_fwd=self.engram_gate_fwd),
        }

    def norm_forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
        out_scale: float = 1.0,
        out: Tensor | None = None,
        residual_out: Tensor | None = None,
        with_rstd: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        assert x.dtype in (torch.bfloat16, torch.float32)
        assert x.dim() in (2, 3)
        hidden = x.shape[-1]
        assert weight is not None
        assert (weight.shape, weight.dtype, weight.is_contiguous()) == ((hidden,), x.dtype, True)
        assert hidden % 16 == 0
        assert hidden <= 8192
        assert all(stride % 16 == 0 for stride in x.stride()[:-1])
        assert x.stride(-1) == 1
        assert (residual, out_scale, out, residual_out, with_rstd) == (None, 1.0, None, None, False)
        self.calls.append("norm_forward")
        wide = x.float()
        inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        return (wide * inverse * weight.float()).to(x.dtype), None, x

    def mhc_pre_apply_mix_fwd(self, x: Tensor, mix: Tensor, o: Tensor) -> None:
        tokens, streams, hidden = x.shape
        assert (x.dtype, mix.dtype, o.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
        assert (mix.shape, o.shape) == ((tokens, streams), (tokens, hidden))
        assert x.is_contiguous()
        assert mix.is_contiguous()
        assert o.is_contiguous()
        self.calls.append("mhc_pre_apply_mix_fwd")
        o.copy_((x.float() * mix[:, :, None]).sum(1))

    def mhc_post_fwd(
        self, x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
    ) -> Tensor:
        sequences, tokens, streams, hidden = residual.shape
        assert (x.dtype, residual.dtype) == (torch.bfloat16, torch.bfloat16)
        assert (post_layer_mix.dtype, comb_res_mix.dtype) == (torch.float32, torch.float32)
        assert x.shape == (sequences, tokens, hidden)
        assert post_layer_mix.shape == (sequences, tokens, streams, 1)
        assert comb_res_mix.shape == (sequences, tokens, streams, streams)
        assert x.is_contiguous()
        assert post_layer_mix.is_contiguous()
        assert comb_res_mix.is_contiguous()
        assert hidden % 128 == 0
        assert out is None
        self.calls.append("mhc_post_fwd")
        kept = torch.einsum("abmn,abmc->abnc", comb_res_mix, residual.float())
        return (x.float()[:, :, None] * post_layer_mix + kept).bfloat16()

    def engram_gate_fwd(
        self,
        hidden_states: Tensor,
        kv: Tensor,
        weight_fused: Tensor,
        eps: float,
        clamp_value: float,
        save_for_backward: bool = True,
        image_token_mask: Tensor | None = None,
        inplace: bool = False,
    ) -> tuple[Tensor, None, None, None, None]:
        tokens, streams, hidden = hidden_states.shape
        assert (hidden_states.dtype, kv.dtype, weight_fused.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        assert (kv.shape, weight_fused.shape) == ((tokens, streams + 1, hidden), (streams, hidden))
        assert any(hidden % block == 0 and hidden >= 2 * block for block in (1024, 768, 512, 256))
        assert image_token_mask is not None
        assert (image_token_mask.shape, image_token_mask.dtype) == ((tokens,), torch.bool)
        assert (save_for_backward, inplace) == (False, False)
        assert all(t.is_contiguous() for t in (hidden_states, kv, weight_fused, image_token_mask))
        self.calls.append("engram_gate_fwd")
        x, key, value = hidden_states.float(), kv[:, :streams].float(), kv[:, streams:].float()
        inverse = torch.rsqrt((x * x).mean(-1) + eps) * torch.rsqrt((key * key).mean(-1) + eps)
        score = (x * weight_fused * key).sum(-1) * inverse * hidden**-0.5
        gate = torch.sigmoid(score.abs().clamp_min(clamp_value).sqrt() * score.sign())
        gate = gate.masked_fill(image_token_mask[:, None], 0.0)
        return (x + gate[..., None] * value).bfloat16(), None, None, None, None
