"""The FILE: what it may say, how its values are marked, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.cluster.figures import Figure
from deepinfer_core.cluster.plan_file import ClusterPlan, plan_from_tables, read_plan
from deepinfer_core.cluster.report import variants
from deepinfer_core.errors import ConfigError
from tests.workspace.conftest import ROOT

DOCUMENTATION = ROOT / "docs/cluster.md"

FULL = """
[cluster]
seed = 7
load = 0.5
[decode]
device = "H200"
devices = 128
[[traffic]]
kind = "agent"
turns = 9
[[traffic]]
requests_per_s = 50
[sweep]
loads = [0.5, 1]
prefill_devices = [32]
[marks]
"decode.device" = "measured"
"traffic.0.turns" = "published"
"""


def written(folder: Path, text: str, name: str = "plan.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_is_the_published_unit(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, ""))
    assert plan == ClusterPlan()
    assert (plan.prefill.devices, plan.decode.devices) == (64, 64)
    assert [traffic.kind for traffic in plan.traffic] == ["chat", "agent"]


def test_a_file_changes_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, FULL))
    assert (plan.cluster.seed, plan.cluster.load, plan.decode.device, plan.decode.devices) == (7, 0.5, "H200", 128)
    agent, chat = plan.traffic
    assert (agent.kind, agent.turns, agent.think_s) == ("agent", 9.0, 4.0)
    assert (chat.kind, chat.requests_per_s, chat.turns) == ("chat", 50.0, 6.0)
    assert (plan.sweep.loads, plan.sweep.prefill_devices) == ((0.5, 1.0), (32,))
    assert plan.store == ClusterPlan().store


def test_json_says_the_same_as_toml(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "cluster": {"seed": 7, "load": 0.5},
        "decode": {"device": "H200", "devices": 128},
        "traffic": [{"kind": "agent", "turns": 9}, {"requests_per_s": 50}],
        "sweep": {"loads": [0.5, 1], "prefill_devices": [32]},
        "marks": {"decode.device": "measured", "traffic.0.turns": "published"},
    }
    assert read_plan(written(tmp_path, json.dumps(tables), "plan.json")) == read_plan(written(tmp_path, FULL))


def test_every_input_says_how_it_is_known(tmp_path: Path) -> None:
    inputs = read_plan(written(tmp_path, FULL)).inputs()
    assert {figure["mark"] for figure in inputs.values()} == {"measured", "published", "assumed"}
    assert all(figure["source"] for figure in inputs.values())
    assert inputs["decode.device"] == {"value": "H200", "mark": "measured", "source": "FILE"}
    assert inputs["decode.devices"] == {"value": 128, "mark": "assumed", "source": "FILE"}
    assert inputs["traffic.0.turns"]["mark"] == "published"
    assert inputs["prefill.expert_parallel"]["mark"] == "published"
    settings = sum(len(dataclasses.fields(section)) for _, section in read_plan(written(tmp_path, FULL)).sections())
    assert len(inputs) == settings


def test_the_example_of_the_documentation_is_a_plan(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", DOCUMENTATION.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    plan = read_plan(written(tmp_path, example))
    assert [changed for changed, _ in variants(plan)] == [
        {"load": 0.5},
        {"load": 1.0},
        {"load": 1.5},
        {"prefill_devices": 64, "decode_devices": 96},
        {"prefill_devices": 128, "decode_devices": 32},
    ]
    assert plan.inputs()["traffic.0.turn_tokens"] == {"value": 1500.0, "mark": "measured", "source": "FILE"}


@pytest.mark.bad_input
def test_a_sweep_to_a_split_that_is_no_plan_is_named() -> None:
    plan = plan_from_tables({"sweep": {"prefill_devices": [32]}})
    with pytest.raises(ConfigError, match=r"sweep\.prefill_devices 32 of 128 devices: decode\.devices is 96"):
        list(variants(plan))


def test_a_figure_is_a_value_with_its_mark() -> None:
    assert Figure(1.0, "assumed", "why")._asdict() == {"value": 1.0, "mark": "assumed", "source": "why"}


REFUSED = [
    ({"clusters": {}}, "no section 'clusters'; a plan has cluster, prefill"),
    ({"decode": {"device_count": 4}}, "decode has no setting 'device_count'; it has device, devices"),
    ({"decode": {"device": "H100"}}, "decode.device is 'H100'; it must be one of 'H200'"),
    ({"decode": {"devices": 0}}, "decode.devices is 0; it must be an integer from 1 to 4096"),
    ({"decode": {"devices": 64.0}}, "decode.devices is 64.0; it must be an integer"),
    ({"decode": {"devices": True}}, "decode.devices is True"),
    ({"decode": {"devices": 65}}, "decode.devices is 65; it must be a multiple of decode.expert_parallel, 64"),
    ({"decode": 5}, "decode is 5; it must be a table"),
    ({"cluster": {"load": float("nan")}}, "cluster.load is nan; it must be a number from 0 to 1000"),
    ({"cluster": {"load": 0}}, "no request ever arrives"),
    ({"cluster": {"seconds": 0}}, "cluster.seconds is 0; it must be a number from 1 to"),
    ({"prefill": {"balanced_context": 1}}, "prefill.balanced_context is 1; it must be True or False"),
    ({"drafts": {"schedule": "greedy"}}, "drafts.schedule is 'greedy'; it must be one of 'budget', 'fixed'"),
    ({"traffic": []}, "it must be a list of 1 to 16 tables"),
    ({"traffic": {"kind": "chat"}}, "it must be a list of 1 to 16 tables"),
    ({"traffic": [5]}, "traffic.0 is 5; it must be a table"),
    ({"traffic": [{"kind": "batch"}]}, "traffic.0.kind is 'batch'; it must be one of 'chat', 'agent'"),
    ({"traffic": [{"turns": 0.5}]}, "traffic.0.turns is 0.5; it must be a number from 1 to"),
    ({"traffic": [{}, {"tokens": 3}]}, "traffic.1 has no setting 'tokens'"),
    ({"traffic": [{"requests_per_s": 0}]}, "no request ever arrives"),
    ({"sweep": {"load": [1]}}, "sweep has no setting 'load'; it has loads, prefill_devices"),
    ({"sweep": {"loads": 1}}, "sweep.loads is 1; it must be a list of 0 to 16 numbers"),
    ({"sweep": {"loads": [0]}}, "sweep.loads is 0; it must be a number above 0"),
    ({"sweep": {"prefill_devices": [1.5]}}, "sweep.prefill_devices is 1.5; it must be an integer"),
    ({"marks": {"decode.device": "measured"}}, "'decode.device' is no value of this plan"),
    ({"decode": {"device": "H200"}, "marks": {"decode.device": "guessed"}}, "it must be one of 'measured'"),
    ({"marks": []}, "marks is []; it must be a table"),
    ([1], "a plan is [1]; it must be a table"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("tables", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_wrong_is_named(tables: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from_tables(tables)
    assert message in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan.toml", "[cluster", "is no TOML"),
        ("plan.json", "{", "is no JSON"),
        ("plan.json", "[" * 100_000, "is no JSON"),
        ("plan.toml", "[decode]\ndevices = 7\n", "plan.toml: decode.devices is 7"),
        ("plan.toml", "#" * ((1 << 20) + 1), "a plan has at most"),
    ],
    ids=["toml", "json", "deep json", "the file is named", "too large"],
)
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_plan(written(tmp_path, text, name))
    assert message in str(caught.value)


@pytest.mark.bad_input
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_plan(path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no TOML"):
        read_plan(tmp_path / "binary.toml")
