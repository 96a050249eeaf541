"""Markdown and CSV renderers. The same runs give the same text: no times, no seconds, no paths of the machine that ran them."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fedlens.report.blocks import Answer, Block, Chart, Code, Details, Entry, Heading, Items, Report, Table, Text, clean
from fedlens.study.results import Gathered, further_metrics

NUMBERS = ("test_accuracy", "val_accuracy", "rounds", "bytes_up", "bytes_down")
FORMULA = ("=", "+", "-", "@")  # a spreadsheet runs text that starts with one of them


def escaped(text: str) -> str:
    """Return text that Markdown shows as it is; an underscore inside a word needs nothing."""
    text = re.sub(r"([\\`*|$~\[\]<>])", r"\\\1", clean(text)).replace("&", "&amp;")
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def rows_text(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """Return a table; `right`: which columns are aligned to the right (default: all but the first)."""
    sides = right or [i > 0 for i in range(len(header))]
    rule = ["---:" if side else "---" for side in sides]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def markdown(report: Report, details: bool = True) -> str:
    """Return text and tables of a report. `details`: also what a page folds away."""
    shown = [block for block in [*report.lead, *report.blocks] if details or not isinstance(block, Details)]
    parts = [f"# {escaped(report.title)}", *map(_block, shown)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {escaped(block.text)}"
        case Text():
            return escaped(block.text)
        case Items():
            return _items(block.items)
        case Code():
            return "\n".join(f"    {clean(line)}" for line in block.text.splitlines())
        case Answer():
            return f"{escaped(block.question)}\n**{escaped(block.text)}**" + (f"\n\n{_items(block.cautions)}" if block.cautions else "")
        case Table():
            return f"{table_text(block)}\n\n{escaped(block.caption)}"
        case Details():
            return "\n\n".join([f"**{escaped(block.summary)}**", *filter(None, map(_block, block.blocks))])
        case Chart():
            return ""


def _items(items: Sequence[str]) -> str:
    return "\n".join(f"- {escaped(item)}" for item in items)


def table_text(table: Table) -> str:
    """Return the table; the best entries are bold, those that differ have a dagger."""
    rows = table.entries()
    right = [i > 0 and any(row[i].value is not None for row in rows) for i in range(len(table.header))]
    return rows_text([*map(escaped, table.header)], [[_entry(entry) for entry in row] for row in rows], right)


def _entry(entry: Entry) -> str:
    text = escaped(entry.text)
    text = f"**{text}**" if entry.mark == "best" else f"{text} †" if entry.mark == "differs" else text
    return f"{text} ({escaped(entry.below)})" if entry.below else text


# --- CSV


def csv_rows(gathered: Gathered) -> str:
    """Return one line per run of a table, with a column per key of a grid. Accuracies are fractions; empty where a run lacks a number."""
    cells = [(study.name, table.name, cell) for study in gathered.studies for table in study.tables for cell in table.cells]
    keys = list(dict.fromkeys(key for *_, cell in cells for key in cell.values))
    columns = [*NUMBERS, *further_metrics(run for *_, cell in cells for run in cell.runs.values())]
    rows: list[list[Any]] = [["study", "table", "case", *keys, "seed", "run", *columns]]
    for study, table, cell in cells:
        for seed, run in sorted(cell.runs.items()):
            values = [*map(cell.values.get, keys), seed, run.name, *map(run.summary.get, columns)]
            rows.append([study, table, cell.case, *values])
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(_plain, row) for row in rows)
    return buffer.getvalue()


def _plain(value: Any) -> str:
    """Return an entry: text without control characters and paths, and never a formula; numbers as they are."""
    if value is None:
        return ""
    text = clean(str(value))
    return f"'{text}" if isinstance(value, str) and text.startswith(FORMULA) else text
