"""Products, norms, rope and residual streams: contract functions over the C library."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kernels.native.library import Library, failure
from deepinfer_core.kernels.reference.mhc import next_of

__all__ = ["DenseOps"]


class DenseOps:
    """Methods are named as in the contract; all tensors are float32 on the CPU."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._linear = library.function("linear")
        self._rms_norm = library.function("rms_norm")
        self._rope_table = library.function("rope_table")
        self._apply_rope = library.function("apply_rope")
        self._mix = library.function("mhc_mix")
        self._collapse = library.function("mhc_collapse")
        self._expand = library.function("mhc_expand")
        self.mhc_next = next_of(self.mhc_expand, self.mhc_collapse, self.rms_norm)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [R, K] @ weight [K, N] -> [R, N]."""
        x, weight = rows_of(x), weight.contiguous()
        rows, inner = x.shape
        width = weight.shape[1]
        out = x.new_empty(rows, width)
        threads = self._library.threads_for(rows * inner * width)
        status = self._linear(
            x.data_ptr(), x.stride()[0], weight.data_ptr(), out.data_ptr(), rows, 1, inner, width, threads
        )
        if status:
            raise failure(status, "linear")
        return out

    def grouped_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [R, G, K], weight [G, K, N] -> [R, G, N]."""
        x, weight = x.contiguous(), weight.contiguous()
        rows, groups, inner = x.shape
        width = weight.shape[2]
        out = x.new_empty(rows, groups, width)
        threads = self._library.threads_for(rows * groups * inner * width)
        status = self._linear(
            x.data_ptr(), groups * inner, weight.data_ptr(), out.data_ptr(), rows, groups, inner, width, threads
        )
        if status:
            raise failure(status, "grouped_linear")
        return out

    def head_logits(self, x: Tensor, head: Tensor) -> Tensor:
        """x [R, D] @ head [D, V] -> [R, V]."""
        return self.linear(x, head)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D], weight [D] -> [..., D]."""
        dim = weight.shape[0]
        if x.dim() == 2:
            x = rows_of(x)
            out, rows, stride = x.new_empty(x.shape), x.shape[0], x.stride()[0]
        else:
            x = x.contiguous()
            out, rows, stride = torch.empty_like(x), x.numel() // dim, dim
        status = self._rms_norm(x.data_ptr(), stride, weight.data_ptr(), out.data_ptr(), rows, dim, eps)
        if status:
            raise failure(status, "rms_norm")
        return out

    def rope_table(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        """positions [R] int64, frequencies [P] -> [R, 2, 2P]."""
        positions, frequencies = positions.contiguous(), frequencies.contiguous()
        rows, pairs = positions.shape[0], frequencies.shape[0]
        out = frequencies.new_empty(rows, 2, 2 * pairs)
        status = self._rope_table(positions.data_ptr(), frequencies.data_ptr(), out.data_ptr(), rows, pairs)
        if status:
            raise failure(status, "rope_table")
        return out

    def apply_rope(self, x: Tensor, table: Tensor, *, inverse: bool = False, in_place: bool = False) -> Tensor:
        """x [R, D] or [R, H, D], table [R, 2, rotary]; x is left as it is."""
        x, table = x.contiguous(), table.contiguous()
        rows, dim = x.shape[0], x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        out = torch.empty_like(x)
        status = self._apply_rope(
            x.data_ptr(), heads * dim, table.data_ptr(), out.data_ptr(), rows, heads, dim, table.shape[-1],
            -1.0 if inverse else 1.0,
        )  # fmt: skip
        if status:
            raise failure(status, "apply_rope")
        return out

    def mhc_mix(
        self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, norm_eps: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """streams [R, S, D] -> pre [R, S], post [R, S], C [R, S, S]."""
        streams, fn = streams.contiguous(), fn.contiguous()
        rows, s, dim = streams.shape
        pre, post, mix = base.new_empty(rows, s), base.new_empty(rows, s), base.new_empty(rows, s, s)
        threads = self._library.threads_for(rows * s * dim * fn.shape[1])
        status = self._mix(
            streams.data_ptr(), fn.data_ptr(), base.contiguous().data_ptr(), scale.contiguous().data_ptr(),
            pre.data_ptr(), post.data_ptr(), mix.data_ptr(), rows, s, dim, iterations, norm_eps, eps, threads,
        )  # fmt: skip
        if status:
            raise failure(status, "mhc_mix")
        return pre, post, mix

    def mhc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """streams [R, S, D], pre [R, S] -> [R, D]."""
        streams, pre = streams.contiguous(), pre.contiguous()
        rows, s, dim = streams.shape
        out = pre.new_empty(rows, dim)
        status = self._collapse(streams.data_ptr(), pre.data_ptr(), out.data_ptr(), rows, s, dim)
        if status:
            raise failure(status, "mhc_collapse")
        return out

    def mhc_expand(self, streams: Tensor, y: Tensor, post: Tensor, c: Tensor) -> Tensor:
        """streams [R, S, D], y [R, D], post [R, S], c [R, S, S] -> [R, S, D]."""
        streams, y, post, c = streams.contiguous(), y.contiguous(), post.contiguous(), c.contiguous()
        rows, s, dim = streams.shape
        out = torch.empty_like(streams)
        status = self._expand(
            streams.data_ptr(), y.data_ptr(), post.data_ptr(), c.data_ptr(), out.data_ptr(), rows, s, dim
        )
        if status:
            raise failure(status, "mhc_expand")
        return out


def rows_of(x: Tensor) -> Tensor:
    """x [R, D] itself where its rows are contiguous (a column slice of a wider tensor is), else a copy."""
    return x if x.stride()[1] == 1 else x.contiguous()
