"""`RankEngine`: the engine of one rank, served to a front end. Commands in, what each step committed out.

    obey the commands that are here ─► step, or keep the others company ─► report        until nobody has work: pause
        ▲                                                                                        │
        └───────────────────────── the next command, of whatever kind ◄──────────────────────────┘

Stop strings and grammars are watched here, where tokens are committed. A grammar is compiled in the background: neither
this rank nor the others wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue

import numpy as np

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import DeepInferError, ParallelError, PeerError
from deepinfer_core.outputs import Answer
from deepinfer_core.outputs.replay import params_from_json
from deepinfer_core.parallel.channel import Inbox, Outbox
from deepinfer_core.parallel.lockstep import Agreement, Notice
from deepinfer_core.runtime.assembly import AssembledEngine
from deepinfer_core.runtime.rank_messages import (
    Abort,
    Ask,
    Close,
    Command,
    Counters,
    Ready,
    Report,
    Start,
    Stepped,
    Submit,
    decode_command,
    encode,
    pack_tokens,
    unpack_tokens,
)
from deepinfer_core.runtime.rank_runner import RankRunner
from deepinfer_core.scheduling.request import Finished, FinishReason, StepOutputs
from deepinfer_core.structured import CompiledGrammar, GrammarCompiler, GrammarConstraint, WatcherChain

__all__ = ["RankEngine"]

_PAUSE_S = 5.0  # between looks whether the front end is still there
_EMPTY_STEP_S = 0.001  # after a step in which no rank had a row


class RankEngine:
    """Serves requests that come through `inbox` until it is told to close. Owns none of what it is given."""

    def __init__(self, engine: AssembledEngine, inbox: Inbox, outbox: Outbox) -> None:
        self._engine, self._inbox, self._outbox = engine, inbox, outbox
        self._together = engine.runner if isinstance(engine.runner, RankRunner) else None
        self._grammars = GrammarCompiler(engine.tokenizer)
        self._compiling: dict[int, Submit] = {}  # by the front end's number
        self._compiled: SimpleQueue[tuple[Submit, Future[CompiledGrammar]]] = SimpleQueue()
        self._own: dict[int, int] = {}  # front end's number -> the scheduler's
        self._theirs: dict[int, int] = {}  # and back
        self._begun: set[int] = set()  # front end's numbers that have given tokens
        self._ends: list[Finished] = []  # of requests that never reached the scheduler
        self._epoch = 0
        self._is_closing = self._is_paused = self._has_ended = False

    def serve(self) -> None:
        """Returns when the front end has closed the group. Raises ParallelError if the ranks lose each other, or the
        front end is gone.
        """
        engine = self._engine
        self._send(
            Ready(
                str(engine.folder),
                engine.fingerprint,
                engine.scheduler.max_model_len,
                engine.scheduler.ledger.pool.num_blocks,
                dict(engine.provenance.settings),
                engine.summary(),
                dict(engine.loaded_bytes),
            )
        )
        try:
            step = self._step if self._together is None or self._together.leads else self._follow
            while not self._has_ended:
                self._obey()
                if not self._is_paused:
                    step()
        finally:
            self._grammars.close()

    # ---- commands --------------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        for data in self._inbox.take(_PAUSE_S if self._is_paused else 0.0):
            self._is_paused = False
            self._carry_out(decode_command(data))
        if self._inbox.is_closed and not self._is_closing:
            raise ParallelError("the front end has ended")
        with suppress(Empty):
            while True:
                self._submit_compiled(*self._compiled.get_nowait())

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Start):
            raise ParallelError("the front end sent its settings twice")
        self._epoch = command.epoch
        if isinstance(command, Submit):
            self._accept(command)
        elif isinstance(command, Abort):
            self._abort(command.number)
        elif isinstance(command, Ask):
            self._send(Counters(self._engine.statistics()))
        elif isinstance(command, Close):
            self._is_closing = True
            for number in [*self._own, *self._compiling]:
                self._abort(number)

    def _accept(self, command: Submit) -> None:
        try:
            params = params_from_json(command.params)
            if params.structured is None:
                self._submit(command, params, None)
                return
            self._compiling[command.number] = command
            future = self._grammars.submit(params.structured)
            future.add_done_callback(lambda done: self._compiled.put((command, done)))
        except DeepInferError as error:
            self._compiling.pop(command.number, None)
            self._refuse(command, str(error))

    def _submit_compiled(self, command: Submit, future: Future[CompiledGrammar]) -> None:
        if self._compiling.pop(command.number, None) is None:  # aborted meanwhile
            return
        params = params_from_json(command.params)
        try:
            if params.structured is None:
                raise ParallelError("a grammar came for a request without one")
            constraint = GrammarConstraint(future.result(), params.structured, unpack_tokens(command.prompt).tolist())
            self._submit(command, params, constraint)
        except Exception as error:  # costs this request alone
            self._refuse(command, str(error))

    def _submit(self, command: Submit, params: SamplingParams, constraint: GrammarConstraint | None) -> None:
        answer = Answer(self._engine.tokenizer, params, 0, command.seed)
        watchers = [watcher for watcher in (constraint, answer.watcher) if watcher is not None]
        own = self._engine.scheduler.add(
            unpack_tokens(command.prompt),
            params,
            seed=command.seed,
            priority=command.priority,
            tenant_salt=command.tenant_salt,
            watcher=WatcherChain(watchers) if watchers else None,
            constraint=constraint,
        )
        self._own[command.number], self._theirs[own] = own, command.number

    def _refuse(self, command: Submit, error: str) -> None:
        self._ends.append(Finished(command.number, FinishReason.ERROR, len(command.prompt) // 4, 0, error=error))

    def _abort(self, number: int) -> None:
        waiting = self._compiling.pop(number, None)
        if waiting is not None:
            self._ends.append(Finished(number, FinishReason.ABORT, len(waiting.prompt) // 4, 0))
        elif number in self._own:
            self._engine.scheduler.abort(self._own[number])

    # ---- steps -----------------------------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        return self._engine.loop.has_work or bool(self._compiling)

    def _step(self) -> None:
        """A step, if there is one; if not, one of the others without rows from here, or a pause with them."""
        loop, together = self._engine.loop, self._together
        num_launched, num_steps = loop.num_launched, 0 if together is None else together.lockstep.num_steps
        self._share_rows()
        self._report(loop.step())
        if together is None:
            self._is_paused = not self._has_work
            self._has_ended = self._is_closing and self._is_paused
            return
        if together.broken is not None:
            raise together.broken
        if num_launched or loop.num_launched or together.lockstep.num_steps != num_steps:
            return
        notice = Notice(has_work=self._has_work, is_closing=self._is_closing, epoch=self._epoch)
        self._agree(lambda: together.join(notice))

    def _share_rows(self) -> None:
        """Plan the drafts with what the ranks agreed on last: some rank has so many rows without any."""
        cost = self._engine.scheduler.speculation.cost
        if cost is not None and self._together is not None and self._together.agreed is not None:
            cost.shared_rows = self._together.agreed.most_fixed_rows

    def _follow(self) -> None:
        """The step of this rank's leader, whatever it is."""
        together = self._together
        if together is None:
            raise ParallelError("a rank alone has nobody to follow")
        self._agree(lambda: together.follow(Notice(is_closing=self._is_closing, epoch=self._epoch)))

    def _agree(self, step: Callable[[], Agreement]) -> None:
        with suppress(PeerError):  # the requests, if any, are another rank's to run again
            agreed = step()
            self._is_paused, self._has_ended = agreed.pauses, agreed.closes
            if not agreed.most_rows and not agreed.pauses:  # somebody waits for a grammar, or for commands to arrive
                time.sleep(_EMPTY_STEP_S)

    # ---- reports ---------------------------------------------------------------------------------------------------

    def _report(self, outputs: StepOutputs) -> None:
        numbers = [self._theirs[own] for own in outputs.number.tolist()]
        prompts = {self._theirs[own]: list(entries) for own, entries in outputs.prompt_logprobs.items()}
        new = [number for number in numbers if number not in self._begun]
        hits = {number: self._engine.scheduler.hit_tokens(self._own[number]) for number in new}
        self._begun.update(hits)
        ends = [self._forget(end) for end in outputs.finished] + self._ends
        self._ends = []
        if not (numbers or prompts or ends):
            return
        kept = np.arange(outputs.tokens.shape[1]) < outputs.num_tokens[:, None]
        self._send(
            Stepped(
                numbers=numbers,
                counts=outputs.num_tokens.tolist(),
                tokens=pack_tokens(outputs.tokens[kept]),
                logprobs={index: list(entries) for index, entries in outputs.logprobs.items()},
                prompt_logprobs=prompts,
                finished=ends,
                hits=hits,
                drafter_has_collapsed=self._engine.scheduler.drafter_has_collapsed,
            )
        )

    def _forget(self, end: Finished) -> Finished:
        number = self._theirs.pop(end.number)
        del self._own[number]
        self._begun.discard(number)
        return end._replace(number=number)

    def _send(self, report: Report) -> None:
        with suppress(ParallelError) if self._is_closing else nullcontext():  # nobody reads what comes after the end
            self._outbox.send(encode(report))
