"""Requests that come, share prefixes and are disturbed, on a real engine; and the same requests alone.

    Job         one request: prompt, parameters, seed; what it must give is a function of it alone
    Traffic     when a job comes, with which priority, and when it is aborted, if ever
    Server      an engine that plays traffic step by step, and watches the shared blocks of its cache
    Oracle      the plain loop, no drafts, no prefix cache, one request at a time, a prompt in one piece
    Setup       settings that must not matter
    check       plays traffic and holds every answer to the oracle's

Times are counted in steps of the engine, so a trace is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch

from deepinfer_core.config.engine import resolve_settings
from deepinfer_core.config.sampling import SamplingParams, StructuredOutput
from deepinfer_core.outputs import CompletionOutput
from deepinfer_core.requests import AnswerBook, PreparedRequest, RequestFactory
from deepinfer_core.runtime.assembly import AssembledEngine, assemble_engine

Style = Literal["greedy", "sampled", "forked", "stopped", "penalised", "regex", "json"]

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
STYLES: Mapping[Style, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 1.0, "ignore_eos": True, "logprobs": 0},
    "forked": {"temperature": 0.8, "top_p": 0.9, "n": 3},
    "stopped": {"temperature": 1.0, "stop": ["e", "th"], "stop_token_ids": list(range(40, 60)), "min_tokens": 2},
    "penalised": {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "regex": {"temperature": 1.0, "structured": StructuredOutput(regex="([a-d]{2,5} ){1,4}end")},
    "json": {"temperature": 1.0, "structured": StructuredOutput(json=SCHEMA)},
}


@dataclass(frozen=True)
class Job:
    """A prompt is the first `shared` tokens of one of three documents and `own` tokens that no other job has."""

    document: int
    shared: int
    own: int
    style: Style
    seed: int
    max_tokens: int

    def prompt(self, num_token_ids: int) -> list[int]:
        document, own = random.Random(self.document), random.Random(repr(self))
        tokens = [document.randrange(10, num_token_ids) for _ in range(self.shared)]
        return tokens + [own.randrange(10, num_token_ids) for _ in range(self.own)]

    def params(self) -> SamplingParams:
        return SamplingParams(**STYLES[self.style], seed=self.seed, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class Setup:
    """Settings that must not matter; `decoder_prefill` is the one that may."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk_tokens: int | None
    num_blocks: int
    num_drafts: int
    draft_schedule: str
    overlap: bool
    prefix_replay: str
    decoder_prefill: str


@dataclass(frozen=True)
class Traffic:
    """A job in a trace."""

    job: Job
    arrives: int = 0
    priority: int = 0
    aborted_after: int | None = None  # steps after its arrival


class Oracle:
    """What jobs give alone. Also prepares the requests of every server: they share one grammar compiler.

    settings: what changes the numbers, such as the kernels.
    """

    def __init__(self, model: str | Path, max_model_len: int, **settings: Any) -> None:
        self.model, self.max_model_len, self.settings = model, max_model_len, settings
        self._engines: dict[str, AssembledEngine] = {}
        self._known: dict[tuple[Job, str], list[CompletionOutput]] = {}
        self._factory = RequestFactory(self._engine("full"), 0)

    def prepare(self, job: Job) -> PreparedRequest:
        """A request for any engine with the same model."""
        prompt = job.prompt(self._engine("full").tokenizer.num_tokens)
        request = self._factory.prepare(prompt, job.params())
        self._factory.start(request)
        return request

    def answers(self, job: Job, decoder_prefill: str) -> list[CompletionOutput]:
        """The finished answers of `job`. `exact` is defined by what `full` gives."""
        form = "full" if decoder_prefill == "exact" else decoder_prefill
        if (job, form) not in self._known:
            engine, request = self._engine(form), self.prepare(job)
            book = AnswerBook(engine.scheduler, engine.fingerprint)
            book.submit(request)
            while not request.output.finished:
                book.distribute(engine.loop.step())
            self._known[job, form] = request.output.outputs
        return self._known[job, form]

    def close(self) -> None:
        self._factory.close()
        for engine in self._engines.values():
            engine.runner.close()

    def _engine(self, decoder_prefill: str) -> AssembledEngine:
        if decoder_prefill not in self._engines:
            self._engines[decoder_prefill] = engine_of(
                self.model,
                max_model_len=self.max_model_len,
                max_num_seqs=1,
                max_num_batched_tokens=self.max_model_len,
                num_drafts=0,
                overlap=False,
                prefix_replay="off",
                decoder_prefill=decoder_prefill,
                **self.settings,
            )
        return self._engines[decoder_prefill]


def engine_of(model: str | Path, **settings: Any) -> AssembledEngine:
    return assemble_engine(resolve_settings({"model": str(model), "quiet": True} | settings, {}).config)


@dataclass
class Server:
    """Plays traffic on an engine. `preempts`: steps before which the least urgent request loses its slot."""

    engine: AssembledEngine
    oracle: Oracle
    preempts: frozenset[int] = frozenset()
    steps: int = 0
    _digests: dict[tuple[int, bytes], bytes] = field(default_factory=dict)

    def play(self, traffic: Sequence[Traffic]) -> list[list[CompletionOutput]]:
        """The answers of every request, in the order of `traffic`."""
        book = AnswerBook(self.engine.scheduler, self.engine.fingerprint)
        start, requests = self.steps, [self.oracle.prepare(one.job) for one in traffic]
        waiting = set(range(len(traffic)))
        while waiting or book.all_numbers():
            now = self.steps - start
            for i in sorted(waiting):
                if traffic[i].arrives <= now or not book.all_numbers():
                    book.submit(requests[i], priority=traffic[i].priority)
                    waiting.remove(i)
            for one, request in zip(traffic, requests, strict=True):
                if one.aborted_after is not None and now >= one.arrives + one.aborted_after:
                    for number in book.open_numbers(request):
                        self.engine.scheduler.abort(number)
            self._disturb(now)
            book.distribute(self.engine.loop.step())
            # It would be computed again, and nothing but the time would tell.
            assert self.engine.scheduler.stats.failed_steps == 0
            self._watch_shared_blocks()
            self.steps += 1
        while self.engine.loop.has_work:  # a step that was launched before the last request ended
            self.engine.loop.step()
        self.engine.scheduler.check_idle()
        return [request.output.outputs for request in requests]

    def _disturb(self, now: int) -> None:
        scheduler = self.engine.scheduler
        if now in self.preempts and scheduler.num_running:
            scheduler._life.preempt(scheduler._table.least_urgent())

    def _watch_shared_blocks(self) -> None:
        """Nobody writes a block that the prefix index can hit."""
        digests: dict[tuple[int, bytes], bytes] = {}
        for block, key in self.engine.scheduler.ledger.index._key_of.items():
            parts = self.engine.runner.state.export_block(block).values()
            content = torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])
            digests[block, key] = blake2b(content.cpu().numpy()).digest()
            assert self._digests.get((block, key), digests[block, key]) == digests[block, key], f"block {block}"
        self._digests = digests


def check(oracle: Oracle, server: Server, traffic: Sequence[Traffic], decoder_prefill: str) -> None:
    """Every answer is the oracle's; of an aborted one its beginning."""
    for one, answers in zip(traffic, server.play(traffic), strict=True):
        for got, want in zip(answers, oracle.answers(one.job, decoder_prefill), strict=True):
            if got.finish_reason == "abort":
                assert one.aborted_after is not None
                assert got.token_ids == want.token_ids[: len(got.token_ids)]
            else:
                assert got == want


def play_anywhere(
    oracle: Oracle, setup: Setup, traffic: Sequence[Traffic], preempts: frozenset[int], **settings: Any
) -> None:
    """`check` on an engine of the oracle's model and numbers, with `setup` and other settings that must not matter."""
    engine = engine_of(oracle.model, max_model_len=oracle.max_model_len, **oracle.settings | vars(setup) | settings)
    try:
        check(oracle, Server(engine, oracle, preempts), traffic, setup.decoder_prefill)
    finally:
        engine.runner.close()
