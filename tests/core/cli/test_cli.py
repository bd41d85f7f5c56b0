"""The command `deepinfer`, run in this process: what it reads, what it writes, its exit status."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core import SamplingParams
from deepinfer_core.cli import main
from deepinfer_core.cli.doctor import examine
from deepinfer_core.cli.main import build_parser
from deepinfer_core.cli.options import sampling_from, settings_from
from deepinfer_core.config.engine import all_settings, resolve_settings
from deepinfer_core.errors import ConfigError
from tests.core.harness import FIXTURES

MODEL = str(FIXTURES / "tiny-a")
SMALL = ["--quiet", "--max-num-seqs", "4", "--draft-schedule", "fixed", "--model", MODEL]


def parsed(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    args = build_parser().parse_args(["generate", "hi", *words])
    return settings_from(args), sampling_from(args)


# ---- flags ----------------------------------------------------------------------------------------------------------

EXAMPLES = {
    "accelerator": ("cpu", "cpu"), "dtype": ("bfloat16", "bfloat16"), "engram_storage": ("disk", "disk"),
    "seed": ("none", None), "deterministic": ("0", False), "overlap": ("off", False), "memory_fraction": ("0.5", 0.5),
    "logprobs_mode": ("processed", "processed"), "decoder_prefill": ("full", "full"), "prefix_replay": ("off", "off"),
    "draft_schedule": ("fixed", "fixed"), "verification": ("coupled", "coupled"),
    "confidence_temperatures": ("1,2,3", (1.0, 2.0, 3.0)), "collective_deadline_s": ("2.5", 2.5),
    "start_deadline_s": ("2.5", 2.5), "launcher": ("ray", "ray"),
}  # fmt: skip


@pytest.mark.parametrize("name", all_settings())
def test_every_setting_has_a_flag(name: str) -> None:
    kind = all_settings()[name].annotation
    text, value = EXAMPLES.get(name, ("1", True) if kind is bool else ("5", 5) if "int" in str(kind) else ("x", "x"))
    flag = "--" + {"seed": "engine_seed"}.get(name, name).replace("_", "-")
    assert parsed(flag, text)[0] == {name: value}


def test_flags_that_are_not_given_set_nothing() -> None:
    assert parsed() == ({}, {})


def test_a_choice_may_be_none_or_an_alias() -> None:
    assert parsed("--accelerator", "none", "--prefix-replay", "none")[0] == {"accelerator": None, "prefix_replay": None}
    given, _ = parsed("--decoder-prefill", "bounded")
    assert resolve_settings(given, {}).config.cache.decoder_prefill == "compact"


def test_a_switch_needs_no_value() -> None:
    assert parsed("--quiet", "--ignore-eos") == ({"quiet": True}, {"ignore_eos": True})


def test_sampling_flags_are_typed() -> None:
    words = "--temperature 0.5 --top-k 3 --seed -4 --stop a --stop b --stop-token-ids 7 --max-tokens none"
    _, sampling = parsed(*words.split(), "--prompt-logprobs", "2", "--logit-bias", '{"5": -2.5}')
    params = SamplingParams(**sampling)
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 2**64 - 4)
    assert (params.stop, params.stop_token_ids, params.max_tokens) == (("a", "b"), (7,), None)
    assert (params.prompt_logprobs, params.logit_bias) == (2, {5: -2.5})


def test_flags_and_environment_fill_the_same_tree() -> None:
    resolved = resolve_settings(parsed("--num-drafts", "2")[0], {"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "150"})
    assert (resolved.config.speculation.num_drafts, resolved.config.cache.keep_tokens) == (2, 150)


# ---- generate -------------------------------------------------------------------------------------------------------


def test_generate_writes_the_text_of_one_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hello", "--temperature", "0", "--max-tokens", "3", *SMALL]) == 0
    first = capsys.readouterr().out
    assert first.endswith("\n")
    assert main(["generate", "Hello", "--temperature", "0", "--max-tokens", "3", "--num-drafts", "0", *SMALL]) == 0
    assert capsys.readouterr().out == first


def test_generate_answers_every_line_and_keeps_other_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"prompt": "Hello", "id": "first", "params": {"max_tokens": 2, "logprobs": 1}},
        {"prompt_token_ids": [0, 5, 9], "id": 2},
        {"prompt": "Hello", "max_tokens": 3, "id": "beside"},
    ]
    text = "\n\n".join(map(json.dumps, lines)) + "\n"
    (tmp_path / "in.jsonl").write_text(text)
    out = tmp_path / "out.jsonl"
    words = ["--temperature", "0", "--max-tokens", "4", "--ignore-eos", *SMALL]
    assert main(["generate", "--jsonl", str(tmp_path / "in.jsonl"), "--output", str(out), *words]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["id"] for one in found] == ["first", 2, "beside"]
    assert [len(one["outputs"][0]["token_ids"]) for one in found] == [2, 4, 3]
    assert "max_tokens" not in found[2]
    assert (found[0]["prompt"], found[1]["prompt"]) == ("Hello", None)
    assert len(found[0]["outputs"][0]["logprobs"]) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["generate", "--jsonl", "-", *words]) == 0
    assert capsys.readouterr().out == out.read_text()


def test_generate_writes_impossible_logprobs_as_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text("Hello")
    words = [
        "--top-k",
        "1",
        "--logprobs",
        "2",
        "--logprobs-mode",
        "processed",
        "--max-tokens",
        "1",
        "--format",
        "jsonl",
    ]
    assert main(["generate", "--file", str(tmp_path / "prompt.txt"), *words, *SMALL]) == 0
    value = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    table = value["outputs"][0]["logprobs"][0]
    assert sorted(one["logprob"] is None for one in table.values()) == [False, True]


def test_generate_reads_a_prompt_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert main(["generate", "-", "--max-tokens", "1", "--format", "jsonl", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "Hello"


def test_help_says_what_a_setting_means_and_its_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "[prompt] [sampling] [settings]" in text
    for setting in all_settings().values():
        default = "" if setting.default is None or isinstance(setting.default, tuple) else f" ({setting.default})"
        assert setting.meaning + default in text


# ---- the others -----------------------------------------------------------------------------------------------------


def test_kernels_names_the_source_of_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    from deepinfer_core.kernels.contract import OPS

    plain = ["kernels", "--accelerator", "cpu", "--cpu-kernels", "reference", "--model", MODEL]
    assert main([*plain, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert {one["op"] for one in value["operations"]} == set(OPS)
    assert {one["from"] for one in value["operations"]} == {"reference"}
    assert main(plain) == 0
    table = capsys.readouterr().out
    assert all(op in table for op in OPS)


def test_kernels_warm_compiles_for_the_chosen_provider_and_shows_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_core.kernels import registry

    asked: list[tuple[int | None, bool]] = []

    class Provider(registry.NativeProvider):
        coded_ops = frozenset(("linear",))

        def warm(self, config: Any, progress: Any, local_experts: int | None = None, *, coded: bool = False) -> None:
            asked.append((local_experts, coded))
            for done in range(4):
                progress(done, 3, "rms_norm" if done < 3 else "")

    provider = Provider(None)
    choice = registry.KernelChoice("nvidia", provider, "cpu", "one GPU")
    monkeypatch.setattr(registry, "choose_provider", lambda *_: choice)
    assert main(["kernels", "--warm", "--local-experts", "2", "--model", MODEL]) == 0
    assert "3/3" in capsys.readouterr().err
    assert main(["kernels", "--warm", "--float8-products", "--model", MODEL]) == 0
    assert asked == [(2, False), (None, True)]
    provider.coded_ops = frozenset()
    assert main(["kernels", "--warm", "--float8-products", "--model", MODEL]) == 2
    assert "--float8-products: nvidia has no kernels of that form" in capsys.readouterr().err


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "--warm has no kernels to compile ahead on cpu"),
        (["--local-experts", "0"], "--local-experts is 0; 1 .. 65536"),
    ],
)
def test_kernels_warm_says_why_it_cannot(capsys: pytest.CaptureFixture[str], options: list[str], reason: str) -> None:
    assert main(["kernels", "--warm", "--accelerator", "cpu", "--model", MODEL, *options]) == 2
    assert reason in capsys.readouterr().err


def test_doctor_finds_nothing_broken_with_a_good_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", MODEL, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"Python", "packages", "torch", "machine", "model"} <= {one["what"] for one in findings}
    assert not [one for one in findings if one["state"] == "broken"]


def test_doctor_says_what_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIENT", "1")
    (tmp_path / "file").touch()
    monkeypatch.setenv("DEEPINFER_JIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "DEEPINFER_BATCH_INVARIENT" in out
    states = {finding.what: finding.state for finding in examine(str(tmp_path))}
    assert (states["model"], states["kernel cache"]) == ("broken", "broken")


@pytest.fixture
def shardless(tmp_path: Path) -> Path:
    """What of a checkpoint is small: everything but its shards."""
    for file in Path(MODEL).glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


def test_doctor_fetches_no_shards_of_a_model_on_the_hub_and_says_so(
    shardless: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        return str(shardless)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert main(["doctor", "--model", "owner/name", "--json"]) == 0
    found = next(one for one in json.loads(capsys.readouterr().out) if one["what"] == "model")
    assert found["state"] == "note"
    assert "2 shards are not here, the first is model-00001-of-00002.safetensors" in found["detail"]
    assert asked == [["*.json"]]


def test_doctor_calls_a_folder_without_its_shards_broken(shardless: Path) -> None:
    found = next(finding for finding in examine(str(shardless)) if finding.what == "model")
    assert found.state == "broken"
    assert "model-00001-of-00002.safetensors is missing" in found.detail


@pytest.mark.bad_input
def test_a_wrong_path_is_said_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "/nowhere", "hello"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("deepinfer generate: the model '/nowhere' is no folder")
    assert "max_num_seqs" not in error


def test_doctor_names_everything_that_a_folder_lacks(tmp_path: Path) -> None:
    shutil.copy(Path(MODEL) / "config.json", tmp_path)
    broken = {finding.what: finding.detail for finding in examine(str(tmp_path)) if finding.state == "broken"}
    assert "tokenizer.json" in broken["tokenizer"]
    assert "neither model.safetensors.index.json nor model.safetensors" in broken["model"]


def test_bench_measures_both_phases(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch", "1,2", "--prompt-tokens", "8", "--output-tokens", "32", "--repeats", "2", "--json"]
    assert main(["bench", *words, *SMALL]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [one["batch"] for one in results] == [1, 2]
    assert all(one["prefill_tokens_per_s"] > 0 and one["decode_tokens_per_s"] > 0 for one in results)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "x", "--temperature", "warm"], "--temperature is 'warm'; it must be a number"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "x", "--logit-bias", "[1]"], "--logit-bias is a JSON list"),
        (["generate", "x", "--logit-bias", "{"], "--logit-bias is not valid JSON"),
        (["generate", "x", "--num-drafts", "many"], "--num-drafts is 'many'"),
        (["generate", "x", "--deterministic", "perhaps"], "--deterministic is 'perhaps'"),
        (["generate", "x", "--model", "/nowhere"], "/nowhere"),
        (["generate", "--file", "/nowhere/prompt"], "/nowhere/prompt cannot be read"),
        (["generate", "--jsonl", "/nowhere/lines"], "/nowhere/lines cannot be read"),
        (["bench", "--batch", "1,x"], "--batch is 'x'"),
        (["bench", "--repeats", "0"], "--repeats is 0"),
        (["kernels", "--accelerator", "cpu", "--model", "/nowhere"], "/nowhere"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_bad_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "give an object"),
        ("{}", "either prompt or prompt_token_ids"),
        ('{"prompt": 3}', "prompt is 3; it must be a text"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "either prompt or prompt_token_ids"),
        ('{"prompt": "a", "params": {"temprature": 1}}', "params is"),
        ('{"prompt": "a", "params": {"top_p": 2}}', "top_p is 2"),
        ('{"prompt": "a", "top_p": 2}', "top_p is 2"),
        ('{"prompt": "a", "n": 2, "params": {"n": 1}}', "n is given twice"),
        ('{"prompt": "a", "params": 3}', "params is 3"),
        ('{"prompt": "a", "max_tokenz": 8}', "write max_tokens"),
        ('{"prompt": "a", "topk": 8}', "write top_k"),
        ('{"prompt": "a", "structured": {"regex": "a"}}', "give so_args"),
        ('{"prompt": "a", "id": "\\ud800"}', "cannot be copied"),
        ('{"prompt": "a", "id": NaN}', "cannot be copied"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    assert main(["generate", "--jsonl", str(tmp_path / "in.jsonl")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "in line 2" in error


@pytest.mark.bad_input
def test_an_output_that_cannot_be_written_is_named_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--model", str(tmp_path / "none"), "--output", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_answers_are_utf_8_in_every_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    words = ["--max-tokens", "8", "--seed", "1", "--ignore-eos", "--format", "jsonl"]
    assert main(["generate", "héllo", *words, *SMALL]) == 0
    sys.stdout.flush()
    line = json.loads(written.getvalue().decode("utf-8"))
    assert line["prompt"] == "héllo"


@pytest.mark.bad_input
def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fly"])
    assert "fly" in capsys.readouterr().err


@pytest.mark.bad_input
def test_flags_share_the_checks_of_the_settings() -> None:
    with pytest.raises(ConfigError, match="num_drafts is 99"):
        resolve_settings(parsed("--num-drafts", "99")[0], {})


def test_bench_replays_routing_with_and_without_the_balancer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 60)
    output, plot = tmp_path / "eplb.json", tmp_path / "eplb.png"
    sizes = ["--eplb-steps", "20", "--eplb-devices", "4", "--eplb-interval", "4", "--eplb-window", "2"]
    files = ["--eplb-text", str(text), "--output", str(output), "--plot", str(plot)]
    assert main(["bench", "--eplb", *sizes, *files, "--eplb-skew", "1.0", "--model", "tiny"]) == 0
    results = json.loads(output.read_text())
    assert len(results["without"]) == len(results["with"]) == 20
    assert results["load"] == "recorded, skewed by Zipf 1 with drift"
    assert results["load"] in capsys.readouterr().out
    assert results["busiest_over_mean_with"] < results["busiest_over_mean_without"]
    assert plot.read_bytes().startswith(b"\x89PNG")
