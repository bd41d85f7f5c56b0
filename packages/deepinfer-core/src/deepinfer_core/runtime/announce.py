"""What an engine says on standard error when it starts, unless `quiet`: every setting, then what the open ones became.

    part         settings
    engine       model=tiny (argument)  tokenizer=auto  ..
    scheduler    max_num_seqs=256  ..
    tiny: native kernels on cpu, float32; at most 4,096 tokens a request; ..

In brackets: who set it. auto: decided while the engine starts.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepinfer_core.checkpoint.resolve import locate_model
from deepinfer_core.config.engine import ResolvedSettings, all_settings
from deepinfer_core.kernels.registry import choose_provider
from deepinfer_core.parallel.launch import Rendezvous
from deepinfer_core.runtime.running import RunningEngine
from deepinfer_core.runtime.start import start_engine

__all__ = ["start_announced"]


def start_announced(resolved: ResolvedSettings) -> RunningEngine:
    """`start_engine` with the settings before and the decisions after it. Raises what that raises."""
    meeting = Rendezvous.from_environment()
    if resolved.config.quiet or (meeting is not None and meeting.local_rank > 0):  # one of a machine's ranks speaks
        return start_engine(resolved.config)
    # What names no device or no model is said alone, not below a table.
    locate_model(resolved.config.model, accelerator=choose_provider(resolved.config.accelerator).name)
    console = Console(stderr=True)
    console.print(_table(resolved))
    for note in resolved.notes:
        console.print(f"Note: {note}", style="yellow", markup=False)
    engine = start_engine(resolved.config)
    console.print(engine.summary(), markup=False, highlight=False, soft_wrap=True)
    return engine


def _table(resolved: ResolvedSettings) -> Table:
    """One row a part of the tree; a default is dim, what was set names its source."""
    parts: dict[str, Text] = {}
    for name, value, source in resolved.rows():
        line = parts.setdefault(all_settings()[name].part or "engine", Text())
        is_default = source == "default"
        line.append(f"{name}={value}" if is_default else f"{name}={value} ({source})", "dim" if is_default else "bold")
        line.append("  ")
    table = Table("part", "settings", title="Settings", title_justify="left")
    for part, line in parts.items():
        line.rstrip()
        table.add_row(part, line)
    return table
