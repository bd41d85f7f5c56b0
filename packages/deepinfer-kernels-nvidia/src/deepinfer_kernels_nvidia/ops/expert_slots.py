# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Pairs (row, choice) sorted by expert into tiles of 128 slots, one expert a tile: a counting sort in three passes.

    pairs  | part 0: 256 | part 1: 256 | ..
    rank   of each pair: how many before it in its part have its expert;    count [parts, experts]
    before of each part: how many pairs of an expert stand in the parts before it; first tile of an expert = sum of
           ceil(count / 128) of the experts before it
    place  slot = 128 first_tile[expert] + before[part, expert] + rank; slots without a pair stay -1

Within a part every pair is compared with every other, from shared memory; the order within an expert is that of the
pairs. No pass waits for the host: the number of tiles is bounded by shapes alone.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, program

__all__ = ["plan_slots"]

_PART = 256  # pairs of a part: a thread each
_COUNTERS, _LOADS = 512, 8


@program
def rank_pairs_program(experts: int):
    """ids [pairs] -> rank [pairs], count [parts, experts]."""
    pairs, parts = T.dynamic("pairs"), T.dynamic("parts")
    turns = -(-experts // _PART)

    @T.prim_func
    def rank_pairs(
        ids: T.Tensor((pairs,), "int32"),
        rank: T.Tensor((pairs,), "int32"),
        count: T.Tensor((parts, experts), "int32"),
    ):
        with T.Kernel(T.ceildiv(pairs, _PART), threads=_PART) as part:
            thread = T.get_thread_binding()
            held = T.alloc_shared((_PART,), "int32")
            counted = T.alloc_shared((turns * _PART,), "int32")
            before = T.alloc_var("int32")
            pair = part * _PART + thread
            held[thread] = T.if_then_else(pair < pairs, ids[T.min(pair, pairs - 1)], -1)
            for i in T.unroll(turns):
                counted[i * _PART + thread] = 0
            T.sync_threads()
            before = 0
            for i in T.serial(_PART):
                before += T.if_then_else((held[i] == held[thread]) & (i < thread), 1, 0)
            if pair < pairs:
                rank[pair] = before
                # The last pair of an expert has the largest rank, whatever the order in which they come.
                T.atomic_max(counted[held[thread]], before + 1)
            T.sync_threads()
            for i in T.unroll(turns):
                if i * _PART + thread < experts:
                    count[part, i * _PART + thread] = counted[i * _PART + thread]

    return rank_pairs


@program
def first_tiles_program(experts: int, tile: int):
    """count [parts, experts] -> before [parts, experts] in its place; first_tile [experts + 1], the last entry the
    number of tiles in use.
    """
    parts = T.dynamic("parts")
    turns = experts // _COUNTERS + 1  # experts + 1 numbers

    @T.prim_func
    def first_tiles(count: T.Tensor((parts, experts), "int32"), first_tile: T.Tensor((experts + 1,), "int32")):
        with T.Kernel(1, threads=_COUNTERS) as _:
            thread = T.get_thread_binding()
            tiles = T.alloc_shared((turns * _COUNTERS,), "int32")
            total = T.alloc_var("int32")
            own = T.alloc_local((_LOADS,), "int32")
            for i in T.unroll(turns):
                total = 0
                if i * _COUNTERS + thread < experts:
                    for first in T.serial(T.ceildiv(parts, _LOADS)):
                        for j in T.unroll(_LOADS):  # all under way before the first store
                            own[j] = count[T.min(first * _LOADS + j, parts - 1), i * _COUNTERS + thread]
                        for j in T.unroll(_LOADS):
                            if first * _LOADS + j < parts:
                                count[first * _LOADS + j, i * _COUNTERS + thread] = total
                                total += own[j]
                tiles[i * _COUNTERS + thread] = (total + tile - 1) // tile
            T.sync_threads()
            for i in T.unroll(turns):
                if i * _COUNTERS + thread <= experts:
                    total = 0
                    for e in T.serial(i * _COUNTERS + thread):
                        total += tiles[e]
                    first_tile[i * _COUNTERS + thread] = total

    return first_tiles


@program
def place_pairs_program(experts: int, tile: int):
    """ids, rank [pairs], before [parts, experts], first_tile [experts + 1] -> slot_pair [tiles * tile], -1 where empty;
    tile_expert [tiles].
    """
    pairs, parts, tiles, slots = T.dynamic("pairs"), T.dynamic("parts"), T.dynamic("tiles"), T.dynamic("slots")

    @T.prim_func
    def place_pairs(
        ids: T.Tensor((pairs,), "int32"),
        rank: T.Tensor((pairs,), "int32"),
        before: T.Tensor((parts, experts), "int32"),
        first_tile: T.Tensor((experts + 1,), "int32"),
        slot_pair: T.Tensor((slots,), "int32"),
        tile_expert: T.Tensor((tiles,), "int32"),
    ):
        with T.Kernel(T.ceildiv(pairs, _PART) + T.ceildiv(tiles, _PART), threads=_PART) as block:
            thread = T.get_thread_binding()
            owner = T.alloc_var("int32")
            pair = block * _PART + thread
            number = (block - T.ceildiv(pairs, _PART)) * _PART + thread
            if block < T.ceildiv(pairs, _PART):
                if pair < pairs:
                    slot_pair[first_tile[ids[pair]] * tile + before[block, ids[pair]] + rank[pair]] = pair
            else:
                if number < tiles:
                    owner = 0
                    for e in T.serial(experts):
                        owner += T.if_then_else(first_tile[e + 1] <= number, 1, 0)
                    tile_expert[number] = T.if_then_else(owner < experts, owner, -1)

    return place_pairs


def plan_slots(ids: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """ids [P] local expert of each pair -> slot_pair [tiles * tile] int32, -1 = empty; tile_expert [tiles] int32, -1 =
    unused.
    """
    pairs, device = len(ids), ids.device
    num_tiles = min(pairs, pairs // tile + num_experts)
    slot_pair = torch.full((num_tiles * tile,), -1, dtype=torch.int32, device=device)
    tile_expert = torch.empty(num_tiles, dtype=torch.int32, device=device)
    if pairs:
        ids = ids.to(torch.int32)
        rank = torch.empty_like(ids)
        count = torch.empty(-(-pairs // _PART), num_experts, dtype=torch.int32, device=device)
        first_tile = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        rank_pairs_program(num_experts)(ids, rank, count)
        first_tiles_program(num_experts, tile)(count, first_tile)
        place_pairs_program(num_experts, tile)(ids, rank, count, first_tile, slot_pair, tile_expert)
    return slot_pair, tile_expert
