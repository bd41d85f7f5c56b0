"""From a prompt and parameters to what the scheduler takes, and back to outputs. Shared by `LLM` and `Engine`.

RequestFactory.prepare(prompt, params) -> PreparedRequest      checks everything, names it, draws its seeds
PreparedRequest.submit(scheduler)                              one sequence an answer
AnswerBook.distribute(step outputs)                            tokens, logprobs and ends to their answers
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, cast

import numpy as np

from deepinfer_core.config.checks import check_integers, shown
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import RequestError
from deepinfer_core.outputs import Answer, Chunk, ChunkText, RequestOutput, logprob_table
from deepinfer_core.runtime.running import RequestQueue, RunningEngine
from deepinfer_core.sampling import fork_seed, request_seed
from deepinfer_core.scheduling.plan import TokenLogprobs
from deepinfer_core.scheduling.request import Finished, FinishReason, StepOutputs, TokenWatcher
from deepinfer_core.structured import CompiledGrammar, GrammarCompiler, GrammarConstraint, WatcherChain
from deepinfer_core.text import Tokenizer

__all__ = [
    "AnswerBook",
    "ChunkSink",
    "PreparedRequest",
    "Prompt",
    "RequestFactory",
    "as_list",
    "params_list",
    "prompt_list",
]

type Prompt = str | Sequence[int] | Mapping[str, Any]
type ChunkSink = Callable[[Chunk], None]

_log = logging.getLogger(__name__)
_COLLAPSED = (
    "hardly any draft is accepted: answers are right, but not faster than without drafts. The drafter was probably "
    "trained for other weights; take the checkpoint's own, or num_drafts=0"
)
_FULL_PREFILL_NOTE = "prompt_logprobs: the whole prompt was computed through all layers, and no cached prefix was used"


class PreparedRequest:
    """One prompt and its n answers; `sink` is told every piece as it comes."""

    def __init__(self, tokenizer: Tokenizer, text: str | None, token_ids: list[int], params: SamplingParams) -> None:
        self._tokenizer, self.token_ids, self.params = tokenizer, token_ids, params
        self.output = RequestOutput("", text, token_ids, None)
        self.answers: list[Answer] = []
        self.numbers: list[int] = []  # of its answers in the scheduler, once it is submitted
        self.sink: ChunkSink | None = None
        self.is_abandoned = False  # its stream was closed, perhaps before its grammar was compiled
        self.grammar: Future[CompiledGrammar] | None = None  # of params.structured, compiled in the background
        self._texts: list[ChunkText] = []
        self._is_ready = False
        self._scored: list[TokenLogprobs] = []

    def start(self, request_id: str, seed: int) -> None:
        """Name it, and make its answers, each with its own seed."""
        seeds = [fork_seed(seed, index) for index in range(self.params.n)]
        self.answers = [Answer(self._tokenizer, self.params, index, one) for index, one in enumerate(seeds)]
        self.output.request_id, self.output.seed = request_id, seed
        self.output.outputs = [answer.output for answer in self.answers]
        if self.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]
            self.output.notes = (_FULL_PREFILL_NOTE,)

    def stream_to(self, sink: ChunkSink) -> None:
        """Tell `sink` every piece from now on."""
        self.sink = sink
        self._texts = [ChunkText(self._tokenizer, self.params) for _ in self.answers]

    def constraint(self) -> GrammarConstraint | None:
        """A fresh one for an answer; None without structured output. Waits for the grammar; raises GrammarError."""
        if self.grammar is None or self.params.structured is None:
            return None
        return GrammarConstraint(self.grammar.result(), self.params.structured, self.token_ids)

    # ---- what happens to it ------------------------------------------------------------------------------------------

    def ready(self, hit_tokens: int, fingerprint: str) -> None:
        """It has begun to give tokens, or ended without any."""
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, hit_tokens)
        if self.sink is not None and not self._is_ready:
            prompt_tokens = len(self.token_ids)
            chunk = Chunk(
                "ready",
                self.output.request_id,
                prompt_tokens=prompt_tokens,
                cached_tokens=hit_tokens,
                fingerprint=fingerprint,
            )
            self.sink(chunk)
        self._is_ready = True

    def add(self, answer: Answer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Committed tokens of one answer."""
        answer.add(token_ids, logprobs)
        if self.sink is None:
            return
        index, kept = answer.output.index, answer.output.logprobs
        self.sink(
            Chunk(
                "text",
                self.output.request_id,
                index,
                text=self._texts[index].push(token_ids),
                token_ids=tuple(token_ids),
                logprobs=None if kept is None else tuple(kept[len(kept) - len(token_ids) :]),
            )
        )

    def add_prompt_logprobs(self, answer: Answer, entries: Sequence[TokenLogprobs]) -> None:
        """Every answer computes them; they are the same, so those of the first are kept."""
        if answer is self.answers[0]:
            self._scored += entries

    def finish(self, answer: Answer, end: Finished) -> None:
        """One answer is over; the last one completes the output."""
        answer.finish(end)
        if self.output.finished and self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs += [logprob_table(entry, self._tokenizer) for entry in self._scored]
        if self.sink is not None:
            self._tell_end(self.sink, answer, end)

    def fail(self, answer: Answer, number: int, reason: str) -> None:
        """One answer is over because its output could not be made or handed out."""
        count = len(answer.output.token_ids)
        with suppress(Exception):  # the reason stands before the text, which may be what failed
            answer.finish(Finished(number, FinishReason.ERROR, len(self.token_ids), count, error=reason))
        if self.sink is not None:
            request_id, index = self.output.request_id, answer.output.index
            with suppress(Exception):  # the sink may be what failed
                self.sink(Chunk("finish", request_id, index, finish_reason="error", error=reason, output_tokens=count))

    def _tell_end(self, sink: ChunkSink, answer: Answer, end: Finished) -> None:
        request_id, index = self.output.request_id, answer.output.index
        rest = self._texts[index].finish()
        if rest:
            sink(Chunk("text", request_id, index, text=rest))
        sink(
            Chunk(
                "finish",
                request_id,
                index,
                finish_reason=answer.output.finish_reason,
                stop_reason=answer.output.stop_reason,
                error=answer.output.error,
                output_tokens=end.output_tokens,
                seed=answer.output.seed,
            )
        )


class RequestFactory:
    """Checks prompts and parameters against one engine; raises before any work."""

    def __init__(self, engine: RunningEngine, seed: int | None) -> None:
        self._engine, self._seed = engine, seed
        self._grammars = GrammarCompiler(engine.tokenizer)
        self._arrivals = count()  # threads may share a factory: taking the next number is atomic

    def prepare(self, prompt: Prompt, params: SamplingParams, *, parse_special: bool = False) -> PreparedRequest:
        """Check one request and begin to compile its grammar. It has no name and no seed until `start`.

        Raises RequestError, or GrammarError for a grammar that is refused at sight; one that turns out to be
        impossible when it is compiled is the error of `PreparedRequest.grammar`.
        """
        text, token_ids = self._encode(prompt, parse_special)
        self._check(token_ids, params)
        request = PreparedRequest(self._engine.tokenizer, text, token_ids, params)
        if params.structured is not None:
            request.grammar = self._grammars.submit(params.structured)
        return request

    def close(self) -> None:
        """End the grammar compiler."""
        self._grammars.close()

    def start(self, request: PreparedRequest) -> None:
        """Give it its arrival number and the seeds that follow from it."""
        request.output.sampling_params = request.params
        request.output.provenance = self._engine.provenance
        number = next(self._arrivals)
        request.start(str(number), request_seed(request.params.seed, self._seed, number))

    def _encode(self, prompt: Prompt, parse_special: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids")]
            if unknown or len(prompt) != 1:
                raise RequestError(f"the prompt is {shown(prompt)}; give it one key, prompt or prompt_token_ids")
            ((key, value),) = prompt.items()
            if isinstance(value, str) != (key == "prompt"):
                raise RequestError(f"{key} is {shown(value)}; it must be a {'text' if key == 'prompt' else 'list'}")
            prompt = cast("Prompt", value)
        tokenizer = self._engine.tokenizer
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give at least one character")
            return prompt, tokenizer.encode(prompt, parse_special=parse_special)
        last = tokenizer.num_tokens - 1
        return None, list(check_integers("prompt_token_ids", prompt, 0, last, 2**26, RequestError))

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance] -- comes from the user
            raise RequestError(f"sampling_params has {shown(params)}; it must be a SamplingParams")
        params.check_vocabulary(self._engine.tokenizer.num_tokens)
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token id")
        limit = self._engine.scheduler.max_model_len
        if len(token_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; with one for the answer it must stay below "
                f"{limit}, the smallest of the model's context, max_model_len and what the cache holds"
            )


class AnswerBook:
    """Which scheduler number belongs to which answer. Used by one thread, the one that steps the engine."""

    def __init__(self, scheduler: RequestQueue, fingerprint: str) -> None:
        self._scheduler, self._fingerprint = scheduler, fingerprint
        self._has_warned = False  # of a drafter that does not fit
        self._open: dict[int, tuple[PreparedRequest, Answer]] = {}

    def submit(self, request: PreparedRequest, *, priority: int = 0, tenant_salt: str = "") -> list[int]:
        """Queue every answer of `request`; the numbers, one an answer. If one is refused none stays. RequestError.

        Waits for the request's grammar.
        """
        numbers = request.numbers
        try:
            for answer in request.answers:
                constraint = request.constraint()
                watchers = [watcher for watcher in (constraint, answer.watcher) if watcher is not None]
                number = self._scheduler.add(
                    np.array(request.token_ids, np.int64),
                    request.params,
                    seed=answer.output.seed,
                    priority=priority,
                    tenant_salt=tenant_salt,
                    watcher=_watch_all(watchers),
                    constraint=constraint,
                )
                numbers.append(number)
                self._open[number] = (request, answer)
        except Exception:
            for number in numbers:
                self._scheduler.abort(number)
                del self._open[number]
            raise
        return numbers

    def distribute(self, outputs: StepOutputs) -> list[PreparedRequest]:
        """Hand the results of a step to their answers; the requests that are complete now."""
        complete: list[PreparedRequest] = []
        hits_of_ended = {end.number: end.hit_tokens for end in outputs.finished}  # the scheduler has forgotten them
        for index, (number, tokens) in enumerate(outputs):
            entry = self._open.get(number)
            if entry is not None:
                request, answer = entry
                try:  # not `_failing_alone`: this runs for every request and step
                    if not answer.output.token_ids:
                        known = hits_of_ended.get(number)
                        hits = self._scheduler.hit_tokens(number) if known is None else known
                        request.ready(hits, self._fingerprint)
                    request.add(answer, tokens, outputs.logprobs.get(index, ()))
                except Exception as error:
                    self._fail(request, error, complete)
        for number, entries in outputs.prompt_logprobs.items():
            if number in self._open:
                request, answer = self._open[number]
                request.add_prompt_logprobs(answer, entries)
        for end in outputs.finished:
            entry = self._open.get(end.number)
            if entry is not None:
                request, answer = entry
                with self._failing_alone(request, complete):
                    request.ready(end.hit_tokens, self._fingerprint)
                    request.finish(answer, end)
                    del self._open[end.number]
                    if request.output.finished:
                        complete.append(request)
        if complete and not self._has_warned and self._scheduler.drafter_has_collapsed:
            self._has_warned = True
            _log.warning("%s", _COLLAPSED)
        return complete

    @contextmanager
    def _failing_alone(self, request: PreparedRequest, complete: list[PreparedRequest]) -> Generator[None]:
        """What goes wrong with the text or the chunks of one request ends that request: others are in the same step."""
        try:
            yield
        except Exception as error:
            self._fail(request, error, complete)

    def _fail(self, request: PreparedRequest, error: Exception, complete: list[PreparedRequest]) -> None:
        reason = f"the output could not be handed out: {type(error).__name__}: {error}"
        for number in self.open_numbers(request):
            self._scheduler.abort(number)
            _, answer = self._open.pop(number)
            request.fail(answer, number, reason)
        complete.append(request)

    def all_numbers(self) -> list[int]:
        """Numbers of all answers that still run."""
        return list(self._open)

    def open_numbers(self, request: PreparedRequest) -> list[int]:
        """Numbers of the answers of `request` that still run."""
        return [number for number in request.numbers if number in self._open]


def _watch_all(watchers: list[TokenWatcher]) -> TokenWatcher | None:
    return None if not watchers else watchers[0] if len(watchers) == 1 else WatcherChain(watchers)


def prompt_list(prompts: Any, prompt_token_ids: Any) -> list[Prompt]:
    """One prompt or many, texts, ids or mappings, as a list. RequestError."""
    if (prompts is None) == (prompt_token_ids is None):
        raise RequestError("give either prompts or prompt_token_ids")
    if isinstance(prompts, (str, Mapping)):
        return [cast("Prompt", prompts)]
    if prompt_token_ids is None:
        return as_list("prompts", prompts)
    given = as_list("prompt_token_ids", prompt_token_ids)
    if not (given and isinstance(given[0], (Sequence, np.ndarray))):
        return [given]
    return [as_list("prompt_token_ids", one) if isinstance(one, np.ndarray) else one for one in given]


def params_list(params: Any, count: int) -> list[SamplingParams]:
    """One set of parameters for each of `count` prompts. RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    given = as_list("sampling_params", params)
    if len(given) != count:
        raise RequestError(f"sampling_params has {len(given)} entries for {count} prompts; give one, or one each")
    return given


def as_list(name: str, values: Any) -> list[Any]:
    """A sequence or array of the user's as a list. RequestError for a text and for anything else."""
    if isinstance(values, np.ndarray):
        return cast("list[Any]", values.tolist())
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise RequestError(f"{name} is {shown(values)}; give a list")
    return list(cast("Sequence[Any]", values))
