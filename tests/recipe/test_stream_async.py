"""`AsyncStreamProcessor` and the writer of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import deepseek_recipe as recipe
from deepseek_recipe.streaming.async_processor import AsyncStreamProcessor
from deepseek_recipe.streaming.sse import KEEP_ALIVE, SseWriter
from tests.recipe.stream_outputs import texts

_RESPONSES_ERROR = (
    b'event: error\ndata: {"type":"error","code":"server_error","message":"no","param":null,"sequence_number":0}\n\n'
)


class Engine:
    """Chunks from a list, then silence if `hangs`. `is_closed`: its iterator has ended."""

    def __init__(self, *chunks: recipe.InferenceChunk, hangs: bool = False) -> None:
        self.chunks = chunks
        self.hangs = hangs
        self.is_closed = False
        self.pulled = 0
        self.is_waiting = asyncio.Event()

    async def generate(self) -> AsyncIterator[recipe.InferenceChunk]:
        try:
            for chunk in self.chunks:
                self.pulled += 1
                yield chunk
            if self.hangs:
                self.is_waiting.set()
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


def stream(engine: Engine, **options: Any) -> AsyncStreamProcessor:
    generator = recipe.ChatCompletionChunkGenerator("id", "m", False)
    processor = recipe.StreamProcessor(generator, recipe.ParsingOptions(**options))
    return AsyncStreamProcessor(processor, engine.generate())


def test_the_events_are_those_of_the_synchronous_processor() -> None:
    async def run() -> tuple[list[str], bool]:
        async with stream(Engine(*texts("a", "b\n", "c"))) as events:
            return [event.to_json() async for event in events], events.finished

    seen, finished = asyncio.run(run())
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionChunkGenerator("id", "m", False).with_clock(lambda: _created(seen)),
        recipe.ParsingOptions(),
    )
    expected = [event for chunk in texts("a", "b\n", "c") for event in processor.push(chunk)] + processor.finish()
    assert (seen, finished) == ([event.to_json() for event in expected], True)


def test_a_stop_sequence_closes_the_engine_before_its_last_events_are_read() -> None:
    async def run() -> tuple[int, bool, bool]:
        engine = Engine(*texts("a", "STOP", "b", "c"))
        events = stream(engine, stop_sequences=["STOP"])
        while not events.finished:
            await anext(events)
        closed_early = engine.is_closed
        rest = [event async for event in events]
        return engine.pulled, closed_early, bool(rest)

    assert asyncio.run(run()) == (2, True, False)


def test_leaving_early_closes_the_engine() -> None:
    async def run() -> bool:
        engine = Engine(*texts("a", "b"), hangs=True)
        async with stream(engine) as events:
            async for _ in events:
                break
        return engine.is_closed

    assert asyncio.run(run())


def test_cancelling_the_consumer_closes_the_engine() -> None:
    async def run() -> bool:
        engine = Engine(hangs=True)
        consumer = asyncio.create_task(_consume(stream(engine)))
        await engine.is_waiting.wait()
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        return engine.is_closed

    assert asyncio.run(run())


def test_closing_from_another_task_ends_a_waiting_consumer() -> None:
    async def run() -> tuple[list[Any], bool]:
        engine = Engine(*texts("a"), hangs=True)
        events = stream(engine)
        consumer = asyncio.create_task(_consume(events))
        await engine.is_waiting.wait()
        await events.aclose()
        await events.aclose()
        return await asyncio.wait_for(consumer, 5), engine.is_closed

    seen, is_closed = asyncio.run(run())
    assert (len(seen), is_closed) == (2, True)


counts_cancellations = pytest.mark.skipif(
    not hasattr(asyncio.Task, "uncancel"), reason="Python 3.10 does not count cancellations"
)


@counts_cancellations
def test_closing_twice_from_another_task_leaves_no_cancellation_behind() -> None:
    async def run() -> tuple[int, int]:
        engine = Engine(*texts("a"), hangs=True)
        events = stream(engine)

        async def consume() -> tuple[int, int]:
            count = len([event async for event in events])
            return count, asyncio.current_task().cancelling()  # type: ignore[union-attr]

        consumer = asyncio.create_task(consume())
        await engine.is_waiting.wait()
        await asyncio.gather(events.aclose(), events.aclose())
        return await consumer

    assert asyncio.run(run()) == (2, 0)


@counts_cancellations
def test_a_consumer_that_is_cancelled_while_it_is_closed_is_cancelled() -> None:
    async def run() -> tuple[bool, bool]:
        engine = Engine(*texts("a"), hangs=True)
        events = stream(engine)

        async def consume() -> None:
            async for _ in events:
                pass

        consumer = asyncio.create_task(consume())
        await engine.is_waiting.wait()
        consumer.cancel()
        await events.aclose()
        await asyncio.wait([consumer])
        return consumer.cancelled(), engine.is_closed

    assert asyncio.run(run()) == (True, True)


def test_an_error_of_the_engine_reaches_the_consumer_and_closes() -> None:
    async def broken() -> AsyncIterator[recipe.InferenceChunk]:
        yield texts("a")[0]
        raise OSError("the engine is gone")

    async def run() -> None:
        processor = recipe.StreamProcessor(
            recipe.ChatCompletionChunkGenerator("id", "m", False), recipe.ParsingOptions()
        )
        events = AsyncStreamProcessor(processor, broken())
        with pytest.raises(OSError, match="gone"):
            await _consume(events)
        assert [event async for event in events] == []

    asyncio.run(run())


def test_two_consumers_at_once_are_refused() -> None:
    async def run() -> None:
        engine = Engine(hangs=True)
        events = stream(engine)
        consumer = asyncio.create_task(_consume(events))
        await engine.is_waiting.wait()
        with pytest.raises(RuntimeError, match="two tasks"):
            await anext(events)
        await events.aclose()
        await consumer

    asyncio.run(run())


def test_the_bytes_of_a_named_stream() -> None:
    processor = recipe.StreamProcessor(recipe.MessagesChunkGenerator("id", "m", False), recipe.ParsingOptions())
    writer = SseWriter(recipe.MessagesResponse)
    data = writer.events(processor.push(recipe.InferenceChunk.text("a\nb\u2028"))[1:])
    assert (
        data
        == (
            "event: content_block_start\n"
            'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
            "event: ping\n"
            'data: {"type":"ping"}\n\n'
            "event: content_block_delta\n"
            'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a\\nb\u2028"}}\n\n'
        ).encode()
    )
    assert writer.done() == b""


def test_the_bytes_of_an_unnamed_stream() -> None:
    writer = SseWriter(recipe.ChatCompletionResponse)
    event = recipe.ChatCompletionChunk.from_dict({"id": "1"})
    assert writer.event(event) + KEEP_ALIVE + writer.done() == b'data: {"id":"1"}\n\n: keep-alive\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("response_class", "expected"),
    [
        (
            recipe.ChatCompletionResponse,
            b'data: {"error":{"message":"no","type":"server_error","param":null,"code":"server_error"}}\n\n',
        ),
        (
            recipe.MessagesResponse,
            b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"no"}}\n\n',
        ),
        (
            recipe.ResponsesResponse,
            _RESPONSES_ERROR,
        ),
    ],
)
def test_an_error_in_mid_stream_has_the_form_of_its_api(response_class: Any, expected: bytes) -> None:
    assert SseWriter(response_class).error("no") == expected


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\u2028b"])
def test_a_writer_never_writes_a_line_that_an_event_brings(name: str) -> None:
    class Forged(recipe.MessagesResponse):
        @classmethod
        def sse_event_name(cls, chunk: Any) -> str:
            return name

    with pytest.raises(ValueError, match="printable"):
        SseWriter(Forged).event(recipe.MessagesStreamEvent.from_dict({"type": "ping"}))
    lines = SseWriter(recipe.ChatCompletionResponse).error(name, kind=name).decode().split("\n")
    assert (len(lines), lines[1:]) == (3, ["", ""])


async def _consume(events: AsyncStreamProcessor) -> list[Any]:
    return [event async for event in events]


def _created(events: list[str]) -> int:
    return recipe.ChatCompletionChunk.from_json(events[0]).to_dict()["created"]


@pytest.mark.bad_input
@pytest.mark.parametrize("response_class", [None, "chat", recipe.SseWriter])
def test_a_writer_needs_a_class_of_responses(response_class: Any) -> None:
    with pytest.raises(TypeError, match="response_class"):
        SseWriter(response_class)
