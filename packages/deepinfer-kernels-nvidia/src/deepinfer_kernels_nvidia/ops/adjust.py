# ruff: noqa: I002, SIM102 - annotations of a TileLang program are its signature; `and` reads both of its sides
# pyright: basic, reportInvalidTypeForm=false
"""Grammar masks, biased ids and penalties in one pass over the logits (the order is that of the contract):

    x -> -inf where the mask's bit is 0 -> x + entry -> repetition -> presence -> frequency

    row   | block 0: 2048 ids | block 1 | ..    a thread holds eight ids, 256 apart; all is read and written once

What the host knows of a row comes as one line of integers and one of factors. The entries of a row are added in shared
memory, since they are few and name any id. Counts of a row are the request's and one for each draft before it, which is
compared with every id; the product of frequency and count is rounded before it is subtracted, as in the reference.
"""

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.kernels.reference.adjust import LogitChanges
from deepinfer_core.kernels.reference.columns import to_device
from deepinfer_kernels_nvidia.jit import T, program

__all__ = ["adjust_logits"]

_THREADS, _HELD = 256, 8
_IDS = _THREADS * _HELD  # of one block
_MASK, _FIRST, _LAST, _POOL, _DRAFTS = range(5)  # of a row: its mask, its entries, its token counts, drafts it sees; -1
_REPETITION, _PRESENCE, _FREQUENCY = range(3)


@program(tl__disable_thread_storage_sync=True, tl__disable_buffer_init_check=True)  # barriers are placed by hand
def adjust_rows_program():
    """logits [rows, num_ids] with any row stride -> out [rows, num_ids]."""
    rows, num_ids, stride = T.dynamic("rows"), T.dynamic("num_ids"), T.dynamic("stride", "int64")
    masks, words, entries, pool = (T.dynamic(name) for name in ("masks", "words", "entries", "pool"))

    @T.prim_func
    def adjust_rows(
        logits: T.StridedTensor((rows, num_ids), (stride, 1), "float32"),
        line: T.Tensor((rows, 5), "int32"),
        factor: T.Tensor((rows, 3), "float32"),
        mask: T.Tensor((masks, words), "int32"),
        entry_id: T.Tensor((entries,), "int32"),
        entry_value: T.Tensor((entries,), "float32"),
        token: T.Tensor((rows,), "int64"),
        prompt_seen: T.Tensor((pool, num_ids), "uint8"),
        output_count: T.Tensor((pool, num_ids), "int32"),
        out: T.Tensor((rows, num_ids), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_ids, _IDS), rows, threads=_THREADS) as (block, row):
            thread = T.get_thread_binding()
            value = T.alloc_local((_HELD,), "float32")
            tile = T.alloc_shared((_IDS,), "float32")
            count = T.alloc_var("int32")
            scaled = T.alloc_var("float32")
            for i in T.unroll(_HELD):
                if block * _IDS + i * _THREADS + thread < num_ids:
                    value[i] = logits[row, block * _IDS + i * _THREADS + thread]
            if line[row, _LAST] > line[row, _FIRST]:
                for i in T.unroll(_HELD):
                    tile[i * _THREADS + thread] = value[i]
                T.sync_threads()
                for e in T.serial(T.ceildiv(line[row, _LAST] - line[row, _FIRST], _THREADS)):
                    entry = line[row, _FIRST] + e * _THREADS + thread
                    if entry < line[row, _LAST]:
                        if entry_id[entry] // _IDS == block:
                            T.atomic_add(tile[entry_id[entry] % _IDS], entry_value[entry])
                T.sync_threads()
                for i in T.unroll(_HELD):
                    value[i] = tile[i * _THREADS + thread]
            for i in T.unroll(_HELD):
                v = block * _IDS + i * _THREADS + thread
                if v < num_ids:
                    if line[row, _MASK] >= 0:
                        if ((mask[T.max(line[row, _MASK], 0), v // 32] >> (v % 32)) & 1) == 0:
                            value[i] = -T.infinity("float32")
                    if line[row, _POOL] >= 0:
                        count = output_count[T.max(line[row, _POOL], 0), v]
                        for d in T.serial(line[row, _DRAFTS]):
                            count += T.if_then_else(token[row - d] == T.cast(v, "int64"), 1, 0)
                        scaled = T.if_then_else(
                            value[i] > 0.0, value[i] / factor[row, _REPETITION], value[i] * factor[row, _REPETITION]
                        )
                        if count > 0 or prompt_seen[T.max(line[row, _POOL], 0), v] != 0:
                            value[i] = scaled
                        if count > 0:
                            value[i] = value[i] - factor[row, _PRESENCE]
                        value[i] = value[i] - T.ieee_mul(factor[row, _FREQUENCY], T.cast(count, "float32"))
                    out[row, v] = value[i]

    return adjust_rows


def adjust_logits(logits: Tensor, changes: LogitChanges) -> Tensor:
    """logits [R, V] float32 -> [R, V]; see contract `adjust_logits`."""
    (rows, num_ids), device = logits.shape, logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    line, factor = np.full((rows, 5), -1, np.int32), np.zeros((rows, 3), np.float32)
    line[:, [_FIRST, _LAST]] = 0
    words = np.zeros((1, 1), np.int32)
    if (masks := changes.masks) is not None:
        line[masks.rows, _MASK] = np.arange(len(masks.rows))
        words = masks.words
    entry_id, entry_value = np.zeros(1, np.int64), torch.zeros(1, device=device)
    if (entries := changes.entries) is not None:
        line[:, _FIRST] = np.searchsorted(entries.rows, np.arange(rows))
        line[:, _LAST] = np.searchsorted(entries.rows, np.arange(rows), side="right")
        entry_id, entry_value = entries.ids, entries.values
    token = torch.zeros(rows, dtype=torch.int64, device=device)
    seen = torch.zeros(1, num_ids, dtype=torch.uint8, device=device)
    count = torch.zeros(1, num_ids, dtype=torch.int32, device=device)
    if (penalties := changes.penalties) is not None:
        line[penalties.rows, _POOL], line[penalties.rows, _DRAFTS] = penalties.pool_row, penalties.num_drafts
        factor[penalties.rows] = np.stack([penalties.repetition, penalties.presence, penalties.frequency], 1)
        token, seen, count = penalties.token, penalties.prompt_seen.view(torch.uint8), penalties.output_count
    out = torch.empty(rows, num_ids, dtype=torch.float32, device=device)
    if out.numel():
        host_columns = (to_device(column, device) for column in (line, factor, words, entry_id.astype(np.int32)))
        adjust_rows_program()(logits, *host_columns, entry_value, token.contiguous(), seen, count, out)
    return out
