"""Replay files: an answer can be drawn again from its file, and a file can't be made to do anything else."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from deepinfer_core import LLM, RequestOutput, SamplingParams, StructuredOutput
from deepinfer_core.cli import main
from deepinfer_core.cli.replay import replay
from deepinfer_core.errors import ReplayError
from deepinfer_core.outputs.replay import read_replay, replay_bytes
from deepinfer_core.outputs.shapes import FinishReason
from tests.core.harness import FIXTURES

PARAMS = SamplingParams(
    temperature=0.9, n=2, max_tokens=24, top_p=0.9, stop=["zzz"], logit_bias={40: 1.5}, repetition_penalty=1.1
)


@pytest.fixture(scope="module")
def answer(tiny_llm: LLM) -> RequestOutput:
    return tiny_llm.generate("The sea", PARAMS, use_tqdm=False)[0]


def test_a_saved_answer_is_drawn_again_in_other_company(tiny_llm: LLM, answer: RequestOutput, tmp_path: Path) -> None:
    token = answer.save_replay(tmp_path / "answer.json")
    assert token == answer.replay_token
    record = read_replay(tmp_path / "answer.json")
    assert record.params.seed is None  # the seed was drawn; the record has it beside the parameters
    assert record.seed == answer.seed
    tiny_llm.generate(["Other work"] * 3, SamplingParams(max_tokens=5), use_tqdm=False)
    assert replay(tiny_llm, record) is None


def test_structured_parameters_survive_the_file(tiny_llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(seed=5, max_tokens=20, structured=StructuredOutput(regex="[a-c]{4,8}"))
    output = tiny_llm.generate("x", params, use_tqdm=False)[0]
    output.save_replay(tmp_path / "a.json")
    record = read_replay(tmp_path / "a.json")
    assert record.params.structured == params.structured
    assert replay(tiny_llm, record) is None


def test_an_answer_that_only_the_context_ended_is_drawn_again(tmp_path: Path) -> None:
    model = FIXTURES / "tiny-a"
    with LLM(model, quiet=True, draft_schedule="fixed", max_num_batched_tokens=256, max_model_len=40) as llm:
        output = llm.generate("hello", SamplingParams(seed=3, max_tokens=None, ignore_eos=True), use_tqdm=False)[0]
    output.save_replay(tmp_path / "a.json")
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40
    record = read_replay(tmp_path / "a.json")
    assert record.params.max_tokens is None
    words = ["--model", str(model), "--max-num-batched-tokens", "256", "--draft-schedule", "fixed"]
    assert main(["replay", str(tmp_path / "a.json"), *words]) == 0


def test_the_first_difference_is_named(tiny_llm: LLM, answer: RequestOutput, tmp_path: Path) -> None:
    raw = json.loads(replay_bytes(answer))
    raw["answers"][1]["token_ids"][7] = 77
    (tmp_path / "changed.json").write_text(json.dumps(raw))
    difference = replay(tiny_llm, read_replay(tmp_path / "changed.json"))
    assert difference is not None
    assert (difference.answer, difference.index, difference.recorded) == (1, 7, 77)
    assert difference.replayed == answer.outputs[1].token_ids[7]


def test_the_token_is_a_function_of_the_content(tiny_llm: LLM, answer: RequestOutput) -> None:
    again = tiny_llm.generate("The sea", SamplingParams(seed=1, max_tokens=3), use_tqdm=False)[0]
    same = tiny_llm.generate("The sea", SamplingParams(seed=1, max_tokens=3), use_tqdm=False)[0]
    assert again.replay_token == same.replay_token
    assert again.replay_token != answer.replay_token


@pytest.mark.bad_input
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_was_ended_from_outside_cannot_be_saved(
    answer: RequestOutput, reason: FinishReason, tmp_path: Path
) -> None:
    ended = copy.deepcopy(answer)
    ended.outputs[1].finish_reason = reason
    with pytest.raises(ReplayError, match=f"answer 1 ended with '{reason}' after"):
        ended.save_replay(tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()


@pytest.mark.bad_input
def test_another_model_is_refused_by_name(tiny_llm: LLM, answer: RequestOutput, tmp_path: Path) -> None:
    raw = json.loads(replay_bytes(answer))
    raw["fingerprint"] = "feedface"
    (tmp_path / "other.json").write_text(json.dumps(raw))
    with pytest.raises(ReplayError, match="feedface"):
        replay(tiny_llm, read_replay(tmp_path / "other.json"))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 1}', "[" * 100_000, '{"format": 1, "settings": 3}'],
)
def test_a_damaged_file_is_a_clean_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ReplayError):
        read_replay(tmp_path / "bad.json")


@pytest.mark.bad_input
def test_a_file_of_another_format_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "new.json").write_text('{"format": 2, "engine_version": "9.1.0"}')
    with pytest.raises(ReplayError, match=r"format 2, written by version '9\.1\.0' .* reads format 1"):
        read_replay(tmp_path / "new.json")


def test_the_command_names_the_first_difference_and_an_older_version(
    answer: RequestOutput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = json.loads(replay_bytes(answer)) | {"engine_version": "0.0.1"}
    file = tmp_path / "old.json"
    file.write_text(json.dumps(raw))
    words = ["replay", str(file), "--draft-schedule", "fixed", "--max-num-batched-tokens", "256"]
    assert main(words) == 0
    assert "the same: " in capsys.readouterr().out
    raw["answers"][0]["token_ids"][0] = 77
    file.write_text(json.dumps(raw))
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "version 0.0.1" in shown
    assert "answer 0 differs at its token 0" in shown
    assert "recorded 77 " in shown


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("seed", 2**64),
        ("seed", "x"),
        ("prompt_token_ids", [1, -1]),
        ("prompt_token_ids", "abc"),
        ("params", {"temperature": "hot"}),
        ("params", {"no_such_field": 1}),
        ("answers", [{"seed": 1}]),
        ("answers", 7),
    ],
)
def test_a_bad_field_is_a_clean_error(answer: RequestOutput, field: str, value: object, tmp_path: Path) -> None:
    raw = json.loads(replay_bytes(answer)) | {field: value}
    (tmp_path / "bad.json").write_text(json.dumps(raw))
    with pytest.raises(ReplayError):
        read_replay(tmp_path / "bad.json")


@pytest.mark.bad_input
@pytest.mark.parametrize("field", ["settings", "params", "answers", "fingerprint", "prompt_token_ids", "seed"])
def test_a_missing_field_is_named(answer: RequestOutput, field: str, tmp_path: Path) -> None:
    raw = json.loads(replay_bytes(answer))
    del raw[field]
    (tmp_path / "bad.json").write_text(json.dumps(raw))
    with pytest.raises(ReplayError, match=f"bad.json is damaged: it lacks '{field}'"):
        read_replay(tmp_path / "bad.json")


@pytest.mark.bad_input
def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"nowhere\.json"):
        read_replay(tmp_path / "nowhere.json")
