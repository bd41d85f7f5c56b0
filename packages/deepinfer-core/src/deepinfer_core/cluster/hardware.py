"""The devices that a plan may name. Peaks are dense; bytes and flops in units of 1, rates a second.

    roofline of a step:   bytes / memory_rate   +   flops / fp8_rate    beside    bytes sent / link_rate

`link_rate` is one direction of a device's links inside its scale-up domain (vendors print the sum of both directions);
`network_rate` is what leads out of the domain. Only memory, its rate, fp8 and the links enter the cost model; bf16 and
fp4 are listed because a reader compares them. Each figure names its source.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_core.cluster.figures import Figure
from deepinfer_core.config.checks import check_choice
from deepinfer_core.errors import ConfigError

__all__ = ["DEVICES", "Device", "device_named"]

_GB, _TB, _TF = 1e9, 1e12, 1e12
_NVIDIA = "vendor's data sheet, as in the tables of stas00/ml-engineering"
_MLPERF = "MLPerf system descriptions"
_HUAWEI = "Huawei Connect 2025 reports"
_UNCHECKED = "known only roughly, not checked against a data sheet"
_ONE_WAY = "half of the printed sum of both directions"
_NETWORK = Figure(50 * _GB, "assumed", "one 400 Gb/s adapter a device")


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of one accelerator, each with its mark; None: the part has no such arithmetic, or no figure is known."""

    name: str
    memory: Figure  # bytes
    memory_rate: Figure  # bytes a second
    bf16: Figure | None  # flops a second
    fp8: Figure
    fp4: Figure | None
    link_rate: Figure  # bytes a second, one direction
    scale_up: Figure  # devices of one scale-up domain
    network_rate: Figure = _NETWORK

    def figures(self) -> dict[str, Figure]:
        """The figures that are known, by name."""
        named = {name: getattr(self, name) for name in self.__slots__ if name != "name"}
        return {name: figure for name, figure in named.items() if figure is not None}

    def exchange_rate(self, num_devices: int) -> float:
        """Bytes a second that a device sends to `num_devices` that share a step: its links, or the network."""
        return self.link_rate.value if num_devices <= self.scale_up.value else self.network_rate.value


DEVICES = {
    device.name: device
    for device in (
        Device(
            "H200",
            memory=Figure(141 * _GB, "published", _NVIDIA),
            memory_rate=Figure(4.8 * _TB, "published", _NVIDIA),
            bf16=Figure(989 * _TF, "published", _NVIDIA),
            fp8=Figure(1979 * _TF, "published", _NVIDIA),
            fp4=None,
            link_rate=Figure(450 * _GB, "published", f"NVLink 4, 900 GB/s: {_ONE_WAY}"),
            scale_up=Figure(8, "published", "HGX board"),
        ),
        Device(
            "B200",
            memory=Figure(180 * _GB, "published", _MLPERF),
            memory_rate=Figure(8.0 * _TB, "published", _NVIDIA),
            bf16=Figure(2250 * _TF, "published", _NVIDIA),
            fp8=Figure(4500 * _TF, "published", _NVIDIA),
            fp4=Figure(9000 * _TF, "assumed", _UNCHECKED),
            link_rate=Figure(900 * _GB, "published", f"NVLink 5, 1.8 TB/s: {_ONE_WAY}"),
            scale_up=Figure(8, "published", "HGX board"),
        ),
        Device(
            "GB200",
            memory=Figure(186 * _GB, "published", _MLPERF),
            memory_rate=Figure(8.0 * _TB, "published", _MLPERF),
            bf16=Figure(2500 * _TF, "assumed", _UNCHECKED),
            fp8=Figure(5000 * _TF, "assumed", _UNCHECKED),
            fp4=Figure(10000 * _TF, "assumed", _UNCHECKED),
            link_rate=Figure(900 * _GB, "published", f"NVLink 5, 1.8 TB/s: {_ONE_WAY}"),
            scale_up=Figure(72, "published", "NVL72"),
        ),
        Device(
            "Ascend950PR",
            memory=Figure(128 * _GB, "published", f"{_HUAWEI}; the Atlas 350 that ships has 112 GB"),
            memory_rate=Figure(1.6 * _TB, "published", _HUAWEI),
            bf16=None,
            fp8=Figure(1000 * _TF, "published", _HUAWEI),
            fp4=Figure(2000 * _TF, "published", f"{_HUAWEI}; the Atlas 350 that ships has 1,560"),
            link_rate=Figure(1000 * _GB, "assumed", f"2 TB/s: {_ONE_WAY}"),
            scale_up=Figure(8192, "published", f"Atlas 950, {_HUAWEI}"),
        ),
        Device(
            "Ascend950DT",
            memory=Figure(144 * _GB, "published", _HUAWEI),
            memory_rate=Figure(4.0 * _TB, "published", _HUAWEI),
            bf16=None,
            fp8=Figure(1000 * _TF, "published", _HUAWEI),
            fp4=Figure(2000 * _TF, "published", _HUAWEI),
            link_rate=Figure(1000 * _GB, "assumed", f"2 TB/s: {_ONE_WAY}"),
            scale_up=Figure(8192, "published", f"Atlas 950, {_HUAWEI}"),
        ),
    )
}


def device_named(name: str) -> Device:
    """The device of that name. Raises ConfigError that lists the known ones."""
    return DEVICES[check_choice("device", name, tuple(DEVICES), ConfigError)]
