"""`EngineConfig`: every setting of the engine in one frozen tree, filled from three sources that are compared.

    LLM(model, num_drafts=3)      deepinfer generate --num-drafts 3      DEEPINFER_USE_NEXTN_DECODE=3
                  \\_________________________|________________________________/
                                    resolve_settings
                                             |
          EngineConfig { model, dtype, seed, .. , scheduler{}, cache{}, speculation{}, parallel{}, experts{} }

A setting has the same flat name everywhere; the part that owns it is found by that name, so no two parts may share
one. An argument wins over the environment; where the two disagree, `ResolvedSettings.notes` says so. Unknown names are
refused. The text beside a setting's type is what `--help` says about it.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal

from deepinfer_core.config.checks import check_choice, check_flag, check_integer, shown
from deepinfer_core.config.env import SETTING_OF_VARIABLE, read_variables, unknown_variables
from deepinfer_core.config.parallel import ParallelConfig
from deepinfer_core.config.sampling import LogprobsMode
from deepinfer_core.config.scheduler import CacheConfig, PrefixReplay, SchedulerConfig, SpeculationConfig
from deepinfer_core.errors import ConfigError

__all__ = [
    "CpuKernels",
    "EngineConfig",
    "ExpertBalanceConfig",
    "ParallelConfig",
    "ResolvedSettings",
    "Setting",
    "WeightForm",
    "all_settings",
    "flat_settings",
    "parse_text",
    "resolve_settings",
    "union_members",
]

Accelerator = Literal["cpu", "nvidia", "ascend"]
EngramStorage = Literal["memory", "disk", "device"]
CpuKernels = Literal["auto", "native", "reference"]
ModelDtype = Literal["float32", "bfloat16"]
WeightForm = Literal["auto", "bfloat16", "experts", "packed"]

_MAX_PATH_CHARS = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalanceConfig:
    """The expert load balancer: what it counts, and when it moves experts between devices."""

    expert_count_window: Annotated[int, "steps whose counts are summed"] = 100
    expert_rearrangement_interval: Annotated[int, "steps between two rearrangements, 0 = never"] = 10_000
    num_extra_experts: Annotated[int, "replicas of each layer beyond one of each expert"] = 0
    expert_stat_interval: Annotated[int, "steps between two reports"] = 128

    def __post_init__(self) -> None:
        check_integer("expert_count_window", self.expert_count_window, 1, 2**24, ConfigError)
        check_integer("expert_rearrangement_interval", self.expert_rearrangement_interval, 0, 2**31, ConfigError)
        check_integer("num_extra_experts", self.num_extra_experts, 0, 65_536, ConfigError)
        check_integer("expert_stat_interval", self.expert_stat_interval, 1, 2**24, ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one engine. Raises ConfigError for a value out of range and for values that contradict."""

    model: Annotated[str | None, "a folder, a name on the hub, or 'tiny'; None = chosen by the device"] = None
    tokenizer: Annotated[str | None, "folder or file of tokenizer.json; None = the model's"] = None
    revision: Annotated[str | None, "of a model on the hub"] = None
    accelerator: Annotated[Accelerator | None, "None = the one that can run here, else the CPU"] = None
    dtype: Annotated[ModelDtype | None, "of activations; None = float32 on a CPU, bfloat16 elsewhere"] = None
    seed: Annotated[int | None, "of requests without one; None = from the operating system"] = 0
    deterministic: Annotated[bool, "tokens do not depend on load, cache state or drafts"] = True
    batch_invariant: Annotated[bool, "refuse to start with an operation that does not promise batch invariance"] = False
    logprobs_mode: Annotated[LogprobsMode, "of the model's logits, or after penalties, temperature and filters"] = "raw"
    enforce_eager: Annotated[bool, "no captured graphs"] = False
    float8_products: Annotated[bool, "products with FP8 or FP4 weights round their rows to FP8"] = False
    weight_form: Annotated[WeightForm, "of FP8 and FP4 products on an accelerator; the same bits in each"] = "auto"
    cpu_kernels: Annotated[CpuKernels, "auto = compiled C kernels where a compiler is, native = always"] = "auto"
    jit_cache_dir: Annotated[str | None, "where compiled kernels are kept; None = the user's cache folder"] = None
    engram_storage: Annotated[EngramStorage, "where Engram tables live"] = "memory"
    quiet: Annotated[bool, "no table of settings, no progress bars"] = False
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    experts: ExpertBalanceConfig = field(default_factory=ExpertBalanceConfig)

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision", "jit_cache_dir"):
            _check_name(name, getattr(self, name))
        if self.accelerator is not None:
            check_choice("accelerator", self.accelerator, typing.get_args(Accelerator), ConfigError)
        if self.dtype is not None:
            check_choice("dtype", self.dtype, typing.get_args(ModelDtype), ConfigError)
        if self.seed is not None:
            seed = check_integer("seed", self.seed, -(2**63), 2**64 - 1, ConfigError)
            object.__setattr__(self, "seed", seed % 2**64)
        for name in ("deterministic", "batch_invariant", "enforce_eager", "float8_products", "quiet"):
            check_flag(name, getattr(self, name), ConfigError)
        check_choice("logprobs_mode", self.logprobs_mode, typing.get_args(LogprobsMode), ConfigError)
        check_choice("weight_form", self.weight_form, typing.get_args(WeightForm), ConfigError)
        check_choice("cpu_kernels", self.cpu_kernels, typing.get_args(CpuKernels), ConfigError)
        check_choice("engram_storage", self.engram_storage, typing.get_args(EngramStorage), ConfigError)
        if self.float8_products and self.weight_form != "auto":
            raise ConfigError(
                f"weight_form is {self.weight_form!r}, and float8_products has a form of its own; leave one of them out"
            )
        if self.deterministic and self.speculation.verification == "ratio":
            raise ConfigError(
                "verification is 'ratio', which is not repeatable under load; set deterministic=False, or take "
                "'coupled'"
            )
        if self.deterministic and self.cache.prefix_replay == "bounded":
            raise ConfigError(
                "prefix_replay is 'bounded', an approximation that depends on what is cached; set deterministic=False, "
                "or take 'exact' or 'off'"
            )

        if self.experts.num_extra_experts and self.parallel.expert_parallel_size == 1:
            raise ConfigError(
                f"num_extra_experts is {self.experts.num_extra_experts}; with expert_parallel_size 1 a rank has every "
                "expert and nothing to balance, leave it at 0"
            )

    @property
    def prefix_replay(self) -> PrefixReplay:
        """What follows a prefix hit: the setting, else "exact" where answers must repeat and "bounded" otherwise."""
        return self.cache.prefix_replay or ("exact" if self.deterministic else "bounded")

    @classmethod
    def from_settings(cls, **settings: Any) -> EngineConfig:
        """From flat settings alone; the environment is not read. Raises ConfigError."""
        return _build({_canonical_name(name): value for name, value in settings.items()})


# ---- flat names ---------------------------------------------------------------------------------------------------

_PARTS = ("scheduler", "cache", "speculation", "parallel", "experts")

# Names that other engines use for the same setting.
_ALIASES: Mapping[str, str] = MappingProxyType({
    "gpu_memory_utilization": "memory_fraction",
    "num_speculative_tokens": "num_drafts",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree: its flat name, the part that owns it ("" = EngineConfig itself), type, default, meaning."""

    name: str
    part: str
    annotation: Any
    default: Any
    meaning: str  # for --help

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts a Literal setting takes; () for others."""
        for option in (self.annotation, *typing.get_args(self.annotation)):
            if typing.get_origin(option) is Literal:
                return typing.get_args(option)
        return ()


@cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting by its flat name, in the order of the tree."""
    found: dict[str, Setting] = {}
    for part, owner in [("", EngineConfig), *((part, _part_class(part)) for part in _PARTS)]:
        hints = typing.get_type_hints(owner, include_extras=True)
        for spec in dataclasses.fields(owner):
            if part == "" and spec.name in _PARTS:
                continue
            if spec.name in found:
                raise ConfigError(
                    f"the setting {spec.name} exists in {part} and {found[spec.name].part or 'EngineConfig'}"
                )
            annotation, meaning = typing.get_args(hints[spec.name])  # of Annotated
            found[spec.name] = Setting(spec.name, part, annotation, spec.default, meaning)
    return MappingProxyType(found)


def flat_settings(config: EngineConfig) -> dict[str, Any]:
    """Every setting by its flat name: `EngineConfig.from_settings` makes the same configuration of it."""
    owners = {"": config} | {part: getattr(config, part) for part in _PARTS}
    return {name: getattr(owners[setting.part], name) for name, setting in all_settings().items()}


@cache
def _part_class(part: str) -> type[Any]:
    return typing.get_type_hints(EngineConfig)[part]


def _canonical_name(name: str) -> str:
    name = _ALIASES.get(name, name)
    if name not in all_settings():
        close = difflib.get_close_matches(name, [*all_settings(), *_ALIASES], 1, 0.6)
        hint = f"did you mean {close[0]}?" if close else "`deepinfer generate --help` lists all"
        raise ConfigError(f"{name} is not a setting; {hint}")
    return name


def _build(values: Mapping[str, Any]) -> EngineConfig:
    groups: dict[str, dict[str, Any]] = {part: {} for part in ("", *_PARTS)}
    for name, value in values.items():
        groups[all_settings()[name].part][name] = value
    top = groups.pop("")
    return EngineConfig(**top, **{part: _part_class(part)(**group) for part, group in groups.items()})


# ---- sources ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """A configuration, where each of its values came from, and what disagreed or had no effect."""

    config: EngineConfig
    sources: Mapping[str, str]  # name -> "argument", the name of a variable, or "default"
    notes: tuple[str, ...]

    def rows(self) -> list[tuple[str, str, str]]:
        """(setting, value, source) of every setting, for a table; auto: left open, decided when the engine starts."""
        rows: list[tuple[str, str, str]] = []
        for name, setting in all_settings().items():
            owner: Any = getattr(self.config, setting.part) if setting.part else self.config
            value = getattr(owner, name)
            source = self.sources[name]
            if name == "prefix_salt" and value is not None:
                text = "(hidden)"
            else:
                text = "auto" if value is None and source == "default" else str(value)
            rows.append((name, text, source))
        return rows


def resolve_settings(settings: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> ResolvedSettings:
    """Merge arguments with the environment (`variables`: names and texts; None = what is set now).

    Raises ConfigError for an unknown argument, one given twice under two names, and any value that is not usable.
    """
    arguments: dict[str, Any] = {}
    for given, value in settings.items():
        name = _canonical_name(given)
        if name in arguments and arguments[name] != value:
            raise ConfigError(
                f"{given} is {shown(value)} and {name} is {shown(arguments[name])}; they mean the same, give one"
            )
        arguments[name] = value
    notes = list(unknown_variables()) if variables is None else []
    values, sources = dict(arguments), dict.fromkeys(arguments, "argument")
    for variable, text in (read_variables() if variables is None else variables).items():
        name = SETTING_OF_VARIABLE[variable]
        value = _from_variable(variable, text)
        if name not in arguments:
            values[name], sources[name] = value, variable
        elif arguments[name] != value:
            notes.append(f"{variable} asks for {name} {text!r}; the argument {shown(arguments[name])} is used")
    try:
        config = _build(values)
    except ConfigError as error:
        about = re.match(r"\w+", str(error))  # the setting that the message begins with
        source = sources.get(about[0] if about else "", "argument")
        if source == "argument":
            raise
        raise ConfigError(f"{error} (it comes from {source})") from error
    return ResolvedSettings(config, {name: sources.get(name, "default") for name in all_settings()}, tuple(notes))


# Switches of the original whose setting here is a choice: what 0 and 1 stand for.
_SWITCHES: Mapping[str, tuple[str, str]] = MappingProxyType({
    "DEEPINFER_ENABLE_MTP_VARLEN": ("fixed", "scheduled"),
    "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE": ("memory", "device"),
})  # fmt: skip


def _from_variable(variable: str, text: str) -> Any:
    if variable in _SWITCHES:
        position: int = parse_text(variable, bool, text)
        return _SWITCHES[variable][position]
    return parse_text(variable, all_settings()[SETTING_OF_VARIABLE[variable]].annotation, text)


_BOOLEANS = MappingProxyType(
    {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
)


def union_members(annotation: Any) -> tuple[Any, ...]:
    """`int | None` -> (int, NoneType); what is no union is its only member."""
    # `int | None` is a types.UnionType, `Literal["a"] | None` a typing.Union.
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    members: tuple[Any, ...] = typing.get_args(annotation) if is_union else (annotation,)
    return members


def parse_text(name: str, annotation: Any, text: str) -> Any:
    """`text` as a value of type `annotation`: bool, int, float, str, Literal, tuple of floats, each perhaps or None."""
    options = union_members(annotation)
    if types.NoneType in options and text.lower() == "none":
        return None
    kind = next(option for option in options if option is not types.NoneType)
    try:
        if kind is bool:
            return _BOOLEANS[text.lower()]
        if kind is int:
            return int(text)
        if kind is float:
            return float(text)
        if typing.get_origin(kind) is tuple:
            return tuple(float(item) for item in text.split(","))
    except (KeyError, ValueError) as error:
        wanted = {bool: "0 or 1", int: "an integer", float: "a number"}.get(kind, "numbers with commas between them")
        raise ConfigError(f"{name} is {shown(text)}; it must be {wanted}") from error
    return text


def _check_name(name: str, value: Any) -> None:
    if value is None:
        return
    if not (isinstance(value, str) and 0 < len(value) <= _MAX_PATH_CHARS and "\0" not in value):
        raise ConfigError(f"{name} is {shown(value)}; it must be a text of 1 to {_MAX_PATH_CHARS} characters")
    try:
        os.fsencode(value)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {shown(value)}; it has a character that no file name can have") from error
