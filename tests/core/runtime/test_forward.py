"""Captured steps: padded to buckets they give the bits of eager ones, and nothing in them waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer_core.cache import CacheLayout, ModelState
from deepinfer_core.checkpoint import dequantize
from deepinfer_core.config.sampling import SamplingParams
from deepinfer_core.kernels.reference import REFERENCE, records
from deepinfer_core.model import Backbone, Drafter
from deepinfer_core.model.batch import batch_of
from deepinfer_core.model.step_arrays import StepShape, fits_fixed_shape, pack_step
from deepinfer_core.runtime.forward import CudaCapture, Forward, bucket
from deepinfer_core.runtime.runner import Runner, RunnerConfig
from deepinfer_core.runtime.step_costs import measure_costs
from deepinfer_core.scheduling.plan import Admission, Content, StepPlan, StepResult, TokenSource
from tests.core.harness import BLOCKS_A_REQUEST, Chunk, TinyModel, plan_of

BLOCKS = 7 * 4 * BLOCKS_A_REQUEST
PARAMS = (SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.9), SamplingParams(temperature=1.0))


class RerunCapture:
    """Stands for a device's graphs on the CPU: what is recorded runs again and fills the same tensors.

    Recording runs the work once, which a real graph would not: harmless, since running a step twice gives the same.
    """

    def __init__(self) -> None:
        self.replays = 0

    def record[Output](self, work: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        output = work()

        def replay() -> None:
            self.replays += 1
            again = work()
            for spec in fields(output):  # type: ignore[arg-type]  # outputs are dataclasses of tensors
                getattr(output, spec.name).copy_(getattr(again, spec.name))

        return output, replay


def runner_of(model: TinyModel, capture: RerunCapture | None, most_rows: int = 16) -> Runner:
    runner = Runner(model.config, model.params, REFERENCE, RunnerConfig(4, BLOCKS, 256, num_drafts=3))
    runner.forward = Forward(runner.backbone, runner.drafter, runner.state, capture=capture, most_rows=most_rows)
    return runner


def prompts_step(model: TinyModel) -> StepPlan:
    names = ("len37", "len130", "len9")
    tokens = [model.expected["sequences"].get(name) or list(range(5, 14)) for name in names]
    plan = plan_of([Chunk(slot, 0, ids) for slot, ids in enumerate(tokens)], sample="last")
    admissions = tuple(
        Admission(slot, 0, slot, np.array(ids), len(ids), 0, PARAMS[slot], seed=slot + 1)
        for slot, ids in enumerate(tokens)
    )
    return replace(plan, admissions=admissions, segment_num_drafts=np.full(3, 3, np.int32))


def held_step(slots: list[int], verified: list[int], decoder_from: int = 0) -> StepPlan:
    """Anchors and drafts that the device holds."""
    chunks = [Chunk(slot, 300, list(range(n + 1)), decoder_from) for slot, n in zip(slots, verified, strict=True)]
    plan = plan_of(chunks)
    source = np.full(plan.num_rows, TokenSource.HELD, np.uint8)
    return replace(plan, row_source=source, segment_num_drafts=np.full(len(slots), 3, np.int32))


def assert_equal(got: StepResult, want: StepResult) -> None:
    """But for `is_cold`, which is of the run and not of its numbers."""
    for spec in fields(StepResult):
        if spec.name == "is_cold":
            continue
        a, b = getattr(got, spec.name), getattr(want, spec.name)
        assert np.array_equal(a, b) if isinstance(b, np.ndarray) else a == b, spec.name


def test_replayed_steps_padded_to_their_bucket_give_the_bits_of_eager_ones(tiny_a: TinyModel) -> None:
    capture = RerunCapture()
    eager, captured = runner_of(tiny_a, None), runner_of(tiny_a, capture)
    plans = [prompts_step(tiny_a)]
    for _ in range(3):
        plans += [held_step([0, 1, 2], [3, 3, 3]), held_step([2, 0], [1, 3]), held_step([1], [0], decoder_from=40)]
    for plan in plans:
        assert_equal(captured.run(plan), eager.run(plan))
    rings = [(runner.state.window + runner.state.draft_window) for runner in (captured, eager)]
    for got, want in zip(*rings, strict=True):
        assert torch.equal(got[: eager.layout.window.trash_row], want[: eager.layout.window.trash_row])
    for layer, entries in eager.state.entries.items():
        kept = slice(0, eager.layout.entry_trash_row(tiny_a.config.compress_ratios[layer]))
        assert torch.equal(captured.state.entries[layer][kept], entries[kept])
    # Every shape is eager once. Steps: 9 in two buckets. Draft blocks: 10 in three sizes, the prompts' included.
    assert capture.replays == (9 - 2) + (10 - 3)
    eager.close()
    captured.close()


def test_steps_that_compile_or_capture_say_so(tiny_a: TinyModel) -> None:
    captured, eager = runner_of(tiny_a, RerunCapture()), runner_of(tiny_a, None)
    plans = [prompts_step(tiny_a)] + [held_step([0, 1, 2], [3, 3, 3])] * 3 + [held_step([2], [1])] * 3
    # The prompts' step runs the draft blocks of three segments for the first time, the step after it the second time.
    assert [captured.run(plan).is_cold for plan in plans] == [True, True, True, False, True, True, False]
    assert not any(eager.run(plan).is_cold for plan in plans)
    captured.close()
    eager.close()


def test_costs_at_start_are_those_of_replayed_graphs(tiny_a: TinyModel) -> None:
    """Of every size two passes come before the first that counts; what is known of sizes is where graphs are."""
    capture = RerunCapture()
    runner = runner_of(tiny_a, capture)
    sizes: list[int] = []
    probe = runner.probe
    runner.probe = lambda plan: (sizes.append(plan.num_rows), probe(plan))[1]  # type: ignore[method-assign]
    cost = measure_costs(runner, max_rows=16, max_requests=4)
    table = cost._verify_table
    assert table.rows[-1] == 16
    assert table.captured == tuple(range(8, 17, 8))
    assert np.unique(table.dense(16)[1:9]).size == 1  # one graph serves them all
    assert all(sizes.count(size) >= 2 + 2 for size in table.rows)
    assert capture.replays > 0
    runner.close()


def test_a_step_of_most_rows_is_captured_where_these_fill_no_whole_tiles(tiny_a: TinyModel) -> None:
    """As five requests with five drafts give: 30 rows, padded to 32, when a graph of fewer rows is there already."""
    capture = RerunCapture()
    eager, captured = runner_of(tiny_a, None), runner_of(tiny_a, capture, most_rows=11)
    assert captured.kernels.row_multiple == 8
    for plan in [prompts_step(tiny_a)] + [held_step([1], [0])] * 3 + [held_step([0, 1, 2], [3, 3, 2])] * 3:
        assert_equal(captured.run(plan), eager.run(plan))
    assert capture.replays == (3 - 1) * 2 + (7 - 2)  # steps; draft blocks of one segment and of three
    eager.close()
    captured.close()


def test_shapes_that_could_not_be_captured_are_named_and_stay_eager(
    tiny_a: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    class NoMemory(RerunCapture):
        def __init__(self) -> None:
            super().__init__()
            self.tries = 0

        def record[Output](self, work: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
            self.tries += 1
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    capture = NoMemory()
    eager, captured = runner_of(tiny_a, None), runner_of(tiny_a, capture)
    for plan in [prompts_step(tiny_a)] + [held_step([0, 1, 2], [3, 3, 3])] * 4:
        assert_equal(captured.run(plan), eager.run(plan))
    assert capture.tries == 2  # one shape of steps, one of draft blocks
    assert caplog.text.count("could not be captured and stay eager: tried to allocate 2 GiB") == capture.tries
    eager.close()
    captured.close()


def test_graphs_after_a_failed_recording_get_another_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes a pool that a recording failed in for one that is still being recorded into, for good."""
    pools: list[object] = []

    class NoGraph:
        def replay(self) -> None:
            return

    @contextmanager
    def recording(graph: object, *, pool: object, **settings: object) -> Iterator[None]:
        pools.append(pool)
        yield

    def no_memory() -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    for name, stand_in in {
        "CUDAGraph": NoGraph,
        "Stream": lambda priority: None,
        "current_stream": lambda: None,
        "stream": lambda stream: nullcontext(),
        "graph": recording,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    capture = CudaCapture()
    capture.record(lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        capture.record(no_memory)
    capture.record(lambda: None)
    capture.record(lambda: None)
    assert pools[0] == pools[1] != pools[2] == pools[3]


def test_buckets_pad_by_an_eighth_at_most() -> None:
    for size in range(1, 3000):
        found = bucket(size)
        assert size <= found <= size + max(0, (size - 1) // 8)
        assert bucket(found) == found


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"row_sample": np.array([True, False, True])}, False),
        ({"row_content": np.array([0, Content.IMAGE, 0], np.uint8)}, False),
        ({"segment_decoder_from": np.array([301])}, False),
    ],
    ids=["decode", "prefill", "image", "rows above the cut only"],
)
def test_only_steps_of_sampled_text_rows_have_a_fixed_shape(
    tiny_a: TinyModel, change: dict[str, Any], fits: bool
) -> None:
    plan = replace(plan_of([Chunk(0, 300, [1, 2, 3])]), **change)
    layout = CacheLayout(tiny_a.config, 4, BLOCKS, 256, 12)
    assert fits_fixed_shape(plan, layout) is fits
    assert not fits_fixed_shape(plan_of([Chunk(0, 300, range(layout.window.capacity + 1))]), layout)


# ---- on a device that does not exist --------------------------------------------------------------------------------


def on_fake_gpu(value: Any) -> Any:
    """Parameters as tensors without storage on a GPU; the table of Engram included."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    if isinstance(value, torch.device):
        return torch.device("cuda")
    if isinstance(value, tuple):
        return tuple(on_fake_gpu(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{spec.name: on_fake_gpu(getattr(value, spec.name)) for spec in fields(value)})
    return value


@pytest.fixture
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Constants that the reference keeps by device must not outlive the device."""
    yield FakeTensorMode()
    for kept in (records._constant, dequantize._e4m3_values):
        kept.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fixed_step_needs_nothing_from_the_device_and_mixes_no_devices(
    tiny_a: TinyModel, dtype: torch.dtype, fake_gpu: FakeTensorMode
) -> None:
    """torch's fake tensors know shapes and devices but no values: reading one on the host raises, and so does an
    operation on tensors of two devices. The reference is what runs where a provider lacks an operation.
    """
    layout = CacheLayout(tiny_a.config, 4, BLOCKS, 256, 12, form="packed")
    shape = StepShape.fixed(8, 4)
    arrays = pack_step(plan_of([Chunk(0, 4, [1]), Chunk(1, 9, [2, 3])]), layout, 8, fixed=shape)
    with fake_gpu:
        params = on_fake_gpu(tiny_a.params)
        state = ModelState.allocate(layout, device="cuda", dtype=dtype)
        columns = arrays.views(torch.zeros(arrays.largest_size, dtype=torch.int64, device="cuda"))
        backbone = Backbone(tiny_a.config, params, REFERENCE)
        drafter = Drafter(backbone, params.draft)
        batch = batch_of(shape, columns, state, params, REFERENCE)
        out = backbone.forward(batch, state)
        assert out.logits is not None
        assert out.features is not None
        assert (out.logits.shape, out.logits.device.type) == ((8, tiny_a.config.vocab_size), "cuda")
        drafter.store_context(out.features, batch, state)
        slot = torch.zeros(3, dtype=torch.int64, device="cuda")
        block = drafter.make_block(slot, slot, slot, slot, state, 3)
        drafts = drafter.draw_block(block, slot, lambda _, logits: logits.argmax(-1))
        assert (drafts.tokens.shape, drafts.tokens.device.type) == ((3, 3), "cuda")
        with pytest.raises(Exception, match=r"_local_scalar_dense|data-dependent"):
            drafts.tokens[0, 0].item()  # the test would see it
