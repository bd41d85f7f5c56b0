"""What crosses the seam between the scheduler and the device: `StepPlan` down, `StepResult` up. Integers only, no
torch.

    plan = scheduler.schedule()            result = runner.run(plan)            outputs = scheduler.commit(plan, result)

    segments   | request in slot 3 (prefill)      | slot 0 (decode, 2 drafts) | slot 7 (replay, prefill) |
    rows       | p=256 p=257 p=258 ... p=383      | p=90    p=91    p=92      | p=0 p=1 ... p=127 p=128  |
    token      | given given given ... given      | held 0  held 1  held 2    | given ...                |
    sample     |                           x      | x       x       x         |                    x     |

A row is one token of one request. Rows of a request are contiguous and ascend by position; together they are a
*segment*. A row's token is GIVEN (its id stands in the plan) or HELD: the id is still on the device. Each slot holds
there the block `[anchor, draft 1, .. draft n]` that the previous step of this slot left, and the position of its
anchor; a held row names an index into the block, and the device resolves both its token and its position. A plan may
thus be made before the result of the step before it is known. `row_position` of a held row is the largest that it can
turn out to have (all drafts accepted), so that blocks can be reserved for it.

A slot is a row of the device's per-request tables. A slot that is used again gets the next generation; results are
keyed by (slot, generation, position), and a key that no longer matches is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepinfer_core.config.sampling import SamplingParams

__all__ = [
    "Admission",
    "Content",
    "Release",
    "RowKind",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "TokenSource",
    "Writes",
]

type Int32Array = NDArray[np.int32]
type Int64Array = NDArray[np.int64]
type UInt8Array = NDArray[np.uint8]
type BoolArray = NDArray[np.bool_]
type FloatArray = NDArray[np.float32]
type UInt32Mask = NDArray[np.uint32]  # [ceil(vocab / 32)], bit v % 32 of word v // 32 = token v is allowed


class RowKind(IntEnum):
    """Why a row is computed."""

    PREFILL = 0
    REPLAY = 1  # recomputed after a prefix hit to rebuild windows; writes no shared block
    DECODE = 2  # the anchor: the newest token of the request
    DRAFT = 3  # a draft token under verification
    DUMMY = 4  # padding, or a step that only keeps other ranks company


class Content(IntEnum):
    """What a row's token stands for; image rows use the router's `bias_vl` and are dead for Engram."""

    TEXT = 0
    IMAGE = 1


class TokenSource(IntEnum):
    """Where a row's token id is."""

    GIVEN = 0
    HELD = 1


class Writes(IntFlag):
    """Which caches a row may write."""

    NONE = 0
    GLOBAL = 1  # compressed KV and index keys in shared blocks
    WINDOW = 2  # window rings, open compressor pairs, draft rings, token history


class Admission(NamedTuple):
    """A request takes a slot. Comes with the first step that has rows of it, before those rows run."""

    slot: int
    generation: int
    request_number: int  # engine-wide arrival number
    token_ids: Int64Array  # [L] prompt, followed by what was generated before a preemption
    prompt_tokens: int  # how many of token_ids are the prompt
    first_position: int  # position of the first row that will run (0 unless a prefix was hit)
    params: SamplingParams
    seed: int  # 0 <= seed < 2**64
    content: UInt8Array | None = None  # [L] Content of each of token_ids; None = all text
    embedded_positions: Int64Array | None = None  # [m] ascending; positions whose input is given below
    embeddings: FloatArray | None = None  # [m, hidden] in place of the token embedding (image spans)


class Release(NamedTuple):
    """A request left its slot (finished, aborted or preempted)."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over R rows of S segments. Arrays are read-only once the plan is handed over."""

    step: int
    # ---- rows [R]
    row_position: Int64Array
    row_token: Int64Array  # token id of a GIVEN row; index into the slot's held block of a HELD row
    row_source: UInt8Array  # TokenSource
    row_kind: UInt8Array  # RowKind
    row_content: UInt8Array  # Content
    row_writes: UInt8Array  # Writes
    row_sample: BoolArray  # logits are wanted
    # ---- segments [S]
    segment_start: Int32Array  # [S + 1] first row of each segment, then R
    segment_slot: Int32Array
    segment_generation: Int32Array
    segment_window_from: (
        Int64Array  # window keys below this position are invisible in the encoder half (bounded replay); 0 = none
    )
    segment_decoder_from: (
        Int64Array  # rows below this position stop after the cut layer's KV write; 0 = all rows run through
    )
    segment_num_drafts: Int32Array  # drafts to propose after this step, 0 = none
    block_tables: Int32Array  # [S, B] block number of positions 128 b .. 128 b + 127, -1 where there is none
    # ---- requests that change hands
    admissions: tuple[Admission, ...] = ()
    releases: tuple[Release, ...] = ()
    # ---- grammar: allowed-token bit masks of sample rows, keyed by row
    grammar_masks: Mapping[int, UInt32Mask] = field(default_factory=dict[int, UInt32Mask])
    # ---- the drafter
    segment_draft_from: Int64Array | None = None  # [S] it has no context of positions below this one; None = it has all
    stores_draft_context: bool = True  # False: nothing will be proposed soon, and its context need not be kept up
    # ---- lockstep with other ranks
    padded_rows: int = 0  # rows that the device pads to (0 = as many as there are)
    is_dummy: bool = False  # no real row; run only to take part in collectives

    @property
    def num_rows(self) -> int:
        return len(self.row_position)

    @property
    def num_segments(self) -> int:
        return len(self.segment_slot)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own and the most likely ones in descending order."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, one entry a segment that drew (N of them), keyed by (slot, generation, position)."""

    step: int
    slot: Int32Array  # [N]
    generation: Int32Array  # [N]
    position: Int64Array  # [N] position of the first token of `tokens`: one past the first sample row
    tokens: Int64Array  # [N, 1 + D] accepted drafts, then the token drawn by the target; -1 beyond num_tokens
    num_tokens: Int32Array  # [N] accepted drafts + 1
    num_verified: Int32Array  # [N] drafts that were under verification
    draft_tokens: Int64Array  # [N, D'] proposals for the next step, -1 where none
    confidences: FloatArray  # [N, D'] calibrated acceptance of each proposal given the ones before it
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict[int, Sequence[TokenLogprobs]])
    # logprobs: index n -> one entry for each of tokens[n, :num_tokens[n]]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict[int, Sequence[TokenLogprobs]])
    # prompt_logprobs: segment number -> one entry for each prompt token predicted by this segment's rows
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    # errors: segment number -> why this request alone failed
    is_cold: bool = (
        False  # kernels were compiled or a graph was captured: how long it took says nothing of the next one
    )
