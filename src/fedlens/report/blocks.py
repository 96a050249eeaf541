"""The contents of a report: a list of blocks, built once from results and rendered to HTML, LaTeX and Markdown.

A block holds plain text; every renderer escapes it. Keys name files and anchors: a-z, 0-9 and hyphens, unique in a report.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, TypeAlias

from fedlens.study.statistics import Summary

NO_VALUE = "–"
UNITS = ("B", "kB", "MB", "GB", "TB")
# An absolute path of any system; its last part may be shown.
PATH = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\",;:()]+[/\\])+([^\s/\\'\",;:()]*)")


@dataclass(frozen=True)
class Heading:
    """A title; levels 2 and 3 appear in the navigation."""

    text: str
    key: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; `soft` ones are secondary."""

    text: str
    soft: bool = False


@dataclass(frozen=True)
class Items:
    """A bulleted list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Commands or output, in a fixed-width font."""

    text: str


@dataclass(frozen=True)
class Answer:
    """A question and the sentence that the data supports, with cautions (an edge of a grid, a tie, one seed).

    `part`: on the first screen, the key of the heading that it leads to.
    """

    question: str
    text: str
    cautions: Sequence[str] = ()
    part: str = ""


@dataclass(frozen=True)
class Entry:
    """An entry of a table: its text, a smaller second line, the number it is sorted by, and a mark (best, differs)."""

    text: str
    below: str = ""
    value: float | None = None
    mark: str = ""


NONE = Entry(NO_VALUE)
Row: TypeAlias = Sequence[Entry | str]


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row. `kind` tells papers what it shows."""

    key: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Row]
    kind: str = ""
    wide: bool = False  # two columns of a paper

    def entries(self) -> list[list[Entry]]:
        return [[cell if isinstance(cell, Entry) else Entry(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Chart:
    """A figure: one Vega-Lite specification with its data; `charts.py` has all of them and renders them to PDF, SVG and PNG."""

    key: str
    title: str
    caption: str
    spec: Mapping[str, Any]
    kind: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away until the reader opens them."""

    summary: str
    blocks: Sequence["Block"] = ()


Block: TypeAlias = Heading | Text | Items | Code | Answer | Table | Chart | Details


@dataclass(frozen=True)
class Report:
    """A title, the blocks of the first screen, and the rest."""

    title: str
    lead: Sequence[Block]
    blocks: Sequence[Block] = field(default_factory=list)

    def walk(self) -> Iterator[Block]:
        """Yield every block, also those inside details."""
        remaining = [*self.lead, *self.blocks][::-1]
        while remaining:
            yield (block := remaining.pop())
            remaining += reversed(block.blocks) if isinstance(block, Details) else ()


# --- text


def clean(text: str) -> str:
    """Return text in one line, without control characters and without paths of a machine except for their last part."""
    printable = "".join(c if unicodedata.category(c) not in ("Cc", "Cf", "Cs") or c.isspace() else "�" for c in str(text))
    return " ".join(PATH.sub(r"…/\1", printable).split())


def label(text: str) -> str:
    """Return a cell's label for readers; in older studies that of a table without cases begins with a comma. An empty list reads "none"."""
    return clean(text.lstrip(", ").replace("[]", "none")) or "all"


def slug(text: str) -> str:
    """Return a key: a-z, 0-9 and hyphens, at most 48 characters, without paths of a machine except for their last part."""
    plain = unicodedata.normalize("NFKD", clean(text)).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:48].strip("-") or "x"


def numbered(names: Iterable[str], form: str) -> list[str]:
    """Return different names: from the second of a kind on, `form` with the name and its number."""
    result: list[str] = []
    for name in names:
        options = chain([name], (form.format(name, number) for number in count(2)))
        result.append(next(option for option in options if option not in result))
    return result


def unique(names: Iterable[str]) -> list[str]:
    """Return different slugs: the second of a kind ends in -2."""
    return numbered(map(slug, names), "{}-{}")


# --- numbers


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:z.{digits}f}"


def size(number: float) -> str:
    """Return a number of bytes in a readable unit: 12.3 MB."""
    power = 0
    while abs(number) >= 999.5 and power < len(UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {UNITS[power]}" if power else f"{number:.0f} B"


def stat(summary: Summary | None, scale: float = 100, digits: int = 2, mark: str = "") -> Entry:
    """Return mean ± standard deviation, with the 95 % interval and n below. One run, or equal runs, have no spread."""
    if summary is None:
        return NONE
    text, below = f"{scale * summary.mean:z.{digits}f}", f"n = {summary.n}"
    if summary.sd and summary.low is not None and summary.high is not None:
        text += f" ± {scale * summary.sd:z.{digits}f}"
        below = f"[{scale * summary.low:z.{digits}f}, {scale * summary.high:z.{digits}f}], {below}"
    return Entry(text, below, summary.mean, mark)


def number(text: str, value: float | None) -> Entry:
    return NONE if value is None else Entry(text.format(value), "", value)


def counts(ns: Iterable[int]) -> str:
    """Return text such as n = 3, or n = 2 to 3."""
    distinct = sorted(set(ns) - {0}) or [0]
    return f"n = {distinct[0]}" + f" to {distinct[-1]}" * (len(distinct) > 1)


def listed(names: Sequence[str]) -> str:
    """Return text such as a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
