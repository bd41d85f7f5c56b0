"""`ClusterPlan`: a FILE of TOML or JSON, read, checked, and marked.

    [cluster]     seed, seconds to simulate, load, scale
    [prefill]     device, number, EP size, chunk            [decode]     device, number, EP size, requests a rank
    [drafts]      length, schedule, acceptance              [balance]    rearrangements, drift
    [store]       capacity, rates                           [transfer]   prefill to decode
    [[traffic]]   one table a class: chat, agent            [trace]      path of a recorded trace instead, or beside
    [sweep]       further runs: loads, splits of devices
    [marks]       "decode.device" = "measured"              how the FILE's own values are known; else "assumed"

Every value has a default, so an empty FILE is a plan: the published unit of 64 prefill and 64 decode devices.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_args

from deepinfer_core.cluster.balance import BalanceSettings
from deepinfer_core.cluster.drafting import DraftSettings
from deepinfer_core.cluster.figures import Mark
from deepinfer_core.cluster.hardware import DEVICES
from deepinfer_core.cluster.prefix_store import StoreSettings
from deepinfer_core.cluster.settings import Section, declared, list_at, setting, table_at
from deepinfer_core.cluster.trace import Trace, read_trace
from deepinfer_core.cluster.traffic import KINDS, TrafficSettings
from deepinfer_core.config.checks import check_choice, check_integer, check_number, shown
from deepinfer_core.errors import ConfigError

__all__ = [
    "ClusterPlan",
    "ClusterSettings",
    "DecodeSettings",
    "PrefillSettings",
    "SweepSettings",
    "TransferSettings",
    "read_plan",
]

_MAX_FILE_BYTES = 1 << 20
_MAX_CLASSES = 16
_MAX_SWEEP = 16
_MAX_DEVICES = 4_096
_NAMES = tuple(DEVICES)
_MARKS = cast("tuple[str, ...]", get_args(Mark.__value__))


@dataclass(frozen=True)
class ClusterSettings(Section):
    """`[cluster]` of a plan."""

    seed: int = setting(0, 0, 2**63, "assumed", "of all random draws")
    seconds: float = setting(240.0, 1.0, 1e6, "assumed", "simulated after the warm-up")
    warmup_seconds: float = setting(60.0, 0.0, 1e6, "assumed", "simulated first and not reported")
    load: float = setting(1.0, 0.0, 1e3, "assumed", "scales the traffic of all classes")
    scale_down: int = setting(16, 1, 4_096, "assumed", "one in so many devices and requests is simulated")


@dataclass(frozen=True)
class PrefillSettings(Section):
    """`[prefill]` of a plan."""

    device: str = setting("B200", 0, 0, "published", "ordinary 8-GPU servers, in production", choices=_NAMES)
    devices: int = setting(64, 1, _MAX_DEVICES, "published", "smallest efficient unit, in production")
    expert_parallel: int = setting(4, 1, 64, "published", "EP4DP4, original's curves; EP2 to EP8 in production")
    chunk_tokens: int = setting(16_384, 128, 2**20, "assumed", "rows of a rank in a step")
    keep_tokens: int = setting(140, 0, 2**20, "published", "rows of a prompt that run through the decoder half")
    replay_tokens: int = setting(128, 0, 2**20, "published", "rows computed again after a hit: the window")
    memory_fraction: float = setting(0.9, 0.05, 1.0, "published", "gpu_memory_utilization of the original")
    balanced_context: bool = setting(False, 0, 0, "assumed", "a step's rows spread evenly over the ranks")


@dataclass(frozen=True)
class DecodeSettings(Section):
    """`[decode]` of a plan."""

    device: str = setting("GB200", 0, 0, "assumed", "the 64-GPU supernode of SM100", choices=_NAMES)
    devices: int = setting(64, 1, _MAX_DEVICES, "published", "smallest efficient unit, in production")
    expert_parallel: int = setting(64, 1, 1_024, "published", "EP64DP64; EP64 to EP128 in production")
    max_requests: int = setting(256, 1, 4_096, "published", "max_num_seqs of the original, a rank")
    memory_fraction: float = setting(0.9, 0.05, 1.0, "published", "gpu_memory_utilization of the original")


@dataclass(frozen=True)
class TransferSettings(Section):
    """`[transfer]` of a plan: the KV of a prompt from a prefill to a decode device."""

    gigabytes_per_s: float = setting(40.0, 1e-3, 1e5, "assumed", "a prefill device's adapter, 400 Gb/s")
    latency_s: float = setting(0.003, 0.0, 60.0, "assumed", "hand-over beside the bytes")


@dataclass(frozen=True)
class SweepSettings:
    """`[sweep]` of a plan: further runs, each with one value changed."""

    loads: tuple[float, ...] = ()
    prefill_devices: tuple[int, ...] = ()  # of all devices; the rest decodes

    def __post_init__(self) -> None:
        loads = [
            check_number("loads", load, 0, 1e3, ConfigError, above_low=True)
            for load in list_at("loads", self.loads, 0, _MAX_SWEEP, "numbers")
        ]
        devices = [
            check_integer("prefill_devices", count, 1, _MAX_DEVICES, ConfigError)
            for count in list_at("prefill_devices", self.prefill_devices, 0, _MAX_SWEEP, "integers")
        ]
        object.__setattr__(self, "loads", tuple(loads))
        object.__setattr__(self, "prefill_devices", tuple(devices))


@dataclass(frozen=True)
class ClusterPlan:
    """All of a FILE. Raises ConfigError for sections that do not go together."""

    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    prefill: PrefillSettings = field(default_factory=PrefillSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    drafts: DraftSettings = field(default_factory=DraftSettings)
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    traffic: tuple[TrafficSettings, ...] = field(
        default_factory=lambda: tuple(TrafficSettings(**kind) for kind in KINDS.values())  # pyright: ignore[reportArgumentType] -- by name
    )
    sweep: SweepSettings = field(default_factory=SweepSettings)
    trace: Trace | None = None
    given: Mapping[str, Mark] = field(default_factory=dict[str, Mark])  # names of values from a FILE -> their marks

    def __post_init__(self) -> None:
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            self._check_pool(name, pool)
        if not self.cluster.load > 0 or (self.trace is None and not any(t.requests_per_s for t in self.traffic)):
            raise ConfigError(
                "no request ever arrives: give cluster.load and requests_per_s of a class of [[traffic]] above 0, or a "
                "[trace]"
            )

    def _check_pool(self, name: str, pool: PrefillSettings | DecodeSettings) -> None:
        scale, size = self.cluster.scale_down, pool.expert_parallel
        if pool.devices % size:
            raise ConfigError(
                f"{name}.devices is {pool.devices}; it must be a multiple of {name}.expert_parallel, {size}"
            )
        of_groups = math.gcd(pool.devices // size, scale)
        if size % (scale // of_groups):
            raise ConfigError(
                f"cluster.scale_down is {scale}, which does not divide the {pool.devices // size} groups of {size} "
                f"devices of the {name} pool; {pool.devices} is a multiple of those that do"
            )

    def inputs(self) -> dict[str, dict[str, Any]]:
        """Every input by its name in a FILE: value, mark, source."""
        shown_inputs: dict[str, dict[str, Any]] = {}
        for name, section in self.sections():
            for spec in fields(section):
                rule, full = declared(spec), f"{name}.{spec.name}"
                mark, source = rule.mark, rule.source
                if full in self.given:
                    mark, source = self.given[full], "FILE"
                shown_inputs[full] = {"value": getattr(section, spec.name), "mark": mark, "source": source}
        if self.trace is not None:
            mark = self.given.get("trace.path", "assumed")
            shown_inputs["trace.path"] = {"value": self.trace.path, "mark": mark, "source": "FILE"}
        return shown_inputs

    def sections(self) -> list[tuple[str, Section]]:
        """Sections by name; traffic classes as traffic.0, traffic.1, .."""
        single = ("cluster", "prefill", "decode", "drafts", "balance", "store", "transfer")
        named: list[tuple[str, Section]] = [(name, getattr(self, name)) for name in single]
        return named + [(f"traffic.{i}", traffic) for i, traffic in enumerate(self.traffic)]


def read_plan(path: Path) -> ClusterPlan:
    """The plan of a FILE, TOML or (by its suffix) JSON. Raises ConfigError that names what is wrong in it."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)  # a device may have no end
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is too long; a plan has at most {_MAX_FILE_BYTES} bytes")
        text = data.decode()
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"the plan {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # both decoders raise ValueErrors
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is no {kind}: {error}; a name that ends in .json is read as JSON") from error
    try:
        return plan_from_tables(tables, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def plan_from_tables(tables: Any, folder: Path = Path()) -> ClusterPlan:
    """The plan of decoded tables; the path of a trace is relative to `folder`.

    Raises ConfigError that names unknown sections and keys.
    """
    sections: dict[str, type[Section]] = {
        "cluster": ClusterSettings, "prefill": PrefillSettings, "decode": DecodeSettings, "drafts": DraftSettings,
        "balance": BalanceSettings, "store": StoreSettings, "transfer": TransferSettings,
    }  # fmt: skip
    known = [*sections, "traffic", "trace", "sweep", "marks"]
    tables = table_at("a plan", tables)
    unknown = [name for name in tables if name not in known]
    if unknown:
        raise ConfigError(f"there is no section {', '.join(map(repr, unknown))}; a plan has {', '.join(known)}")
    parts: dict[str, Any] = {
        name: section.from_table(name, tables[name]) for name, section in sections.items() if name in tables
    }
    if "traffic" in tables:
        parts["traffic"] = _traffic(tables["traffic"])
    if "trace" in tables:
        parts["trace"] = _trace(tables["trace"], folder)
        parts.setdefault("traffic", ())
    if "sweep" in tables:
        parts["sweep"] = _sweep(tables["sweep"])
    return ClusterPlan(**parts, given=_marks(tables))


def _traffic(classes: Any) -> tuple[TrafficSettings, ...]:
    settings: list[TrafficSettings] = []
    for i, table in enumerate(list_at("traffic", classes, 1, _MAX_CLASSES, "tables [[traffic]]")):
        name = f"traffic.{i}"
        given = table_at(name, table)
        kind = check_choice(f"{name}.kind", given.get("kind", "chat"), tuple(KINDS), ConfigError)
        settings.append(TrafficSettings.from_table(name, KINDS[kind] | given))
    return tuple(settings)


def _trace(table: Any, folder: Path) -> Trace:
    given = table_at("trace", table)
    path: Any = given.get("path")
    if list(given) != ["path"] or not isinstance(path, str):
        raise ConfigError(f"trace is {shown(given)}; it must have a path to a file of requests, and nothing else")
    return read_trace(folder / path)


def _sweep(table: Any) -> SweepSettings:
    known = [spec.name for spec in fields(SweepSettings)]
    given = table_at("sweep", table)
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ConfigError(f"sweep has no setting {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
    try:
        return SweepSettings(**given)
    except ConfigError as error:
        raise ConfigError(f"sweep.{error}") from None


def _marks(tables: Mapping[str, Any]) -> dict[str, Mark]:
    """Marks of all values that `tables` gives; sections have been checked."""
    given: dict[str, Mark] = {}
    for section, table in tables.items():
        if section == "traffic":
            for i, part in enumerate(table):
                given |= {f"traffic.{i}.{key}": "assumed" for key in part}
        elif section not in ("marks", "sweep"):
            given |= {f"{section}.{key}": "assumed" for key in table}
    for name, mark in table_at("marks", tables.get("marks", {})).items():
        if name not in given:
            raise ConfigError(f"marks.{name!r} is no value of this plan; it gives {', '.join(given) or 'none'}")
        given[name] = cast("Mark", check_choice(f"marks.{name!r}", mark, _MARKS, ConfigError))
    return given
