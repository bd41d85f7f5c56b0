"""From what the user named, or did not name, to a folder with a checkpoint (design.md 10).

argument ─► "tiny": the bundled checkpoint
         ─► a folder (a folder called tiny is "./tiny")
         ─► "owner/name": the hub, cached
nothing  ─► DEEPINFER_HF_MODEL_DIR ─► with an accelerator: the released weights from the hub ─► the bundled checkpoint
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tqdm.asyncio import tqdm_asyncio

from deepinfer_core.config.checks import shown
from deepinfer_core.config.env import read_text
from deepinfer_core.errors import ModelNotFoundError

__all__ = ["BUNDLED_MODEL", "RELEASED_MODEL", "resolve_model"]

BUNDLED_MODEL = "tiny"
RELEASED_MODEL = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
_BUNDLED_FOLDER = Path(__file__).resolve().parents[1] / "models" / BUNDLED_MODEL
_MODEL_VARIABLE = "DEEPINFER_HF_MODEL_DIR"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_FILES = ["*.json", "*.safetensors"]  # never code


def resolve_model(
    model: str | Path | None = None, *, accelerator: str = "cpu", revision: str | None = None, progress: bool = True
) -> Path:
    """Folder of the checkpoint to use; it holds a config.json. Downloads from the hub where that is what was named.

    `accelerator` decides what no name means; `revision` counts for the hub only. Raises ModelNotFoundError, which says
    what to name or set instead.
    """
    if model is None:
        folder = read_text(_MODEL_VARIABLE)
        if folder is not None:
            return _existing_folder(Path(folder), f"{_MODEL_VARIABLE} is {shown(folder)}")
        model = BUNDLED_MODEL if accelerator == "cpu" else RELEASED_MODEL
    if model == BUNDLED_MODEL:
        return _existing_folder(_BUNDLED_FOLDER, "this installation lacks the bundled model 'tiny'")
    path = Path(model).expanduser()
    if not path.exists() and isinstance(model, str) and _HUB_NAME.fullmatch(model):
        return _existing_folder(_download(model, revision, progress), f"the hub's {model}")
    return _existing_folder(path, f"the model is {shown(str(model))}")


def _existing_folder(folder: Path, what: str) -> Path:
    if (folder / "config.json").is_file():
        return folder
    why = "has no config.json" if folder.is_dir() else "is no folder"
    raise ModelNotFoundError(
        f"{what}, but {folder} {why}; name a checkpoint folder as model or in {_MODEL_VARIABLE}, "
        f"or a model of the hub such as {RELEASED_MODEL}"
    )


def _download(name: str, revision: str | None, progress: bool) -> Path:
    from huggingface_hub import snapshot_download  # 0.2 s to import, needed only here

    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=_FILES, tqdm_class=None if progress else _SilentProgress
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
