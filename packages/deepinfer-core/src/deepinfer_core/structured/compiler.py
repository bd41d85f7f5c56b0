"""`GrammarCompiler`: from a request to a compiled grammar, off the step loop, remembered by (grammar, vocabulary).

    submit ─► cache? ─► sandbox (child process, deadline) ─► llguidance in this process ─► cache ─► CompiledGrammar
                             └─ too slow, too large, crash, cannot be enforced ─► GrammarError, remembered too

Up to four worker threads compile, each with a child process of its own, so that a hostile grammar, which takes its
whole deadline, holds up nobody's. Nothing is imported, started or built before the first grammar is asked for, and no
second child before two grammars come at once.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from deepinfer_core.config.checks import check_integer
from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import ConfigError, GrammarError
from deepinfer_core.structured.engine import build_tokenizer, start_matcher
from deepinfer_core.structured.limits import COMPILE_DEADLINE_S
from deepinfer_core.structured.sandbox import Sandbox
from deepinfer_core.structured.source import GrammarSource, GrammarText, grammar_text
from deepinfer_core.structured.vocabulary import TokenizerLike, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["CompiledGrammar", "GrammarCompiler"]

DEFAULT_CACHE_BYTES: Final = 256 << 20
# llguidance doesn't say how much memory a grammar takes. Measured as growth of the process: 67 kB on average for the
# 300 schemas of the tests (440 bytes of text), up to 93 bytes a byte of text for large ones (2,000 properties).
_FIXED_BYTES: Final = 64 << 10
_BYTES_A_BYTE: Final = 96
_REFUSAL_BYTES: Final = 1 << 10
_MOST_WORKERS: Final = min(4, os.cpu_count() or 1)
_CLOSED: Final = "the engine is closed; no grammar can be compiled any more"


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar for one vocabulary, shared by all requests that want it. `matcher` is only copied, never advanced."""

    source: GrammarSource
    vocabulary: Vocabulary
    matcher: LLMatcher

    @property
    def num_bytes(self) -> int:
        """Memory that it is charged with in the cache."""
        return _FIXED_BYTES + _BYTES_A_BYTE * len(self.source.text)


type _Found = CompiledGrammar | GrammarError


class GrammarCompiler:
    """Compiles for one tokenizer. Safe to use from several threads.

    max_cache_bytes: what compiled grammars may take together; the least recently used one goes first.
    deadline_s: for one grammar; one that takes longer is refused.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        max_cache_bytes: int = DEFAULT_CACHE_BYTES,
        deadline_s: float = COMPILE_DEADLINE_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._cache = _Cache(check_integer("max_cache_bytes", max_cache_bytes, 0, 1 << 40, ConfigError))
        self._lock = threading.Lock()  # of everything below but the tools
        self._workers: ThreadPoolExecutor | None = None
        self._running: dict[GrammarText, Future[_Found]] = {}
        self._sandboxes: list[Sandbox] = []
        self._free: list[Sandbox] = []  # of them
        self._closed = False
        self._tools_lock = threading.Lock()
        self._tools: tuple[Vocabulary, LLTokenizer] | None = None

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """The compiled grammar of a request; waits for it. Raises GrammarError with the reason."""
        return self.submit(structured).result()

    def submit(self, structured: StructuredOutput) -> Future[CompiledGrammar]:
        """The same without waiting. Who asks for a grammar that is being compiled waits for that one."""
        given = grammar_text(structured)
        answer: Future[CompiledGrammar] = Future()
        with self._lock:
            found = self._cache.get(given)
            compiling = None if found is not None else self._running.get(given) or self._start(given)
        if found is not None:
            _settle(answer, found)
        if compiling is not None:
            compiling.add_done_callback(lambda done: _follow(answer, done))
        return answer

    def close(self) -> None:
        """End the workers and their child processes."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    @property
    def num_cached_bytes(self) -> int:
        """Memory that the cached grammars are charged with."""
        return self._cache.num_bytes

    def _start(self, given: GrammarText) -> Future[_Found]:
        if self._closed:
            raise GrammarError(_CLOSED)
        if self._workers is None:
            self._workers = ThreadPoolExecutor(_MOST_WORKERS, thread_name_prefix="grammar-compiler")
        compiling = self._running[given] = self._workers.submit(self._compile, given)
        return compiling

    def _compile(self, given: GrammarText) -> _Found:
        """Runs in a worker."""
        try:
            found = self._compiled_or_refused(given)
            self._cache.put(given, found)
            return found
        finally:
            with self._lock:
                del self._running[given]

    def _compiled_or_refused(self, given: GrammarText) -> _Found:
        vocabulary, tokenizer = self._prepared()
        sandbox = self._free_sandbox(vocabulary)
        try:
            source = sandbox.convert(given)
            return CompiledGrammar(source, vocabulary, start_matcher(tokenizer, source.text))
        except GrammarError as error:
            return error
        finally:
            with self._lock:
                self._free.append(sandbox)

    def _free_sandbox(self, vocabulary: Vocabulary) -> Sandbox:
        with self._lock:
            if not self._free:
                self._sandboxes.append(Sandbox(vocabulary, deadline_s=self._deadline_s))
                return self._sandboxes[-1]
            # One whose child was just killed only if there is no other: it waits until the next child has started.
            self._free.sort(key=lambda sandbox: sandbox.is_ready)
            return self._free.pop()

    def _prepared(self) -> tuple[Vocabulary, LLTokenizer]:
        with self._tools_lock:
            if self._tools is None:
                vocabulary = Vocabulary.of(self._tokenizer)
                self._tools = vocabulary, build_tokenizer(vocabulary, _encoder(self._tokenizer))
            return self._tools


class _Cache:
    """Least recently used first, bounded by bytes; holds refusals beside grammars."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[GrammarText, _Found] = OrderedDict()
        self.num_bytes = 0

    def get(self, given: GrammarText) -> _Found | None:
        with self._lock:
            if given in self._entries:
                self._entries.move_to_end(given)
            return self._entries.get(given)

    def put(self, given: GrammarText, found: _Found) -> None:
        with self._lock:
            old = self._entries.pop(given, None)
            if old is not None:
                self.num_bytes -= _num_bytes(given, old)
            self._entries[given] = found
            self.num_bytes += _num_bytes(given, found)
            while self.num_bytes > self._max_bytes:
                oldest, entry = self._entries.popitem(last=False)
                self.num_bytes -= _num_bytes(oldest, entry)


def _num_bytes(given: GrammarText, found: _Found) -> int:
    own = _REFUSAL_BYTES if isinstance(found, GrammarError) else found.num_bytes
    return own + len(given.text)


def _follow(answer: Future[CompiledGrammar], done: Future[_Found]) -> None:
    if done.cancelled():
        _settle(answer, GrammarError(_CLOSED))
    else:
        _settle(answer, done.exception() or done.result())


def _settle(answer: Future[CompiledGrammar], found: CompiledGrammar | BaseException) -> None:
    if not answer.set_running_or_notify_cancel():  # nobody waits for it any more
        return
    if isinstance(found, GrammarError):
        answer.set_exception(_fresh(found))
    elif isinstance(found, BaseException):
        answer.set_exception(found)
    else:
        answer.set_result(found)


def _fresh(error: GrammarError) -> GrammarError:
    """A copy without traceback and notes: the remembered one may be raised many times."""
    return GrammarError(*error.args)


def _encoder(tokenizer: TokenizerLike) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_bos=False)
