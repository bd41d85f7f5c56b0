"""Mixture of experts: router, dispatch, expert MLPs, combine (docs/model.md: Experts).

    route    s = sqrt(softplus(x Wg)); experts = top-k of s + bias; weight_e = scale * s_e / (sum of chosen s + 1e-20)
    expert   g = min(x w1, limit), u = clamp(x w3, -limit, limit), a = silu(g) u weight, y = a w2
    shared   the same with weight 1
    combine  the chosen experts in ascending id, then the shared expert

Rows are grouped by expert in tiles of 8 (`plan_tiles`), zero rows filling up the last tile of each expert, so the bits
of a row's output don't depend on the other rows; the sum in ascending expert id makes them independent of where the
experts live, too. On the CPU the tiles are counted; on another device, where the host would have to wait for the count,
there are as many as the shapes allow, and those left over are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_core.kernels.reference.coded import CodedWeight, Weight, plain_weight, round_rows
from deepinfer_core.kernels.reference.elementwise import silu, softplus
from deepinfer_core.kernels.reference.linear import ROW_TILE, linear, tile_product
from deepinfer_core.kernels.reference.topk import top_k_set

__all__ = ["ExpertTiles", "combine_experts", "plan_tiles", "route", "run_experts", "shared_expert", "swiglu"]

_GATHER_LIMIT_BYTES = 4 << 20  # above this, copying the weights of every tile costs more than a call per expert


def route(x: Tensor, gate: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """x [R, D], gate [D, E], bias [E] or [R, E] -> expert ids [R, k] int64 ascending, weights [R, k] float32.

    Scores are float32 sums of the products, whatever the dtypes of x and gate.
    """
    scores = torch.sqrt(softplus(linear(x.float(), gate.float())))
    ids = top_k_set(scores + bias, k)
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """gate_up [..., 2 I], gate half first -> [..., I]: silu(min(g, limit)) * clamp(u, -limit, limit), in float32."""
    g, u = gate_up.float().chunk(2, -1)
    return silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """x [R, D], w13 [D, 2 I], w2 [I, D] -> [R, D]."""
    return linear(swiglu(linear(x, w13), limit).to(x.dtype), w2)


@dataclass(frozen=True)
class ExpertTiles:
    """Pairs (row, choice) sorted by expert and cut into tiles of 8 rows of one expert each."""

    num_tiles: int
    tile_expert: Tensor  # [T] local expert of each tile
    first_tile: list[int] | None  # [E + 1] tiles first_tile[e] .. first_tile[e + 1] - 1 belong to expert e; CPU only
    pair_slot: Tensor  # [R * k] place of each pair in the tiles: tile * 8 + row of the tile


def plan_tiles(ids: Tensor, num_experts: int) -> ExpertTiles:
    """ids [R, k] local expert ids."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    first_pair = torch.searchsorted(flat[order], torch.arange(num_experts + 1, device=flat.device))  # [E + 1]
    tiles = (first_pair.diff() + (ROW_TILE - 1)) // ROW_TILE
    first_tile = F.pad(tiles.cumsum(0), (1, 0))
    place = torch.arange(flat.numel(), device=flat.device)  # of each pair in the sorted list
    rank = torch.empty_like(order).index_copy_(0, order, place)
    pair_slot = first_tile[flat] * ROW_TILE + rank - first_pair[flat]
    if flat.device.type == "cpu":
        bounds: list[int] = first_tile.tolist()
        return ExpertTiles(bounds[-1], torch.repeat_interleave(tiles, output_size=bounds[-1]), bounds, pair_slot)
    most = min(flat.numel(), flat.numel() // ROW_TILE + num_experts)
    owner = torch.searchsorted(first_tile[1:], torch.arange(most, device=flat.device), right=True)
    return ExpertTiles(most, owner.clamp_max(num_experts - 1), None, pair_slot)


def run_experts(x: Tensor, weights: Tensor, tiles: ExpertTiles, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """x [R, D], weights [R, k], w13 [E, D, 2 I], w2 [E, I, D] -> one output for each pair [R, k, D].

    The routing weight is applied before w2.
    """
    rows, k = weights.shape
    if isinstance(w13, CodedWeight):
        x = round_rows(x)
    slots = tiles.num_tiles * ROW_TILE
    grouped = x.new_zeros(slots, x.shape[1]).index_copy(0, tiles.pair_slot, x.repeat_interleave(k, 0))
    scale = weights.new_zeros(slots).index_copy(0, tiles.pair_slot, weights.flatten())
    hidden = _tile_product(grouped.view(tiles.num_tiles, ROW_TILE, -1), plain_weight(w13, x.dtype), tiles)
    act = (swiglu(hidden, limit) * scale.view(tiles.num_tiles, ROW_TILE, 1)).to(x.dtype)
    if isinstance(w2, CodedWeight):
        act = round_rows(act)
    out = _tile_product(act, plain_weight(w2, x.dtype), tiles).flatten(0, 1)
    return out.index_select(0, tiles.pair_slot).view(rows, k, -1)


def combine_experts(pairs: Tensor, shared: Tensor) -> Tensor:
    """pairs [R, k, D] in ascending expert id, shared [R, D] -> [R, D] in the dtype of `shared`, summed in float32, in
    that order.
    """
    total = pairs[:, 0].float()
    for choice in range(1, pairs.shape[1]):
        total = total + pairs[:, choice]
    return (total + shared).to(shared.dtype)


def _tile_product(tiles_in: Tensor, weight: Tensor, tiles: ExpertTiles) -> Tensor:
    """[T, 8, K] x weight[tile_expert] [T, K, N] -> [T, 8, N]. Every branch runs equal [8, K] x [K, N] products."""
    expert_bytes = weight[0].numel() * weight.element_size()
    if tiles.num_tiles * expert_bytes <= _GATHER_LIMIT_BYTES:
        return tile_product(tiles_in, weight.index_select(0, tiles.tile_expert))
    if tiles.first_tile is None:
        step = max(1, _GATHER_LIMIT_BYTES // expert_bytes)
        spans = [slice(start, start + step) for start in range(0, tiles.num_tiles, step)]
        return torch.cat(
            [tile_product(tiles_in[span], weight.index_select(0, tiles.tile_expert[span])) for span in spans]
        )
    parts = [
        tile_product(tiles_in[start:end], weight[expert].expand(end - start, -1, -1))
        for expert, (start, end) in enumerate(zip(tiles.first_tile, tiles.first_tile[1:], strict=False))
        if end > start
    ]
    return torch.cat(parts)
