"""`LLM`: one model in this process, asked for whole answers.

    from deepinfer_core import LLM, SamplingParams

    llm = LLM("tiny")
    for output in llm.generate(["The sea", "A list:"], SamplingParams(temperature=0.7)):
        print(output.prompt, output.outputs[0].text)

A request's tokens are a function of weights, prompt, parameters and seed: not of what else is asked for in the same
call (docs/determinism.md). The seed of every answer is in its output.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from deepinfer_core.chat import ChatCodec, ChatOutput, ChatPrompt
from deepinfer_core.config.checks import check_flag
from deepinfer_core.config.engine import EngineConfig, resolve_settings
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import EngineError, RequestError
from deepinfer_core.outputs import Chunk, Provenance, RequestOutput
from deepinfer_core.requests import (
    AnswerBook,
    PreparedRequest,
    Prompt,
    RequestFactory,
    as_list,
    params_list,
    prompt_list,
)
from deepinfer_core.runtime.announce import start_announced
from deepinfer_core.runtime.interrupts import DeferredInterrupt
from deepinfer_core.scheduling.request import StepOutputs
from deepinfer_core.text import Tokenizer

__all__ = ["LLM"]


@dataclass(slots=True)
class _Call:
    """One `generate` or one stream: how many of its requests are not finished, and those not queued yet."""

    num_open: int
    queued: deque[PreparedRequest]


class LLM:
    """Loads a model and generates.

    model: a checkpoint folder, a name on the hub, or "tiny"; None = `DEEPINFER_HF_MODEL_DIR`, else the default of the
    device. tokenizer: a folder or file in place of the model's own. settings: any setting of `EngineConfig` by its flat
    name (`deepinfer generate --help` lists them); an unknown one is a ConfigError.
    """

    def __init__(self, model: str | Path | None = None, tokenizer: str | Path | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = str(model)
        if tokenizer is not None:
            settings["tokenizer"] = str(tokenizer)
        resolved = resolve_settings(settings)
        self.config: EngineConfig = resolved.config
        self._engine = start_announced(resolved)
        self._factory = RequestFactory(self._engine, self.config.seed)
        self._book = AnswerBook(self._engine.scheduler, self._engine.fingerprint)
        self._codec: ChatCodec | None = None  # made when the first chat begins
        self._lock = threading.Lock()  # held for a step: calls of several threads share the engine, a step in turn
        self._call_of: dict[PreparedRequest, _Call] = {}
        self._dropped: deque[PreparedRequest] = deque()  # nobody waits for them any more; see _abort
        self._closed = False
        self._process_id = os.getpid()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def provenance(self) -> Provenance:
        """What answers of this object are a function of, beside prompt, parameters and seed."""
        return self._engine.provenance

    def statistics(self) -> dict[str, object]:
        """Counters since the start; flat names with units."""
        return self._engine.statistics()

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and answer."""
        return self._engine.scheduler.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: object = None,
        *,
        parse_special: bool = False,
    ) -> list[RequestOutput]:
        """Answer every prompt; outputs are in the order of the prompts.

        prompts: a text, a list of texts, or mappings with "prompt" or "prompt_token_ids". prompt_token_ids: ids in
        their place, used as they are. sampling_params: one for all, or one each; None = `SamplingParams()`.
        parse_special: spellings of special tokens in texts become these tokens; otherwise they are plain text.

        Raises RequestError, before any work, for a prompt or parameters that cannot run. A request that fails while it
        runs has finish_reason "error" in its output and leaves the others alone.
        """
        if multi_modal_data is not None:
            raise RequestError("multi_modal_data is given; this version reads text only")
        requests = self._requests(prompt_list(prompts, prompt_token_ids), sampling_params, parse_special)
        with self._submitted(requests) as call:
            self._run(call, use_tqdm and not self.config.quiet)
        return [request.output for request in requests]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, parse_special: bool = False
    ) -> Generator[Chunk]:
        """Answer one prompt piece by piece: `ready`, then `text` as tokens come, then `finish` (outputs/chunks.py).

        Closing the generator aborts the request. Raises as `generate` does: at once for a prompt or parameters that
        cannot run, with a piece for what goes wrong later.
        """
        (request,) = self._requests([prompt], sampling_params, parse_special)
        return self._stream(request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        **fields: Any,
    ) -> ChatOutput:
        """Answer a conversation in the model's chat format.

        messages: as Chat Completions has them (system, user, assistant, tool). thinking: let the model think first.
        fields: any further field of a Chat Completions request: tools, tool_choice, response_format, reasoning_effort,
        stop, temperature ... sampling_params: what the request leaves open. Tool calls, JSON and strict schemas are
        enforced by a grammar. Raises RequestError, before any work, for a request that cannot be converted.
        """
        codec, prompt = self._chat_prompt(messages, sampling_params, thinking, fields)
        (request,) = self._requests([prompt.token_ids], prompt.params, parse_special=False)
        return codec.collect(prompt, self._stream(request), request.output)

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        **fields: Any,
    ) -> Generator[dict[str, Any]]:
        """Like `chat`, as Chat Completions chunks (dictionaries) while they come. Closing it aborts the request."""
        codec, prompt = self._chat_prompt(messages, sampling_params, thinking, fields)
        (request,) = self._requests([prompt.token_ids], prompt.params, parse_special=False)
        return (event.to_dict() for event in codec.events(prompt, self._stream(request)))

    def close(self) -> None:
        """End the worker threads. The object cannot generate afterwards; calls that run in other threads raise."""
        with self._lock:
            self._closed = True
            self._factory.close()
            self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _requests(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, parse_special: bool
    ) -> list[PreparedRequest]:
        """All are checked before the first is numbered: a call that is refused changes no seed of the next."""
        requests: list[PreparedRequest] = []
        for index, (prompt, one) in enumerate(zip(prompts, params_list(params, len(prompts)), strict=True)):
            try:
                requests.append(self._factory.prepare(prompt, one, parse_special=parse_special))
            except RequestError as error:
                error.add_note(f"in prompts[{index}], counted from 0, of {len(prompts)}")
                raise
        for index, request in enumerate(requests):
            try:
                request.constraint()
            except RequestError as error:
                error.add_note(f"in prompts[{index}], counted from 0, of {len(prompts)}")
                raise
        with self._lock, DeferredInterrupt():  # the numbers of one call follow each other
            for request in requests:
                self._factory.start(request)
        return requests

    # ---- work -------------------------------------------------------------------------------------------------------

    def _stream(self, request: PreparedRequest) -> Generator[Chunk]:
        pieces: deque[Chunk] = deque()
        request.stream_to(pieces.append)
        with self._submitted([request]) as call:
            while pieces or call.num_open:
                if not pieces:
                    self._step(call)
                while pieces:
                    yield pieces.popleft()

    def _chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None,
        thinking: bool,
        fields: Mapping[str, Any],
    ) -> tuple[ChatCodec, ChatPrompt]:
        if self._codec is None:
            self._codec = ChatCodec(self._engine.folder, self.tokenizer.eos_token_id, self.max_model_len)
        body = {
            "messages": as_list("messages", messages),
            "thinking": {"type": "enabled" if check_flag("thinking", thinking, RequestError) else "disabled"},
        }
        return self._codec, self._codec.prepare(body | dict(fields), params)

    @contextmanager
    def _submitted(self, requests: list[PreparedRequest]) -> Generator[_Call]:
        """Queue them; whatever is unfinished at the end (an error, Ctrl-C, a closed stream) is aborted."""
        call = _Call(len(requests), deque(requests))
        try:
            with self._lock, DeferredInterrupt():
                self._check_usable()
                self._feed(call)
            yield call
        finally:
            self._abort(requests)

    def _feed(self, call: _Call) -> None:
        """Hand the scheduler what its waiting queue has room for; a call may be larger than the queue."""
        scheduler, limit = self._engine.scheduler, self.config.scheduler.max_num_waiting
        while call.queued:
            request = call.queued[0]
            if scheduler.num_waiting and scheduler.num_waiting + request.params.n > limit:
                return
            self._call_of[request] = call
            self._book.submit(request)
            call.queued.popleft()

    def _step(self, call: _Call) -> int:
        """A step for the requests of all threads, unless others have finished this call. Tokens that it brought."""
        with self._lock, DeferredInterrupt():
            self._check_usable()
            self._drop()
            if not call.num_open:
                return 0
            self._feed(call)
            outputs = self._engine.loop.step()
            self._distribute(outputs)
            return int(outputs.num_tokens.sum())

    def _distribute(self, outputs: StepOutputs) -> None:
        for request in self._book.distribute(outputs):
            call = self._call_of.pop(request, None)
            if call is not None:
                call.num_open -= 1

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed; make a new one")
        if os.getpid() != self._process_id:
            raise EngineError("this LLM was made before a fork, which its threads did not survive; make one here")

    def _abort(self, requests: list[PreparedRequest]) -> None:
        """End what is unfinished of them. A stream may be closed by the garbage collector in the middle of a step of
        the same thread: whoever holds the lock then does it, before the next step or after this one.
        """
        with DeferredInterrupt():
            self._dropped.extend(requests)
            while self._dropped and self._lock.acquire(blocking=False):
                try:
                    self._drop()
                finally:
                    self._lock.release()

    def _drop(self) -> None:
        engine = self._engine
        while self._dropped:
            request = self._dropped.popleft()
            self._call_of.pop(request, None)
            for number in self._book.open_numbers(request):
                engine.scheduler.abort(number)
        self._distribute(engine.scheduler.take_finished())
        while engine.loop.has_work and engine.scheduler.num_unfinished == 0:  # a step was launched for them
            self._distribute(engine.loop.step())

    def _run(self, call: _Call, show_progress: bool) -> None:
        with tqdm(total=call.num_open, desc="Generating", unit="prompt", disable=not show_progress) as bar:
            num_tokens = 0
            while call.num_open:
                num_before = call.num_open
                num_tokens += self._step(call)
                bar.update(num_before - call.num_open)
                seconds = float(bar.format_dict["elapsed"])
                if show_progress and seconds > 0:
                    bar.set_postfix_str(f"{num_tokens / seconds:.0f} tokens/s", refresh=False)
