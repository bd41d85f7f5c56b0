"""Work that nothing needs until later runs beside the work launched next, on another stream of the device.

    mix    = beside(lambda: kernels.mhc_mix(..), device)     ─┬─► mix ───────────────┐
    y      = sublayer(x)                                      └─► sublayer ─────────┴─► expand
    expand(.., mix.join())

Small kernels leave most of a device idle, and so do the last blocks of large ones; another branch fills that, in a
captured graph as in an eager step. Where there are no streams, on a CPU, the work simply runs. Results don't depend on
it.

Memory needs no care beyond one rule: what the work reads must live until `join`. A stream's own memory is used again
only by later work of that stream, and this begins after everything that its caller has launched before. A step that
fails between the two joins what it has begun (`all_joined`): it would otherwise write, from memory that others have by
then, beside the step after it; and a capture cannot end before all its streams are joined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Beside", "all_joined", "beside"]


class _Streams(threading.local):
    """Of this thread. Threads share none, since a capture takes all it touches."""

    def __init__(self) -> None:
        self.idle: dict[torch.device, list[Any]] = {}  # nobody has to join them
        self.under_way: list[Beside[Any]] = []  # not joined yet


_streams = _Streams()


class Beside[Output]:
    """Work under way, and its output."""

    def __init__(self, work: Callable[[], Output], device: torch.device) -> None:
        self._device = device
        self._stream: Any = _take_stream(device)
        if self._stream is None:
            self._output = work()
            return
        streams = torch.get_device_module(device)
        self._stream.wait_stream(streams.current_stream(device))
        _streams.under_way.append(self)
        try:
            with streams.stream(self._stream):
                self._output = work()
        except BaseException:
            self._rejoin()
            raise

    def join(self) -> Output:
        """The output; what the caller launches from here on begins after the work. To be called once."""
        if self._stream is not None:
            self._rejoin()
        return self._output

    def _rejoin(self) -> None:
        _streams.under_way.remove(self)
        torch.get_device_module(self._device).current_stream(self._device).wait_stream(self._stream)
        _streams.idle[self._device].append(self._stream)
        self._stream = None


def beside[Output](work: Callable[[], Output], device: torch.device) -> Beside[Output]:
    """Start `work` on an idle stream, after all that this thread has launched so far."""
    return Beside(work, device)


@contextmanager
def all_joined() -> Iterator[None]:
    """Around work that joins what it begins: where it fails, the rest is joined here."""
    before = len(_streams.under_way)
    try:
        yield
    except BaseException:
        for left in reversed(_streams.under_way[before:]):
            left.join()
        raise


def _take_stream(device: torch.device) -> Any:
    """An idle stream, None where the device has none: a CPU, or tensors without a device behind them."""
    if device.type == "cpu" or not torch.get_device_module(device).is_available():
        return None
    idle = _streams.idle.setdefault(device, [])
    return idle.pop() if idle else torch.get_device_module(device).Stream(device)
