"""From settings to an engine that is ready to run: which device, which model, which kernels, how large a cache.

EngineConfig ─► provider (cpu | nvidia | ascend) ─► folder ─► config.json, tokenizer.json, weights
                                                      │
                    Scheduler  ◄── sizes ──►  Runner (kernels, caches, sampler)
                         └──────── EngineLoop ────────┘
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from deepinfer_core import __version__
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.memory_plan import Form, kv_bytes_per_token
from deepinfer_core.checkpoint.resolve import resolve_model
from deepinfer_core.config.engine import EngineConfig
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.config.scheduler import BLOCK_TOKENS, SpeculationConfig
from deepinfer_core.errors import CapacityError, ConfigError, KernelError, ParallelError
from deepinfer_core.kernels.contract import CODED_OPS, SAMPLING_OPS, TakesPacked
from deepinfer_core.kernels.native import NativeProvider
from deepinfer_core.kernels.reference.packed import Packing
from deepinfer_core.kernels.registry import KernelChoice, OpSource, build_kernels, choose_provider
from deepinfer_core.model.params import build_params
from deepinfer_core.outputs import Provenance
from deepinfer_core.parallel.world import World
from deepinfer_core.runtime.engine_loop import EngineLoop, make_loop
from deepinfer_core.runtime.memory import available_bytes, total_bytes, weights_bytes
from deepinfer_core.runtime.pending import PendingResult
from deepinfer_core.runtime.rank_part import RankPart
from deepinfer_core.runtime.rank_runner import RankRunner
from deepinfer_core.runtime.runner import Runner, RunnerConfig
from deepinfer_core.runtime.step_costs import measure_costs
from deepinfer_core.runtime.weight_form import choose_packing
from deepinfer_core.scheduling.cost import CostModel
from deepinfer_core.scheduling.prefix_index import PrefixHasher
from deepinfer_core.scheduling.replay import ReplayRules
from deepinfer_core.scheduling.scheduler import Scheduler
from deepinfer_core.text import Tokenizer

__all__ = ["AssembledEngine", "assemble_engine"]

# On a CPU the cache shares the memory of everything else, so its default size stays small.
_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """Everything that one process runs."""

    folder: Path
    model_config: ModelConfig
    fingerprint: str  # of the weights
    tokenizer: Tokenizer
    choice: KernelChoice
    op_sources: list[OpSource]
    runner: Runner
    scheduler: Scheduler
    loop: EngineLoop[Future[PendingResult]]
    provenance: Provenance
    loaded_bytes: Mapping[str, int]  # read from the checkpoint, by part

    def close(self) -> None:
        """Finish what is queued and end the worker thread."""
        self.runner.close()

    def summary(self) -> str:
        """What the settings that were left open have become."""
        made = self.provenance.settings
        return (
            f"{self.folder}: {made['kernels']} kernels on {made['device']}, {made['dtype']}; at most "
            f"{self.scheduler.max_model_len:,} tokens a request; prefix_replay {made['prefix_replay']}"
        )

    def statistics(self) -> dict[str, object]:
        """Counters of scheduler and device since the start; flat names with units."""
        speculation, device = self.scheduler.speculation, self.runner.stats
        meter = speculation.meter
        counts = zip(meter.accepted.tolist(), meter.verified.tolist(), strict=True)
        balancer = self.runner.balancer if isinstance(self.runner, RankRunner) else None
        return self.scheduler.stats.as_dict() | {
            "draft_policy": speculation.policy.value,
            "acceptance_by_position": [accepted / verified if verified else None for accepted, verified in counts],
            "device_seconds": device.device_seconds,
            "rows_per_layer": list(device.rows_per_layer),
            **({} if balancer is None else balancer.statistics()),
        }


def assemble_engine(config: EngineConfig, world: World | None = None) -> AssembledEngine:
    """Load and connect; of a `world`, the part of its rank, while all its ranks do the same.

    Raises an error of `errors` for whatever is missing, damaged or too large.
    """
    if (size := config.parallel.topology().world_size) != (1 if world is None else world.size):
        raise ParallelError(f"the settings ask for {size} ranks; this process is one of {world.size if world else 1}")
    choice = choose_provider(config.accelerator)
    form: Form = "plain" if choice.provider is None else choice.provider.cache_form
    find_model = partial(
        resolve_model, config.model, accelerator=choice.name, revision=config.revision, progress=not config.quiet
    )
    folder = find_model(weights=False)  # shards on the hub are fetched when everything else is in order
    model_config = ModelConfig.from_folder(folder)
    tokenizer = Tokenizer.from_path(
        config.tokenizer or folder, bos_token_id=model_config.bos_token_id, eos_token_id=model_config.eos_token_id
    )
    _check_tokenizer(tokenizer, model_config)
    speculation = _speculation(config.speculation, model_config)
    dtype = _dtype(config, choice)
    kernels, op_sources = build_kernels(
        choice, model_config, dtype, cpu_kernels=config.cpu_kernels, cache_dir=config.jit_cache_dir
    )
    _set_torch_threads(op_sources)
    _check_batch_invariance(config, op_sources)
    _check_float8_products(config, choice, op_sources, world)
    packed = choose_packing(config, choice, op_sources, dtype, model_config)
    part = RankPart.of(world, model_config, config)
    _check_weights_fit(config, model_config, choice.device, _held_form(config, form, packed), folder)
    folder = find_model()
    weights = load_model_weights(
        folder,
        model_config,
        dtype=dtype,
        device=choice.device if world is None else world.device,
        experts=part.experts,
        engram_rows=part.engram_rows,
        engram_storage=config.engram_storage,
        draft=speculation.num_drafts > 0,
        packed=packed,
        progress=not config.quiet,
    )
    arrange = choice.provider.arranged if isinstance(choice.provider, TakesPacked) else None
    params = build_params(weights, model_config, coded=config.float8_products, arrange=arrange, consume=True)
    if choice.device != "cpu":
        torch.get_device_module(choice.device).empty_cache()  # what loading took: the blocks are made of what is left
    max_model_len = _max_model_len(config, model_config)
    # The longest request, and so where it ends, must not depend on the rank.
    num_blocks = part.smallest(_num_blocks(config, model_config, choice, max_model_len, form))
    rules = ReplayRules.from_configs(model_config, config.cache, speculation, deterministic=config.deterministic)
    runner = part.runner(
        model_config,
        params,
        kernels,
        RunnerConfig(
            num_slots=config.scheduler.max_num_seqs,
            num_blocks=num_blocks,
            max_step_rows=config.scheduler.max_num_batched_tokens,
            num_drafts=speculation.num_drafts,
            verification=speculation.verification,
            mask_decoder=config.cache.decoder_prefill == "mask",
            confidence_temperatures=speculation.confidence_temperatures,
            logprobs_mode=config.logprobs_mode,
            num_token_ids=tokenizer.num_tokens,
            graphs=not config.enforce_eager and world is None,
        ),
        cache_form=form,
    )
    scheduled = speculation.num_drafts > 0 and speculation.draft_schedule == "scheduled"
    cost = _measured_costs(config, runner, part) if scheduled else None
    salt = bytes.fromhex(config.cache.prefix_salt) if config.cache.prefix_salt else None
    scheduler = Scheduler(
        config.scheduler,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        eos_token_id=model_config.eos_token_id,
        rules=rules,
        speculation=speculation,
        hasher=None if rules.prefix_replay == "off" else PrefixHasher(weights.fingerprint.encode(), salt),
        cost=cost,
    )
    loop = make_loop(scheduler, runner, overlap=config.scheduler.overlap)
    provenance = Provenance(
        __version__,
        weights.fingerprint,
        {
            "kernels": "+".join(sorted({source.provider for source in op_sources})),
            "device": choice.device,
            "dtype": str(dtype).removeprefix("torch."),
            "decoder_prefill": rules.decoder_prefill,
            "keep_tokens": rules.keep_tokens,
            "prefix_replay": rules.prefix_replay,
            "verification": speculation.verification,
            "deterministic": config.deterministic,
            "float8_products": config.float8_products,
            "max_model_len": scheduler.max_model_len,
        },
    )
    return AssembledEngine(
        folder,
        model_config,
        weights.fingerprint,
        tokenizer,
        choice,
        op_sources,
        runner,
        scheduler,
        loop,
        provenance,
        weights.bytes_read,
    )


def _measured_costs(config: EngineConfig, runner: Runner, part: RankPart) -> CostModel:
    most = config.scheduler.max_num_batched_tokens
    return measure_costs(runner, max_rows=most, max_requests=config.scheduler.max_num_seqs, agree=part.largest)


def _check_tokenizer(tokenizer: Tokenizer, model: ModelConfig) -> None:
    if tokenizer.num_tokens > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.num_tokens} tokens and the model's vocabulary {model.vocab_size}; they "
            "don't belong together"
        )


def _speculation(speculation: SpeculationConfig, model: ModelConfig) -> SpeculationConfig:
    """The default number of drafts, cut to what the checkpoint can draft; another number is taken or refused."""
    most = model.dspark_block_size if model.num_nextn_predict_layers else 0
    if speculation.num_drafts <= most:
        return speculation
    if speculation.num_drafts == SpeculationConfig().num_drafts:
        return dataclasses.replace(speculation, num_drafts=most)
    raise ConfigError(f"num_drafts is {speculation.num_drafts}; this checkpoint drafts at most {most} tokens")


def _held_form(config: EngineConfig, cache_form: Form, packed: Packing) -> Form:
    """The form in which the weights are held."""
    if cache_form == "plain":
        return "plain"
    if config.float8_products:
        return "float8"
    return "bfloat16" if packed == "none" else packed


def _check_weights_fit(config: EngineConfig, model: ModelConfig, device: str, held: Form, folder: Path) -> None:
    """Before a long load: can this machine hold the weights at all? The cache is fitted into what they leave."""
    needed, there = weights_bytes(config, model, held), total_bytes(device)
    if needed > there:
        raise CapacityError(
            f"the weights of {folder} take {needed / 1e9:,.1f} GB on one device ({held} form), and {device} has "
            f"{there / 1e9:,.1f} GB; take a smaller checkpoint or a larger device (`deepinfer plan` says what fits)"
        )
    if not config.quiet:  # before the load, which may take minutes
        plan = f"{folder}: {needed / 1e9:,.2f} GB of weights, {there / 1e9:,.1f} GB on {device}"
        Console(stderr=True).print(plan, markup=False, highlight=False, soft_wrap=True)


def _dtype(config: EngineConfig, choice: KernelChoice) -> torch.dtype:
    name = config.dtype or ("float32" if choice.device == "cpu" else "bfloat16")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _set_torch_threads(op_sources: list[OpSource]) -> None:
    """One torch thread where the native kernels do the work: they start threads of their own when a call is worth it,
    and torch's would only wait for each other between small operations, for very long on a busy machine.
    """
    if all(source.provider == NativeProvider.name for source in op_sources if source.op not in SAMPLING_OPS):
        torch.set_num_threads(1)


def _check_batch_invariance(config: EngineConfig, op_sources: list[OpSource]) -> None:
    broken = [source for source in op_sources if not source.row_invariant]
    if config.batch_invariant and broken:
        named = "; ".join(f"{source.op} from {source.provider} ({source.reason})" for source in broken)
        raise KernelError(
            "batch_invariant is set, and these operations do not promise that a row's bits are independent of the "
            f"other rows: {named}; set it to False, or DEEPINFER_ACCELERATOR=cpu"
        )


def _check_float8_products(
    config: EngineConfig, choice: KernelChoice, op_sources: list[OpSource], world: World | None
) -> None:
    if not config.float8_products:
        return
    if world is not None:
        raise ParallelError(
            "float8_products is set, which is built for one rank; set it to False, or leave the parallel sizes at 1"
        )
    taken = frozenset() if choice.provider is None else choice.provider.coded_ops
    lacking = [source.op for source in op_sources if source.op in CODED_OPS and source.op not in taken]
    lacking += [source.op for source in op_sources if source.op in taken and source.provider == "reference"]
    if lacking:
        raise KernelError(
            f"float8_products is set, and the kernels of {choice.name} have no such form of {', '.join(lacking)}; "
            "set it to False"
        )


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    given = config.scheduler.max_model_len
    if given is not None and given > model.max_position_embeddings:
        raise ConfigError(f"max_model_len is {given}; this model reads at most {model.max_position_embeddings} tokens")
    return given or model.max_position_embeddings


def _num_blocks(config: EngineConfig, model: ModelConfig, choice: KernelChoice, max_model_len: int, form: Form) -> int:
    """As the setting says, else blocks for all slots at full length, or as many as the memory holds."""
    wanted = config.scheduler.max_num_seqs * math.ceil(max_model_len / BLOCK_TOKENS)
    block_bytes = kv_bytes_per_token(model, form) * BLOCK_TOKENS
    given = config.cache.num_blocks
    if given is not None:
        most = total_bytes(choice.device)  # a CPU hands out more than it has, and ends the process when that is used
        if given * block_bytes > most:
            raise CapacityError(
                f"num_blocks is {given}: {given * block_bytes / 1e9:.2f} GB, more than the {most / 1e9:.2f} GB of this "
                f"device; at most {int(most // block_bytes)} fit"
            )
        return given
    free = _free_bytes(choice.device) * config.cache.memory_fraction
    fitting = int(free // block_bytes) if block_bytes else wanted
    if fitting < 1:
        raise CapacityError(
            f"{free / 1e9:.2f} GB are left for the cache, less than one block of {block_bytes / 1e6:.2f} MB; use a "
            "device with more memory, or engram_storage='disk'"
        )
    return min(wanted, fitting)


def _free_bytes(device: str) -> int:
    free = available_bytes(device)
    return min(_CPU_CACHE_BYTES, free) if device == "cpu" else free
