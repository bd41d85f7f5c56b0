"""Workloads, `bench --workload`, `calibrate`, `generate --stats`: on the fixture model, whose drafts are wrong."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.cli import main
from deepinfer_core.cli.calibrate import record
from deepinfer_core.cli.workload import Arrival, made_up, read_workload, write_workload
from deepinfer_core.config.engine import resolve_settings
from deepinfer_core.errors import RequestError
from deepinfer_core.scheduling.calibration import Calibration
from tests.core.harness import FIXTURES
from tests.core.inside import inside

MODEL = str(FIXTURES / "tiny-a")
SMALL = ["--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--model", MODEL]


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_written_workload_is_read_back(tmp_path: Path) -> None:
    workload = [
        Arrival(0.0, "The sea", output_tokens=3, params={"temperature": 0.5}),
        Arrival(0.5, (4, 5, 6)),
        Arrival(1.25, None, prompt_tokens=40, document=9, output_tokens=2),
    ]
    write_workload(tmp_path / "w.jsonl", workload)
    assert [
        (one.arrival_s, one.prompt, one.prompt_for(300), one.output_tokens, dict(one.params))
        for one in read_workload(tmp_path / "w.jsonl")
    ] == [(one.arrival_s, one.prompt, one.prompt_for(300), one.output_tokens, dict(one.params)) for one in workload]


def test_arrivals_are_sorted(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"prompt": "b", "arrival_s": 2}\n\n{"prompt": "a", "arrival_s": 1}\n')
    assert [one.prompt for one in read_workload(tmp_path / "w.jsonl")] == ["a", "b"]


def test_prompts_of_one_document_share_their_beginning() -> None:
    short, long, other = (Arrival(0.0, None, n, document).prompt_for(500) for n, document in ((9, 1), (30, 1), (9, 2)))
    assert len(long) == 30
    assert long[:9] == short
    assert short != other


@pytest.mark.parametrize("kind", ["chat", "agent"])
def test_a_made_up_workload_has_growing_turns_and_keeps_its_limits(kind: str) -> None:
    workload = made_up(kind, 60, 4.0, 2_000, seed=3)
    assert workload == made_up(kind, 60, 4.0, 2_000, seed=3)
    assert len(workload) == 60
    assert [one.arrival_s for one in workload] == sorted(one.arrival_s for one in workload)
    assert all(one.prompt_tokens + (one.output_tokens or 0) <= 2_000 for one in workload)
    assert len({one.document for one in workload}) < 60  # some are turns of one conversation
    assert 3.0 <= workload[-1].arrival_s <= 60.0  # about 60 / 4 seconds


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("7", "give an object"),
        ('{"prompt": "a", "prompts": 1}', "give an object"),
        ('{"arrival_s": 1}', "give one of prompt"),
        ('{"prompt": "a", "prompt_tokens": 3}', "give one of prompt"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt_token_ids": [-1]}', "prompt_token_ids"),
        ('{"prompt_tokens": 0}', "prompt_tokens is 0"),
        ('{"prompt": "a", "arrival_s": -1}', "arrival_s is -1"),
        ('{"prompt": "a", "arrival_s": NaN}', "arrival_s is nan"),
        ('{"prompt": "a", "output_tokens": true}', "output_tokens is True"),
        ('{"prompt": "a", "params": {"top_p": 2}}', "top_p is 2"),
        ('{"prompt": "a", "params": {"structured": {}}}', "params is"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "w.jsonl").write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(RequestError, match=message) as error:
        read_workload(tmp_path / "w.jsonl")
    assert "in line 2" in error.value.__notes__[0]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--workload", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["bench", "--workload", "chat", "--loads", "1,0"], "--loads is 0"),
        (["bench", "--workload", "chat", "--loads", "fast"], "--loads is 'fast'"),
        (["bench", "--workload", "chat", "--rate", "nan"], "--rate is nan"),
        (["bench", "--workload", "chat", "--requests", "0"], "--requests is 0"),
        (["bench", "--workload", "chat", "--output", "/nowhere/r.json"], "there is no folder /nowhere"),
        (["bench", "--workload", "chat", "--plot", "/nowhere/r.png"], "there is no folder /nowhere"),
        (["bench", "--workload", "chat", "--save-workload", "/"], "/ cannot be written: it is a folder"),
        (["bench", "--eplb", "--output", "/nowhere/r.json"], "there is no folder /nowhere"),
        (["bench", "--eplb", "--eplb-steps", "110"], "no expert has moved before step 111; give at least 111"),
        (["bench", "--slice", "ep=64", "--output", "/nowhere/r.json"], "there is no folder /nowhere"),
        (["calibrate", "--output", "/nowhere/c.json"], "there is no folder /nowhere"),
        (["calibrate", "--records", "9"], "--records is 9"),
        (["calibrate", "--draft-schedule", "scheduled"], "draft_schedule is 'scheduled'"),
        (["calibrate", "--confidence-temperatures", "2"], "confidence_temperatures is"),
        (["calibrate", "--num-drafts", "0", *SMALL], "nothing to calibrate"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


# ---- bench ----------------------------------------------------------------------------------------------------------


def test_tokens_of_all_n_answers_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_workload(tmp_path / "w.jsonl", [Arrival(0.0, "hello", output_tokens=5, params={"n": 3})])
    words = ["bench", "--workload", str(tmp_path / "w.jsonl"), "--json", "--draft-schedule", "fixed", *SMALL]
    assert main(words) == 0
    (one,) = json.loads(capsys.readouterr().out)["loads"]
    assert (one["requests"], one["output_tokens"]) == (1, 15)


def test_a_workload_is_served_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = [Arrival(0.02 * i, None, 20 + i, i % 2, output_tokens=4 + i) for i in range(5)]
    write_workload(tmp_path / "w.jsonl", workload)
    words = ["bench", "--workload", str(tmp_path / "w.jsonl"), "--loads", "1,10", "--json", "--draft-schedule", "fixed"]
    assert main([*words, "--output", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png"), *SMALL]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results == json.loads((tmp_path / "r.json").read_text())
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert [one["load"] for one in results["loads"]] == [1.0, 10.0]
    for one in results["loads"]:
        assert (one["requests"], one["answered"], one["output_tokens"]) == (5, 5, 4 + 5 + 6 + 7 + 8)
        assert one["output_tokens_per_s"] == pytest.approx(30 / one["seconds"])
        assert 0 < one["first_token_ms"]["p10"] <= one["first_token_ms"]["p90"] < one["seconds"] * 1e3


# ---- calibrate ------------------------------------------------------------------------------------------------------


def test_calibrate_prints_the_setting_and_writes_what_it_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_workload(tmp_path / "w.jsonl", [Arrival(0.0, "hello", output_tokens=60, params={"temperature": 1.0})] * 8)
    words = ["calibrate", "--workload", str(tmp_path / "w.jsonl"), "--records", "200", "--num-drafts", "2"]
    assert main([*words, "--output", str(tmp_path / "c.json"), *SMALL]) == 0
    printed = capsys.readouterr().out
    fitted = Calibration.from_dict(json.loads((tmp_path / "c.json").read_text()))
    assert fitted.num_records >= 200
    assert max(fitted.error_after) <= max(fitted.error_before)
    (flag,) = re.findall(r"--confidence-temperatures (\S+)", printed)
    settings = resolve_settings({"num_drafts": 2, "confidence_temperatures": tuple(map(float, flag.split(",")))}, {})
    assert settings.config.speculation.confidence_temperatures == pytest.approx(fitted.for_use("coupled", 2), abs=1e-3)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_log_agrees_with_what_the_scheduler_counted(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    import deepinfer_core.runtime.assembly as assembly

    made: list[Any] = []
    assemble = assembly.assemble_engine
    monkeypatch.setattr(assembly, "assemble_engine", lambda config: made.append(assemble(config)) or made[-1])
    settings: dict[str, Any] = {"model": MODEL, "quiet": True, "max_num_seqs": 4, "overlap": overlap}
    config = resolve_settings(settings | {"draft_schedule": "fixed", "max_num_batched_tokens": 64}, {}).config
    log = record(config, [Arrival(0.0, "hello", output_tokens=20), Arrival(0.0, "abc", output_tokens=9)], 10)
    (engine,) = made
    verified, accepted = engine.scheduler.speculation.meter.verified, engine.scheduler.speculation.meter.accepted
    places = np.arange(5)
    assert (log.num_verified[:, None] > places).sum(axis=0).tolist() == verified.tolist()
    assert (log.num_accepted[:, None] > places).sum(axis=0).tolist() == accepted.tolist()
    assert ((log.confidences > 0) | (log.num_verified[:, None] <= places)).all()  # every judged draft had one


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_stats_are_printed_beside_the_answer_and_metrics_stand_in_jsonl(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "hello", "--format", "jsonl", "--max-tokens", "5", "--ignore-eos", "--seed", "1", "--quiet"]
    assert main([*words, *SMALL, "--draft-schedule", "fixed"]) == 0
    plain = capsys.readouterr()
    assert main([*words, *SMALL, "--draft-schedule", "fixed", "--stats"]) == 0
    with_stats = capsys.readouterr()
    assert "mean_first_token_ms" in with_stats.err
    assert "mean_first_token_ms" not in plain.err
    line = json.loads(with_stats.out)
    metrics = line["outputs"][0].pop("metrics")
    assert line == json.loads(plain.out)
    assert sum(tokens * steps for tokens, steps in enumerate(metrics["steps_by_tokens"], 1)) == 5
    assert metrics["first_token_s"] == pytest.approx(metrics["queue_s"] + metrics["prefill_s"])
    assert metrics["total_s"] == pytest.approx(metrics["first_token_s"] + 4 * metrics["inter_token_s"])
    assert metrics["num_blocks"] == 1


def test_a_drafter_that_is_always_wrong_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(MODEL, quiet=True, max_num_seqs=16, max_num_batched_tokens=256, draft_schedule="fixed") as llm:
        params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=5)
        with caplog.at_level(logging.WARNING, "deepinfer_core"):
            for _ in range(3):
                llm.generate(["hello"] * 16, params, use_tqdm=False)
        meter = inside(llm).scheduler.speculation.meter
        warnings = [one for one in caplog.records if "hardly any draft is accepted" in one.message]
        assert len(warnings) == int(meter.has_collapsed)
        depth = len(meter.verified)
        for _ in range(200):  # a drafter that promises something and is always wrong
            meter.observe(np.full((depth, 16), 0.5, np.float32), np.full(16, depth), np.zeros(16, np.int64))
        with caplog.at_level(logging.WARNING, "deepinfer_core"):
            for _ in range(2):
                llm.generate("hello", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        warnings = [one for one in caplog.records if "hardly any draft is accepted" in one.message]
        assert len(warnings) == 1
