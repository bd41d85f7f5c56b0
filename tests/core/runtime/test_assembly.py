"""An engine is refused before a long load where the weights can't fit; it shows its settings and what they became."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepinfer_core import LLM
from deepinfer_core.config.engine import WeightForm, all_settings
from deepinfer_core.errors import CapacityError, ConfigError, KernelError
from deepinfer_core.kernels.registry import KernelChoice
from tests.core.harness import FIXTURES
from tests.core.model_configs import release_json

MODEL = FIXTURES / "tiny-a"


@pytest.mark.bad_input
def test_weights_beyond_the_machine_are_refused_before_a_shard_is_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(release_json()))
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    with pytest.raises(CapacityError, match=r"take 2,46\d\.\d GB on one device \(plain form\), and cpu has"):
        LLM(tmp_path, quiet=True)


@pytest.mark.bad_input
def test_weights_that_cannot_fit_are_not_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        (tmp_path / "config.json").write_text(json.dumps(release_json()))
        shutil.copy(MODEL / "tokenizer.json", tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CapacityError, match="take a smaller checkpoint"):
        LLM("owner/name", quiet=True)
    assert asked == [["*.json"]]


def test_the_start_shows_every_setting_the_memory_and_what_open_settings_became(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "2")
    with LLM(MODEL, max_model_len=96, max_num_seqs=2, draft_schedule="fixed", cpu_kernels="reference"):
        pass
    text = capsys.readouterr().err
    assert all(f" {name}=" in text for name in all_settings())
    assert "max_num_seqs=2 (argument)" in text
    assert "num_drafts=2 (DEEPINFER_USE_NEXTN_DECODE)" in text
    assert "num_blocks=auto " in text
    table, memory, loading, became = (
        text.index(part) for part in ("Settings", "GB of weights", "Loading weights", "reference kernels on cpu")
    )
    assert table < memory < loading < became
    assert f"{MODEL}: reference kernels on cpu, float32; at most 96 tokens a request; prefix_replay exact" in text


def test_a_quiet_start_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(MODEL, max_model_len=96, max_num_seqs=2, draft_schedule="fixed", cpu_kernels="reference", quiet=True):
        pass
    assert capsys.readouterr() == ("", "")


class NoKernels:
    """A provider of a device that is not here; all operations come from the reference, on that device."""

    name = "none"
    cache_form = "packed"
    row_invariant_ops: frozenset[str] = frozenset()
    coded_ops: frozenset[str] = frozenset()

    def load(self) -> dict[str, object]:
        return {}


@pytest.mark.bad_input
def test_operations_that_are_not_row_invariant_are_named_where_that_is_demanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = KernelChoice("none", NoKernels(), "cuda", "for a test")  # type: ignore[arg-type]  # no probe is needed
    monkeypatch.setattr("deepinfer_core.runtime.assembly.choose_provider", lambda _: choice)
    with pytest.raises(KernelError, match=r"batch_invariant is set.*: linear from reference \(not offered") as raised:
        LLM(MODEL, quiet=True, batch_invariant=True)
    assert "select_entries" not in str(raised.value)  # exact, so it has one result in any company


@pytest.mark.bad_input
def test_float8_products_are_refused_without_kernels_for_them() -> None:
    with pytest.raises(KernelError, match=r"kernels of cpu have no such form of linear, run_experts, shared_expert"):
        LLM(MODEL, quiet=True, float8_products=True)


@pytest.mark.bad_input
@pytest.mark.parametrize("form", ["experts", "packed"])
def test_packed_weights_are_refused_without_kernels_for_them(form: WeightForm) -> None:
    with pytest.raises(KernelError, match=rf"weight_form is '{form}', and the kernels of cpu decode no weights"):
        LLM(MODEL, quiet=True, weight_form=form)


@pytest.mark.bad_input
def test_two_forms_of_weights_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight_form is 'packed', and float8_products has a form of its own"):
        LLM(MODEL, quiet=True, weight_form="packed", float8_products=True)
