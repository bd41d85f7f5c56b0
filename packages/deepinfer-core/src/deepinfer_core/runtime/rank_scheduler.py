"""`RankScheduler`: the schedulers and steps of all ranks as one.

    add ─► the rank with the least to do          (scheduling/rank_load.py)
    abort ─► the rank that has the request
    step ◄─ what any rank has committed

A rank that ends takes the group with it: steps need every rank. Then every open request ends with an error that names
the rank, and new requests are refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import EngineError, ParallelError, QueueFullError
from deepinfer_core.outputs.replay import params_to_json
from deepinfer_core.runtime.rank_messages import (
    Abort,
    Ask,
    Close,
    Command,
    Counters,
    Failed,
    Report,
    Stepped,
    Submit,
    Wake,
    decode_report,
    encode,
    pack_tokens,
    unpack_tokens,
)
from deepinfer_core.scheduling.plan import Int64Array, TokenLogprobs
from deepinfer_core.scheduling.rank_load import RankCapacity, RankLoad, choose_rank
from deepinfer_core.scheduling.request import Constraint, Finished, FinishReason, StepOutputs, TokenWatcher

__all__ = ["RankScheduler", "Ranks", "find_cause"]

_SLICE_S = 0.5  # of a wait; between slices Ctrl-C and dead ranks are noticed
_LAST_WORDS_S = 3.0  # for the other ranks, after the first has failed
_ANSWER_S = 60.0  # for statistics


class Ranks(Protocol):
    """Where the ranks are: `parallel.workers.Workers`, or those of a launcher."""

    def __len__(self) -> int: ...

    def send(self, rank: int, message: bytes) -> None:
        """Raises ParallelError if the rank has ended."""
        ...

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """(rank, message); waits up to `timeout_s` for the first. Raises ParallelError when a rank has ended."""
        ...

    def stop(self, timeout_s: float) -> None:
        """End those that still run after `timeout_s`."""
        ...


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    rank: int
    prompt_tokens: int
    watcher: TokenWatcher | None  # sees every token here too: it keeps the text of stop strings
    output_tokens: int = 0
    hit_tokens: int = 0
    arrival_s: float = field(default_factory=time.monotonic)


class RankScheduler:
    """The schedulers of all ranks as one, and their steps: what `LLM` and `Engine` ask of a scheduler and a loop.

    leaders: the ranks that take requests. max_num_waiting: requests beyond the slots of all ranks that are accepted.
    Threads may share it, for statistics: one at a time listens to the ranks.
    """

    def __init__(
        self, ranks: Ranks, leaders: Sequence[int], capacity: RankCapacity, max_model_len: int, max_num_waiting: int
    ) -> None:
        self.max_model_len = max_model_len
        self.drafter_has_collapsed = False
        self.failure: ParallelError | None = None
        self._ranks, self._leaders, self._capacity = ranks, tuple(leaders), capacity
        self._max_num_waiting = max_num_waiting
        self._loads = [RankLoad() for _ in leaders]
        self._open: dict[int, _Open] = {}
        self._ends: list[Finished] = []
        self._counters: dict[int, dict[str, object]] = {}
        self._next_number = 0
        self._epoch = 0
        self._steps = 0
        self._arrived: list[Stepped] = []  # not handed out
        self._lock = threading.RLock()

    # ---- requests --------------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests whose end has not been handed out."""
        return len(self._open) + len(self._ends) + sum(len(one.finished) for one in self._arrived)

    @property
    def num_waiting(self) -> int:
        """Requests beyond the slots of the rank that has them."""
        return sum(max(0, load.requests - self._capacity.slots) for load in self._loads)

    def add(
        self,
        prompt: Int64Array,
        params: SamplingParams,
        *,
        seed: int,
        priority: int = 0,
        tenant_salt: str = "",
        watcher: TokenWatcher | None = None,
        constraint: Constraint | None = None,
    ) -> int:
        """Give the request to the rank with the least to do; its number. The rank makes watcher and constraint anew,
        from `params`; `watcher` is shown here what it is shown there.

        Raises QueueFullError where too many wait, EngineError where the ranks have ended.
        """
        if self.failure is not None:
            raise EngineError(f"the ranks have ended, make a new engine: {self.failure}") from self.failure
        if self.num_waiting >= self._max_num_waiting:
            raise QueueFullError(f"{self.num_waiting} requests wait; at most {self._max_num_waiting} may")
        with self._lock:
            place = choose_rank(self._loads, self._capacity, len(prompt))
            number = self._next_number
            self._next_number += 1
            self._open[number] = _Open(place, len(prompt), watcher)
            load = self._loads[place]
            load.requests += 1
            load.context_tokens += len(prompt)
            load.prefill_tokens += len(prompt)
            tokens, wire_params = pack_tokens(prompt), params_to_json(params)
            self._say(
                self._leaders[place],
                lambda epoch: Submit(epoch, number, tokens, wire_params, seed, priority, tenant_salt),
            )
        return number

    def abort(self, number: int) -> bool:
        """End a request wherever it is; its `Finished` comes with the next outputs. False: unknown or already ended."""
        with self._lock:
            request = self._open.get(number)
            if request is None or self.failure is not None:
                return False
            self._say(self._leaders[request.rank], lambda epoch: Abort(epoch, number))
        return True

    def hit_tokens(self, number: int) -> int:
        """Prompt tokens of an unfinished request that were found in the cache; 0 if it is not known."""
        request = self._open.get(number)
        return 0 if request is None else request.hit_tokens

    # ---- steps -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether requests are open, or what became of some is not handed out."""
        return bool(self._open or self._ends or self._arrived)

    def step(self) -> StepOutputs:
        """What the ranks have committed since, after waiting a little for some; empty if nothing came."""
        with self._lock:
            if self._open and not self._ends and not self._arrived:
                self._listen(_SLICE_S)
            return self.take_finished()

    def take_finished(self) -> StepOutputs:
        """What is here by now, without waiting."""
        with self._lock:
            steps, self._arrived = self._arrived, []
            ends, self._ends = self._ends, []
            self._steps += 1
            return _joined(self._steps, steps, ends)

    def ask(self) -> dict[int, dict[str, object]]:
        """Statistics of every rank. Raises ParallelError if one does not answer."""
        with self._lock:
            self._counters = {}
            for rank in range(len(self._ranks)):
                self._say(rank, Ask)
            deadline_s = time.monotonic() + _ANSWER_S
            while self.failure is None and len(self._counters) < len(self._ranks) and time.monotonic() < deadline_s:
                self._listen(_SLICE_S)
            if len(self._counters) < len(self._ranks):
                raise self.failure or ParallelError(f"not every rank gave its statistics within {_ANSWER_S:g} s")
            return self._counters

    def close(self) -> None:
        """Abort what is open and end the ranks."""
        with self._lock:
            if self.failure is None:
                for rank in range(len(self._ranks)):
                    self._say(rank, Close)
            self.failure = self.failure or ParallelError("the engine is closed")
            self._ranks.stop(10.0)

    # ---- messages --------------------------------------------------------------------------------------------------

    def _say(self, rank: int, command: Callable[[int], Command]) -> None:
        """Give `rank` the command with the next epoch, and let the others know that there is one."""
        self._epoch += 1
        try:
            for other in range(len(self._ranks)):
                message = command(self._epoch) if other == rank else Wake(self._epoch)
                self._ranks.send(other, encode(message))
        except ParallelError as error:
            self._break(error)

    def _listen(self, timeout_s: float) -> None:
        try:
            for rank, data in self._ranks.receive(timeout_s):
                report = decode_report(data)
                if isinstance(report, Failed):
                    self._break(report, rank)
                    return
                self._take(rank, report)
        except ParallelError as error:
            self._break(error)

    def _take(self, rank: int, report: Report) -> None:
        if isinstance(report, Counters):
            self._counters[rank] = report.values
        elif isinstance(report, Stepped):
            self._take_step(report)

    def _take_step(self, report: Stepped) -> None:
        self._arrived.append(report)
        self.drafter_has_collapsed |= report.drafter_has_collapsed
        tokens = unpack_tokens(report.tokens).tolist()
        start = 0
        for number, count in zip(report.numbers, report.counts, strict=True):
            request = self._open[number]
            load = self._loads[request.rank]
            load.context_tokens += count
            if request.output_tokens == 0:
                load.prefill_tokens -= request.prompt_tokens
            request.output_tokens += count
            request.hit_tokens = report.hits.get(number, request.hit_tokens)
            if request.watcher is not None:
                request.watcher.observe(tokens[start : start + count])
            start += count
        for end in report.finished:
            self._forget(end.number)

    def _forget(self, number: int) -> None:
        request = self._open.pop(number)
        load = self._loads[request.rank]
        load.requests -= 1
        load.context_tokens -= request.prompt_tokens + request.output_tokens
        if request.output_tokens == 0:
            load.prefill_tokens -= request.prompt_tokens

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _break(self, first: ParallelError | Failed, rank: int = -1) -> None:
        """A rank has failed or ended, so the group has: find out why, and end every request with that."""
        self.failure = cause = find_cause(self._ranks, first, rank)
        for number, request in list(self._open.items()):
            waited_s = time.monotonic() - request.arrival_s
            self._ends.append(
                Finished(
                    number,
                    FinishReason.ERROR,
                    request.prompt_tokens,
                    request.output_tokens,
                    request.hit_tokens,
                    error=f"the ranks have ended: {cause}",
                    total_s=waited_s,
                )
            )
            self._forget(number)
        self._ranks.stop(_LAST_WORDS_S)


def find_cause(ranks: Ranks, first: ParallelError | Failed, rank: int) -> ParallelError:
    """What is behind the first failure: the others often know better. A rank that died without a word is the cause;
    else one that failed by itself; else what the first one saw of the others.
    """
    failed: dict[int, Failed] = {rank: first} if isinstance(first, Failed) else {}
    deaths = [first] if isinstance(first, ParallelError) else []
    deadline_s = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline_s and len(failed.keys() | {r for d in deaths for r in d.late_ranks}) < len(ranks):
        try:
            for other, data in ranks.receive(0.1):
                report = decode_report(data)
                if isinstance(report, Failed):
                    failed.setdefault(other, report)
        except ParallelError as error:
            deaths.append(error)
            time.sleep(0.05)  # it says the same again at once
    for death in deaths:
        if set(death.late_ranks) - failed.keys():
            return death
    by_itself = [one for one in failed if not failed[one].blamed]
    if not failed:
        return deaths[0]
    chosen = by_itself[0] if by_itself else next(iter(failed))
    return ParallelError(f"rank {chosen}: {failed[chosen].error}", tuple(failed[chosen].blamed) or (chosen,))


def _joined(step: int, steps: Sequence[Stepped], ends: Sequence[Finished]) -> StepOutputs:
    """Steps of several ranks, or of one rank after the other, as one. A request may come more than once."""
    counts = np.array([count for one in steps for count in one.counts], np.int32)
    tokens = np.full((len(counts), max(1, int(counts.max(initial=0)))), -1, np.int64)
    tokens[np.arange(tokens.shape[1]) < counts[:, None]] = unpack_tokens(b"".join(one.tokens for one in steps))
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    first = 0
    for one in steps:
        logprobs |= {first + index: entries for index, entries in one.logprobs.items()}
        for number, entries in one.prompt_logprobs.items():
            prompt_logprobs.setdefault(number, []).extend(entries)
        first += len(one.numbers)
    return StepOutputs(
        step,
        np.array([number for one in steps for number in one.numbers], np.int64),
        tokens,
        counts,
        tuple(end for one in steps for end in one.finished) + tuple(ends),
        logprobs,
        prompt_logprobs,
    )
