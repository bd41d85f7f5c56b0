"""The kernel contract: one table of operations, filled by a provider and, op by op, by the reference.

    Kernels          a plain object with one function an operation; the model calls `kernels.attend(...)` directly
    OPS              what each must fulfil: exactness, tolerance, row invariance
    KernelProvider   what an entry point of group `deepinfer.kernels` is

Shapes: R rows (tokens of a step; rows of one request are contiguous), D hidden, S streams, H heads, hd head_dim, W
window, E selected entries, k experts a row. Caches are 2-D, one row an entry, *plain* (rounded values in a float
dtype) or *packed* (uint8 records, see reference/records.py); a provider names the form it wants and the reference
reads both. Row indices into caches are int64, -1 = invisible. Weights of products are stored [K, N].

Attention, indexer and experts are split in `plan_*` (what is the same for many layers of a step) and a run function
without host synchronisation. What `plan_*` returns is private to the table that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_core.config.model import ModelConfig

if TYPE_CHECKING:
    from deepinfer_core.kernels.reference.adjust import LogitChanges
    from deepinfer_core.kernels.reference.coded import Weight
    from deepinfer_core.kernels.reference.filters import RowFilters
    from deepinfer_core.kernels.reference.packed import PackedWeight

__all__ = [
    "CODED_OPS",
    "CODED_RMS",
    "OPS",
    "SAMPLING_OPS",
    "Capability",
    "KernelProvider",
    "Kernels",
    "NamesLibraries",
    "OpContract",
    "TakesPacked",
    "Unavailable",
]

type PlanHandle = Any  # private to a provider


@dataclass(frozen=True)
class Kernels:
    """The functions that the model runs on. Signatures are those of the reference functions of the same name."""

    # products
    linear: Callable[[Tensor, Weight], Tensor]  # x [R, K], w [K, N] -> [R, N]
    grouped_linear: Callable[[Tensor, Tensor], Tensor]  # x [R, G, K], w [G, K, N] -> [R, G, N]
    head_logits: Callable[[Tensor, Tensor], Tensor]  # x [R, D], head [D, V] -> float32 [R, V], not rounded on the way
    # norms and rope
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x [.., D], w [D], eps
    rope_table: Callable[[Tensor, Tensor], Tensor]  # positions [R], frequencies [P] -> [R, 2, 2P]
    apply_rope: Callable[..., Tensor]  # x [R, (H,) D], table, inverse=False, in_place=False: x may be overwritten
    # residual streams
    mhc_mix: Callable[..., tuple[Tensor, Tensor, Tensor]]  # X, fn, base, scale -> pre, post, C
    mhc_collapse: Callable[[Tensor, Tensor], Tensor]  # X [R, S, D], pre [R, S] -> [R, D]
    mhc_expand: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # X, y, post, C -> X'
    mhc_next: Callable[..., tuple[Tensor, Tensor]]  # X, y, post, C, pre, w [D], eps -> X', rms_norm(collapse(X'))
    # caches
    write_window: Callable[[Tensor, Tensor, Tensor], None]  # cache, rows [R], keys [R, hd]: rounds and stores
    write_entries: Callable[[Tensor, Tensor, Tensor], None]
    write_index_keys: Callable[[Tensor, Tensor, Tensor], None]
    copy_rows: Callable[[Tensor, Tensor, Tensor], None]  # cache, destination rows [n], source rows [n], disjoint
    round_index: Callable[[Tensor], Tensor]  # index queries [R, Hi, Di]
    pool_pairs: Callable[[Tensor, Tensor], Tensor]  # first, second [R, 2, hd] -> [R, hd]
    # attention
    plan_keys: Callable[[Tensor], PlanHandle]  # cache rows [R, W or E], -1 = invisible
    attend: Callable[
        ..., Tensor
    ]  # q, window cache, window plan, entry cache | None, entry plan | None, sink -> [R, H, hd]
    # indexer
    plan_index: Callable[..., PlanHandle]  # block rows [R, B], entries a block, num_visible [R]
    index_scores: Callable[..., Tensor]  # iq, w, index cache, plan, candidates | None, block size -> [R, N]
    candidate_blocks: Callable[
        [Tensor, Tensor, int, int], Tensor
    ]  # scores, num_visible, block, top blocks -> [R, NB] bool
    select_entries: Callable[[Tensor, int], Tensor]  # scores, k -> [R, k] ascending, -1
    # experts
    route: Callable[..., tuple[Tensor, Tensor]]  # x, gate, bias, k, scale -> ids ascending, weights
    plan_experts: Callable[[Tensor, int], PlanHandle]  # local ids [R, k], number of local experts
    run_experts: Callable[..., Tensor]  # x, weights, plan, w13, w2, limit -> [R, k, D]
    shared_expert: Callable[[Tensor, Weight, Weight, float], Tensor]
    combine_experts: Callable[[Tensor, Tensor], Tensor]  # pairs [R, k, D], shared [R, D] -> [R, D]
    # engram, dspark
    engram_rows: Callable[..., Tensor]
    engram_gate: Callable[..., Tensor]
    markov_step: Callable[..., tuple[Tensor, Tensor]]
    # sampling: V logits a row, float32; what the host knows of the rows comes as numpy arrays
    adjust_logits: Callable[[Tensor, LogitChanges], Tensor]  # mask, bias, penalties [R, V]
    filter_logits: Callable[[Tensor, RowFilters], Tensor]  # temperature, top-k, top-p, min-p [R, V]
    draw_token: Callable[..., tuple[Tensor, Tensor]]  # scores [R, V], seed, position, stream -> ids, failed [R]
    accept_drafts: Callable[
        [Tensor, Tensor, Tensor, NDArray[np.int32]], tuple[Tensor, Tensor, Tensor]
    ]  # emitted, stands, failed [N], first rows of M segments -> tokens [M, 1 + D], num_tokens, failed [M]
    token_logprobs: Callable[
        [Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]
    ]  # logits, token [R], n -> logprob, rank [R], top ids, theirs [R, n]
    # no operation: rows of a step come in multiples of this, 1 where every operation takes any number without waste
    row_multiple: int = 8


@dataclass(frozen=True)
class OpContract:
    """What an implementation of one operation must fulfil.

    `exact`: the result equals the reference bit for bit (integers, bytes, roundings). Otherwise |out - ref| <= atol +
    rtol * |ref| for at least 99.9 % of the elements, with the tolerance of the compute dtype. `row_invariant`: the
    bits of a row depend on that row's inputs only; demanded by the engine's `batch_invariant` switch.
    """

    name: str
    exact: bool
    float32_tolerance: float = 1e-5  # both atol and rtol; the order of additions is free
    bfloat16_tolerance: float = 2e-2  # inputs and outputs are rounded to 8 bits, about three roundings in a row
    coded_tolerance: float = 2e-2  # with coded weights, in any dtype
    row_invariant: bool = True


def _contract(name: str) -> OpContract:
    return OpContract(
        name,
        name in _EXACT,
        float32_tolerance=_FLOAT32_TOLERANCES.get(name, 1e-5),
        bfloat16_tolerance=_BFLOAT16_TOLERANCES.get(name, 2e-2),
        coded_tolerance=_CODED_TOLERANCES.get(name, 2e-2),
    )


_EXACT = frozenset(
    (
        "write_window",
        "write_entries",
        "write_index_keys",
        "copy_rows",
        "round_index",
        "candidate_blocks",
        "select_entries",
        "engram_rows",
        "plan_keys",
        "plan_index",
        "plan_experts",
        "combine_experts",
        "adjust_logits",
        "filter_logits",
        "draw_token",
        "accept_drafts",
    )
)
_FLOAT32_TOLERANCES = {
    "mhc_mix": 2e-5,  # 39 normalizations in a row, each with a division
    "rope_table": 1e-4,  # cosines of angles up to 10^6 radians: their reduction differs between libraries
    # sums over thousands of terms of both signs
    "linear": 1e-4,
    "grouped_linear": 1e-4,
    "head_logits": 1e-4,
    "shared_expert": 1e-4,
    "run_experts": 1e-4,
    "index_scores": 1e-4,
    "markov_step": 1e-4,
}
# index_scores: the reference rounds every dot product to 8 bits before it sums them over the heads, with both signs.
# head_logits: the product of the head takes what the model computes in (its weight is kept in that dtype, half the
# bytes in bfloat16), accumulates in float32 and gives that out, so nothing but the inputs is rounded.
_BFLOAT16_TOLERANCES = {"head_logits": 1e-4, "index_scores": 2e-1, "plan_index": 2e-1}
# The activation between the two products is rounded to four bits: where it is near the middle of two codes, the last
# bit of the sum before decides which one, and they are up to an eighth apart. The reference in bfloat16 has up to 3.3 %
# of the elements beyond 2e-2 for that reason, the largest at 5e-2; CODED_RMS holds what is not such a flip.
_CODED_TOLERANCES = {"run_experts": 1e-1, "shared_expert": 1e-1}
OPS: Mapping[str, OpContract] = {
    spec.name: _contract(spec.name) for spec in fields(Kernels) if spec.name != "row_multiple"
}


# What runs after the forward pass, on sample rows only: no padding, and on a CPU torch does it.
SAMPLING_OPS = frozenset(("adjust_logits", "filter_logits", "draw_token", "accept_drafts", "token_logprobs"))

# Operations whose weights may be coded (reference/coded.py), as an engine with float8_products has them, or packed
# (reference/packed.py).
CODED_OPS = frozenset(("linear", "run_experts", "shared_expert"))
CODED_RMS = 1.5e-2  # at most, of |out - ref| / (1 + |ref|) with coded weights; 7e-3 for the reference in bfloat16


# ---- providers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capability:
    """A provider can run here."""

    device: str  # torch device type
    arch: str  # sm_90, ascend950, x86_64 ..
    summary: str  # one line for people


@dataclass(frozen=True)
class Unavailable:
    """A provider cannot run here."""

    reason: str  # one sentence: what is missing and how to get it


@runtime_checkable
class KernelProvider(Protocol):
    """What an entry point of group `deepinfer.kernels` refers to."""

    name: str
    cache_form: Literal["plain", "packed"]
    row_invariant_ops: frozenset[str]  # of its operations: those that keep `OpContract.row_invariant`
    coded_ops: frozenset[str]  # of `CODED_OPS`: those that take coded weights

    def probe(self) -> Capability | Unavailable:
        """Cheap and without side effects: imports neither tilelang nor torch_npu, makes no CUDA context."""
        ...

    def load(self) -> Mapping[str, Callable[..., Any]]:
        """Functions by name of `Kernels`; raises KernelError with the reason where `probe` says unavailable."""
        ...

    def unsupported(self, op: str, config: ModelConfig, dtype: torch.dtype) -> str | None:
        """None where the loaded function handles this model's shapes, else why not (the reference runs it then)."""
        ...


@runtime_checkable
class NamesLibraries(Protocol):
    """What a `KernelProvider` may have besides: it binds other projects' libraries and says where."""

    def library_of(self, function: Callable[..., Any]) -> str | None:
        """The library that a function of `load` hands its work to, None for the provider's own kernel."""
        ...


@runtime_checkable
class TakesPacked(Protocol):
    """What a `KernelProvider` may have besides: kernels that decode packed weights tile by tile."""

    packed_ops: frozenset[str]  # of `CODED_OPS`: those that take packed weights, with the bits of decoded ones

    def arranged(self, weight: PackedWeight, halves: bool) -> Weight:
        """The same values as these operations read them: an `ArrangedWeight`, or decoded where the kernels don't take
        this one. `halves`: gate and up projections, side by side.
        """
        ...
