"""`SlotTable`: the running requests as arrays, one row a slot, so that a step of any size is a few dozen numpy calls.

    slot | phase  | length | in flight | held drafts | blocks ...     length     committed tokens; the last: anchor
    0    | DECODE |    214 |  1 .. 6   |           5 | 7 12 -1 -1     in flight  what launched steps add, least .. most
    1    | FREE   |      - |           |             |                tail       newest tokens, until a block is full

The anchor of the next step lies at position length - 1 + in flight.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from deepinfer_core.config.scheduler import BLOCK_TOKENS
from deepinfer_core.errors import EngineError
from deepinfer_core.scheduling.acceptance import UNKNOWN_SURVIVAL
from deepinfer_core.scheduling.plan import Int32Array, Int64Array
from deepinfer_core.scheduling.request import Request, RequestStatus

__all__ = ["NO_BLOCK", "NO_TOKEN", "Phase", "SlotTable"]

NO_BLOCK: Final = -1
NO_TOKEN: Final = -1


class Phase(IntEnum):
    """What a slot does next."""

    FREE = 0
    PREFILL = 1
    DECODE = 2


class SlotTable:
    """Arrays [S] or [S, ...] over slots. The scheduler writes them; nobody else does."""

    def __init__(self, num_slots: int, max_model_len: int, num_drafts: int) -> None:
        columns = -(-max_model_len // BLOCK_TOKENS)
        self.num_slots = num_slots
        self.num_drafts = num_drafts
        self.requests: list[Request | None] = [None] * num_slots
        self.number = np.full(num_slots, -1, np.int64)
        self.generation = np.zeros(num_slots, np.int32)
        self.announced = np.zeros(num_slots, np.bool_)  # the device has been told of the admission
        self.phase = np.zeros(num_slots, np.uint8)
        self.urgency = np.zeros(num_slots, np.int64)
        # ---- lengths, in tokens
        self.prompt_tokens = np.zeros(num_slots, np.int64)
        self.length = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.expected_end = np.zeros(num_slots, np.int64)  # forecast of the final length, for admission
        self.next_position = np.zeros(num_slots, np.int64)  # first prefill row not planned yet
        self.shared_tokens = np.zeros(num_slots, np.int64)  # rows below write no global cache
        self.window_from = np.zeros(num_slots, np.int64)
        self.decoder_from = np.zeros(num_slots, np.int64)
        # ---- steps that are launched and not committed
        self.in_flight_min = np.zeros(num_slots, np.int64)
        self.in_flight_max = np.zeros(num_slots, np.int64)
        # ---- speculation
        self.draft_from = np.zeros(num_slots, np.int64)  # the drafter has context from this position on
        self.held_drafts = np.zeros(num_slots, np.int32)  # drafts that the device will hold when the next step runs
        # position-major [D, S]: numpy is fast along the long axis
        self.survival = np.ones((num_drafts, num_slots), np.float32)  # of the newest proposals that were committed
        self.stale_survival = np.ones((num_drafts, num_slots), np.float32)  # of the ones before
        # ---- what ends a request
        self.eos = np.full(num_slots, NO_TOKEN, np.int64)
        self.stop_from = np.zeros(num_slots, np.int64)  # stop tokens count from this position on (min_tokens)
        self.stop_ids = np.full((num_slots, 0), NO_TOKEN, np.int64)
        self.watched = np.zeros(num_slots, np.bool_)  # has a watcher
        self.constrained = np.zeros(num_slots, np.bool_)  # has a constraint
        self.num_watched = self.num_constrained = 0  # slots that have one
        # ---- memory
        self.block_table = np.full((num_slots, columns), NO_BLOCK, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.sealed_blocks = np.zeros(num_slots, np.int64)  # full and computed ones, at the start of the table
        self.tail = np.zeros((num_slots, BLOCK_TOKENS + 2 * (num_drafts + 1)), np.int64)
        self.tail_tokens = np.zeros(num_slots, np.int64)
        self._free = list(range(num_slots - 1, -1, -1))

    # ---- who is where ----------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return self.num_slots - len(self._free)

    def running(self) -> Int64Array:
        """Slots in use, ascending."""
        return np.flatnonzero(self.phase)

    def request(self, slot: int) -> Request:
        """The request in `slot`."""
        request = self.requests[slot]
        if request is None:
            raise EngineError(f"slot {slot} holds no request; this is a bug in the scheduler")
        return request

    def least_urgent(self) -> int:
        """The running slot that memory is taken from first."""
        slots = self.running()
        return int(slots[np.argmax(self.urgency[slots])])

    # ---- coming and going ------------------------------------------------------------------------------------------

    def occupy(self, request: Request, eos_token_id: int) -> int:
        """Give `request` a free slot, in phase PREFILL with no rows planned and no blocks."""
        slot = self._free.pop()
        params = request.params
        self.requests[slot] = request
        self.number[slot] = request.number
        self.phase[slot] = Phase.PREFILL
        self.urgency[slot] = request.urgency
        self.prompt_tokens[slot] = request.prompt_tokens
        self.length[slot] = request.num_tokens
        self.limit[slot] = request.limit
        self.decoder_from[slot] = request.decoder_from
        self.in_flight_min[slot] = self.in_flight_max[slot] = 0
        self.held_drafts[slot] = self.draft_from[slot] = 0
        self.survival[:, slot] = self.stale_survival[:, slot] = UNKNOWN_SURVIVAL
        self.eos[slot] = NO_TOKEN if params.ignore_eos else eos_token_id
        self.stop_from[slot] = request.prompt_tokens + params.min_tokens
        if params.stop_token_ids or self.stop_ids.shape[1]:
            self._set_stop_ids(slot, tuple(params.stop_token_ids or ()))
        if request.watcher is not None:
            self.watched[slot] = True
            self.num_watched += 1
        if request.constraint is not None:
            self.constrained[slot] = True
            self.num_constrained += 1
        self.tail_tokens[slot] = 0
        request.slot, request.status = slot, RequestStatus.RUNNING
        return slot

    def vacate(self, slot: int) -> list[int]:
        """Free the slot and return its blocks. The next tenant gets the next generation, so late results miss."""
        self.flush(slot)
        blocks = self.blocks(slot)
        request = self.request(slot)
        request.slot = -1
        self.requests[slot] = None
        self.phase[slot] = Phase.FREE
        self.number[slot] = -1
        self.generation[slot] += 1
        self.block_table[slot, : len(blocks)] = NO_BLOCK
        self.num_blocks[slot] = 0
        self.num_watched -= int(self.watched[slot])
        self.num_constrained -= int(self.constrained[slot])
        self.announced[slot] = self.watched[slot] = self.constrained[slot] = False
        self._free.append(slot)
        return blocks

    # ---- blocks and tokens -----------------------------------------------------------------------------------------

    def blocks(self, slot: int) -> list[int]:
        """Block numbers of the slot, by position."""
        return self.block_table[slot, : self.num_blocks[slot]].tolist()

    def add_blocks(self, slot: int, blocks: list[int]) -> None:
        """Append blocks to the slot's table."""
        start = int(self.num_blocks[slot])
        self.block_table[slot, start : start + len(blocks)] = blocks
        self.num_blocks[slot] = start + len(blocks)

    def append_tokens(self, slots: Int64Array, columns: Int64Array, counts: Int32Array) -> None:
        """Add columns[:counts[i], i] to the tail of slots[i]; columns is [W, N], the slots are distinct.

        All W are written, since that is cheaper: what lies beyond the tail has no meaning.
        """
        width = self.tail.shape[1]
        cell = slots * width + self.tail_tokens[slots] + np.arange(len(columns), dtype=np.int64)[:, None]
        self.tail.reshape(-1)[cell] = columns
        self.tail_tokens[slots] += counts
        self.length[slots] += counts

    def flush(self, slot: int) -> Request:
        """Move the tail into the request, so that `request.tokens` is complete."""
        request = self.request(slot)
        count = int(self.tail_tokens[slot])
        if count:
            request.append(self.tail[slot, :count])
            self.tail_tokens[slot] = 0
        return request

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(ids)] = ids
