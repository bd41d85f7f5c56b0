"""Work that nothing needs until later runs beside the work launched next, on another stream of the device.

    mix    = beside(lambda: kernels.mhc_mix(..), device)     ─┬─► mix ───────────────┐
    y      = sublayer(x)                                      └─► sublayer ─────────┴─► expand
    expand(.., mix.join())

Small kernels leave most of a device idle, and so do the last blocks of large ones; another branch fills that, in a
captured graph as in an eager step. Where there are no streams, on a CPU, the work simply runs. Results don't depend on
it.

Memory needs no care beyond one rule: what the work reads must live until `join`. A stream's own memory is used again
only by later work of that stream, and this begins after everything that its caller has launched before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Beside", "beside"]


class _IdleStreams(threading.local):
    """Of this thread: streams that nobody has to join. Threads share none, since a capture takes all it touches."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, list[Any]] = {}


_idle = _IdleStreams()


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
        torch.get_device_module(self._device).current_stream(self._device).wait_stream(self._stream)
        _idle.by_device[self._device].append(self._stream)
        self._stream = None


def beside[Output](work: Callable[[], Output], device: torch.device) -> Beside[Output]:
    """Start `work` on an idle stream, after all that this thread has launched so far."""
    return Beside(work, device)


def _take_stream(device: torch.device) -> Any:
    """An idle stream, None where the device has none: a CPU, or tensors without a device behind them."""
    if device.type == "cpu" or not torch.get_device_module(device).is_available():
        return None
    idle = _idle.by_device.setdefault(device, [])
    return idle.pop() if idle else torch.get_device_module(device).Stream(device)
