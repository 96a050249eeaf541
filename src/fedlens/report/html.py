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
    style, script = ((files("fedlens.report") / "assets" / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    charts = {block.key: _plain(block.spec) for block in report.walk() if isinstance(block, Chart)}
    data = json.dumps({"config": CONFIG, "dark": DARK, "charts": charts}, allow_nan=False, separators=(",", ":")).encode()
    scripts = [_library(), script] if charts else [script]
    hashes = (f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in scripts)
    policy, title = POLICY.format(" ".join(hashes)), _text(report.title)
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f'<link rel="icon" href="data:,"><style>{style}</style>'  # without an icon a browser requests one
        "<noscript><style>figure.chart, .help { display: none; }</style></noscript>"
    )
    lead = sorted(report.lead, key=lambda block: isinstance(block, Answer))  # the answers stand beside and below the main figure
    body = (
        f'<a class="skip" href="#top">Skip the contents</a>{_contents(report.blocks)}'
        "<noscript><p>Without scripts the figures are left out; all tables are here.</p></noscript>"
        f'<main id="top"><h1>{title}</h1><section class="lead">{_blocks(lead)}</section><p class="soft help">{HELP}</p>{_blocks(report.blocks)}</main>'
        f'<script type="text/plain" id="report-data">{base64.b64encode(gzip.compress(data, mtime=0)).decode()}</script>'
        f"{''.join(f'<script>{each}</script>' for each in scripts)}"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which sets `vegaEmbed`."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


@cache
def _text(text: str) -> str:
    return escape(clean(text))


@cache
def _lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


def _plain(content: Any, key: str = "") -> Any:
    """Return a specification with its strings cleaned, without addresses, and with null in place of what is not finite."""
    if isinstance(content, str):
        return content if key in EXPRESSIONS else _lines(content)
    if isinstance(content, Mapping):
        return {name: _plain(value, name) for name, value in content.items() if name != "$schema"}
    if isinstance(content, list | tuple):
        return [_plain(value, key) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _contents(blocks: Iterable[Block]) -> str:
    """Return the navigation: headings of level 2, and below each those of level 3."""
    items = '<li><a href="#top">Overview</a><ul>'
    for heading in (block for block in blocks if isinstance(block, Heading)):
        link = f'<li><a href="#part-{heading.key}">{_text(heading.text)}</a>'
        items += f"{link}</li>" if heading.level > 2 else f"</ul></li>{link}<ul>"
    return f'<nav aria-label="Contents"><button type="button" aria-expanded="false">Contents</button><ul>{items}</ul></li></ul></nav>'


def _blocks(blocks: Iterable[Block]) -> str:
    """Return blocks in order; charts that follow each other stand side by side."""
    html = []
    for kind, run in groupby(blocks, key=type):
        each = [_block(block) for block in run]
        html.append(f'<div class="charts">{"".join(each)}</div>' if kind is Chart and len(each) > 1 else "".join(each))
    return "".join(html)


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
        case Answer():
            return _answer(block)
        case Table():
            return _table(block)
        case Chart():
            return (
                f'<figure class="chart{" wide" * block.wide}" id="figure-{block.key}"><h4>{_text(block.title)}</h4><div class="plot"></div>'
                f"<figcaption>{_text(block.caption)}</figcaption></figure>"
            )
        case Details():
            return f"<details><summary>{_text(block.summary)}</summary>{_blocks(block.blocks)}</details>"


def _answer(answer: Answer) -> str:
    """Return an answer; one that leads to its part of the page is short: its cautions are folded."""
    question, cautions, n = _text(answer.question), _items(answer.cautions), len(answer.cautions)
    if answer.part:
        question = f'<a href="#part-{answer.part}">{question}</a>'
        cautions = f"<details><summary>{n} caution{'s' * (n > 1)}</summary>{cautions}</details>" if cautions else ""
    return f'<div class="answer"><p class="question">{question}</p><p>{_text(answer.text)}</p>{cautions}</div>'


def _table(table: Table) -> str:
    """Return a table whose first column names the row. Its heads sort it, unless rows with nothing but a name divide it into parts."""
    rows, name = table.entries(), f"table-{table.key}"
    parted = any(len(row) > 1 and not any(entry.text for entry in row[1:]) for row in rows)
    numeric = [i > 0 and any(row[i].value is not None for row in rows) for i in range(len(table.header))]
    head = "".join(f'<th scope="col"{" class=number" * n}>{_text(h) or "name"}</th>' for h, n in zip(table.header, numeric, strict=True))
    body = "".join(f"<tr>{''.join(_cell(entry, i == 0, numeric[i]) for i, entry in enumerate(row))}</tr>" for row in rows)
    shape = " tall" * (len(rows) > TALL) + " long" * any(len(row[0].text) > LONG for row in rows)
    return (
        f'<p class="caption" id="{name}">{_text(table.caption)}</p>'
        f'<div class="box{shape}" tabindex="0" role="region" aria-labelledby="{name}">'
        f'<table class="{"" if parted else "sortable"}" aria-labelledby="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(entry: Entry, first: bool, numeric: bool) -> str:
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    names = " ".join(["number"] * numeric + [escape(entry.mark)] * bool(entry.mark))
    kind = f' class="{names}"' if names else ""
    value = "" if entry.value is None or not math.isfinite(entry.value) else f' data-v="{entry.value:.9g}"'
    below = f"<small>{_text(entry.below)}</small>" if entry.below else ""
    return f"<{tag}{scope}{kind}{value}>{_text(entry.text)}{MARKS.get(entry.mark, '')}{below}</{tag}>"
