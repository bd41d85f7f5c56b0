"""torch_npu's operations as its 2.14.0 wheel publishes them: signature checked by torch's dispatcher, calls recorded.

Each signature is registered in torch as it stands in the wheel's operator library, so an argument that is missing,
misnamed or of a wrong type is refused as the real operation refuses it. What the documentation in the wheel says about
shapes, dtypes and values is asserted in each body, and the body computes the documented formula in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SIGNATURES = {
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_mhc_pre": (
        "(Tensor x, Tensor phi, Tensor alpha, Tensor bias, *, Tensor? gamma=None, float norm_eps=1e-6, float"
        " hc_eps=1e-6, int out_flag=0, int inner_precise=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_mhc_post": "(Tensor x, Tensor? h_res, Tensor h_out, Tensor h_post) -> Tensor",
    "npu_moe_init_routing_v2": (
        "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, int"
        " expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, bool"
        " expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, int?"
        " x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_grouped_matmul": (
        "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]?"
        " antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor?"
        " group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, Tensor[]?"
        " activation_quant_offset=None, int? split_item=0, int? group_type=None, int? group_list_type=0, int?"
        " act_type=0, int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None,"
        " int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]"
    ),
}
_HALVES = (torch.bfloat16, torch.float16)


@dataclass
class FakeTorchNpu:
    """Stands for the module torch_npu: one attribute an operation, and `calls`, the names in order."""

    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in SIGNATURES:
            raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")
        self.calls.append(name)
        return getattr(torch.ops.fake_torch_npu, name)


def define() -> torch.library.Library:
    """Register the operations; they live as long as what is returned."""
    library = torch.library.Library("fake_torch_npu", "DEF")
    for name, signature in SIGNATURES.items():
        library.define(name + signature)
        library.impl(name, globals()[f"_{name}"], "CPU")
    return library


def _npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:  # noqa: A002 - published
    assert input.dtype == gamma.dtype
    assert 2 <= input.dim() <= 8
    wide = input.float()
    inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * gamma.float()).to(input.dtype), inverse


def _npu_mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    *,
    gamma: Tensor | None = None,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    out_flag: int = 0,
    inner_precise: int = 0,
) -> tuple[Tensor, ...]:
    rows, n, dim = x.shape
    assert x.dtype in _HALVES
    assert phi.shape == (n * n + 2 * n, n * dim)
    assert alpha.shape == (3,)
    assert bias.shape == (n * n + 2 * n,)
    assert all(tensor.dtype == torch.float32 for tensor in (phi, alpha, bias))
    assert gamma is None
    assert out_flag == 1, "h_pre is an output only with out_flag=1"
    assert inner_precise == 0, "1 is HF32"
    flat = x.flatten(1).float()
    inverse = torch.rsqrt((flat * flat).mean(-1) + norm_eps)
    mix = flat @ phi.t()
    scaled = mix * inverse[:, None]
    pre = torch.sigmoid(scaled[:, :n] * alpha[0] + bias[:n]) + hc_eps
    post = 2.0 * torch.sigmoid(scaled[:, n : 2 * n] * alpha[1] + bias[n : 2 * n])
    res = (scaled[:, 2 * n :] * alpha[2] + bias[2 * n :]).view(rows, n, n)
    h_in = torch.einsum("rn,rnd->rd", pre, x.float()).to(x.dtype)
    return h_in, post, res, inverse, mix, pre


def _npu_mhc_post(x: Tensor, h_res: Tensor | None, h_out: Tensor, h_post: Tensor) -> Tensor:
    assert h_res is not None
    rows, n, dim = x.shape
    assert x.dtype == h_out.dtype
    assert x.dtype in _HALVES
    assert h_res.shape == (rows, n, n)
    assert h_res.dtype == h_post.dtype == torch.float32
    assert h_out.shape == (rows, dim)
    assert h_post.shape == (rows, n)
    return (h_res.transpose(1, 2) @ x.float() + h_post[:, :, None] * h_out.float()[:, None]).to(x.dtype)


def _npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, ...]:
    rows, k = expert_idx.shape
    assert x.dim() == 2
    assert x.shape[0] == rows
    assert expert_idx.dtype == torch.int32
    assert 0 <= int(expert_idx.min()) <= int(expert_idx.max()) < expert_num <= 10240
    assert active_num in (-1, 0, rows * k)
    assert (drop_pad_mode, expert_tokens_num_type, expert_tokens_num_flag, quant_mode) == (0, 1, True, -1)
    assert (scale, offset, x_dtype) == (None, None, None)
    assert list(active_expert_range or ()) == [0, expert_num]
    assert row_idx_type == 0, "0: the place of each pair"
    order = torch.argsort(expert_idx.flatten(), stable=True)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(rows * k))
    counts = torch.bincount(expert_idx.flatten(), minlength=expert_num)
    return x[order // k], place.to(torch.int32), counts, torch.empty(rows * k)


def _npu_grouped_matmul(x: list[Tensor], weight: list[Tensor], **options: Any) -> list[Tensor]:
    counts = options.pop("group_list")
    assert options.pop("split_item") == 3, "3: one output tensor"
    assert options.pop("group_type") == 0, "0: rows are grouped"
    assert options.pop("group_list_type") == 1, "1: numbers of rows"
    assert all(value in (None, 0) for value in options.values())
    (rows,), (weights,) = x, weight
    assert counts.dtype == torch.int64
    assert counts.shape == (len(weights),)
    assert len(weights) > 1, "its length cannot be 1"
    assert rows.dtype == weights.dtype
    assert rows.shape[1] == weights.shape[1]
    assert int(counts.sum()) == len(rows)
    parts = rows.float().split(counts.tolist())
    return [torch.cat([part @ matrix.float() for part, matrix in zip(parts, weights, strict=True)]).to(rows.dtype)]
