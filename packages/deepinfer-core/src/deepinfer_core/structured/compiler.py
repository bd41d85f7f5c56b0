"""`GrammarCompiler`: from a request to a compiled grammar, off the step loop, remembered by (grammar, vocabulary).

    submit ─► cache? ─► sandbox (child process, deadline) ─► llguidance in this process ─► cache ─► CompiledGrammar
                             └─ too slow, too large, crash, cannot be enforced ─► GrammarError, remembered too

One worker thread compiles; llguidance works without the interpreter lock. Nothing is imported, started or built before
the first grammar is asked for.
"""

from __future__ import annotations

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
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._tools: tuple[Vocabulary, LLTokenizer, Sandbox] | None = None
        self._closed = False

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """The compiled grammar of a request; waits for it. Raises GrammarError with the reason."""
        return self.submit(structured).result()

    def submit(self, structured: StructuredOutput) -> Future[CompiledGrammar]:
        """The same without waiting."""
        given = grammar_text(structured)
        found = self._cache.get(given)
        if found is not None:
            return _done(found)
        with self._lock:
            if self._closed:
                raise GrammarError("the engine is closed; no grammar can be compiled any more")
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
            return self._worker.submit(self._compile, given)

    def close(self) -> None:
        """End the worker and its child process."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(cancel_futures=True)
        if self._tools is not None:
            self._tools[2].close()

    @property
    def num_cached_bytes(self) -> int:
        """Memory that the cached grammars are charged with."""
        return self._cache.num_bytes

    def _compile(self, given: GrammarText) -> CompiledGrammar:
        """Runs in the worker."""
        found = self._cache.get(given) or self._compiled_or_refused(given)
        self._cache.put(given, found)
        if isinstance(found, GrammarError):
            raise _fresh(found)
        return found

    def _compiled_or_refused(self, given: GrammarText) -> CompiledGrammar | GrammarError:
        vocabulary, tokenizer, sandbox = self._prepared()
        try:
            source = sandbox.convert(given)
            return CompiledGrammar(source, vocabulary, start_matcher(tokenizer, source.text))
        except GrammarError as error:
            return error

    def _prepared(self) -> tuple[Vocabulary, LLTokenizer, Sandbox]:
        if self._tools is None:
            vocabulary = Vocabulary.of(self._tokenizer)
            tokenizer = build_tokenizer(vocabulary, _encoder(self._tokenizer))
            self._tools = vocabulary, tokenizer, Sandbox(vocabulary, deadline_s=self._deadline_s)
        return self._tools


class _Cache:
    """Least recently used first, bounded by bytes; holds refusals beside grammars."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[GrammarText, CompiledGrammar | GrammarError] = OrderedDict()
        self.num_bytes = 0

    def get(self, given: GrammarText) -> CompiledGrammar | GrammarError | None:
        with self._lock:
            if given in self._entries:
                self._entries.move_to_end(given)
            return self._entries.get(given)

    def put(self, given: GrammarText, found: CompiledGrammar | GrammarError) -> None:
        with self._lock:
            old = self._entries.pop(given, None)
            if old is not None:
                self.num_bytes -= _num_bytes(given, old)
            self._entries[given] = found
            self.num_bytes += _num_bytes(given, found)
            while self.num_bytes > self._max_bytes:
                oldest, entry = self._entries.popitem(last=False)
                self.num_bytes -= _num_bytes(oldest, entry)


def _num_bytes(given: GrammarText, found: CompiledGrammar | GrammarError) -> int:
    own = _REFUSAL_BYTES if isinstance(found, GrammarError) else found.num_bytes
    return own + len(given.text)


def _done(found: CompiledGrammar | GrammarError) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    if isinstance(found, GrammarError):
        future.set_exception(_fresh(found))
    else:
        future.set_result(found)
    return future


def _fresh(error: GrammarError) -> GrammarError:
    """A copy without traceback and notes: the remembered one may be raised many times."""
    return GrammarError(*error.args)


def _encoder(tokenizer: TokenizerLike) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_bos=False)
