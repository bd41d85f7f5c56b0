"""`Engine`: streams of chunks, aborts, cancellation, refusal, failure. On the fixture checkpoint, with real steps."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from deepinfer_core import LLM, Chunk, Engine, SamplingParams, StructuredOutput
from deepinfer_core.errors import EngineError, QueueFullError, RequestError
from tests.core.harness import FIXTURES
from tests.core.inside import inside

MODEL = FIXTURES / "tiny-a"
PROMPTS = ["hello world", "one two three", "a"]
# "fixed": costs need not be measured at every start
SETTINGS: dict[str, Any] = {
    "quiet": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "draft_schedule": "fixed",
}


def run(scenario: Callable[[Engine], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run a scenario with a fresh engine; afterwards nothing may be left in it."""

    async def main() -> None:
        async with Engine(MODEL, **SETTINGS | settings) as engine:
            await scenario(engine)
        inside(engine).scheduler.check_idle()

    asyncio.run(main())


async def ends(engine: Engine, count: int) -> dict[str, int]:
    """How so many requests ended, when they have and their outputs know it."""
    finished = inside(engine).scheduler.stats.finished
    for _ in range(6_000):
        if finished.total() == count and not engine._book.all_numbers():
            return dict(finished)
        await asyncio.sleep(0.01)
    raise AssertionError(f"after a minute {dict(finished)} of {count}, open: {engine._book.all_numbers()}")


async def read(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 11, "max_tokens": 12, "ignore_eos": True} | changes)


def test_streams_equal_what_generate_returns() -> None:
    with LLM(MODEL, **SETTINGS) as llm:
        expected = llm.generate(PROMPTS, sampled(logprobs=1), use_tqdm=False)

    async def scenario(engine: Engine) -> None:
        streams = [engine.add_request(prompt, sampled(logprobs=1)) for prompt in PROMPTS]
        for stream, want in zip(streams, expected, strict=True):
            chunks = await read(stream)
            assert [chunk.kind for chunk in chunks[:1]] == ["ready"]
            assert chunks[0].prompt_tokens == len(want.prompt_token_ids)
            assert chunks[-1].kind == "finish"
            assert chunks[-1].finish_reason == "length"
            assert chunks[-1].output_tokens == 12
            assert "".join(chunk.text for chunk in chunks) == want.outputs[0].text
            assert [token for chunk in chunks for token in chunk.token_ids] == want.outputs[0].token_ids
            logprobs = [table for chunk in chunks for table in chunk.logprobs or ()]
            assert [list(table) for table in logprobs] == [list(table) for table in want.outputs[0].logprobs or []]
            assert stream.output.outputs[0].text == want.outputs[0].text

    run(scenario)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_stream_begins_with_the_cached_tokens_however_soon_it_ends(max_tokens: int) -> None:
    async def scenario(engine: Engine) -> None:
        prompt = [9 + i % 300 for i in range(300)]
        for cached_tokens in (0, 256):
            ready, *_ = await read(engine.add_request(prompt, sampled(max_tokens=max_tokens)))
            assert (ready.kind, ready.cached_tokens) == ("ready", cached_tokens)

    run(scenario)


def test_stop_strings_never_show_in_the_stream() -> None:
    with LLM(MODEL, **SETTINGS) as llm:
        free = llm.generate(PROMPTS[0], sampled(max_tokens=30), use_tqdm=False)[0].outputs[0].text
        stop = free[8:10]
        expected = llm.generate(PROMPTS[0], sampled(max_tokens=30, stop=[stop]), use_tqdm=False)[0].outputs[0]

    async def scenario(engine: Engine) -> None:
        chunks = await read(engine.add_request(PROMPTS[0], sampled(max_tokens=30, stop=[stop])))
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert chunks[-1].stop_reason == stop
        assert chunks[-1].finish_reason == "stop"

    run(scenario)


def test_n_answers_share_a_stream() -> None:
    async def scenario(engine: Engine) -> None:
        chunks = await read(engine.add_request("hello", sampled(n=3)))
        assert sum(chunk.kind == "ready" for chunk in chunks) == 1
        assert sorted(chunk.index for chunk in chunks if chunk.kind == "finish") == [0, 1, 2]
        assert len({chunk.seed for chunk in chunks if chunk.kind == "finish"}) == 3

    run(scenario)


def test_a_closed_stream_aborts_its_request_and_frees_its_blocks() -> None:
    async def scenario(engine: Engine) -> None:
        other = engine.add_request(PROMPTS[1], sampled())
        stream = engine.add_request("hello", sampled(max_tokens=900))
        async for chunk in stream:
            if chunk.kind == "text":
                break
        await stream.aclose()
        assert len([c async for c in other]) > 2
        assert await ends(engine, 2) == {"length": 1, "abort": 1}
        assert stream.output.outputs[0].finish_reason == "abort"

    run(scenario)


def test_a_stream_closed_while_its_grammar_is_compiled_never_starts() -> None:
    async def scenario(engine: Engine) -> None:
        stream = engine.add_request("hello", sampled(max_tokens=400, structured=StructuredOutput(regex="[a-z]{400}")))
        await stream.aclose()
        assert stream._request.grammar is not None
        await asyncio.wrap_future(stream._request.grammar)
        await read(engine.add_request("a", sampled()))
        assert inside(engine).scheduler.num_unfinished == 0
        assert engine.statistics()["finished"] == {"length": 1}

    run(scenario)


def test_a_cancelled_task_aborts_its_request() -> None:
    async def scenario(engine: Engine) -> None:
        stream = engine.add_request("hello", sampled(max_tokens=900))
        task = asyncio.create_task(read(stream))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await ends(engine, 1) == {"abort": 1}
        assert stream.output.outputs[0].finish_reason == "abort"

    run(scenario)


def test_a_stream_that_nobody_holds_is_aborted() -> None:
    async def scenario(engine: Engine) -> None:
        engine.add_request("hello", sampled(max_tokens=900))
        gc.collect()
        assert await ends(engine, 1) == {"abort": 1}

    run(scenario)


def test_an_abort_leaves_the_tokens_of_others_alone() -> None:
    with LLM(MODEL, **SETTINGS) as llm:
        expected = llm.generate(PROMPTS[1], sampled(max_tokens=40), use_tqdm=False)[0].outputs[0].token_ids

    async def scenario(engine: Engine) -> None:
        doomed = [engine.add_request(PROMPTS[0], sampled(max_tokens=300)) for _ in range(3)]
        kept = engine.add_request(PROMPTS[1], sampled(max_tokens=40))
        tokens: list[int] = []
        async for chunk in kept:
            tokens += chunk.token_ids
            if len(tokens) > 5 and doomed:
                await doomed.pop().aclose()
        assert tokens == expected
        for stream in doomed:
            await stream.aclose()

    run(scenario)


@pytest.mark.bad_input
def test_bad_requests_are_refused_before_any_work() -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(RequestError, match="empty"):
            engine.add_request("")
        with pytest.raises(RequestError, match="999999"):
            engine.add_request([1, 999999])
        assert engine.statistics()["steps"] == 0

    run(scenario)


@pytest.mark.bad_input
def test_a_full_queue_is_raised_by_the_stream() -> None:
    async def scenario(engine: Engine) -> None:
        streams = [engine.add_request("hello", sampled(max_tokens=200)) for _ in range(12)]
        results = await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFullError)]
        assert refused
        assert len(refused) < 12

    run(scenario, max_num_waiting=1, max_num_seqs=2)


@pytest.mark.bad_input
def test_answers_of_a_request_that_has_no_room_for_all_never_run() -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(QueueFullError):
            await read(engine.add_request("hello", sampled(n=4)))
        assert (await read(engine.add_request("hello", sampled(max_tokens=3))))[-1].output_tokens == 3
        assert inside(engine).scheduler.stats.output_tokens == 3

    run(scenario, max_num_waiting=2, max_num_seqs=1)


def test_closing_ends_every_stream() -> None:
    async def main() -> None:
        engine = Engine(MODEL, **SETTINGS)
        tasks = [asyncio.create_task(read(engine.add_request("hello", sampled(max_tokens=900)))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await engine.close()
        for chunks in await asyncio.gather(*tasks):
            assert chunks[-1].finish_reason == "abort"
        with pytest.raises(EngineError, match="closed"):
            engine.add_request("hello")

    asyncio.run(main())


def test_an_engine_that_breaks_tells_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Engine(MODEL, **SETTINGS) as engine:
            monkeypatch.setattr(engine._book, "distribute", lambda outputs: 1 / 0)
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await asyncio.wait_for(read(engine.add_request("hello", sampled())), 30)
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                engine.add_request("hello")

    asyncio.run(main())


def test_llm_stream_gives_the_same_pieces_and_can_be_closed() -> None:
    with LLM(MODEL, **SETTINGS) as llm:
        want = llm.generate("hello", sampled(), use_tqdm=False)[0].outputs[0]
        chunks = list(llm.stream("hello", sampled()))
        assert "".join(chunk.text for chunk in chunks) == want.text
        assert chunks[-1].finish_reason == "length"
        stream = llm.stream("hello", sampled(max_tokens=300))
        next(stream)
        stream.close()
        inside(llm).scheduler.check_idle()
