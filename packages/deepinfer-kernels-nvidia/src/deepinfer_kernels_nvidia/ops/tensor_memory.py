# pyright: basic
"""Where a product's sums stand while its tiles stream: in registers (SM90), or in tensor memory (SM100, tcgen05).

    registers       every warp multiplies (wgmma) and holds its part of the sums
    tensor memory   one thread multiplies, an mbarrier tells when; all warps read the sums once, after the last tile

The first warp frees the memory at the end of the block. So reading ends in a barrier of the block: no warp reads later.
"""

from __future__ import annotations

from typing import Any

from deepinfer_kernels_nvidia.jit import T

__all__ = ["accumulate", "is_streamed", "read_sums"]


def accumulate(a: Any, b: Any, total: Any, sums: Any, done: Any, first: Any, *, transposed: bool = False) -> Any:
    """total += a @ b, of shared tiles, where `sums` is None; else sums += a @ b in tensor memory, from zero at the
    `first` tile, and `done` is the mbarrier that tells when. `transposed`: b is [columns, inner].
    """
    if sums is None:
        return T.gemm(a, b, total, transpose_B=transposed, policy=T.GemmWarpPolicy.FullRow)
    return T.gemm(a, b, sums, transpose_B=transposed, mbar=done, clear_accum=first)


def is_streamed(expert: Any, tensor_memory: bool) -> Any:
    """Whether the loop over a tile of this expert, -1 = none, is entered. In tensor memory a loop takes a constant
    number of steps, so an unused tile goes around it; in registers it is entered and takes none.
    """
    return expert >= 0 if tensor_memory else True


@T.macro
def read_sums(sums, total):
    """Sums from tensor memory into registers. The fences order the reads after the products and before the release;
    TileLang adds its own around a barrier, but not within a condition.
    """
    T.tcgen05_after_thread_sync()
    T.copy(sums, total)
    T.tcgen05_before_thread_sync()
    T.sync_threads()
    T.tcgen05_after_thread_sync()
