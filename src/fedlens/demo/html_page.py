"""The demo's self-contained HTML page: headings, prose, tables and inline SVG, without network requests."""

import re
from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure

from fedlens.study.figures import as_svg

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #667; --line: #d5d9e0; --card: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --paper: #14171b; --soft: #9aa3ad; --line: #333a42; --card: #f7f8fa; } }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 62rem; font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; } p { max-width: 46rem; }
.soft, figcaption { color: var(--soft); font-size: .92rem; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem; box-sizing: border-box; }
.row { display: flex; flex-wrap: wrap; gap: .8rem; } .row svg { flex: 0 1 auto; min-width: 0; } .row svg:not(:only-child) { flex: 1 1 22rem; }
table { border-collapse: collapse; margin: .8rem 0; } th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } code, pre { font: .9em ui-monospace, monospace; }
pre { padding: .7rem 1rem; border: 1px solid var(--line); border-radius: 8px; overflow-x: auto; }
@media print { body { max-width: none; } }
"""
NUMBER = re.compile(r"[+-]?[\d.,]+( (MB|%))?|nan|-?inf")  # aligned to the right


class DemoPage:
    """A page that collects sections in order."""

    def __init__(self, title: str, lead: str) -> None:
        self.title = title
        self.parts = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(lead)}</p>']

    def section(self, heading: str, *paragraphs: str) -> None:
        self.parts.append(f"<h2>{escape(heading)}</h2>")
        self.text(*paragraphs)

    def text(self, *paragraphs: str) -> None:
        self.parts += [f"<p>{escape(p)}</p>" for p in paragraphs]

    def figure(self, figure: Figure, caption: str, *beside: Figure) -> None:
        """Add a figure, or several side by side where the page is wide enough, with one caption."""
        drawn = "".join(map(as_svg, (figure, *beside)))
        text = escape(caption)
        self.parts.append(f'<figure role="img" aria-label="{text}"><div class="row">{drawn}</div><figcaption>{text}</figcaption></figure>')

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        def cell(value: object) -> str:
            text = f"{value:.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
            return f'<td class="number">{text}</td>' if NUMBER.fullmatch(text) else f"<td>{escape(text)}</td>"

        head = "".join(f"<th>{escape(h)}</th>" for h in header)
        body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
        self.parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")

    def code(self, text: str) -> None:
        self.parts.append(f"<pre>{escape(text)}</pre>")

    def html(self) -> str:
        viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
        head = f'<meta charset="utf-8">{viewport}<title>{escape(self.title)}</title>'
        icon = '<link rel="icon" href="data:,">'  # without it, a browser requests one
        return f'<!doctype html><html lang="en"><head>{head}{icon}<style>{STYLE}</style></head><body>{"".join(self.parts)}</body></html>\n'
