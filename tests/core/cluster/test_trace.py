# What must be refused has the wrong type on purpose.
# pyright: reportArgumentType=false
"""A recorded trace as traffic: times, sessions that grow, and lines that are no request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.cluster.build import Cluster
from deepinfer_core.cluster.model_work import RELEASE
from deepinfer_core.cluster.plan_file import ClusterPlan, plan_from_tables, read_plan
from deepinfer_core.cluster.trace import read_trace
from deepinfer_core.errors import ConfigError


def line(time_s: float, session: str, new: int = 1_000, output: int = 100, **more: Any) -> dict[str, Any]:
    return {"time_s": time_s, "session": session, "new_tokens": new, "output_tokens": output, **more}


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def traced(folder: Path, lines: list[dict[str, Any]], **cluster: float) -> ClusterPlan:
    written(folder, lines)
    settings = {"seconds": 100, "warmup_seconds": 0, "scale_down": 1, **cluster}
    return plan_from_tables({"cluster": settings, "trace": {"path": "trace.jsonl"}}, folder)


def test_turns_are_asked_at_their_times_and_prompts_grow(tmp_path: Path) -> None:
    lines = [line(7.0, "a", 500), line(2.0, "b", 300, **{"class": "agent"}), line(1.0, "a", 2_000)]
    plan = traced(tmp_path, lines)
    assert plan.traffic == ()
    assert plan.inputs()["trace.path"]["value"] == str(tmp_path / "trace.jsonl")
    simulation = Cluster(plan, RELEASE, "position").simulation()
    simulation.run()
    found = [(r.arrived_s, r.prompt_tokens, r.hit_tokens, r.session.traffic.kind) for r in simulation.records.ended]
    assert sorted(found) == [(1.0, 2_000, 0, "chat"), (2.0, 300, 0, "agent"), (7.0, 2_600, 16 * 128, "chat")]


def test_a_turn_waits_for_the_answer_before_it(tmp_path: Path) -> None:
    simulation = Cluster(
        traced(tmp_path, [line(1.0, "a", output=5_000), line(1.1, "a")]), RELEASE, "position"
    ).simulation()
    simulation.run()
    first, second = simulation.records.ended
    assert second.arrived_s == first.finished_s > 2.0


def test_load_replays_faster_and_scale_takes_every_nth_session(tmp_path: Path) -> None:
    lines = [line(10.0 * number, f"s{number}") for number in range(8)]
    simulation = Cluster(traced(tmp_path, lines, load=2.0, scale_down=4), RELEASE, "position").simulation()
    simulation.run()
    assert [r.arrived_s for r in simulation.records.ended] == [0.0, 20.0]


def test_a_trace_may_stand_beside_drawn_traffic_and_may_be_measured(tmp_path: Path) -> None:
    written(tmp_path, [line(0.0, "a")])
    tables = {"trace": {"path": "trace.jsonl"}, "traffic": [{}], "marks": {"trace.path": "measured"}}
    plan = plan_from_tables(tables, tmp_path)
    assert len(plan.traffic) == 1
    assert plan.inputs()["trace.path"]["mark"] == "measured"


BAD_LINES = [
    ("{", "line 2 is no JSON"),
    ("[1]", "line 2 is [1]; it must be a table"),
    ('{"time": 1}', "line 2 has 'time'; a request has time_s"),
    (json.dumps(line(-1.0, "a")), "line 2: time_s is -1.0; it must be a number from 0"),
    (json.dumps(line(1.0, "a", new=0)), "line 2: new_tokens is 0; it must be an integer from 1"),
    (json.dumps(line(1.0, "a", output=1 << 21)), "line 2: output_tokens is 2097152"),
    (json.dumps(line(1.0, "a") | {"session": None}), "line 2: session is None"),
    (json.dumps(line(1.0, "a", **{"class": "batch"})), "line 2: class is 'batch'; it must be one of 'chat', 'agent'"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("text", "message"), BAD_LINES, ids=[message for _, message in BAD_LINES])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line(0.0, "a")) + "\n" + text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert message in str(caught.value)


@pytest.mark.bad_input
def test_a_trace_that_is_absent_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_from_tables({"trace": {"path": "absent.jsonl"}}, tmp_path)
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(written(tmp_path, []))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is no UTF-8"):
        read_trace(tmp_path / "binary.jsonl")
    for table in ({}, {"path": 5}, {"path": "x", "rate": 1}):
        with pytest.raises(ConfigError, match="it must have a path"):
            plan_from_tables({"trace": table}, tmp_path)


@pytest.mark.bad_input
def test_files_without_an_end_are_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero, line 1 is longer than 65536 bytes"):
        read_trace(Path("/dev/zero"))
    with pytest.raises(ConfigError, match="/dev/zero is too long; a plan has at most"):
        read_plan(Path("/dev/zero"))
