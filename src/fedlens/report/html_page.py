"""The frame of the HTML report: headings, prose, sortable tables and places for charts, in one file that asks nobody for anything.

Text is escaped here, and loses the paths of the machine here. Charts are drawn by assets/report.js from JSON in the page.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
PATH = re.compile(
    r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\",;:()]+[/\\])+([^\s/\\'\",;:()]*)"
)  # of a machine: only its last part is said
TALL, LONG = 25, 24  # rows of a table that scrolls in its box; characters of a name that needs a wide column
LEAD = (
    "Accuracies are in %, as mean ± standard deviation over seeds, with the 95 % confidence interval of the mean in brackets and n, the "
    "number of runs. Whatever was chosen was chosen on validation images, never on the test set. Click on a table's head to sort it, on a "
    "name below a chart to hide or show it; point at a chart, or reach it with Tab and walk with the arrow keys, to read its values."
)
UNDRAWN = "<noscript><p>Without scripts the charts are left out; all tables are here.</p></noscript>"
SERIES = 8  # drawn at first; the reader chooses others


@dataclass(frozen=True)
class Cell:
    """Of a table: what it says, in small below it, and the number that it is sorted by."""

    text: str
    below: str = ""
    value: float | None = None


NONE = Cell("–")


@dataclass
class Page:
    parts: list[str] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)
    headings: list[tuple[int, str]] = field(default_factory=list)
    tables: int = 0

    def heading(self, level: int, text: str) -> None:
        self.headings.append((level, text))
        self.parts.append(f'<h{level} id="part-{len(self.headings)}">{say(text)}</h{level}>')

    def text(self, *paragraphs: str, soft: bool = False) -> None:
        self.parts += [f"<p{' class=soft' if soft else ''}>{say(p)}</p>" for p in paragraphs if p]

    def listed(self, items: Sequence[str]) -> None:
        if items:
            self.parts.append(f"<ul>{''.join(f'<li>{say(item)}</li>' for item in items)}</ul>")

    def table(self, caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell | str]]) -> None:
        """Sorts by its columns; the first names the row."""
        cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
        numeric = [i > 0 and any(row[i].value is not None for row in cells) for i in range(len(header))]
        head = "".join(f'<th scope="col"{_kind(n)}>{say(h)}</th>' for h, n in zip(header, numeric, strict=True))
        body = "".join(f"<tr>{''.join(_td(c, i == 0, numeric[i]) for i, c in enumerate(row))}</tr>" for row in cells)
        shape = " tall" * (len(rows) > TALL) + " long" * any(len(row[0].text) > LONG for row in cells)
        self.tables += 1
        name = f"table-{self.tables}"
        table = f'<table class="sortable" aria-labelledby="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        box = f'<div class="box{shape}" tabindex="0" role="region" aria-labelledby="{name}">{table}</div>'
        self.parts.append(f'<p class="caption" id="{name}">{say(caption)}</p>{box}')

    def chart(self, kind: str, title: str, explanation: str, views: Sequence[Mapping[str, Any]], choice: str = "show") -> None:
        """One of the kinds of report.js, if there is anything to draw."""
        if not views:
            return
        name = f"chart-{len(self.charts) + 1}"
        self.charts.append({"id": name, "kind": kind, "choice": choice, "views": list(views)})
        drawing = f'<div class="plot"><svg role="img" aria-label="{say(title)}"></svg></div>'
        self.parts.append(
            f'<figure class="chart" id="{name}"><h4>{say(title)}</h4>{drawing}<figcaption>{say(explanation)}</figcaption></figure>'
        )

    def html(self, title: str) -> str:
        assets = files("fedlens.report") / "assets"
        style, script = ((assets / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
        data = json.dumps(_cleaned(self.charts), ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        head = (
            f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{say(title)}</title>'
            f'<link rel="icon" href="data:,"><style>{style}</style>'  # without an icon a browser asks for one
            "<noscript><style>figure.chart { display: none; }</style></noscript>"
        )
        top = (
            f'<a class="skip" href="#part-1">Skip the contents</a><header><h1>{say(title)}</h1><p class="soft">{LEAD}</p>{UNDRAWN}</header>'
        )
        body = f"{top}{self._contents()}<main>{''.join(self.parts)}</main>"
        scripts = f'<script type="application/json" id="report-data">{data}</script><script>{script}</script>'
        return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}{scripts}</body></html>\n'

    def _contents(self) -> str:
        found, open_list = [], False
        for number, (level, text) in enumerate(self.headings, 1):
            link = f'<a href="#part-{number}">{say(text)}</a>'
            if level == 2:
                found.append(("</ul></li>" if open_list else "") + f"<li>{link}<ul>")
                open_list = True
            else:
                found.append(f"<li>{link}</li>")
        return f'<nav aria-label="Contents"><ul>{"".join(found)}{"</ul></li>" if open_list else ""}</ul></nav>'


def say(text: str) -> str:
    return escape(PATH.sub(r"…/\1", text))


def _cleaned(content: Any) -> Any:
    """What is drawn, without paths of the machine."""
    if isinstance(content, str):
        return PATH.sub(r"…/\1", content)
    if isinstance(content, Mapping):
        return {key: _cleaned(value) for key, value in content.items()}
    return [_cleaned(value) for value in content] if isinstance(content, list | tuple) else content


def _kind(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _td(cell: Cell, first: bool, numeric: bool) -> str:
    name, scope = ("th", ' scope="row"') if first else ("td", "")
    value = "" if cell.value is None else f' data-v="{cell.value!r}"'
    below = f"<small>{say(cell.below)}</small>" if cell.below else ""
    return f"<{name}{scope}{_kind(numeric)}{value}>{say(cell.text)}{below}</{name}>"


def view(series: Sequence[Mapping[str, Any]], **rest: Any) -> list[dict[str, Any]]:
    """What a chart of series shows: a list of one, or of none where there is nothing."""
    return [{"series": list(series), "limit": SERIES, **rest}] if series else []


# --- numbers


def percent(value: float) -> str:
    return f"{100 * value:z.2f}"


def number(text: str, value: float | None) -> Cell:
    return NONE if value is None else Cell(text.format(value), "", value)


def rounded(value: float | None, scale: float = 1) -> float | None:
    """To six digits: what is drawn needs no more."""
    return None if value is None else float(f"{scale * value:.6g}")


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
