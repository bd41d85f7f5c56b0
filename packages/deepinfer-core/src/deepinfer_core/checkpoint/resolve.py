"""From what the user named, or did not name, to a folder with a checkpoint.

argument ─► "tiny": the bundled checkpoint
         ─► a folder (a folder called tiny is "./tiny")
         ─► "owner/name": the hub, cached
nothing  ─► DEEPINFER_HF_MODEL_DIR ─► with an accelerator: the released weights from the hub ─► the bundled checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.asyncio import tqdm_asyncio

from deepinfer_core.config.checks import shown
from deepinfer_core.config.env import read_text
from deepinfer_core.errors import ModelNotFoundError

__all__ = ["BUNDLED_MODEL", "RELEASED_MODEL", "locate_model", "resolve_model"]

BUNDLED_MODEL = "tiny"
RELEASED_MODEL = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
_BUNDLED_FOLDER = Path(__file__).resolve().parents[1] / "models" / BUNDLED_MODEL
_MODEL_VARIABLE = "DEEPINFER_HF_MODEL_DIR"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_DESCRIPTION_FILES = ["*.json"]
_WEIGHT_FILES = ["*.safetensors"]  # code and pickles are never fetched


def resolve_model(
    model: str | Path | None = None,
    *,
    accelerator: str = "cpu",
    revision: str | None = None,
    weights: bool = True,
    progress: bool = True,
) -> Path:
    """Folder of the checkpoint to use; it holds a config.json. Downloads from the hub where that is what was named.

    `accelerator` decides what no name means; `revision` counts for the hub only. `weights=False` leaves shards there:
    config, index and tokenizer are enough for a plan. Raises ModelNotFoundError, which says what to name or set.
    """
    place = locate_model(model, accelerator=accelerator)
    if isinstance(place, Path):
        return place
    return _existing_folder(_download(place, revision, weights, progress), f"the hub's {place}")


def locate_model(model: str | Path | None = None, *, accelerator: str = "cpu") -> Path | str:
    """`resolve_model` as far as it needs no network: the folder, or the name on the hub. Raises ModelNotFoundError."""
    if model is None:
        folder = read_text(_MODEL_VARIABLE)
        if folder is not None:
            return _existing_folder(_local(folder), _MODEL_VARIABLE)
        model = BUNDLED_MODEL if accelerator == "cpu" else RELEASED_MODEL
    if model == BUNDLED_MODEL:
        return _existing_folder(_BUNDLED_FOLDER, "this installation lacks the bundled model 'tiny':")
    path = _local(model)
    if isinstance(model, str) and _HUB_NAME.fullmatch(model) and not _answers(path.exists):
        return model
    return _existing_folder(path, "the model")


def _existing_folder(folder: Path, what: str) -> Path:
    if _answers((folder / "config.json").is_file):
        return folder
    why = "has no config.json" if _answers(folder.is_dir) else "is no folder"
    raise ModelNotFoundError(
        f"{what} {shown(str(folder))} {why}; name a checkpoint folder as model or in {_MODEL_VARIABLE}, "
        f"or a model of the hub such as {RELEASED_MODEL}"
    )


def _local(name: str | Path) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # "~somebody" who has no home here
        return Path(name)


def _answers(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:  # a name too long for a file, a folder that may not be looked into
        return False


def _download(name: str, revision: str | None, weights: bool, progress: bool) -> Path:
    from huggingface_hub import snapshot_download  # 0.2 s to import, needed only here

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=_DESCRIPTION_FILES + _WEIGHT_FILES * weights,
            tqdm_class=None if progress else _SilentProgress,
        )
    except Exception as error:  # network, hub and disk each have their own families of exceptions
        reason = str(error).strip().splitlines()
        raise ModelNotFoundError(
            f"{name} could not be fetched from the hub ({reason[0] if reason else type(error).__name__}); set "
            f"{_MODEL_VARIABLE} to a folder that holds the checkpoint, or connect to the network and try again"
        ) from error
    return Path(folder)


class _SilentProgress(tqdm_asyncio):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})
