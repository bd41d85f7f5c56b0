# ruff: noqa: I002 - the annotations of a TileLang program are its signature and are evaluated
# pyright: basic, reportInvalidTypeForm=false
"""Experts: torch_npu sorts the pairs (row, choice) by expert and multiplies the groups; the activation is ours.

    npu_moe_init_routing_v2   x [R, D], ids [R, k] -> rows sorted by expert [R k, D], place of each pair, counts [E]
    npu_grouped_matmul        [R k, D] x w13 [E, D, 2 I] -> [R k, 2 I]
    gated_activation          a = silu(min(g, limit)) clamp(u, -limit, limit) weight             float32, rounded once
    npu_grouped_matmul        [R k, I] x w2 [E, I, D] -> [R k, D], put back in the order of the pairs

torch_npu's clipped SwiGLU is documented for older chips only, its quantising ones round the result to 8 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.errors import KernelError
from deepinfer_kernels_ascend.jit import BLOCKS, THREADS, T, dtype_name, each_unit, program

# Constants of the two operations' documentation.
_NOT_QUANTISED, _COUNTS, _PAIR_TO_PLACE = -1, 1, 0
_ONE_OUTPUT, _GROUPS_OF_ROWS = 3, 0


@program
def gated_activation_program(width: int, dtype: str):
    """hidden [rows, 2 width], gate half first, weight [rows] -> [rows, width]."""
    rows = T.dynamic("rows")

    @T.prim_func
    def gated_activation(
        hidden: T.Tensor((rows, 2 * width), dtype),
        weight: T.Tensor((rows,), "float32"),
        out: T.Tensor((rows, width), dtype),
        limit: T.float32,
    ):
        with T.Kernel(BLOCKS) as block, T.SimtVF(threads=THREADS):
            gate = T.alloc_var("float32")
            up = T.alloc_var("float32")
            for step in T.serial(each_unit(rows * width)):
                unit = (step * BLOCKS + block) * THREADS + T.get_thread_binding()
                if unit < rows * width:
                    row, i = unit // width, unit % width
                    gate = T.min(T.cast(hidden[row, i], "float32"), limit)
                    up = T.max(T.min(T.cast(hidden[row, width + i], "float32"), limit), -limit)
                    gate = gate / (1.0 + T.exp(-gate)) * up * weight[row]
                    out[row, i] = T.cast(gate, dtype)

    return gated_activation


@dataclass(frozen=True)
class ExpertPlan:
    """Local expert of each pair, and how many experts there are."""

    ids: Tensor  # [R, k] int32
    num_experts: int


def plan_experts(ids: Tensor, num_experts: int) -> ExpertPlan:
    """ids [R, k] local expert ids; see contract `plan_experts`."""
    return ExpertPlan(ids.to(torch.int32), num_experts)


def run_experts(x: Tensor, weights: Tensor, plan: ExpertPlan, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """x [R, D], weights [R, k], w13 [E, D, 2 I], w2 [E, I, D], all but weights bfloat16 -> [R, k, D]; see contract
    `run_experts`. Raises KernelError for other dtypes.
    """
    _check_dtypes((x, w13, w2))
    torch_npu: Any = import_module("torch_npu")
    rows, k = weights.shape
    if rows == 0:
        return x.new_empty(0, k, x.shape[1])
    expanded, place, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        plan.ids,
        active_num=rows * k,
        expert_num=plan.num_experts,
        expert_tokens_num_type=_COUNTS,
        expert_tokens_num_flag=True,
        quant_mode=_NOT_QUANTISED,
        active_expert_range=[0, plan.num_experts],
        row_idx_type=_PAIR_TO_PLACE,
    )
    where = place.to(torch.int64)
    sorted_weights = torch.empty(rows * k, dtype=torch.float32, device=x.device)
    sorted_weights.index_copy_(0, where, weights.float().flatten())
    hidden = _grouped(torch_npu, expanded, w13, counts)
    out = _grouped(torch_npu, _activation(hidden, sorted_weights, limit), w2, counts)
    return out.index_select(0, where).view(rows, k, -1)


def shared_expert(x: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """x [R, D], w13 [D, 2 I], w2 [I, D], all bfloat16 -> [R, D]; see contract `shared_expert`. Raises KernelError for
    other dtypes.
    """
    _check_dtypes((x, w13, w2))
    ones = torch.ones(len(x), dtype=torch.float32, device=x.device)
    return torch.mm(_activation(torch.mm(x, w13), ones, limit), w2)


def _grouped(torch_npu: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=counts, split_item=_ONE_OUTPUT, group_type=_GROUPS_OF_ROWS, group_list_type=_COUNTS
    )[0]


def _activation(hidden: Tensor, weight: Tensor, limit: float) -> Tensor:
    width = hidden.shape[1] // 2
    out = torch.empty(len(hidden), width, dtype=hidden.dtype, device=hidden.device)
    if out.numel():
        gated_activation_program(width, dtype_name(hidden))(hidden.contiguous(), weight, out, float(limit))
    return out


def _check_dtypes(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            raise KernelError(f"the Ascend expert kernels take bfloat16, not {tensor.dtype}")
