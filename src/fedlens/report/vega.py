"""Vega-Lite specifications: one definition of a chart for the page, which embeds it, and for papers, which get PDF, SVG or PNG of it.

Colours are Okabe and Ito's; lines differ in marker and dash too, so that grey print can be read. No data and no image is loaded from a URL.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from fedlens.files import write_atomic
from fedlens.report.blocks import Chart, clean, numbered
from fedlens.study.statistics import Summary

Spec: TypeAlias = dict[str, Any]
Axes: TypeAlias = tuple[str, str, str]  # titles of rows and columns, meaning of a value
Levels: TypeAlias = Mapping[str, float] | None

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
COLUMN, WIDE = 360, 764  # pixels of a whole chart, which is printed 3.25 or 6.9 inches wide
PRINTED = 72 * 3.25 / COLUMN  # points per pixel
HEIGHT, LETTER = 190, 5.3  # pixels of a panel and, about, of a letter
BANDED, LISTED = 6, 9  # lines in a panel up to which intervals are drawn; names up to which one column holds the legend
MARKED = 8  # markers per line, about
NUMBERED = 24  # rows and columns of a map up to which its cells show their numbers
PERCENT, ANY = (0.0, 100.0), (-inf, inf)  # possible ranges: of an accuracy, of other numbers
SHAPES = ("circle", "square", "diamond", "cross", "triangle-up", "triangle-down", "triangle-right", "triangle-left")
DASHES = ([1, 0], [6, 2], [2, 2], [6, 2, 2, 2], [10, 3])
NAMED = re.compile(r"(?<=id=\")(?:clip|gradient_)\d+(?=\")|(?<=url\(#)(?:clip|gradient_)\d+(?=\))")
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # vl-convert brings the first
INTERVAL = {"calculate": "isValid(datum.l) ? '[' + format(datum.l, '.4~g') + ', ' + format(datum.h, '.4~g') + ']' : 'none'", "as": "i"}


def _config(ink: str, soft: str, grid: str, background: str, *palette: str) -> Spec:
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"}
    legend = {"orient": "bottom", "offset": 6, "labelLimit": 300, "symbolSize": 45, "symbolOpacity": 1, "symbolStrokeWidth": 0}
    axis = {"gridColor": grid, "domainColor": soft, "tickColor": soft, "labelLimit": 178, "tickSize": 4, "titlePadding": 5}
    marks = {"mark": {"color": palette[0]}, "rule": {"color": palette[0]}, "style": {"seed": {"fill": soft, "stroke": soft}}}
    look = {"background": background, "font": FONT, "padding": 3, "view": {"stroke": None}, "concat": {"spacing": 12}}
    title = {"color": ink, "fontSize": 11, "fontWeight": "normal", "offset": 4}
    scales = {"category": list(palette), "heatmap": {"scheme": "cividis"}}
    return {**look, **marks, "title": title, "axis": {**text, **axis}, "legend": {**text, **legend}, "range": scales}


CONFIG = _config("#222", "#777", "#e6e6e6", "white", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
DARK = _config("#e8e8e8", "#a0a0a0", "#3a3a3a", "transparent", "#6cb6ff", "#ff9a57", "#3fd6a8", "#f2a6d0", "#ffc94d", "#a5e3ff", "#f0f0f0")


def render(chart: Chart, suffix: str, dark: bool = False) -> bytes:
    """Return the chart as "pdf", "svg" or "png"; the same bytes for the same chart."""
    import vl_convert

    if suffix not in ("pdf", "svg", "png"):
        raise ValueError(f"a chart can be written as .pdf, .svg or .png, not .{suffix}")
    spec = {**chart.spec, "config": {**(DARK if dark else CONFIG), "aria": False}}
    if suffix == "png":
        return bytes(vl_convert.vegalite_to_png(spec, scale=2.5, allowed_base_urls=[]))
    names: dict[str, str] = {}  # of clip paths and gradients: the library counts on from chart to chart
    svg = str(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))
    svg = NAMED.sub(lambda m: names.setdefault(m[0], f"{chart.key}-{len(names)}"), svg)
    if suffix == "svg":
        return svg.encode()
    size = r'width="([\d.]+)" height="([\d.]+)"'
    printed = re.sub(size, lambda m: f'width="{float(m[1]) * PRINTED:g}" height="{float(m[2]) * PRINTED:g}"', svg, count=1)
    while True:  # the library writes fonts and lists of objects in random order: take and make the sorted ones
        pdf = bytes(vl_convert.svg_to_pdf(printed))
        fonts = [int(number) for number in re.findall(rb"(\d+) 0 obj\s+<<\s+/Type /Font\s+/Subtype /Type0", pdf)]
        if fonts == sorted(fonts):
            return re.sub(rb"(?: +/[a-z]+\d+ \d+ 0 R\n){2,}", lambda m: b"".join(sorted(m[0].splitlines(keepends=True))), pdf)


def save(chart: Chart, path: Path, suffixes: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write PATH.svg and PATH.png, or other suffixes; return the paths."""
    files = {path.with_name(f"{path.name}.{suffix}"): render(chart, suffix) for suffix in suffixes}
    for file, content in files.items():
        write_atomic(file, content)
    return list(files)


def build(head: Sequence[str], views: Sequence[Spec], columns: int = 1, wide: bool = False, left: int = 46) -> Chart:
    """Return key, title, caption and kind with one view, or with views side by side. `left`: pixels of their axes."""
    total, spec = WIDE if wide else COLUMN, dict(views[0])
    if len(views) == 1:
        spec |= {"width": total, "autosize": {"type": "fit-x", "contains": "padding"}}
    else:
        spec = {"columns": columns, "concat": [{"width": (total - 12) // columns - left, **view} for view in views]}
    key, title, caption, kind = head
    return Chart(key, title, caption, {"$schema": SCHEMA, **spec}, kind, wide)


def q(field: str, title: str | None = None, **rest: Any) -> Spec:
    """Return the encoding of a quantity."""
    return {"field": field, "type": "quantitative", "title": title, **rest}


def tips(**fields: str) -> list[Spec]:
    """Return the values that a mark shows: field -> title."""
    return [{"field": field, "title": title, **({"format": ".4~g"} if field in "xyv" else {})} for field, title in fields.items()]


def short(value: float) -> float:
    """Round to five digits, more than a drawing shows."""
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded


def limits(rows: Sequence[Spec], bounds: tuple[float, float]) -> Spec:
    """Return a scale with room for all means and a third of their range: the interval of two runs would make lines of them."""
    ends: list[Spec] = [{"l": row["y"], "h": row["y"], **row} for row in rows]
    lowest, highest = min(row["y"] for row in ends), max(row["y"] for row in ends)
    room = (highest - lowest) / 3 or 0.05 * abs(highest) or 1.0
    bottom = max(lowest - room, min(row["l"] for row in ends) - 0.15 * room)
    top = min(highest + room, max(row["h"] for row in ends) + 0.15 * room)
    edge = 0.03 * (top - bottom)
    return {"domain": [short(max(bottom, bounds[0] - edge)), short(min(top, bounds[1] + edge))], "zero": False, "nice": False}


# --- lines


@dataclass(frozen=True)
class Series:
    """A line, or points: x and value, which may have an interval. Series with the same label share their look and legend entry."""

    label: str
    points: Sequence[tuple[float, float | Summary]]
    ring: float | None = None  # the x of the chosen point
    panel: str = ""
    scale: float = 1  # 100: accuracies, in percent
    note: str = ""  # shown with the values

    def rows(self, bounds: tuple[float, float] = ANY, marked: int = MARKED) -> list[Spec]:
        """Return the data of its points; intervals end at the bounds."""
        rows, every = [], max(1, len(self.points) // marked) if marked else len(self.points) + 1
        for i, (x, value) in enumerate(self.points):
            row: Spec = {"s": clean(self.label), "x": short(x)}
            row |= {"m": 1} if (i + 1) % every == 0 or x == self.ring else {}
            if isinstance(value, Summary):
                row |= {"n": value.n, "y": short(self.scale * value.mean)}
                if value.sd and value.low is not None and value.high is not None:
                    row |= {"l": short(max(bounds[0], self.scale * value.low)), "h": short(min(bounds[1], self.scale * value.high))}
            else:
                row["y"] = short(self.scale * value)
            rows.append(row | ({"r": 1} if x == self.ring else {}) | ({"note": clean(self.note)} if self.note else {}))
        return rows


@dataclass(frozen=True)
class Style:
    """How series are drawn. log: None decides by their x. joined: lines, else points. path: joined in the given order.

    bounds: the possible range of y. share: all panels have the same axes.
    """

    log: bool | None = False
    joined: bool = True
    path: bool = False
    bounds: tuple[float, float] = ANY
    share: bool = True


LINES = Style()


def line_chart(
    key: str,
    title: str,
    caption: str,
    series: Sequence[Series],
    x: str,
    y: str,
    style: Style = LINES,
    kind: str = "",
    levels: Levels = None,
) -> Chart:
    """Draw series over x, a panel per `Series.panel`. `levels`: name -> horizontal line."""
    panels, at = list(dict.fromkeys(each.panel for each in series)), [x for each in series for x, _ in each.points]
    flat = [Series(name, [(min(at), v), (max(at), v)], panel=panel) for panel in panels for name, v in (levels or {}).items()]
    drawn = [*series, *(flat if min(at) < max(at) else [])]
    names = list(dict.fromkeys(clean(each.label) for each in drawn))
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    wide = columns > 2 or len(names) > LISTED or max(map(len, panels)) > 24
    look, views = _look(names, WIDE if wide else COLUMN), []
    for i, panel in enumerate(panels):
        own = [each for each in drawn if each.panel == panel]
        rows = [row for each in (drawn if style.share else own) for row in each.rows(style.bounds)]
        views.append({**_panel(own, _axes(rows, x, y, style, not i % columns), look, style), "title": clean(panel) or None})
    return build((key, title, caption, kind), views, columns, wide)


def _axes(rows: Sequence[Spec], x: str, y: str, style: Style, first: bool) -> Spec:
    at = [row["x"] for row in rows]
    least, most = min(at), max(at)
    axis: Spec = {"grid": False, "format": ".4~g", "tickCount": 6, "labelOverlap": "greedy"}
    scale: Spec = {"zero": False, "nice": False, "padding": 6}
    if least > 0 and most >= 10 * least if style.log is None else style.log:
        edge = max(1.04, (most / least) ** 0.03)
        scale = {"type": "log", "nice": False, "domain": [short(least / edge), short(most * edge)]}
    elif all(float(value).is_integer() for value in at):
        axis |= {"format": "d", "tickCount": min(6, most - least)}
    ticks, title = {"tickCount": 6, "labels": first or not style.share}, y if y and first else None
    return {"x": q("x", x or None, axis=axis, scale=scale), "y": q("y", title, axis=ticks, scale=limits(rows, style.bounds))}


def _panel(series: Sequence[Series], axes: Spec, look: Spec, style: Style) -> Spec:
    """Return a panel: intervals below lines below points. `g` distinguishes series of one label, `o` the points of a path."""
    banded, several = len(series) <= BANDED or not style.joined, len({each.label for each in series}) < len(series)
    rows: list[Spec] = []
    for i, each in enumerate(series):
        found = each.rows(style.bounds, 0 if style.path else MARKED)
        rows += [row | ({"g": i} if several else {}) | ({"o": j} if style.path else {}) for j, row in enumerate(found)]
    rows = [{name: value for name, value in row.items() if banded or name not in "lh"} for row in rows]
    has = {name for row in rows for name in row}
    x, y = (axes[axis]["title"] for axis in "xy")
    titles = {"s": "of", "x": x or "value", "y": y or "value", "i": "95 % interval", "n": "n", "note": "note"}
    tooltip = tips(**{name: title for name, title in titles.items() if name in has or (name == "i" and "n" in has)})
    color = {"color": look["color"]}
    line = color | ({"detail": {"field": "g"}} if several else {})
    layers: list[Spec] = []
    if "l" in has:
        mark = {"type": "area", "opacity": 0.14, "clip": True} if style.joined else {"type": "rule", "clip": True}
        between = {"y": q("l", y), "y2": {"field": "h"}, **line}
        layers.append({"transform": [{"filter": "isValid(datum.l)"}], "mark": mark, "encoding": between})
    if style.joined:
        order = {"order": q("o")} if style.path else {}
        layers.append(
            {"mark": {"type": "line", "strokeWidth": 1.5, "clip": True}, "encoding": {"strokeDash": look["strokeDash"], **line, **order}}
        )
    seen = {"condition": {"test": "datum.m", "value": 1}, "value": 0} if style.joined else {"value": 1}
    points = {**color, "shape": look["shape"], "opacity": seen, "tooltip": tooltip}
    layers.append({"mark": {"type": "point", "filled": True, "size": 30, "clip": True}, "encoding": points})
    if "r" in has:
        ring = {"type": "point", "size": 150, "filled": False, "strokeWidth": 1.4, "opacity": 1}
        layers.append({"transform": [{"filter": "datum.r"}], "mark": ring, "encoding": color})
    return {"data": {"values": rows}, "transform": [INTERVAL], "encoding": axes, "layer": layers, "height": HEIGHT}


def _look(names: Sequence[str], width: int) -> Spec:
    """Return colour, shape and dash of every series; colour and shape share one legend."""
    columns = max(1, int(width // (max(map(len, names), default=1) * LETTER + 28)))
    legend = {"title": None, "columns": min(columns, len(names))} if len(names) > 1 else None

    def encoded(legend: Spec | None, looks: Sequence[Any] = ()) -> Spec:
        ranged = {"range": [looks[i % len(looks)] for i in range(len(names))]} if looks else {}
        return {"field": "s", "type": "nominal", "sort": None, "legend": legend, "scale": {"domain": list(names), **ranged}}

    return {"color": encoded(legend), "shape": encoded(legend, SHAPES), "strokeDash": encoded(None, DASHES)}


# --- shades and bars


@dataclass(frozen=True)
class Heat:
    """A map: values by row and column (None stays blank), their names (default: numbers from 0), and texts to write on them."""

    values: Sequence[Sequence[float | None]]
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    title: str = ""
    texts: Sequence[Sequence[str]] = ()


def heat_chart(key: str, title: str, caption: str, maps: Sequence[Heat], axes: Axes, most: float | None = None, kind: str = "") -> Chart:
    """Draw maps of shades, all on one scale. `most`: end of a square-root scale from 0; default: linear."""
    known = [value for each in maps for line in each.values for value in line if value is not None] or [0]
    columns, views = min(len(maps), 2 if len(maps) in (2, 4) else 3), [heat_view(each, axes, most, known) for each in maps]
    return build((key, title, caption, kind), views, columns, columns > 1 or len(maps[0].columns) > 8)


def heat_view(heat: Heat, axes: Axes, most: float | None = None, known: Sequence[float] = (0,)) -> Spec:
    """Return one map. A row of its data holds lists, which are unrolled when it is drawn: a partition has 10,000 entries."""
    rows = distinct(heat.rows or [str(i) for i in range(len(heat.values))])
    columns: Sequence[Any] = distinct(heat.columns) or range(max(map(len, heat.values)))
    low, high, middle = (min(known), max(known), 0.55) if most is None else (0.0, most, 0.3)
    fields = ["c", "v", "t"] if heat.texts else ["c", "v"]
    data = []
    for i, line in enumerate(heat.values):
        filled = [(columns[j], short(v), heat.texts[i][j] if heat.texts else "") for j, v in enumerate(line) if v is not None]
        entry = {"r": rows[i], **{name: [each[k] for each in filled] for k, name in enumerate(fields)}}
        whole = not heat.columns and len(filled) > len(columns) / 2  # shorter without the columns' numbers
        data.append({"r": rows[i], "v": [v and short(v) for v in line]} if whole else entry)
    numbered = bool(heat.texts) or max(len(columns), len(rows)) <= NUMBERED
    scale = {"domain": [low, high], "type": "linear" if most is None else "sqrt"}
    shade = q("v", axes[2], scale=scale, legend=None if numbered else {"gradientLength": 150})
    tip = tips(r=axes[0] or "of", c=axes[1] or "in", **{fields[-1]: axes[2]})
    layers: list[Spec] = [{"mark": "rect", "encoding": {"color": shade, "tooltip": tip}}]
    if numbered:
        ink = {"condition": {"test": f"datum.v > {low + middle * (high - low):g}", "value": "black"}, "value": "white"}
        mark = {"type": "text", "fontSize": 9, "lineBreak": "\n", "dy": -5 if heat.texts else 0}
        layers.append({"mark": mark, "encoding": {"text": {"field": "t"} if heat.texts else q("v", format=".0f"), "color": ink}})
    encoding = {"x": names_axis("c", columns, axes[1]), "y": names_axis("r", rows, axes[0])}
    height = (30 if heat.texts else 20) * len(rows) if numbered else HEIGHT
    unroll = [{"calculate": f"datum.c || sequence({len(columns)})", "as": "c"}, {"flatten": fields}, {"filter": "isValid(datum.v)"}]
    view = {"data": {"values": data}, "transform": unroll, "encoding": encoding, "layer": layers, "height": height}
    return {**view, "title": clean(heat.title) or None}


def slider_chart(
    key: str, title: str, caption: str, points: Mapping[float, Mapping[str, float]], slider: tuple[str, float], x: str
) -> Chart:
    """Draw bars of percentages at one position of a slider. `points`: position, in equal steps -> name -> value; `slider`: its name and start."""
    (first, second, *_), names = sorted(points), list(next(iter(points.values())))
    data = [{"a": at, "r": name, "v": short(value)} for at, values in points.items() for name, value in values.items()]
    bind = {"input": "range", "min": first, "max": max(points), "step": second - first, "name": slider[0]}
    encoding = {
        "y": names_axis("r", names, ""),
        "x": q("v", x, scale={"domain": list(PERCENT), "nice": False}),
        "tooltip": tips(r="of", v=x),
    }
    heading = {"text": {"expr": f"'{slider[0]} = ' + at"}, "anchor": "start"}
    view = {
        "data": {"values": data},
        "params": [{"name": "at", "value": slider[1], "bind": bind}],
        "transform": [{"filter": "datum.a == at"}],
    }
    return build(
        (key, title, caption, "slider"), [{**view, "title": heading, "mark": "bar", "encoding": encoding, "height": 20 * len(names)}]
    )


def bar_view(rows: Mapping[str, Mapping[str, float]], x: str, width: int) -> Spec:
    """Return stacked bars. `rows`: name -> part -> value."""
    parts = list(dict.fromkeys(part for shares in rows.values() for part, value in shares.items() if value))
    names = distinct(list(rows))
    named = list(zip(names, rows.values(), strict=True))
    data = [{"r": name, "s": part, "v": short(shares.get(part, 0)), "o": i} for name, shares in named for i, part in enumerate(parts)]
    axes = {"y": names_axis("r", names, ""), "x": q("v", x, stack="zero", scale={"nice": False}), "order": q("o")}
    look = {"color": _look(parts, width)["color"], "tooltip": tips(r="of", s="part", v=x)}
    return {"data": {"values": data}, "mark": "bar", "encoding": {**axes, **look}, "height": 20 * len(names)}


def names_axis(field: str, names: Sequence[Any], title: str) -> Spec:
    """Return an axis of names in their order, every n-th of many."""
    many, across = list(names)[:: -(-len(names) // NUMBERED)], field == "c"
    axis = {"domain": False, "ticks": False, "grid": False, "labelAngle": 0, "values": many, "labelOverlap": "greedy" if across else False}
    axis |= {"labelFontSize": 9} if across and sum(len(str(name)) + 2 for name in many) * LETTER > WIDE * 0.7 else {}
    return {"field": field, "type": "ordinal", "sort": None, "scale": {"domain": list(names)}, "title": clean(title) or None, "axis": axis}


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names, cleaned, the second of a kind with its number."""
    return numbered(map(clean, names), "{} ({})")
