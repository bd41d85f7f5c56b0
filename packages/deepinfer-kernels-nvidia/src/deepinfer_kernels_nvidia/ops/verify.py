# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Which drafts stand: of a segment's rows, those up to the first whose draft does not; one thread a segment.

rows of a segment   0 anchor   1 draft   2 draft
stands              yes        no        -          k = 1: the first row that does not stand, or the last
tokens              emitted 0  emitted 1  -1
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.kernels.reference.columns import to_device
from deepinfer_kernels_nvidia.jit import T, program

__all__ = ["accept_drafts"]

_THREADS = 64


@program
def accept_program():
    """emitted, stands, failed [rows], first row of each segment -> tokens [segments, width], counts, failures."""
    rows, segments, width = T.dynamic("rows"), T.dynamic("segments"), T.dynamic("width")

    @T.prim_func
    def accept(
        emitted: T.Tensor((rows,), "int64"),
        stands: T.Tensor((rows,), "uint8"),
        failed: T.Tensor((rows,), "uint8"),
        bounds: T.Tensor((segments, 2), "int32"),
        tokens: T.Tensor((segments, width), "int64"),
        num_tokens: T.Tensor((segments,), "int64"),
        any_failed: T.Tensor((segments,), "uint8"),
    ):
        with T.Kernel(T.ceildiv(segments, _THREADS), threads=_THREADS) as block:
            segment = block * _THREADS + T.get_thread_binding()
            going = T.alloc_var("int32")
            count = T.alloc_var("int32")
            bad = T.alloc_var("uint8")
            if segment < segments:
                going = 1
                count = 0
                bad = T.uint8(0)
                for column in T.serial(width):
                    tokens[segment, column] = T.int64(-1)
                    row = bounds[segment, 0] + column
                    if going == 1 and row < bounds[segment, 1]:
                        tokens[segment, column] = emitted[row]
                        bad = bad | failed[row]
                        count += 1
                        going = T.if_then_else(stands[row] != T.uint8(0), 1, 0)
                num_tokens[segment] = T.cast(count, "int64")
                any_failed[segment] = bad

    return accept


def accept_drafts(
    emitted: Tensor, stands: Tensor, failed: Tensor, segment_start: NDArray[np.int32]
) -> tuple[Tensor, Tensor, Tensor]:
    """emitted, stands, failed [N], segment_start [M + 1] -> tokens [M, 1 + D], num_tokens, failed [M]; see contract
    `accept_drafts`.
    """
    bounds = np.stack([segment_start[:-1], segment_start[1:]], 1).astype(np.int32)
    segments, width = len(bounds), int(np.diff(segment_start).max(initial=1))
    tokens = torch.empty(segments, width, dtype=torch.int64, device=emitted.device)
    num_tokens = torch.empty(segments, dtype=torch.int64, device=emitted.device)
    any_failed = torch.empty(segments, dtype=torch.bool, device=emitted.device)
    if segments:
        flags = (stands.contiguous().view(torch.uint8), failed.contiguous().view(torch.uint8))
        where = to_device(bounds, emitted.device)
        accept_program()(emitted.contiguous(), *flags, where, tokens, num_tokens, any_failed.view(torch.uint8))
    return tokens, num_tokens, any_failed
