"""Tables on the terminal and in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["console", "table_of"]

_WIDTH_OF_FILES = 160  # of output that is no terminal: tables are not cut to 80 columns


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for a file."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=_WIDTH_OF_FILES)


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of plain text: brackets in a cell are no markup."""
    table = Table(*columns, title=title or None)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
