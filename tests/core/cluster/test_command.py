"""`deepinfer plan --cluster FILE` and the speed estimate of `deepinfer plan`, run in this process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.cli import main
from deepinfer_core.cluster.hardware import device_named
from deepinfer_core.cluster.model_work import RELEASE
from deepinfer_core.cluster.speed import estimate_speed
from deepinfer_core.errors import ConfigError
from tests.core.harness import FIXTURES
from tests.core.model_configs import release_json

SHORT = "[cluster]\nseconds = 8\nwarmup_seconds = 2\n"
TINY = str(FIXTURES / "tiny-a")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "cluster.toml"
    path.write_text(f"{SHORT}[sweep]\nloads = [0.5]\n", encoding="utf-8")
    return path


def test_json_has_both_readings_the_points_and_marked_inputs(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--cluster", str(plan_file), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert list(report["readings"]) == ["position", "drafts"]
    for reading in report["readings"].values():
        run = reading["run"]
        assert run["output_tokens_per_s"] > 1e5
        assert set(run["first_token_s"]) == {"p50", "p90", "p99"}
        assert run["keeps_up"] is True
        assert {point["name"]: point["fitted"] for point in reading["points"]}["decode-256"] is False
        assert reading["sweep"][0]["load"] == 0.5
        assert reading["sweep"][0]["run"]["output_tokens_per_s"] < run["output_tokens_per_s"]
        speeds = [point["user_tokens_per_s"] for point in reading["decode_curve"]]
        assert speeds == sorted(speeds, reverse=True)
        assert {figure["mark"] for figure in reading["calibration"].values()} == {"fitted"}
    assert {"H200", "B200", "GB200", "Ascend950DT"} <= set(report["hardware"])
    assert report["inputs"]["cluster.seconds"] == {"value": 8, "mark": "assumed", "source": "FILE"}
    assert report["inputs"]["prefill.devices"]["mark"] == "published"


def test_tables_and_a_picture(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "cluster.png"
    assert main(["plan", "--cluster", str(plan_file), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    for text in ("user tokens/s", "held out", "Sweep", "load 0.5", "wait for prefill", "expert balance", "assumed"):
        assert text in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_cluster_that_cannot_keep_up_is_a_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f"{SHORT}[prefill]\ndevices = 16\n", encoding="utf-8")
    assert main(["plan", "--cluster", str(path)]) == 1
    assert "NO" in capsys.readouterr().out


def test_another_model_is_planned_from_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = release_json()
    config["text_config"]["moe_intermediate_size"] = 1152
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "plan.toml").write_text(SHORT, encoding="utf-8")
    assert main(["plan", "--cluster", str(tmp_path / "plan.toml"), "--model", str(tmp_path), "--json"]) == 0
    half = json.loads(capsys.readouterr().out)["readings"]["position"]["run"]["capacity"]
    assert main(["plan", "--cluster", str(tmp_path / "plan.toml"), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["readings"]["position"]["run"]["capacity"]
    assert half["prefill_requests_per_s"] > 1.2 * whole["prefill_requests_per_s"]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "8"], "--devices: not with --cluster"),
        (["--device", "H200", "--step-rows", "7"], "--device, --step-rows: not with --cluster"),
        (["--plot", "/absent/folder/x.png"], "/absent/folder/x.png cannot be written"),
    ],
)
def test_what_does_not_go_with_a_cluster_is_refused(
    plan_file: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--cluster", str(plan_file), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.bad_input
def test_a_plot_needs_a_cluster_and_a_file_must_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", TINY, "--plot", "x.png"]) == 2
    assert "give --cluster FILE" in capsys.readouterr().err
    assert main(["plan", "--cluster", "absent.toml"]) == 2
    assert "absent.toml cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_the_default_cluster_is_planned_in_20_s(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("", encoding="utf-8")
    begin_s = time.process_time()
    assert main(["plan", "--cluster", str(tmp_path / "plan.toml")]) == 0
    assert time.process_time() - begin_s < 20


# ---- one machine -----------------------------------------------------------------------------------------------------


def test_a_device_adds_its_memory_and_an_estimate_of_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", TINY, "--device", "H200", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["workload"]["device_bytes"] == 141e9
    assert set(plan["speed_estimate"]) >= {"user_tokens_per_s", "decode_tokens_per_s", "prefill_tokens_per_s"}
    assert main(["plan", "--model", TINY, "--device", "H200", "--memory", "70"]) == 0
    shown = capsys.readouterr().out
    assert "an ESTIMATE" in shown
    assert "70.00 GB" in shown
    assert main(["plan", "--model", TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speed_estimate"] is None


def test_an_estimate_is_between_its_floor_and_the_peaks() -> None:
    """Eight H200: a step cannot be shorter than reading the weights, nor prefill faster than the peak."""
    found = estimate_speed(
        RELEASE, device_named("H200"), num_devices=8, num_sequences=64, context_tokens=32_768, num_drafts=5,
        step_rows=16_384,
    )  # fmt: skip
    for low, high in (found.step_s, found.user_tokens_per_s, found.decode_tokens_per_s, found.prefill_tokens_per_s):
        assert 0 < low <= high
    assert found.step_s[0] > RELEASE.dense_bytes / 4.8e12
    assert found.prefill_tokens_per_s[1] < 8 * 1979e12 / 16e9
    assert found.decode_tokens_per_s[0] == pytest.approx(64 * found.user_tokens_per_s[0])


@pytest.mark.bad_input
def test_an_estimate_for_more_sequences_than_a_device_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequences of one device is 5000"):
        estimate_speed(
            RELEASE, device_named("H200"), num_devices=1, num_sequences=5_000, context_tokens=1, num_drafts=0,
            step_rows=1,
        )  # fmt: skip
