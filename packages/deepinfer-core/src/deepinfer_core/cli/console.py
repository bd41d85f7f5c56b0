"""Tables on the terminal and in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["console", "statistics_table", "table_of"]

_WIDTH_OF_FILES = 160  # of output that is no terminal: tables are not cut to 80 columns


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for a file."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=_WIDTH_OF_FILES)


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of plain text: brackets in a cell are no markup."""
    table = Table(title=title or None)
    for column in columns:
        table.add_column(column, overflow="fold")  # a long path goes on in the next line, never into an ellipsis
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def statistics_table(statistics: Mapping[str, object]) -> Table:
    """`LLM.statistics()` for people: one row a counter."""
    return table_of("", ("statistic", "value"), [(name, _shown(value)) for name, value in statistics.items()])


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        counts = cast("Mapping[str, object]", value)
        return ", ".join(f"{name} {_shown(count)}" for name, count in counts.items() if count) or "-"
    if isinstance(value, list):
        return " ".join(_shown(item) for item in cast("list[object]", value)) or "-"
    if isinstance(value, float):
        return f"{value:,.3f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
