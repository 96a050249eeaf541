"""Tables on the terminal."""

import sys
from collections.abc import Sequence
from typing import Literal


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None, justify: Literal["left", "right"] = "right"
) -> None:
    """Print a table. `justify`: the side of all columns but the first, which is on the left."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*map(escape, header), title=None if title is None else escape(title))
    for column in table.columns[1:]:
        column.justify = justify
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else 250).print(table)
