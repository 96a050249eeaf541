"""HTML renderer: a report as one file that makes no request. Charts are drawn by Vega, which the page contains, in assets/page.js.

Without scripts the text and all tables are there. The policy admits only the page's own scripts, by their hashes, and no `eval`.
"""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

from fedlens.report.blocks import Answer, Block, Chart, Code, Details, Entry, Heading, Items, Report, Table, Text, clean
from fedlens.report.vega import CONFIG, DARK

POLICY = "default-src 'none'; script-src {}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
TALL, LONG = 25, 24  # rows of a table that scrolls in its box; characters of a name that needs a wide column
MARKS = {"differs": " †"}  # `best` is bold
EXPRESSIONS = {"expr", "filter", "calculate", "test", "labelExpr", "signal"}  # code of a specification, which is not text
HELP = (
    "Click a column's head to sort a table. Point at a figure to read its values, or reach it with Tab and walk with the arrow keys; "
    "click a name below it to hide or show it."
)


def page(report: Report) -> str:
    """Return the whole page."""
    assets = files("fedlens.report") / "assets"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    charts = {block.key: _plain(block.spec) for block in report.walk() if isinstance(block, Chart)}
    data = {"config": CONFIG, "dark": DARK, "charts": charts}
    scripts = [_library(), script] if charts else [script]
    policy = POLICY.format(" ".join(map(_hash, scripts)))
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{_text(report.title)}</title>'
        f'<link rel="icon" href="data:,"><style>{style}</style>'  # without an icon a browser requests one
        "<noscript><style>figure.chart, .help { display: none; }</style></noscript>"
    )
    parts = {block.question: key for key, block in _questions(report.blocks)}
    first = sorted(report.lead, key=lambda block: isinstance(block, Answer))  # the answers stand beside and below the main figure
    lead = f'<section class="lead">{_blocks(first, parts)}</section><p class="soft help">{HELP}</p>'
    main = f'<main id="top"><h1>{_text(report.title)}</h1>{lead}{_blocks(report.blocks, {})}</main>'
    undrawn = "<noscript><p>Without scripts the figures are left out; all tables are here.</p></noscript>"
    content = gzip.compress(json.dumps(data, allow_nan=False, separators=(",", ":")).encode(), mtime=0)
    code = f'<script type="text/plain" id="report-data">{base64.b64encode(content).decode()}</script>' + "".join(
        f"<script>{s}</script>" for s in scripts
    )
    body = f'<a class="skip" href="#top">Skip the contents</a>{_contents(report)}{undrawn}{main}{code}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which sets `vegaEmbed`."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def _cleaned(text: str) -> str:
    return clean(text)


def _text(text: str) -> str:
    return escape(_cleaned(text))


def _plain(content: Any, key: str = "") -> Any:
    """Return a specification with its strings cleaned, without addresses, and with null in place of what is not finite."""
    if isinstance(content, str):
        return content if key in EXPRESSIONS else _cleaned(content)
    if isinstance(content, Mapping):
        return {name: _plain(value, name) for name, value in content.items() if name != "$schema"}
    if isinstance(content, list | tuple):
        return [_plain(value, key) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _contents(report: Report) -> str:
    """Return the navigation: headings of level 2, and below each those of level 3."""
    items, inside = [], False
    for heading in (b for b in [*report.lead, *report.blocks] if isinstance(b, Heading) and b.level in (2, 3)):
        link = f'<a href="#part-{heading.key}">{_text(heading.text)}</a>'
        if heading.level == 3 and inside:
            items.append(f"<li>{link}</li>")
        else:
            items.append(("</ul></li>" if inside else "") + f"<li>{link}<ul>")
            inside = True
    entries = f'<li><a href="#top">Overview</a></li>{"".join(items)}{"</ul></li>" if inside else ""}'
    return f'<nav aria-label="Contents"><button type="button" aria-expanded="false">Contents</button><ul>{entries}</ul></nav>'


def _questions(blocks: Iterable[Block]) -> list[tuple[str, Answer]]:
    """Return each answer with the key of the heading before it."""
    found, key = [], "top"
    for block in blocks:
        if isinstance(block, Heading):
            key = block.key
        elif isinstance(block, Answer):
            found.append((key, block))
    return found


def _blocks(blocks: Iterable[Block], parts: Mapping[str, str]) -> str:
    """Return blocks in order; charts that follow each other stand side by side. `parts`: question -> key of its part of the page."""
    html = []
    for kind, run in groupby(blocks, key=type):
        each = [_answer(b, parts) if isinstance(b, Answer) else _block(b) for b in run]
        html.append(f'<div class="charts">{"".join(each)}</div>' if kind is Chart and len(each) > 1 else "".join(each))
    return "".join(html)


def _answer(answer: Answer, parts: Mapping[str, str]) -> str:
    question, key = _text(answer.question), parts.get(answer.question)
    title = f'<a href="#part-{key}">{question}</a>' if key else question
    return f'<div class="answer"><p class="question">{title}</p><p>{_text(answer.text)}</p>{_items(answer.cautions)}</div>'


def _items(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in items)}</ul>" if items else ""


def _block(block: Block) -> str:
    match block:
        case Heading():
            return f'<h{block.level} id="part-{block.key}">{_text(block.text)}</h{block.level}>'
        case Text():
            return f"<p{' class=soft' if block.soft else ''}>{_text(block.text)}</p>"
        case Items():
            return _items(block.items)
        case Code():
            lines = [line[: len(line) - len(line.lstrip(" "))] + _text(line) for line in block.text.splitlines()]
            return f'<pre tabindex="0">{"<br>".join(lines)}</pre>'
        case Table():
            return _table(block)
        case Chart():
            return (
                f'<figure class="chart{" wide" * block.wide}" id="figure-{block.key}"><h4>{_text(block.title)}</h4><div class="plot"></div>'
                f"<figcaption>{_text(block.caption)}</figcaption></figure>"
            )
        case Details():
            return f"<details><summary>{_text(block.summary)}</summary>{_blocks(block.blocks, {})}</details>"
        case Answer():
            return _answer(block, {})


def _table(table: Table) -> str:
    """Return a table whose first column names the row. Its heads sort it, unless rows with nothing but a name divide it into parts."""
    rows = table.entries()
    parted = any(len(row) > 1 and not any(entry.text for entry in row[1:]) for row in rows)
    numeric = [i > 0 and any(row[i].value is not None for row in rows) for i in range(len(table.header))]
    head = "".join(f'<th scope="col"{_kind(n, "")}>{_text(h) or "name"}</th>' for h, n in zip(table.header, numeric, strict=True))
    body = "".join(f"<tr>{''.join(_cell(entry, i == 0, numeric[i]) for i, entry in enumerate(row))}</tr>" for row in rows)
    shape = " tall" * (len(rows) > TALL) + " long" * any(len(row[0].text) > LONG for row in rows)
    name = f"table-{table.key}"
    return (
        f'<p class="caption" id="{name}">{_text(table.caption)}</p>'
        f'<div class="box{shape}" tabindex="0" role="region" aria-labelledby="{name}">'
        f'<table class="{"" if parted else "sortable"}" aria-labelledby="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _kind(numeric: bool, mark: str) -> str:
    names = " ".join(["number"] * numeric + [escape(mark)] * bool(mark))
    return f' class="{names}"' if names else ""


def _cell(entry: Entry, first: bool, numeric: bool) -> str:
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    value = "" if entry.value is None or not math.isfinite(entry.value) else f' data-v="{entry.value:.9g}"'
    below = f"<small>{_text(entry.below)}</small>" if entry.below else ""
    return f"<{tag}{scope}{_kind(numeric, entry.mark)}{value}>{_text(entry.text)}{MARKS.get(entry.mark, '')}{below}</{tag}>"
