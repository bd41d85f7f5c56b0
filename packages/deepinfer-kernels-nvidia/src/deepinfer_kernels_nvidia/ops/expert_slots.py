# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Pairs (row, choice) sorted by expert into tiles of 128 slots, one expert a tile: a counting sort in three passes.

    rank   of each pair: how many pairs before it have its expert
    tiles  count of each expert = its largest rank + 1; its first tile = sum of ceil(count / 128) of those before
    place  slot = 128 first_tile[expert] + rank; slots without a pair stay -1

Every pair is compared with every other, from shared memory: for the few thousand of a step that is less work than the
passes of a radix sort, and the order within an expert is that of the pairs. No pass waits for the host: the number of
tiles is bounded by shapes alone.
"""

import torch
from torch import Tensor

from deepinfer_kernels_nvidia.jit import T, program

__all__ = ["plan_slots"]

_THREADS, _PART = 256, 1024  # threads, and pairs that a block holds at a time
_COUNTERS = 512


@program
def rank_pairs_program():
    """ids [pairs] -> rank [pairs]."""
    pairs = T.dynamic("pairs")

    @T.prim_func
    def rank_pairs(ids: T.Tensor((pairs,), "int32"), rank: T.Tensor((pairs,), "int32")):
        with T.Kernel(T.ceildiv(pairs, _THREADS), threads=_THREADS) as block:
            thread = T.get_thread_binding()
            part = T.alloc_shared((_PART,), "int32")
            own = T.alloc_var("int32")
            before = T.alloc_var("int32")
            pair = block * _THREADS + thread
            own = ids[T.min(pair, pairs - 1)]
            before = 0
            for step in T.serial(T.ceildiv(T.min((block + 1) * _THREADS, pairs), _PART)):
                T.sync_threads()
                for i in T.unroll(_PART // _THREADS):
                    part[i * _THREADS + thread] = ids[T.min(step * _PART + i * _THREADS + thread, pairs - 1)]
                T.sync_threads()
                for i in T.serial(T.min(_PART, pair - step * _PART)):
                    if part[i] == own:
                        before += 1
            if pair < pairs:
                rank[pair] = before

    return rank_pairs


@program
def first_tiles_program(experts: int, tile: int):
    """ids, rank [pairs] -> first_tile [experts + 1], the last entry the number of tiles in use."""
    pairs = T.dynamic("pairs")
    turns = experts // _COUNTERS + 1  # experts + 1 numbers

    @T.prim_func
    def first_tiles(
        ids: T.Tensor((pairs,), "int32"),
        rank: T.Tensor((pairs,), "int32"),
        first_tile: T.Tensor((experts + 1,), "int32"),
    ):
        with T.Kernel(1, threads=_COUNTERS) as _:
            thread = T.get_thread_binding()
            count = T.alloc_shared((turns * _COUNTERS,), "int32")
            start = T.alloc_var("int32")
            for i in T.unroll(turns):
                count[i * _COUNTERS + thread] = 0
            T.sync_threads()
            # The last pair of an expert has the largest rank, whatever the order in which they come.
            for i in T.serial(T.ceildiv(pairs, _COUNTERS)):
                if i * _COUNTERS + thread < pairs:
                    T.atomic_max(count[ids[i * _COUNTERS + thread]], rank[i * _COUNTERS + thread] + 1)
            T.sync_threads()
            for i in T.unroll(turns):
                if i * _COUNTERS + thread <= experts:
                    start = 0
                    for e in T.serial(i * _COUNTERS + thread):
                        start += (count[e] + tile - 1) // tile
                    first_tile[i * _COUNTERS + thread] = start

    return first_tiles


@program
def place_pairs_program(experts: int, tile: int):
    """ids, rank [pairs], first_tile [experts + 1] -> slot_pair [tiles * tile], -1 where empty; tile_expert [tiles]."""
    pairs, tiles, slots = T.dynamic("pairs"), T.dynamic("tiles"), T.dynamic("slots")

    @T.prim_func
    def place_pairs(
        ids: T.Tensor((pairs,), "int32"),
        rank: T.Tensor((pairs,), "int32"),
        first_tile: T.Tensor((experts + 1,), "int32"),
        slot_pair: T.Tensor((slots,), "int32"),
        tile_expert: T.Tensor((tiles,), "int32"),
    ):
        with T.Kernel(T.ceildiv(pairs, _THREADS) + T.ceildiv(tiles, _THREADS), threads=_THREADS) as block:
            thread = T.get_thread_binding()
            owner = T.alloc_var("int32")
            pair = block * _THREADS + thread
            number = (block - T.ceildiv(pairs, _THREADS)) * _THREADS + thread
            if block < T.ceildiv(pairs, _THREADS):
                if pair < pairs:
                    slot_pair[first_tile[ids[pair]] * tile + rank[pair]] = pair
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
        first_tile = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        rank_pairs_program()(ids, rank)
        first_tiles_program(num_experts, tile)(ids, rank, first_tile)
        place_pairs_program(num_experts, tile)(ids, rank, first_tile, slot_pair, tile_expert)
    return slot_pair, tile_expert
