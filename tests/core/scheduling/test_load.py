"""Many requests at once: memory is used, nobody is thrown out again and again, and overlap pays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.config.scheduler import SchedulerConfig, SpeculationConfig
from deepinfer_core.runtime.engine_loop import make_loop
from deepinfer_core.runtime.simulated import SimulatedDevice
from deepinfer_core.scheduling.admission import OutputForecast, peak_tokens
from deepinfer_core.scheduling.request import Stop
from deepinfer_core.scheduling.scheduler import Scheduler
from tests.core.scheduling.harness import EOS, VOCAB, Engine, alone, make_engine, rules
from tests.core.scheduling.test_scheduler import prompt_of


def held_at_most(current: list[int], remaining: list[int]) -> int:
    """By playing it out token by token."""
    return max(
        sum(c + step for c, r in zip(current, remaining, strict=True) if r >= step)
        for step in range(1 + max(remaining))
    )


def test_the_predicted_peak_is_the_one_that_comes() -> None:
    rng = random.Random(0)
    for _ in range(50):
        n = rng.randrange(1, 12)
        current, remaining = [rng.randrange(1, 300) for _ in range(n)], [rng.randrange(1, 200) for _ in range(n)]
        assert peak_tokens(np.array(current), np.array(remaining)) == held_at_most(current, remaining)


def test_the_forecast_follows_how_long_answers_are() -> None:
    forecast = OutputForecast()
    assert forecast.output_tokens(400, open_end=False) == 400
    for _ in range(200):
        forecast.finished(100, 400, open_end=False)
    assert forecast.output_tokens(400, open_end=False) == pytest.approx(100, abs=5)
    assert forecast.output_tokens(10**6, open_end=True) == 1024
    forecast.preempted()
    assert forecast.output_tokens(400, open_end=False) == pytest.approx(120, abs=5)


@pytest.mark.parametrize("known_lengths", [True, False])
def test_a_thousand_queued_requests_fill_the_cache_without_a_preemption_storm(known_lengths: bool) -> None:
    rng = random.Random(3)
    engine = make_engine(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        num_blocks=160,
        max_model_len=4096,
        num_drafts=3,
        prefix_caching=False,
    )
    lengths: dict[int, int] = {}
    for i in range(1_000):
        output = rng.choice([1, 10, 60, 200, 500])
        params = SamplingParams(max_tokens=output if known_lengths else 800, ignore_eos=True)
        watcher = None if known_lengths else _StopAfter(output)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([5, 60, 300, 900]))]
        lengths[engine.scheduler.add(prompt, params, seed=i, watcher=watcher)] = output
    engine.run()
    assert {number: len(tokens) for number, tokens in engine.tokens.items()} == lengths
    assert engine.scheduler.stats.peak_used_blocks >= 0.9 * 160
    assert engine.scheduler.stats.preemptions <= 50
    engine.scheduler.check_idle()


class _StopAfter:
    """Ends an answer after so many tokens, which the scheduler cannot know."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens

    def observe(self, tokens: Sequence[int]) -> Stop | None:
        kept, self._left = self._left, self._left - len(tokens)
        return Stop(kept) if kept <= len(tokens) else None


def test_the_overlapped_loop_is_faster_than_the_plain_one_where_the_device_takes_time() -> None:
    """With a virtual clock: host time is counted in steps, device time per plan, and waiting moves the clock."""

    def elapsed(overlap: bool) -> float:
        now = 0.0

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        device = SimulatedDevice(
            num_blocks=64,
            num_slots=8,
            num_drafts=0,
            vocab_size=VOCAB,
            window=16,
            encoder_layers=2,
            step_seconds=lambda plan: 1.0,
            clock=lambda: now,
            sleep=sleep,
        )
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
            num_blocks=64,
            max_model_len=512,
            eos_token_id=EOS,
            rules=rules(),
            speculation=SpeculationConfig(num_drafts=0),
            clock=lambda: now,
        )
        engine = Engine(scheduler, device, make_loop(scheduler, device, overlap=overlap))  # type: ignore[arg-type]
        number = scheduler.add(prompt_of(5), SamplingParams(max_tokens=100, ignore_eos=True), seed=1)
        while engine.loop.has_work:
            engine.step()
            now += 0.5  # what the host does with a step: commit, detokenize, plan
        assert len(engine.tokens[number]) == 100
        return now

    assert elapsed(overlap=False) == pytest.approx(150, abs=2)
    assert elapsed(overlap=True) == pytest.approx(100, abs=3)


def test_a_large_batch_of_long_answers_is_right() -> None:
    engine = make_engine(max_num_seqs=96, max_num_batched_tokens=1024, num_blocks=700, num_drafts=5)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    numbers = {engine.scheduler.add(prompt_of(100 + i % 40, i), params, seed=i): i for i in range(96)}
    engine.run()
    for number, i in list(numbers.items())[::16]:
        assert engine.tokens[number] == alone(prompt_of(100 + i % 40, i), params, i, 2048)
    assert all(len(engine.tokens[number]) == 300 for number in numbers)
