"""Files that a measurement leaves: whether they can be written is found out before it, not after.

check_outputs(args.output, args.plot)    minutes of work    write_json(args.output, results)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_outputs", "check_plot", "new_figure", "save_figure", "write_json", "write_text"]


def check_outputs(*paths: Path | None) -> None:
    """Raise ConfigError for a path in a folder that is not there, or that is a folder itself; None = not wanted."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder; give a file")


def check_plot(path: Path | None) -> None:
    """`check_outputs` for a picture; also raises ConfigError without matplotlib."""
    if path is not None:
        check_outputs(path)
        new_figure(1, 1)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8. Raises ConfigError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from error


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write `value` as JSON. Raises ConfigError."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def new_figure(width: float, height: float) -> Figure:
    """An empty matplotlib figure of so many inches. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # an extra: only plots need it
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; install deepinfer-core[bench]") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG. Raises ConfigError."""
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from error
