"""The memory plan against published figures, against what is really allocated, and the command that prints it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.cache.state import ModelState
from deepinfer_core.checkpoint.engram_store import EngramTable
from deepinfer_core.checkpoint.folder import INDEX_NAME
from deepinfer_core.checkpoint.loader import load_model_weights
from deepinfer_core.checkpoint.memory_plan import (
    Form,
    Workload,
    cache_bytes,
    kv_bytes_per_token,
    part_sizes,
    plan_memory,
)
from deepinfer_core.checkpoint.resolve import resolve_model
from deepinfer_core.checkpoint.sharding import engram_shares, expert_shares
from deepinfer_core.cli.plan import add_parser
from deepinfer_core.config.model import ModelConfig
from deepinfer_core.errors import CheckpointError, ConfigError, ModelNotFoundError
from deepinfer_core.kernels.reference.packed import Packing
from deepinfer_core.model.params import build_params
from tests.core.model_configs import release_config, release_json, small_config

GB = 10**9


def test_the_parts_of_the_release_add_up_to_its_payload() -> None:
    sizes = part_sizes(release_config())
    assert sum(size.packed_bytes for size in sizes) == 510_286_023_000
    assert sum(size.num_parameters for size in sizes) == 763_205_315_794


def test_a_token_of_the_release_takes_890_bytes() -> None:
    assert kv_bytes_per_token(release_config(), "packed") == 890
    # 2.5 entries a token of 512 + 128 float32.
    assert kv_bytes_per_token(release_config(), "plain") == 2.5 * 640 * 4


def test_the_windows_of_the_release_have_140_slots() -> None:
    plan = plan_memory(release_config(), Workload(context_tokens=1024))
    assert plan.ring_slots == 140
    assert plan.ranks[0].caches["windows"] == 43 * (140 + 1) * 528  # one more row takes what must not be stored


@pytest.mark.parametrize("form", ["plain", "packed"])
@pytest.mark.parametrize(("slots", "context", "step_rows", "drafts"), [(1, 1, 1, 0), (3, 300, 17, 5), (70, 512, 64, 2)])
def test_planned_caches_are_what_the_engine_allocates(
    form: Form, slots: int, context: int, step_rows: int, drafts: int
) -> None:
    config = small_config()
    workload = Workload(context_tokens=context, form=form, step_rows=step_rows, num_drafts=drafts)
    blocks = slots * -(-context // 128)
    layout = CacheLayout(config, slots, blocks, step_rows, 2 * (drafts + 1), form)
    state = ModelState.allocate(layout, device="cpu", dtype=torch.float32)
    assert sum(cache_bytes(config, workload, slots).values()) == state.num_bytes()


@pytest.mark.parametrize("num_devices", [1, 2, 5])
def test_planned_weights_are_what_a_rank_reads(small: Path, num_devices: int) -> None:
    config = small_config()
    plan = plan_memory(config, Workload(context_tokens=64, num_devices=num_devices, engram_storage="device"))
    for group in plan.ranks:
        for rank in range(group.first_rank, group.last_rank + 1):
            weights = load_model_weights(
                small,
                config,
                experts=expert_shares(config, rank, num_devices),
                engram_rows=engram_shares(config, rank, num_devices),
                progress=False,
            )
            assert group.weights == weights.bytes_read


def tensor_bytes(value: object, seen: set[int]) -> int:
    """Of all tensors in a tree of dataclasses, each storage once; Engram's tables and constants stay out."""
    if isinstance(value, torch.Tensor):
        pointer = value.untyped_storage().data_ptr()
        fresh = pointer not in seen
        seen.add(pointer)
        return value.untyped_storage().nbytes() if fresh and value.dtype != torch.int64 else 0
    if isinstance(value, tuple):
        return sum(tensor_bytes(one, seen) for one in value)
    if is_dataclass(value) and not isinstance(value, EngramTable):
        return sum(tensor_bytes(getattr(value, field.name), seen) for field in fields(value))
    return 0


@pytest.mark.parametrize("form", ["bfloat16", "float8", "experts", "products"])
@pytest.mark.parametrize("model", ["small", "tiny"])  # widths that are no whole groups of 32, and such that are
def test_planned_weights_are_what_an_accelerator_holds(small: Path, model: str, form: Form) -> None:
    folder = small if model == "small" else resolve_model("tiny")
    config = ModelConfig.from_folder(folder)
    plan = plan_memory(config, Workload(context_tokens=64, form=form))
    packed: Packing = {"bfloat16": "none", "float8": "products"}.get(form, form)
    weights = load_model_weights(folder, config, dtype=torch.bfloat16, packed=packed, progress=False)
    arrange = (lambda weight, halves: weight) if form == packed else None
    params = build_params(weights, config, coded=form == "float8", arrange=arrange, consume=True)
    assert not weights.layers
    held = tensor_bytes(params, set())
    assert sum(plan.ranks[0].weights.values()) == pytest.approx(held, rel=0.02)


def test_ranks_that_are_alike_stand_together() -> None:
    plan = plan_memory(release_config(), Workload(context_tokens=128, num_sequences=10, num_devices=8))
    assert [(rank.first_rank, rank.last_rank) for rank in plan.ranks] == [(0, 1), (2, 7)]
    assert plan.ranks[0].weights == plan.ranks[1].weights
    assert plan.ranks[0].total > plan.ranks[1].total


def test_engram_tables_are_planned_where_they_are() -> None:
    config, work = release_config(), Workload(context_tokens=128, num_devices=4)
    tables = 384006168 * 264 + 384016682 * 264
    memory, disk, device = (plan_memory(config, replace(work, engram_storage=s)) for s in ("memory", "disk", "device"))
    assert (memory.host_bytes, memory.disk_bytes) == (tables, 0)
    assert (disk.host_bytes, disk.disk_bytes) == (0, tables)
    assert (device.host_bytes, device.disk_bytes) == (0, 0)
    assert device.ranks[0].total - memory.ranks[0].total == pytest.approx(tables / 4, abs=264 * 2)
    plain = plan_memory(config, replace(work, form="plain"))  # the reference: its device is the host
    assert plain.host_bytes == 0
    assert plain.ranks[0].weights["engram_table"] == pytest.approx(tables / 4, abs=264 * 2)


@pytest.mark.parametrize("num_devices", [4, 8, 64])
def test_a_limit_fits_and_one_more_does_not(num_devices: int) -> None:
    config = release_config()
    work = Workload(
        context_tokens=300_000, num_sequences=256 * num_devices, num_devices=num_devices, device_bytes=141 * GB
    )
    limits = plan_memory(config, work).limits
    assert limits is not None

    def fits(**changed: Any) -> bool:
        return plan_memory(config, replace(work, **changed)).fits

    assert 0 < limits.context_tokens < config.max_position_embeddings
    assert fits(context_tokens=limits.context_tokens)
    assert not fits(context_tokens=limits.context_tokens + 1)
    assert fits(num_sequences=limits.num_sequences)
    assert not fits(num_sequences=limits.num_sequences + 1)
    assert fits(num_devices=limits.num_devices)
    assert not fits(num_devices=limits.num_devices - 1)


def test_the_models_own_context_is_a_limit() -> None:
    plan = plan_memory(small_config(), Workload(context_tokens=8, device_bytes=GB))
    assert plan.limits is not None
    assert plan.limits.context_tokens == 512


def test_limits_are_zero_where_the_weights_alone_do_not_fit() -> None:
    plan = plan_memory(release_config(), Workload(context_tokens=1, device_bytes=GB))
    assert plan.limits is not None
    assert (plan.limits.context_tokens, plan.limits.num_sequences, plan.limits.num_devices) == (0, 0, 0)
    assert not plan.fits


def test_a_host_too_small_for_the_tables_does_not_fit() -> None:
    work = Workload(context_tokens=128, num_devices=8, device_bytes=141 * GB, host_bytes=200 * GB)
    assert not plan_memory(release_config(), work).fits
    assert plan_memory(release_config(), replace(work, host_bytes=210 * GB)).fits
    assert plan_memory(release_config(), replace(work, engram_storage="disk")).fits


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "changed",
    [
        {"context_tokens": 0},
        {"context_tokens": -1},
        {"num_sequences": 0},
        {"num_devices": 0},
        {"num_devices": 10**6},
        {"device_bytes": 0},
        {"host_bytes": -1},
        {"memory_fraction": 0.0},
        {"memory_fraction": 1.5},
        {"memory_fraction": float("nan")},
        {"engram_storage": "tape"},
        {"form": "zipped"},
        {"step_rows": 0},
        {"num_drafts": -1},
    ],
)
def test_a_workload_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Workload(**{"context_tokens": 128, **changed})


@pytest.mark.bad_input
def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="context is 513; the model has max_position_embeddings 512"):
        plan_memory(small_config(), Workload(context_tokens=513))


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *map(str, arguments)])
    return args.run(args)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(release_json()))
    return tmp_path


def test_a_folder_with_only_a_config_is_enough(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", release, "--devices", 16, "--memory", 141, "--context", 131072, "--sequences", 64) == 0
    text = capsys.readouterr().out
    assert "config.json alone" in text
    assert "763,205,315,794" in text
    assert "510.29 GB" in text
    assert "890 B packed" in text


def test_what_does_not_fit_is_exit_status_1(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", release, "--devices", 2, "--memory", 80) == 1
    assert "do NOT fit" in capsys.readouterr().out
    assert run("--model", release, "--devices", 16, "--memory", 141, "--host-memory", 128) == 1
    assert "--engram disk or device" in capsys.readouterr().out


def test_weights_too_large_in_bfloat16_point_to_packed_ones(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--model", release, "--devices", 8, "--memory", 141, "--context", 32768)
    assert run(*machine) == 1
    assert "--form products" in capsys.readouterr().out
    assert run(*machine, "--form", "products") == 0
    assert "--form products" not in capsys.readouterr().out


def test_without_a_memory_everything_fits(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", release) == 0
    assert "Give --memory" in capsys.readouterr().out


def test_json_holds_the_same_plan(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form = ("--form", "packed")
    assert run("--model", release, "--devices", 8, "--memory", 141, "--context", 4096, *form, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    expected = plan_memory(release_config(), Workload(context_tokens=4096, num_devices=8, device_bytes=141 * GB))
    assert plan["fits"] is True
    assert plan["ranks"][0]["total"] == expected.ranks[0].total
    assert sum(part["packed_bytes"] for part in plan["checkpoint"]) == 510_286_023_000
    assert plan["kv_bytes_per_token"] == {"packed": 890, "plain": 6400}
    assert plan["limits"]["num_devices"] == expected.limits.num_devices if expected.limits else False


def test_shards_that_are_there_are_checked(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", small) == 0
    assert "the headers of" in capsys.readouterr().out
    next(small.glob("*.safetensors")).unlink()
    assert run("--model", small) == 0
    assert f"{INDEX_NAME} names the tensors" in capsys.readouterr().out


@pytest.mark.bad_input
def test_an_index_of_another_model_is_refused(small: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    config["text_config"]["n_routed_experts"] = 8
    (small / "config.json").write_text(json.dumps(config))
    for path in small.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"missing: layers\.0\.ffn\.experts\.6\.w1\.weight"):
        run("--model", small)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--memory", "0"], ConfigError),
        (["--memory", "nan"], ConfigError),
        (["--memory", "-5"], ConfigError),
        (["--context", "0"], ConfigError),
        (["--context", "2000000"], ConfigError),
        (["--devices", "-1"], ConfigError),
        (["--model", "/no/such/folder"], ModelNotFoundError),
    ],
)
def test_values_that_cannot_be_are_errors_of_this_package(
    release: Path, arguments: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run("--model", release, *arguments)


@pytest.mark.bad_input
def test_a_negative_size_in_the_config_is_named(release: Path) -> None:
    config = release_json()
    config["text_config"]["moe_intermediate_size"] = -2304
    (release / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="moe_intermediate_size is -2304"):
        ModelConfig.from_folder(release)
    with pytest.raises(ConfigError, match="moe_intermediate_size is -2304"):
        run("--model", release)


def test_the_example_shows_from_how_many_devices_on_the_release_fits(release: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "plan_memory.py"
    done = subprocess.run(
        [sys.executable, script, "--model", release, "--memory", "141"], capture_output=True, text=True, check=True
    )
    fits = {int(line.split()[0]): line.split()[2] for line in done.stdout.splitlines()[2:]}
    assert fits == {1: "no", 2: "no", 4: "no", 8: "no", 16: "yes", 32: "yes", 64: "yes"}
