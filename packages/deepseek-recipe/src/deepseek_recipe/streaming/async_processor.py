"""`AsyncStreamProcessor`: an engine's asynchronous chunks in, events out, and the engine released whatever happens.

    async with AsyncStreamProcessor(processor, engine.generate(...)) as events:
        async for event in events:
            await send(event)

The engine's iterator is closed as soon as the response is complete (a stop sequence ends it early), when the consumer
leaves, is cancelled or calls `aclose`, from this task or another, and when anything raises.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from types import TracebackType
from typing import Any

from deepseek_recipe.streaming.chunks import InferenceChunk
from deepseek_recipe.streaming.processor import StreamProcessor

__all__ = ["AsyncStreamProcessor"]


class AsyncStreamProcessor(AsyncIterator[Any]):
    """Events of one response. Owns `processor` and the iterator of `chunks`; one consumer at a time.

    Raises while iterating: what the engine raises, what `StreamProcessor.push` raises, and RuntimeError for a second
    consumer while the first one waits.
    """

    def __init__(self, processor: StreamProcessor, chunks: AsyncIterable[InferenceChunk]) -> None:
        self._processor = processor
        self._source = aiter(chunks)
        self._pending: deque[Any] = deque()
        self._pulling: asyncio.Task[Any] | None = None  # the consumer, while it waits for the engine
        self._is_woken = False  # whether `aclose` has cancelled that wait
        self._is_source_closed = False
        self._is_closed = False
        self._is_complete = False

    @property
    def finished(self) -> bool:
        """Whether the response is complete: the engine finished, ended, or a stop sequence was found."""
        return self._is_complete

    def __aiter__(self) -> AsyncStreamProcessor:
        return self

    async def __anext__(self) -> Any:
        if self._pulling is not None:
            raise RuntimeError("two tasks iterate over one AsyncStreamProcessor; give each response one consumer")
        try:
            while not self._pending and not self._is_closed and not self._is_complete:
                self._pending += await self._next_events()
        except BaseException:
            await self.aclose()
            raise
        if not self._pending:
            raise StopAsyncIteration
        return self._pending.popleft()

    async def aclose(self) -> None:
        """Stop the engine and drop what was not consumed. May be called at any time, any number of times.

        A consumer that waits in another task sees the end of the iteration.
        """
        self._is_closed = True
        self._pending.clear()
        self._processor.close()
        if self._pulling is None or self._pulling is asyncio.current_task():
            await self._close_source()
        elif not self._is_woken:
            self._is_woken = True
            self._pulling.cancel()  # that task closes the engine's iterator, which is in its hands

    async def __aenter__(self) -> AsyncStreamProcessor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _next_events(self) -> list[Any]:
        """The events of one more chunk; the engine is closed when they are the last."""
        chunk = await self._pull()
        if self._is_closed:
            return []
        events = self._processor.finish() if chunk is None else self._processor.push(chunk)
        if self._processor.finished:
            self._is_complete = True
            await self._close_source()
        return events

    async def _pull(self) -> InferenceChunk | None:
        """The next chunk; None at the end, and when `aclose` was called meanwhile."""
        task = self._pulling = asyncio.current_task()
        num_cancelled = _num_cancelled(task)
        try:
            return await anext(self._source)
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError:
            if not self._is_woken or not _is_forgiven(task, num_cancelled):
                raise
            await self._close_source()
            return None
        finally:
            self._pulling = None

    async def _close_source(self) -> None:
        close = getattr(self._source, "aclose", None)
        if close is not None and not self._is_source_closed:
            self._is_source_closed = True
            await close()


def _num_cancelled(task: asyncio.Task[Any] | None) -> int:
    """How often a task was cancelled and did not forgive; Python 3.10 does not count."""
    count: Callable[[], int] | None = getattr(task, "cancelling", None)
    return 0 if count is None else count()


def _is_forgiven(task: asyncio.Task[Any] | None, num_cancelled: int) -> bool:
    """Takes back the cancellation by which `aclose` woke the task; False if another one remains that is meant."""
    uncancel: Callable[[], int] | None = getattr(task, "uncancel", None)
    return uncancel is None or uncancel() <= num_cancelled
