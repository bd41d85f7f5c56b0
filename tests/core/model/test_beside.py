"""Work beside the step: which stream waits for which. These ones are recorded; tests/kernels compares bits on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from deepinfer_core.model import beside as module
from deepinfer_core.model.beside import all_joined, beside

GPU = torch.device("cuda", 5)


class Stream:
    def __init__(self, device: Device) -> None:
        self._device, self.name = device, f"s{len(device.streams)}"
        device.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self._device.log.append(f"{self.name} waits for {other.name}")


class Device:
    """What `torch.cuda` offers of streams, for one thread at a time."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams: list[Stream] = []
        self._current = Stream(self)

    def is_available(self) -> bool:
        return True

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802 - torch's name
        assert device == GPU
        return Stream(self)

    def current_stream(self, device: torch.device) -> Stream:
        assert device == GPU
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def run(self, name: str) -> str:
        self.log.append(f"{name} on {self._current.name}")
        return name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(module, "_streams", module._Streams())
    return device


def test_work_begins_after_what_came_before_and_what_follows_the_join_begins_after_it(gpu: Device) -> None:
    started = beside(lambda: gpu.run("side"), GPU)
    gpu.run("main")
    assert started.join() == "side"
    assert gpu.log == ["s1 waits for s0", "side on s1", "main on s0", "s0 waits for s1"]


def test_work_within_work_takes_another_stream_and_joined_streams_are_taken_again(gpu: Device) -> None:
    def outer() -> None:
        inner = beside(lambda: gpu.run("inner"), GPU)
        gpu.run("outer")
        inner.join()

    for _ in range(2):
        first, second = beside(outer, GPU), beside(lambda: gpu.run("second"), GPU)
        second.join()
        first.join()
    assert len(gpu.streams) == 3
    half = len(gpu.log) // 2
    assert gpu.log[:half] == gpu.log[half:]
    assert gpu.log[:5] == ["s1 waits for s0", "s2 waits for s1", "inner on s2", "outer on s1", "s1 waits for s2"]


def test_a_stream_whose_work_failed_is_waited_for_and_taken_again(gpu: Device) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        beside(fail, GPU)
    beside(lambda: gpu.run("next"), GPU).join()
    assert gpu.log == ["s1 waits for s0", "s0 waits for s1", "s1 waits for s0", "next on s1", "s0 waits for s1"]


def test_what_a_failed_step_left_beside_is_joined_before_what_comes_next(gpu: Device) -> None:
    @all_joined()
    def step() -> None:
        beside(lambda: gpu.run("first"), GPU)
        beside(lambda: gpu.run("second"), GPU)
        beside(lambda: gpu.run("third"), GPU).join()
        raise MemoryError

    caller = beside(lambda: gpu.run("caller's"), GPU)
    with pytest.raises(MemoryError):
        step()
    gpu.run("next step")
    assert gpu.log[-4:] == ["s0 waits for s4", "s0 waits for s3", "s0 waits for s2", "next step on s0"]
    caller.join()
    assert gpu.log[-1] == "s0 waits for s1"
    step_streams = len(gpu.streams)
    with pytest.raises(MemoryError):
        step()
    assert len(gpu.streams) == step_streams


def test_threads_share_no_streams(gpu: Device) -> None:
    names: list[str] = []

    def work() -> None:
        started = beside(lambda: gpu.current_stream(GPU).name, GPU)
        names.append(started.join())

    beside(lambda: None, GPU).join()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert names == ["s2", "s1"]


def test_without_streams_the_work_simply_runs() -> None:
    assert beside(lambda: 7, torch.device("cpu")).join() == 7
