"""Runners of a context group under one scheduler: answers, drafts and log-probabilities of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.config.scheduler import CacheConfig, SchedulerConfig, SpeculationConfig
from deepinfer_core.kernels.contract import Kernels
from deepinfer_core.kernels.reference import REFERENCE
from deepinfer_core.model import Backbone
from deepinfer_core.parallel.communicator import Communicator
from deepinfer_core.parallel.lockstep import Lockstep, Notice
from deepinfer_core.runtime.context_group import ContextGroup
from deepinfer_core.runtime.engine_loop import make_loop
from deepinfer_core.runtime.plan_codec import decode_plan, encode_plan
from deepinfer_core.runtime.rank_runner import RankRunner
from deepinfer_core.runtime.runner import Runner, RunnerConfig
from deepinfer_core.scheduling.plan import Admission, Content, StepPlan, StepResult
from deepinfer_core.scheduling.prefix_index import PrefixHasher
from deepinfer_core.scheduling.replay import ReplayRules
from deepinfer_core.scheduling.scheduler import Scheduler
from tests.core.harness import Chunk, TinyModel, plan_of
from tests.core.parallel.in_process import on_ranks

NUM_BLOCKS, MAX_LEN, DRAFTS = 9, 900, 3  # fewer blocks than the requests want: some are preempted


@contextmanager
def runner_of(model: TinyModel, group: Communicator | None, **settings: Any) -> Iterator[Runner]:
    config = RunnerConfig(4, NUM_BLOCKS, 512, num_drafts=DRAFTS, **settings)
    runner = Runner(model.config, model.params, model.backbone.kernels, config, context=group)
    try:
        yield runner
    finally:
        runner.close()


class Leader:
    """A device that tells the other ranks every plan before it runs it."""

    def __init__(self, runner: Runner, group: Communicator | None) -> None:
        self.runner, self.group = runner, group
        self.split_rows = 0  # prompt rows that another rank computed

    def launch(self, plan: StepPlan) -> StepResult:
        if self.group is not None:
            self.group.broadcast_bytes(encode_plan(plan), 0, "plan")
        before = self.runner.stats.rows_per_layer[0]
        result = self.runner.run(plan)
        self.split_rows += plan.num_rows - (self.runner.stats.rows_per_layer[0] - before)
        return result

    def wait(self, ticket: StepResult) -> StepResult:
        return ticket


def follow(runner: Runner, group: Communicator) -> None:
    while data := group.broadcast_bytes(b"", 0, "plan"):
        runner.run(decode_plan(data))


def requests(model: TinyModel) -> list[tuple[list[int], SamplingParams]]:
    """Long prompts with a common start, one that is scored, one that is sampled with penalties, short ones."""
    generator = torch.Generator().manual_seed(17)
    shared, other = (torch.randint(9, model.config.vocab_size, (700,), generator=generator).tolist() for _ in range(2))
    plain = SamplingParams(max_tokens=16, ignore_eos=True)
    return [
        (shared[:630], plain),
        (other[:375], SamplingParams(max_tokens=16, ignore_eos=True, temperature=0, logprobs=2)),
        (other[:7], plain),
        (shared[:431] + other[:90], SamplingParams(max_tokens=16, ignore_eos=True, repetition_penalty=1.3)),
        (other[:150], SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=1)),
        (shared[:600] + other[100:130], plain),
        (shared[:20], plain),
    ]


def serve(model: TinyModel, group: Communicator | None, decoder_prefill: str, overlap: bool) -> dict[str, Any]:
    """Answers by request, on the rank with the scheduler; {} on the others."""
    cache = CacheConfig(decoder_prefill=decoder_prefill, prefix_replay="exact")  # type: ignore[arg-type]
    speculation = SpeculationConfig(num_drafts=DRAFTS, draft_schedule="fixed")
    with runner_of(model, group, mask_decoder=decoder_prefill == "mask") as runner:
        if group is not None and group.rank > 0:
            follow(runner, group)
            return {}
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=400, max_prefill_chunk_tokens=251),
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_LEN,
            eos_token_id=model.config.eos_token_id,
            rules=ReplayRules.from_configs(model.config, cache, speculation, deterministic=True),
            speculation=speculation,
            hasher=PrefixHasher(b"weights", b"0123456789abcdef"),
        )
        device = Leader(runner, group)
        loop = make_loop(scheduler, device, overlap=overlap)
        answers: dict[int, list[Any]] = {}
        scored: dict[int, list[Any]] = {}
        for number, (prompt, params) in enumerate(requests(model)):
            own = scheduler.add(prompt, params, seed=number)
            answers[own], scored[own] = [], []
        while loop.has_work:
            outputs = loop.step()
            for number, tokens in outputs:
                answers[number] += tokens
            for index, entries in outputs.logprobs.items():
                answers[int(outputs.number[index])] += entries
            for number, entries in outputs.prompt_logprobs.items():
                scored[number] += entries
            assert all(not end.error for end in outputs.finished)
        if group is not None:
            group.broadcast_bytes(b"", 0, "plan")
        stats = scheduler.stats.as_dict()
        return {"answers": answers, "scored": scored, "stats": stats, "split rows": device.split_rows}


@pytest.mark.parametrize(
    ("decoder_prefill", "size", "native"),
    [
        pytest.param("compact", 2, False, marks=pytest.mark.slow),
        ("compact", 3, True),
        ("exact", 2, True),
        ("full", 3, True),
        ("mask", 2, True),
    ],
)
def test_answers_are_those_of_one_process(
    tiny_a: TinyModel, native_kernels: Kernels, decoder_prefill: str, size: int, native: bool
) -> None:
    """With chunks, prefix hits, preemption, drafts, several requests a step."""
    kernels = native_kernels if native else REFERENCE
    model = replace(tiny_a, backbone=Backbone(tiny_a.config, tiny_a.params, kernels))
    alone = serve(model, None, decoder_prefill, overlap=False)
    together, *others = on_ranks(size, lambda group: serve(model, group, decoder_prefill, overlap=size == 3))
    assert others == [{}] * (size - 1)
    assert together["answers"] == alone["answers"]
    assert together["scored"] == alone["scored"]
    assert alone["split rows"] == 0
    assert together["split rows"] > 500
    assert alone["stats"]["preemptions"] > 0
    if decoder_prefill in ("compact", "exact"):  # else the replay is exact from the first row on
        assert alone["stats"]["replayed_tokens"] > 0


def test_given_embeddings_reach_the_rank_that_computes_them(tiny_a: TinyModel) -> None:
    tokens = list(range(10, 110))
    content = np.zeros(100, np.uint8)
    content[20:81] = Content.IMAGE
    values = tiny_a.params.embed[torch.arange(200, 261)].numpy() * 2
    params = SamplingParams(temperature=0, logprobs=5)
    brought = Admission(0, 0, 0, np.array(tokens), 100, 0, params, 1, content, np.arange(20, 81), values)
    plan = replace(plan_of([Chunk(0, 0, tokens, 60)], sample="last"), row_content=content, admissions=(brought,))

    def logprobs(group: Communicator | None) -> Any:
        with runner_of(tiny_a, group) as runner:
            return runner.run(plan).logprobs

    assert on_ranks(3, logprobs) == [logprobs(None)] * 3


def test_what_the_leader_holds_counts(tiny_a: TinyModel) -> None:
    """A device whose arithmetic is not the same on every rank must not lead to ranks that run different rows."""
    tokens = list(range(10, 50))
    brought = Admission(0, 0, 0, np.array(tokens), 40, 0, SamplingParams(temperature=0), 1)
    wanted = np.array([DRAFTS], np.int32)
    plan = replace(plan_of([Chunk(0, 0, tokens)], sample="last"), admissions=(brought,), segment_num_drafts=wanted)

    def held(group: Communicator) -> list[int]:
        head = tiny_a.params.head if group.rank == 0 else -tiny_a.params.head
        runner = RankRunner(
            tiny_a.config,
            replace(tiny_a.params, head=head),
            tiny_a.backbone.kernels,
            RunnerConfig(4, NUM_BLOCKS, 512, num_drafts=DRAFTS),
            lockstep=Lockstep(group),
            exchange=None,
            engram=None,
            group=ContextGroup(group, group),
        )
        if runner.leads:
            runner.run(plan)
        else:
            runner.follow(Notice())
        runner.close()
        return [int(runner.state.held_position[0]), *runner.state.held_tokens[0].tolist()]

    leader, follower = on_ranks(2, held)
    assert leader == follower
    assert leader[0] == 40
