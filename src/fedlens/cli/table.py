"""Tables on the terminal."""

import sys
from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a table, its first column aligned to the left and the others to the right."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*map(escape, header), title=None if title is None else escape(title))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else 250).print(table)
