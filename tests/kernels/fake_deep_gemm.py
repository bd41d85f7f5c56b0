"""deepinfer-gemm 2.8.2's grouped products: signatures of csrc/apis/gemm.hpp, checks of its host code, calls recorded.

What the sources assert on SM100 about shapes, dtypes, strides and layouts is asserted in each body (gemm.hpp,
layout.hpp in apis and utils, docs/scaling-factor-format.md), and the body computes the product in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

type Scaled = tuple[Tensor, Tensor]

COPY_UNIT_BYTES = 16  # strides of what the bulk copy engine moves


@dataclass
class FakeDeepGemm:
    """Stands for the module deep_gemm: `calls` holds name, shapes and groups in order."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    alignment: int = 128  # kLegacyMKAlignmentForContiguousLayout
    deterministic: bool = False

    def set_mk_alignment_for_contiguous_layout(self, new_value: int) -> None:
        self.alignment = new_value

    def use_deterministic_algorithms(self, enabled: bool) -> None:
        self.deterministic = enabled

    def m_grouped_bf16_gemm_nn_contiguous(
        self,
        a: Tensor,
        b: Tensor,
        d: Tensor,
        grouped_layout: Tensor,
        compiled_dims: str = "nk",
        use_psum_layout: bool = False,
        ensure_zero_padding: bool = True,
        epilogue: None = None,
    ) -> None:
        assert (a.dtype, b.dtype) == (torch.bfloat16, torch.bfloat16)
        assert (compiled_dims, use_psum_layout, ensure_zero_padding, epilogue) == ("nk", False, True, None)
        self._grouped("bf16", a, b.transpose(1, 2), d, grouped_layout)
        d.copy_(product(a.float(), b.float(), grouped_layout))

    def m_grouped_fp8_fp4_gemm_nt_contiguous(
        self,
        a: Scaled,
        b: Scaled,
        d: Tensor,
        grouped_layout: Tensor,
        recipe: tuple[int, int, int] | None = None,
        recipe_a: tuple[int, int] | None = None,
        recipe_b: tuple[int, int] | None = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
        use_psum_layout: bool = False,
        ensure_zero_padding: bool = True,
        expected_m_for_psum_layout: int | None = None,
        epilogue: None = None,
    ) -> None:
        assert (recipe is None) != (recipe_a is None)
        assert (recipe_a is None) == (recipe_b is None)
        assert (compiled_dims, disable_ue8m0_cast, use_psum_layout, ensure_zero_padding) == ("nk", False, False, True)
        assert (expected_m_for_psum_layout, epilogue) == (None, None)
        assert (a[0].dtype, b[0].dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
        self._grouped("e4m3", a[0], b[0], d, grouped_layout)
        values = [scaled(operand, pair) for operand, pair in zip((a, b), (recipe_a, recipe_b), strict=True)]
        d.copy_(product(values[0], values[1].transpose(1, 2), grouped_layout))

    def _grouped(self, kind: str, a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> None:
        """a [M, K], b [G, N, K] K- or N-major, d [M, N], layout [M]."""
        (m, k), (groups, n, inner) = a.shape, b.shape
        assert (d.shape, d.dtype, inner) == ((m, n), torch.bfloat16, k)
        assert min(groups, n, k) > 0
        assert a.stride(1) == d.stride(1) == 1
        assert b.stride(0) == n * k
        assert 1 in (b.stride(1), b.stride(2))
        for tensor in (a, b, d):
            row_bytes = max(tensor.stride()[-2:]) * tensor.element_size()
            assert row_bytes % COPY_UNIT_BYTES == tensor.data_ptr() % COPY_UNIT_BYTES == 0
        assert (layout.shape, layout.dtype, layout.is_contiguous()) == ((m,), torch.int32, True)
        assert -1 <= int(layout.min()) <= int(layout.max()) < groups
        assert m % self.alignment == 0
        tiles = layout.view(-1, self.alignment)
        assert torch.equal(tiles, tiles[:, :1].expand_as(tiles)), "a tile has rows of two groups"
        assert self.deterministic
        self.calls.append((kind, m, k, n, groups))


def scaled(operand: Scaled, recipe: tuple[int, int] | None) -> Tensor:
    """codes [(G,) M, K] and packed scales -> values; the checks of check_sf_layout for packed scales."""
    codes, scale = operand
    assert recipe in ((1, 32), (1, 128))
    per_scale = recipe[1]
    rows, k = codes.shape[-2:]
    words = -(-k // (per_scale * 4))
    assert (scale.dtype, scale.shape) == (torch.int32, (*codes.shape[:-1], words))
    assert scale.stride(-2) == 1 or rows == 1
    assert scale.stride(-1) % 4 == 0
    assert scale.stride(-1) >= rows
    if scale.dim() == 3:
        assert scale.stride(0) == scale.stride(-1) * words
    exponents = torch.stack([(scale >> shift) & 255 for shift in (0, 8, 16, 24)], -1).flatten(-2)
    assert 0 < int(exponents.min()) <= int(exponents.max()) < 255
    factor = torch.exp2(exponents.float() - 127).repeat_interleave(per_scale, -1)[..., :k]
    return codes.float() * factor


def product(a: Tensor, b: Tensor, layout: Tensor) -> Tensor:
    """a [M, K] by b [G, K, N] of each row's group; zero where the group is -1."""
    out = torch.zeros(len(a), b.shape[-1])
    for group in range(len(b)):
        rows = layout == group
        out[rows] = a[rows] @ b[group]
    return out
