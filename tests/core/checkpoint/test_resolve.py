"""Which folder a model's name stands for."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from deepinfer_core.checkpoint import resolve
from deepinfer_core.checkpoint.resolve import RELEASED_MODEL, resolve_model
from deepinfer_core.errors import ModelNotFoundError


@pytest.fixture(autouse=True)
def _clean_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder


def test_a_folder_wins_over_a_hub_name(tmp_path: Path) -> None:
    checkpoint(tmp_path / "owner" / "name")
    assert resolve_model("owner/name").resolve() == tmp_path / "owner" / "name"


def test_the_variable_counts_where_no_argument_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = checkpoint(tmp_path / "first"), checkpoint(tmp_path / "second")
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(first))
    assert resolve_model() == first
    assert resolve_model(accelerator="nvidia") == first
    assert resolve_model(second) == second


def test_nothing_at_all_means_the_bundled_model_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = checkpoint(tmp_path / "bundled")
    monkeypatch.setattr(resolve, "_BUNDLED_FOLDER", bundled)
    assert resolve_model() == bundled
    assert resolve_model("tiny") == bundled


def test_a_folder_called_tiny_needs_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled, own = checkpoint(tmp_path / "bundled"), checkpoint(tmp_path / "tiny")
    monkeypatch.setattr(resolve, "_BUNDLED_FOLDER", bundled)
    assert resolve_model("tiny") == bundled
    assert resolve_model("./tiny").resolve() == own


def test_a_model_in_the_hubs_cache_is_found_offline(tmp_path: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = checkpoint(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert resolve_model("owner/name", progress=False) == snapshot


def test_an_accelerator_asks_the_hub_for_the_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, asked = checkpoint(tmp_path / "fetched"), []

    def fetch(name: str, **options: object) -> str:
        asked.append((name, options["revision"], options["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_model(accelerator="nvidia", revision="main") == folder
    assert resolve_model("owner/name", weights=False) == folder
    assert asked == [(RELEASED_MODEL, "main", ["*.json", "*.safetensors"]), ("owner/name", None, ["*.json"])]


@pytest.mark.bad_input
def test_the_hub_offline_says_what_to_set() -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"deepinfer/none could not be fetched.*set DEEPINFER_HF_MODEL_DIR to a folder"
    ):
        resolve_model("deepinfer/none", progress=False)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "name",
    ["/no/such/folder", "missing", "a/b/c", "../x", "", "-x/y", "a/../b", "x" * 300, "~nobody-of-that-name/x", "a\0b"],
)
def test_a_name_that_is_neither_folder_nor_model_is_shown(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="DEEPINFER_HF_MODEL_DIR"):
        resolve_model(name)


@pytest.mark.bad_input
def test_a_folder_without_config_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path / "gone"))
    with pytest.raises(ModelNotFoundError, match=r"DEEPINFER_HF_MODEL_DIR .*gone' is no folder"):
        resolve_model()


@pytest.mark.bad_input
def test_an_installation_without_the_bundled_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_BUNDLED_FOLDER", tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match="lacks the bundled model 'tiny'"):
        resolve_model("tiny")
