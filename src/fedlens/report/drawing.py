"""How figures for papers are drawn: panels of lines with one legend, and shades with their numbers on them.

Colours are Okabe and Ito's; lines differ in marker and dash too, so that grey print can be read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedlens.study.figures import MARKERS, PALETTE
from fedlens.study.statistics import Summary

COLUMN, PAGE = 3.35, 6.95  # inches: one column, two
COLORS = PALETTE[:7]  # without the yellow, which white paper swallows
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (8, 2)))
BANDED = 6  # lines in one panel up to which each has its band
ABREAST = 4  # panels
LONGEST = 36  # letters of a label
LETTER = 0.058  # inches that a letter takes, about
PERCENT = 100  # the scale of an accuracy
FONT = "DejaVu Sans"  # comes with matplotlib, and has Greek
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": [FONT],
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,  # TrueType, embedded
    "text.parse_math": False,  # a dollar in a label is a dollar
}


@dataclass(frozen=True)
class Line:
    """Points, each of one run or with the mean's interval over several."""

    label: str
    x: Sequence[float]
    y: Sequence[Summary]
    scale: float = PERCENT
    ring: float | None = None  # the x of a point to put a ring round
    look: tuple[int, int] | None = None  # numbers of its colour and its dash


@dataclass(frozen=True)
class Panel:
    lines: list[Line]
    y: str
    title: str = ""


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family=[FONT]))).get_charmap())


def clean(text: str) -> str:
    """A label that can be drawn: what the font lacks is a box, a long one is cut in its middle, a first underscore does not hide it."""
    drawn = "".join(letter if ord(letter) in _glyphs() else "□" for letter in text)
    if len(drawn) > LONGEST:
        drawn = f"{drawn[: LONGEST * 2 // 3]}…{drawn[-(LONGEST // 3 - 1) :]}"
    return f" {drawn}" if drawn.startswith("_") else drawn


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, share: bool = False, widths: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share, sharex=share, width_ratios=widths)
    axes: list[Axes] = grid.ravel().tolist()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(width=0.6, length=2.5)
    return figure, axes


def line_figure(
    panels: Sequence[Panel], x: str, levels: Mapping[str, float] | None = None, *, share: bool = False, log: bool = False
) -> Figure:
    """Panels with one legend below, side by side where they share their axes, else one above the other; `levels` are grey horizontal lines."""
    labels = list(dict.fromkeys([*(line.label for panel in panels for line in panel.lines), *(levels or {})]))
    rows = -(-len(panels) // ABREAST) if share else len(panels)
    columns = -(-len(panels) // rows)  # five panels are three and two
    width, height = PAGE if columns > 1 else COLUMN, 1.85 if share or rows == 1 else 1.15
    abreast = names_abreast(width, labels)
    figure, axes = new_figure(width, height * rows + 0.15 * -(-len(labels) // abreast), rows, columns, share)
    banded, named = max(len(panel.lines) for panel in panels) <= BANDED, dict[str, Any]()
    for place, (ax, panel) in enumerate(zip(axes, panels, strict=False)):
        for i, line in enumerate(panel.lines):
            named.setdefault(line.label, _line(ax, line, i, banded))
        for i, (label, level) in enumerate((levels or {}).items()):
            named[label] = ax.axhline(level, color="#666666", linestyle=("--", ":", "-.")[i % 3], linewidth=0.9)
        lowest = place + columns >= len(panels)  # of its column
        ax.set(xlabel=x if lowest else "", ylabel=panel.y if not place % columns else "", title=clean(panel.title))
        ax.tick_params(labelbottom=lowest or not share)
        ax.grid(alpha=0.25, linewidth=0.5)
        if log:
            log_axis(ax, [value for each in (panels if share else [panel]) for line in each.lines for value in line.x])
        elif x == "round":
            ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for group in [list(zip(axes, panels, strict=False))] if share else [[pair] for pair in zip(axes, panels, strict=False)]:
        _limit([ax for ax, _ in group], [line for _, panel in group for line in panel.lines], list((levels or {}).values()))
    legend_below(figure, {label: named[label] for label in _ordered(panels, labels)}, abreast)
    return figure


def _ordered(panels: Sequence[Panel], labels: Sequence[str]) -> list[str]:
    """By their looks where they have any: a first panel that lacks a line must not put it at the legend's end."""
    looks = {line.label: line.look for panel in panels for line in panel.lines if line.look}
    return sorted(labels, key=lambda label: looks.get(label) or (len(labels), 0))


def names_abreast(width: float, labels: Sequence[str]) -> int:
    """In how many columns the entries of a legend stand: as many as fit, each as wide as its own, and as many entries in each row."""
    font = FontProperties(family=FONT, size=STYLE["legend.fontsize"])
    wide = [0.45 + TextPath((0, 0), clean(label), prop=font).get_extents().width / 72 for label in labels]  # inches, with line and gap
    for rows in range(1, len(labels)):
        columns = -(-len(labels) // rows)
        if sum(max(part) for part in np.array_split(wide, columns)) <= width:  # matplotlib fills them so, from the left
            return columns
    return 1


def text_width(labels: Sequence[str]) -> float:
    """Inches that the longest of them takes, about."""
    return LETTER * max(len(clean(label)) for label in labels)


def legend_below(figure: Figure, named: Mapping[str, Any], abreast: int) -> None:
    figure.legend(
        list(named.values()),
        [clean(label) for label in named],
        loc="outside lower center",
        ncols=abreast,
        frameon=False,
        handlelength=2.8,
        columnspacing=1.2,
    )


def _line(ax: Axes, line: Line, number: int, banded: bool) -> Any:
    hue, dash = line.look or (number, number)
    color, y = COLORS[hue % len(COLORS)], [line.scale * s.mean for s in line.y]
    every = max(1, len(line.x) // 8)
    drawn = ax.plot(
        line.x,
        y,
        color=color,
        linestyle=DASHES[dash % len(DASHES)],
        marker=MARKERS[hue % len(MARKERS)],
        markersize=2.8,
        linewidth=1.0,
        markevery=every,
    )
    if banded and all(s.low is not None for s in line.y):
        low, high = zip(*_intervals(line), strict=True)
        ax.fill_between(line.x, low, high, color=color, alpha=0.13, linewidth=0)
    ringed = [(at, value) for at, value in zip(line.x, y, strict=True) if at == line.ring]
    ax.scatter(
        [at for at, _ in ringed], [value for _, value in ringed], s=45, facecolors="none", edgecolors=color, linewidths=1.1, zorder=3
    )
    return drawn[0]


def _intervals(line: Line) -> list[tuple[float, float]]:
    """Those of its points that have one; of percent what lies within 0 to 100."""
    least, most = (0.0, 100.0) if line.scale == PERCENT else (-math.inf, math.inf)
    return [(max(least, line.scale * s.low), min(most, line.scale * s.high)) for s in line.y if s.low is not None and s.high is not None]


def _limit(axes: Sequence[Axes], lines: Sequence[Line], levels: Sequence[float]) -> None:
    """The frame holds all means with room for a third of their range on both sides: the interval of two runs would make lines of them.
    Of percent it ends a marker's width beyond 0 and 100."""
    means = [line.scale * s.mean for line in lines for s in line.y] + list(levels)
    ends = [end for line in lines for pair in _intervals(line) for end in pair]
    if not means:
        return
    lowest, highest = min(means), max(means)
    room = (highest - lowest) / 3 or 0.05 * abs(highest) or 1.0
    bottom = max(lowest - room, min([*ends, lowest - 0.15 * room]))
    top = min(highest + room, max([*ends, highest + 0.15 * room]))
    if all(line.scale == PERCENT for line in lines):
        marker = 0.04 * (top - bottom)
        bottom, top = max(bottom, -marker), min(top, 100 + marker)
    for ax in axes:
        ax.set_ylim(bottom, top)


def log_axis(ax: Axes, values: Sequence[float]) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=_named(values, _inches(ax))))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _inches(ax: Axes) -> float:
    """How wide the axes are, about: a column of the figure less the numbers at its left."""
    figure, place = ax.get_figure(root=True), ax.get_subplotspec()
    assert figure is not None and place is not None
    return float(figure.get_figwidth()) / place.get_gridspec().ncols - 0.45


def _named(values: Sequence[float], inches: float) -> tuple[float, ...]:
    """Which parts of a power of ten have their number on a logarithmic axis: as many as there is room for."""
    least, most = (min(values), max(values)) if values else (1.0, 1.0)
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    for subs in ((1.0, 2.0, 5.0), (1.0, 3.0)):
        ticks = [at for power in powers for sub in subs if least <= (at := sub * 10.0**power) <= most]
        if most / least < 300 and sum(LETTER * len(f"{at:g}") + 0.1 for at in ticks) <= inches:
            return subs
    return (1.0,)


def heat(
    ax: Axes,
    values: Sequence[Sequence[float | None]],
    texts: Sequence[Sequence[str]],
    rows: Sequence[str],
    columns: Sequence[str],
    most: float | None = None,
    size: float = 7,
) -> None:
    """Shades with their numbers on them; what is missing stays white."""
    table = np.ma.masked_invalid([[np.nan if value is None else value for value in row] for row in values])
    image = ax.imshow(table, aspect="auto", cmap="cividis", interpolation="nearest", vmin=None if most is None else 0, vmax=most)
    for (row, column), value in np.ndenumerate(table.filled(np.nan)):
        ink = "black" if not np.isfinite(value) or float(np.asarray(image.norm(value))) > 0.55 else "white"
        ax.text(column, row, texts[row][column], ha="center", va="center", fontsize=size, color=ink, linespacing=1.0)
    ax.set_xticks(range(len(columns)), [clean(name) for name in columns])
    ax.set_yticks(range(len(rows)), [clean(name) for name in rows])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
