"""Nobody waits for ever: streams of an engine that closes or fails, several readers, strange arguments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from deepinfer_core import LLM, Chunk, Engine, SamplingParams
from deepinfer_core.config.sampling import StructuredOutput
from deepinfer_core.engine import RequestStream
from deepinfer_core.errors import EngineError, RequestError
from tests.core.harness import FIXTURES
from tests.core.inside import inside

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
        inside(engine).scheduler.check_idle()

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
        for one in results:
            assert isinstance(one, EngineError) if isinstance(one, BaseException) else one[-1].kind == "finish"
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


def test_a_storm_of_closed_streams_leaves_the_tokens_of_the_others_and_no_block() -> None:
    """While they wait, compute their prompt, decode, at their last token: closed, cancelled or no longer held."""
    rng = random.Random(4)
    prompts = ["one two three four five six seven " * rng.choice([1, 6, 12]) + str(i) for i in range(40)]
    lengths = [rng.choice([1, 3, 12]) for _ in prompts]
    orders = [sampled(seed=i, max_tokens=length) for i, length in enumerate(lengths)]
    ways = [rng.choice(["read", "close", "cancel", "drop"]) for _ in prompts]
    with LLM(MODEL, **SETTINGS) as llm:
        outputs = llm.generate(prompts, orders, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in outputs]

    async def part(stream: RequestStream, way: str, pieces: int) -> list[int] | None:
        tokens: list[int] = []
        async for chunk in stream:
            tokens += chunk.token_ids
            pieces -= 1
            if pieces == 0 and way != "read":
                break
        if way == "close":
            await stream.aclose()
        return tokens if way == "read" else None

    async def scenario(engine: Engine) -> None:
        tasks: list[asyncio.Task[list[int] | None]] = []
        for prompt, order, length, way in zip(prompts, orders, lengths, ways, strict=True):
            pieces = rng.randrange(length + 2)  # 0: to the end
            tasks.append(asyncio.create_task(part(engine.add_request(prompt, order), way, pieces)))
        for task in [task for task, way in zip(tasks, ways, strict=True) if way == "cancel"]:
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for tokens, way, want in zip(found, ways, expected, strict=True):
            assert way != "read" or tokens == want
        assert (await read(engine.add_request("hello", sampled())))[-1].finish_reason == "length"
        scheduler = inside(engine).scheduler
        for _ in range(5_000):
            if scheduler.num_unfinished == 0:
                break
            await asyncio.sleep(0.001)
        assert scheduler.ledger.pool.num_available == scheduler.ledger.pool.num_blocks

    run(scenario)


def test_without_a_running_loop_the_reason_is_named() -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(EngineError, match="asyncio loop"):
            await asyncio.to_thread(engine.add_request, "hello", sampled())

    run(scenario)
