"""Nobody waits for ever: streams of an engine that closes or fails, several readers, strange arguments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from deepinfer_core import Chunk, Engine, SamplingParams
from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.errors import EngineError, RequestError
from tests.core.harness import FIXTURES

MODEL = FIXTURES / "tiny-a"
SETTINGS: dict[str, Any] = {
    "quiet": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "draft_schedule": "fixed",
}
LIMIT_S = 60.0  # for what takes well under a second; a test that reaches it hangs


def run(scenario: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with Engine(MODEL, **SETTINGS) as engine:
            await asyncio.wait_for(scenario(engine), LIMIT_S)
        engine._engine.scheduler.check_idle()

    asyncio.run(main())


async def read(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 11, "max_tokens": 8, "ignore_eos": True} | changes)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "arguments",
    [{"tenant_salt": 5}, {"tenant_salt": b"x"}, {"tenant_salt": "x" * 2000}, {"priority": 1.5}, {"priority": 10**5000}],
    ids=["salt-int", "salt-bytes", "salt-long", "priority-float", "priority-huge"],
)
def test_a_bad_order_is_refused_at_once_and_costs_nobody_anything(arguments: dict[str, Any]) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(RequestError):
            engine.add_request("hello", sampled(), **arguments)
        chunks = await read(engine.add_request("hello", sampled()))
        assert chunks[-1].finish_reason == "length"

    run(scenario)


def test_an_unexpected_error_while_queueing_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engine: Engine) -> None:
        submit = engine._book.submit

        def failing(request: Any, **order: Any) -> list[int]:
            if request.params.max_tokens == 3:
                raise ZeroDivisionError("on purpose")
            return submit(request, **order)

        monkeypatch.setattr(engine._book, "submit", failing)
        bad, good = (engine.add_request("hello", sampled(max_tokens=count)) for count in (3, 4))
        with pytest.raises(EngineError, match="ZeroDivisionError: on purpose"):
            await read(bad)
        assert (await read(good))[-1].finish_reason == "length"

    run(scenario)


def test_streams_whose_grammar_is_not_compiled_end_when_the_engine_closes() -> None:
    async def main() -> None:
        engine = Engine(MODEL, **SETTINGS)
        forms = [StructuredOutput(regex=f"[a-z]{{1,{count}}}") for count in range(2, 12)]
        readers = [asyncio.create_task(read(engine.add_request("hello", sampled(structured=form)))) for form in forms]
        await asyncio.sleep(0)
        await asyncio.wait_for(engine.close(), LIMIT_S)
        results = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), LIMIT_S)
        assert all(isinstance(one, EngineError) or one[-1].kind == "finish" for one in results)
        with pytest.raises(EngineError, match="closed"):
            engine.add_request("hello", sampled())

    asyncio.run(main())


def test_two_readers_of_one_stream_share_its_pieces_and_both_end() -> None:
    async def scenario(engine: Engine) -> None:
        stream = engine.add_request("hello", sampled(n=3))
        one, other = await asyncio.gather(read(stream), read(stream))
        pieces = [*one, *other]
        assert sorted(chunk.index for chunk in pieces if chunk.kind == "finish") == [0, 1, 2]
        assert sum(len(chunk.token_ids) for chunk in pieces) == 24

    run(scenario)


def test_closing_a_stream_wakes_its_reader() -> None:
    async def scenario(engine: Engine) -> None:
        stream = engine.add_request("hello", sampled(max_tokens=500))
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        await reader
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(scenario)


def test_without_a_running_loop_the_reason_is_named() -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(EngineError, match="asyncio loop"):
            await asyncio.to_thread(engine.add_request, "hello", sampled())

    run(scenario)
