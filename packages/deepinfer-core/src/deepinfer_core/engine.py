"""`Engine`: one model, many requests at once, each an asynchronous stream of chunks.

    engine = Engine("tiny")
    async for chunk in engine.add_request("The sea", SamplingParams(max_tokens=50)):
        print(chunk.text, end="")
    await engine.close()

    asyncio tasks --commands--> engine thread: scheduler, loop, answers --call_soon_threadsafe--> one queue a request

The scheduler belongs to the engine thread alone. A stream that is closed, or whose task is cancelled, aborts its
request. If the engine itself fails, every open stream raises EngineError and new requests are refused.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from deepinfer_core.config.engine import EngineConfig, resolve_settings
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.errors import DeepInferError, EngineError, RequestError
from deepinfer_core.outputs import Chunk, RequestOutput
from deepinfer_core.requests import AnswerBook, PreparedRequest, Prompt, RequestFactory
from deepinfer_core.runtime.announce import start_announced
from deepinfer_core.scheduling.scheduler import check_order
from deepinfer_core.text import Tokenizer

__all__ = ["Engine", "RequestStream"]

type _Command = Callable[[], None]
type _Piece = Chunk | DeepInferError
type _Put = Callable[[_Piece], None]
type _Abort = Callable[[PreparedRequest], None]


class RequestStream(AsyncIterator[Chunk]):
    """The pieces of one request: `ready`, `text` .., `finish` once an answer; then it ends. See outputs/chunks.py."""

    def __init__(self, request: PreparedRequest, pieces: asyncio.Queue[_Piece | None], abort: _Abort) -> None:
        self._request, self._pieces = request, pieces
        self._open_answers = request.params.n
        self._abort = weakref.finalize(self, abort, request)  # also when the last reference to the stream goes
        self._abort.atexit = False

    @property
    def output(self) -> RequestOutput:
        """The answer as `LLM.generate` would return it; complete when the stream has ended."""
        return self._request.output

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._open_answers == 0:
            raise StopAsyncIteration
        try:
            piece = await self._pieces.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if piece is None or self._open_answers == 0:  # over since this reader began to wait
            self._end()
            raise StopAsyncIteration
        if isinstance(piece, DeepInferError):
            await self.aclose()
            raise piece
        if piece.kind == "finish":
            self._open_answers -= 1
            if self._open_answers == 0:
                self._abort.detach()
                self._end()
        return piece

    async def aclose(self) -> None:
        """Abort the request if it still runs; its blocks are free after the next step."""
        self._end()
        self._abort()

    def _end(self) -> None:
        """Nothing follows. Wakes one reader that still waits; that one comes here too and wakes the next."""
        self._open_answers = 0
        self._pieces.put_nowait(None)


class Engine:
    """Serves requests of asyncio tasks. Arguments and settings are those of `LLM`."""

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
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()
        self._open: dict[int, _Put] = {}  # by id of the request; the engine thread's
        self._error: EngineError | None = None  # why nothing runs any more
        self._has_ended = False  # the engine thread takes no more commands
        self._lock = threading.RLock()  # of _has_ended; a finalizer may come here in the middle of it
        self._thread = threading.Thread(target=self._work, name="deepinfer-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and answer."""
        return self._engine.scheduler.max_model_len

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant_salt: str = "",
        parse_special: bool = False,
    ) -> RequestStream:
        """Queue one request; call it in the asyncio loop that will read the stream.

        prompt: a text or token ids. priority: -1,000..1,000, lower goes first. tenant_salt: cached prefixes are shared
        only between requests with the same salt. Raises RequestError before any work. The stream raises QueueFullError
        where too many wait, and GrammarError for a grammar that cannot be compiled or enforced.
        """
        if self._error is not None or not self._thread.is_alive():
            raise self._error or EngineError("the engine is closed; make a new one")
        check_order(priority, tenant_salt)
        params = SamplingParams() if sampling_params is None else sampling_params
        request = self._factory.prepare(prompt, params, parse_special=parse_special)
        pieces: asyncio.Queue[_Piece | None] = asyncio.Queue()
        put = _threadsafe_put(_running_loop(), pieces)
        self._factory.start(request)
        request.stream_to(put)

        def submit(_: object = None) -> None:
            self._tell(lambda: self._submit(request, put, priority, tenant_salt))

        if request.grammar is None:
            submit()
        else:  # the step loop never waits for a grammar
            request.grammar.add_done_callback(submit)
        return RequestStream(request, pieces, self._abort)

    def statistics(self) -> dict[str, object]:
        """Counters since the start, by name with units."""
        return self._engine.statistics()

    async def close(self) -> None:
        """Abort what is open, finish the running step, end the thread. The engine cannot be used afterwards."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)  # it answers what comes later, too: see _tell
        self._factory.close()
        self._engine.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # ---- the engine thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._obey():
                self._step()
            self._drain()
        except Exception as error:  # whatever it is: nobody may wait for ever
            self._error = EngineError(f"the engine stopped: {type(error).__name__}: {error}")
            self._error.__cause__ = error
            for put in self._open.values():
                put(self._error)
        with self._lock:
            self._has_ended = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()  # with `_error` set, a request is only told why it does not run

    def _tell(self, command: _Command) -> None:
        """Hand `command` to the engine thread; when that has ended, carry it out here. From any thread."""
        with self._lock:
            if not self._has_ended:
                self._commands.put(command)
                return
        command()

    def _obey(self) -> bool:
        """Carry out the commands that are there, or wait for one if nothing runs. False: close."""
        while not (self._commands.empty() and self._engine.loop.has_work):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _step(self) -> None:
        for request in self._book.distribute(self._engine.loop.step()):
            self._open.pop(id(request), None)

    def _drain(self) -> None:
        """Abort everything, so that every stream ends and every block is free."""
        for number in self._book.all_numbers():
            self._engine.scheduler.abort(number)
        while self._engine.loop.has_work or self._book.all_numbers():
            self._step()
        self._error = EngineError("the engine is closed; make a new one")

    def _submit(self, request: PreparedRequest, put: _Put, priority: int, tenant_salt: str) -> None:
        if self._error is not None:
            put(self._error)
            return
        if request.is_abandoned:
            return
        try:
            self._book.submit(request, priority=priority, tenant_salt=tenant_salt)
        except RequestError as error:
            put(error)
        except Exception as error:  # costs this request alone
            failure = EngineError(f"the request could not be queued: {type(error).__name__}: {error}")
            failure.__cause__ = error
            put(failure)
        else:
            self._open[id(request)] = put

    def _abort(self, request: PreparedRequest) -> None:
        """Called from any thread; does nothing for a request that has ended."""

        def command() -> None:
            request.is_abandoned = True
            for number in self._book.open_numbers(request):
                self._engine.scheduler.abort(number)

        self._tell(command)


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise EngineError("no asyncio loop runs in this thread; call add_request in the one that reads") from error


def _threadsafe_put(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[_Piece | None]) -> _Put:
    def put(piece: _Piece) -> None:
        # A loop that was closed meanwhile has no reader left.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    return put
