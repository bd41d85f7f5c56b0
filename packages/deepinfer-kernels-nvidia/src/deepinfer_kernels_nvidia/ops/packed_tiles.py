"""Packed weights in the order in which a tensor core's threads read them: decoding moves no value between threads.

    tile     64 columns of the product by 64 of K: codes, 2 KiB of e2m1 or 4 KiB of e4m3, then 128 bytes of scales
    thread   warp w, octet, lane (128 = 4 * 8 * 4): of the columns 16 w + 8 side + octet, of each 16 of K those at
             8 half + 2 lane and the one after it: the A operand of wgmma m64k16, registers 2 half + side
    word     e2m1: the thread's eight codes of 16 of K; e4m3: its four of one half
    scale    byte 2 i + side: the exponent of the i-th 32 of K of column 16 w + 8 side + octet

In a word the two codes of a register lie 16 bits apart, and each bit where few shifts bring it to its place in bf16:

    e2m1   s | ee | m         bits 15 | 8 7 | 6              worth 2^-126 of its value
    e4m3   s | eeee | mmm     bits 15 | 10 9 8 7 | 6 5 4     worth 2^-120

The exponent field keeps its meaning, subnormal codes included, so one exact product with a power of two gives the
value. That power is at most 2^127: scales above 2^1 (e2m1) or 2^7 (e4m3) don't fit, and such a weight is decoded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_core.kernels.reference.coded import Weight
from deepinfer_core.kernels.reference.packed import GROUP, ArrangedWeight, PackedWeight
from deepinfer_kernels_nvidia.jit import T
from deepinfer_kernels_nvidia.ops.fp8 import pair_of_power, times

__all__ = [
    "BLOCK_COLUMNS",
    "SCALE_WORDS",
    "TILE",
    "arranged",
    "code_words",
    "power_of_scales",
    "registers_of_word",
    "scaled",
    "tile_counts",
    "tile_words",
]

TILE = 64  # columns, and values of K
BLOCK_COLUMNS = 256  # columns are padded to whole blocks of threads
SCALE_WORDS = 32  # of a tile
_WARPS, _SIDES, _OCTETS, _LANES = 4, 2, 8, 4
_STEP = 16  # values of K of one instruction
_BIAS = {4: 126, 8: 120}  # what a moved code is worth too little, in powers of two
_LARGEST_EXPONENT = 254  # of a finite bf16
# Where the bits of a code stand in its half of the word, the sign first, by registers of the word.
_PLACES = {
    4: ((15, 8, 7, 6), (12, 5, 4, 3), (14, 2, 1, 0), (13, 11, 10, 9)),
    8: ((15, 10, 9, 8, 7, 6, 5, 4), (11, 14, 13, 12, 3, 2, 1, 0)),
}


def code_words(bits: int) -> int:
    """32-bit words of the codes of a tile."""
    return TILE * TILE * bits // 32


def tile_words(bits: int) -> int:
    """32-bit words of a tile."""
    return code_words(bits) + SCALE_WORDS


def registers_of_word(bits: int, word: Any) -> list[Any]:
    """The registers that come from one word of a thread, two bf16 in each, not yet scaled."""
    if bits == 4:
        whole, split = 0x81C081C0, (0x01C001C0, 0x80008000)
        return [
            word & T.uint32(whole),
            (word << T.uint32(3)) & T.uint32(whole),
            ((word << T.uint32(6)) & T.uint32(split[0])) | ((word << T.uint32(1)) & T.uint32(split[1])),
            ((word >> T.uint32(3)) & T.uint32(split[0])) | ((word << T.uint32(2)) & T.uint32(split[1])),
        ]
    return [
        word & T.uint32(0x87F087F0),
        ((word << T.uint32(4)) & T.uint32(0x80F080F0)) | ((word >> T.uint32(4)) & T.uint32(0x07000700)),
    ]


def power_of_scales(word: Any, place: Any) -> Any:
    """Two bf16 of the power in byte `place` of a word of scales."""
    return pair_of_power((word >> T.uint32(8 * place)) & T.uint32(0xFF))


def scaled(register: Any, power: Any) -> Any:
    """Two values of a weight in bf16."""
    return times(register, power)


def arranged(weight: PackedWeight, halves: bool) -> Weight:
    """weight [.., K, N] in tiles [.., N' / 64, K' / 64, words] int32, N' and K' padded with zeros; `halves`: columns of
    the two halves of N stand octet by octet in turn. Decoded where a scale is too large, or a row of the result no
    whole 16-byte units.
    """
    bits = weight.form.value_bits
    if weight.shape[-1] % (16 if halves else 8) or bool((weight.scales > _LARGEST_EXPONENT - _BIAS[bits]).any()):
        return weight.decoded(weight.dtype)
    *outer, columns, _ = weight.records.shape
    codes, scales = (part.reshape(-1, *part.shape[-2:]) for part in (weight.codes, weight.scales))
    shape = (len(codes), *tile_counts(weight.inner, columns), tile_words(bits))
    tiles = torch.empty(shape, dtype=torch.int32, device=weight.records.device)
    for i in range(len(codes)):  # one after the other: on the way a matrix takes 16 times its bytes
        tiles[i] = _tiles(codes[i], scales[i], bits, halves)
    return ArrangedWeight(tiles.view(*outer, *tiles.shape[1:]), weight.form, weight.shape, weight.dtype)


def tile_counts(inner: int, columns: int) -> tuple[int, int]:
    """Tiles of the columns and of K."""
    return -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS // TILE, -(-inner // TILE)


def _tiles(codes: Tensor, scales: Tensor, bits: int, halves: bool) -> Tensor:
    """One matrix: codes [N, K * bits / 8], scales [N, K / 32] -> [tiles, steps, words] int32."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    tiles, steps = tile_counts(codes.shape[1], codes.shape[0])
    codes = _padded(codes, tiles * TILE, steps * TILE, halves)
    scales = _padded(scales, tiles * TILE, steps * TILE // GROUP, halves)
    # column: tile, warp, side, octet; K: step, 16 of it, half, lane, which of two
    shape = (tiles, _WARPS, _SIDES, _OCTETS, steps, TILE // _STEP, 2, _LANES, 2)
    ordered = codes.view(shape).permute(0, 4, 5, 1, 3, 7, 6, 2, 8)  # tile, step, 16 of it, thread, register, which
    registers = 32 // (2 * bits)  # of a word
    ordered = ordered.reshape(tiles, steps, TILE // _STEP, 128, -1, registers, 2).int()
    places = _places(bits, codes.device)
    moved = sum((places[i][ordered[..., i, :]] for i in range(registers)), torch.zeros_like(ordered[..., 0, :]))
    words = moved[..., 0] | (moved[..., 1] << 16)  # [tiles, steps, 16 of it, thread, words]
    words = words.view(tiles, steps, -1, 4 // words.shape[-1], 128, words.shape[-1])  # four words of a thread together
    words = words.transpose(3, 4).reshape(tiles, steps, -1)
    power = (scales.int() + _BIAS[bits]).view(tiles, _WARPS, _SIDES, _OCTETS, steps, TILE // GROUP)
    power = power.permute(0, 4, 1, 3, 5, 2).reshape(tiles, steps, SCALE_WORDS, 4)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=codes.device)
    return torch.cat([words, (power << shifts).sum(-1, dtype=torch.int32)], -1)


def _padded(part: Tensor, columns: int, width: int, halves: bool) -> Tensor:
    """part [N, W] -> [columns, width], with zeros; halves of N in turn by octets."""
    if halves:
        half = part.reshape(2, -1, part.shape[1])
        half = F.pad(half, (0, 0, 0, (columns - part.shape[0]) // 2))  # [2, columns / 2, W]
        part = half.reshape(2, -1, _OCTETS, part.shape[1]).transpose(0, 1).reshape(columns, -1)
    return F.pad(part, (0, width - part.shape[1], 0, columns - part.shape[0]))


@cache
def _places(bits: int, device: torch.device) -> Tensor:
    """[registers of a word, codes] int32: a code with its bits in their places."""
    codes = torch.arange(1 << bits, dtype=torch.int32)
    moved = [
        sum((((codes >> (bits - 1 - i)) & 1) << place for i, place in enumerate(places)), torch.zeros_like(codes))
        for places in _PLACES[bits]
    ]
    return torch.stack(moved).to(device)
