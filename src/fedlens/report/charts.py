"""The charts of a report: what a table, a study, an analysis or a search shows, as specifications that vega.py renders.

Every function returns None where the results have nothing to draw. Accuracies are drawn in percent.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedlens.lens.mask import Mask
from fedlens.report import vega
from fedlens.report.answers import diverged
from fedlens.report.blocks import UNITS, Chart, clean, counts, label, slug
from fedlens.report.over_seeds import GEOMETRY, LENGTH, grid_text, label_of, layout, mask_shares
from fedlens.report.vega import PERCENT, Heat, Levels, Series, Spec, Style, heat_chart, line_chart
from fedlens.study.results import Analysis, CellResult, RunResult, SearchResult, StudyResult, TableResult, Tuned
from fedlens.study.statistics import Summary, summarise

POINTS = 30  # of a curve; longer ones are thinned
SPREAD = 10  # ratio of the longest to the shortest update from which their lengths are drawn
SHOWN_CLIENTS = 100  # further rows would be thinner than a pixel
NAMED = 4  # diverged runs in a caption
PARTS = {"train": "Training", "val": "Validation", "test": "Test"}
METRICS = {f"{part}_{what}": f"{name} {what}" for part, name in PARTS.items() for what in ("loss", "accuracy")}
ACCURACY, TEST, VALIDATION = Style(bounds=PERCENT), "test accuracy (%)", "validation accuracy (%)"
Curve = list[tuple[float, Summary]]
Head = tuple[str, str, str]  # key, title, kind


# --- tables


def scores(table: TableResult, key: str) -> Chart | None:
    """Draw a row per cell: the mean test accuracy, its interval, and every seed. What lies off the axis because a seed diverged is marked."""
    cells = [(cell, summary) for cell in table.cells if (summary := cell.summary("test_accuracy"))]
    if not cells:
        return None
    names, data, sound = vega.distinct([label(cell.label) for cell, _ in cells]), list[Spec](), list[Spec]()
    for name, (cell, summary) in zip(names, cells, strict=True):
        lost = {f"seed {seed}" for seed, run in cell.runs.items() if diverged(run)}
        points: dict[str, float | Summary] = {"mean": summary}
        points |= {f"seed {seed}": value for seed, value in sorted(cell.of("test_accuracy").items())}
        rows = [Series(name, [(0, value)], scale=100).rows(PERCENT)[0] | {"k": which} for which, value in points.items()]
        data, sound = data + rows, sound + [row for row in rows if row["k"] not in lost and not (lost and row["k"] == "mean")]
    scale = vega.limits(sound or data, PERCENT)
    low = scale["domain"][0]
    data = [{**row, "x": max(low, row["y"]), "off": int(row["y"] < low)} for row in data]
    shape = {"condition": {"test": "datum.off", "value": "triangle-left"}, "value": "circle"}
    encoding = {"tooltip": vega.tips(s="of", k="value", y=TEST), "shape": shape}
    mean = {"tooltip": vega.tips(s="of", k="value", y=TEST, i="95 % interval", n="n"), "shape": shape}
    layers: list[Spec] = [
        {"mark": {"type": "rule", "clip": True}, "encoding": {"x": vega.q("l", TEST), "x2": {"field": "h"}}},
        {"mark": {"type": "point", "style": "seed", "filled": True, "size": 14, "yOffset": 6, "opacity": 0.8}, "encoding": encoding},
        {"mark": {"type": "point", "filled": True, "size": 45, "opacity": 1}, "encoding": mean},
    ]
    for layer, test in zip(layers, ("isValid(datum.l)", "datum.k != 'mean'", "datum.k == 'mean'"), strict=True):
        layer["transform"] = [{"filter": test}]
    axes = {"y": vega.names_axis("s", names, ""), "x": vega.q("x", TEST, scale=scale, axis={"tickCount": 6})}
    view = {"data": {"values": data}, "transform": [vega.INTERVAL], "encoding": axes, "layer": layers, "height": 20 * len(names) + 8}
    n = counts(summary.n for _, summary in cells)
    caption = f"{clean(table.name)}: test accuracy. Large points: mean over seeds ({n}); lines: 95 % t interval; small points: each seed."
    caption += _lost(table, " Triangles at the edge: off the axis, as a seed diverged")
    return vega.build((key, "Test accuracy", caption, "scores"), [view])


def curves(table: TableResult, key: str) -> list[Chart]:
    """Draw loss and accuracy on training, validation and test images by round and by epoch, whichever the runs recorded."""
    return [chart for metric in METRICS for unit in ("round", "epoch") if (chart := _curve(table, key, unit, metric))]


def _curve(table: TableResult, key: str, unit: str, metric: str) -> Chart | None:
    title, cells, in_percent = METRICS[metric], list(map(_trained, table.cells)), metric.endswith("accuracy")
    scale, style = (100, ACCURACY) if in_percent else (1, Style())
    lines = [(cell, points) for cell in cells if (points := _with_start(cell, unit, metric)) and points[-1][0] > 0]
    still = [c for c in cells if not any(line.get("round") or line.get("epoch") for run in c.runs.values() for line in run.metrics)]
    levels = {label(c.label): scale * s.mean for c in still if (s := c.summary(metric))}
    series, what = [_series(table, *each, scale) for each in lines], title.lower()
    head = (f"{key}-{slug(metric)}-{unit}", title, metric)
    return _lines(table, head, f"{what} by {unit}", series, unit, what + " (%)" * in_percent, style, levels)


def _lines(
    table: TableResult, head: Head, what: str, series: Sequence[Series], x: str, y: str, style: Style, levels: Levels = None
) -> Chart | None:
    """Draw a recorded metric of a table's cells; None if no cell has two points. `head`: key, title and kind."""
    if not any(len(each.points) > 1 for each in series):
        return None
    key, title, kind = head
    return line_chart(key, title, f"{clean(table.name)}: {what}; {_spread(series)}.{_lost(table)}", series, x, y, style, kind, levels)


def _trained(cell: CellResult) -> CellResult:
    return replace(cell, runs={seed: run for seed, run in cell.runs.items() if not diverged(run)})


def _lost(table: TableResult, opening: str = " Left out, as they diverged") -> str:
    lost = [f"{label(cell.label)}, seed {seed}" for cell in table.cells for seed, run in cell.runs.items() if diverged(run)]
    return f"{opening}: {'; '.join(lost[:NAMED])}{f'; {len(lost) - NAMED} more' if len(lost) > NAMED else ''}." if lost else ""


def _spread(series: Sequence[Series]) -> str:
    """Return what a caption says about seeds."""
    ns = [getattr(value, "n", 1) for each in series for _, value in each.points[:1]]
    if max(ns) == 1:
        return "one seed (n = 1)"
    fullest = max(Counter(each.panel for each in series).values())
    return f"mean over seeds ({counts(ns)}){', bands: 95 % t interval' if fullest <= vega.BANDED else ''}"


def _with_start(cell: CellResult, unit: str, metric: str) -> Curve:
    """Return the mean curve, thinned, from θ₀ on: a line of metrics at 0, or the run's score before its first step."""
    points = cell.mean_curve(unit, metric, POINTS)
    scored = [{**(run.summary.get("ridge") or {}), **(run.summary.get("start") or {})}.get(metric) for run in cell.runs.values()]
    known = [float(score) for score in scored if score is not None]
    return [(0.0, summarise(known)), *points] if points and points[0][0] > 0 and len(known) == len(scored) else points


def _series(table: TableResult, cell: CellResult, points: Curve, scale: float = 1) -> Series:
    """Return a cell's line; in a table of two dimensions it is called by its value, in a panel of its case."""
    grid = layout(table)
    if grid is None:
        return Series(label(cell.label), points, scale=scale)
    return Series(f"{grid.key.rsplit('.', 1)[-1]} {grid_text(cell.values[grid.key])}", points, panel=label(cell.case), scale=scale)


def traffic(table: TableResult, key: str) -> Chart | None:
    """Draw validation accuracy against the bytes that all clients sent."""
    lines = []
    for cell in map(_trained, table.cells):
        sent = {at: s.mean for at, s in cell.mean_curve("round", "bytes_up")}
        lines.append((cell, [(sent[at], y) for at, y in cell.mean_curve("round", "val_accuracy") if sent.get(at, 0) > 0]))
    power = min(len(UNITS) - 1, int(math.log10(max((x for _, points in lines for x, _ in points), default=1)) // 3))
    series = [_series(table, cell, [(x / 1000**power, y) for x, y in points], 100) for cell, points in lines if points]
    what = f"validation accuracy against the {UNITS[power]} that all clients sent (logarithmic)"
    head = (key, "Accuracy by bytes sent", "traffic")
    return _lines(table, head, what, series, f"sent by all clients ({UNITS[power]})", VALIDATION, replace(ACCURACY, log=True))


def drift(table: TableResult, key: str) -> Chart | None:
    """Draw the geometry of the clients' updates by round: a panel per measure."""
    measured = [
        (cell, name, cell.mean_curve("round", measure, POINTS)) for measure, name in GEOMETRY.items() for cell in map(_trained, table.cells)
    ]
    series = [Series(label(cell.label), points, panel=name) for cell, name, points in measured if points]
    head = (key, "Client drift", "drift")
    return _lines(table, head, "geometry of the clients' updates by round", series, "round", "", Style(share=False))


def lengths(table: TableResult, key: str) -> Chart | None:
    """Draw test accuracy against the length of a client's update; None where all move about as far."""
    moved = [(c, s.mean, y) for c in table.cells if (y := c.summary("test_accuracy")) and (s := c.over_rounds(LENGTH)) and s.mean > 0]
    if len(moved) < 4 or max(x for _, x, _ in moved) < SPREAD * min(x for _, x, _ in moved):
        return None
    series = [Series(label(cell.label), [(x, y)], scale=100) for cell, x, y in moved]
    caption = (
        f"{clean(table.name)}: test accuracy against how far a client moves in a round (norm of its update, mean over rounds; logarithmic). "
        f"Mean over seeds ({counts(y.n for *_, y in moved)}), lines: 95 % t interval."
    )
    style = replace(ACCURACY, log=True, joined=False)
    return line_chart(key, "Accuracy by length of updates", caption, series, "length of a client's update", TEST, style, kind="lengths")


def grid_map(table: TableResult, key: str) -> Chart | None:
    """Draw a table of two dimensions as shades: mean test accuracy ± half of its interval."""
    grid = layout(table)
    cells = [[c.summary("test_accuracy") if (c := grid.at(case, v)) else None for v in grid.values] for case in grid.cases] if grid else []
    if not grid or not any(map(any, cells)):
        return None
    texts = [[_with_half(summary) for summary in row] for row in cells]
    values = [[100 * summary.mean if summary else None for summary in row] for row in cells]
    heat = Heat(values, list(map(label, grid.cases)), list(map(grid_text, grid.values)), texts=texts)
    n = counts(summary.n for row in cells for summary in row if summary)
    caption = f"{clean(table.name)}: mean test accuracy (%) over seeds ({n}), ± half of its 95 % t interval."
    return heat_chart(key, "Test accuracy", caption, [heat], ("", grid.key.rsplit(".", 1)[-1], TEST), kind="map")


def _with_half(summary: Summary | None) -> str:
    """Return a mean in percent, below it half of its interval."""
    if summary is None:
        return ""
    half = f"\n± {100 * (summary.high - summary.mean):.1f}" if summary.sd and summary.high is not None else ""
    return f"{100 * summary.mean:.1f}{half}"


def tried(tuned: Sequence[Tuned], key: str) -> Chart | None:
    """Draw what the short runs of a table's search scored: a line per cell, a ring around the chosen value."""
    lines = [(each, sorted((value, score) for value, score in each.tried if score is not None)) for each in tuned]
    lines = [(each, points) for each, points in lines if points]
    if not lines:
        return None
    keys, last = list(dict.fromkeys(each.key for each, _ in lines)), "nothing was tried beyond the chosen value"
    series = [Series(label(e.label), at, e.value, e.key if len(keys) > 1 else "", 100, last if e.at_an_end else "") for e, at in lines]
    bounds, _ = _frame([100 * score for _, points in lines for _, score in points])
    caption = f"{clean(tuned[0].table)}: values tried in short runs (n = 1 each); rings: chosen on validation."
    if ends := [label(each.label) for each, _ in lines if each.at_an_end]:
        caption += f" The ring lies at an end of what was tried: {'; '.join(ends)}."
    if failed := [f"{label(each.label)} at {value:g}" for each in tuned for value, score in each.tried if score is None]:
        caption += f" Failed: {'; '.join(failed)}."
    style = Style(None, bounds=bounds, share=len(keys) == 1)
    return line_chart(key, "Values tried", caption, series, keys[0] if len(keys) == 1 else "value", VALIDATION, style, kind="tried")


def _frame(scores: Sequence[float]) -> tuple[tuple[float, float], int]:
    """Return limits of y and how many scores lie below them: those that are not close to the best."""
    kept = [score for score in scores if score >= 0.8 * max(scores)]
    return (min(kept) - 1, 100.0), len(scores) - len(kept)


# --- studies


def partitions(runs: Iterable[RunResult], key: str) -> Chart | None:
    """Draw samples by client and class: the first run of up to four ways to divide the data."""
    schemes: dict[str, Any] = {}
    for run in runs:
        if run.partition is not None and run.partition.get("label_counts"):
            data = run.config.get("data", {})
            known = {"iid": "IID", "classes": f"Nc = {data.get('classes_per_client')}", "dirichlet": f"Dirichlet {data.get('alpha')}"}
            scheme = f"{known.get(data.get('partition'), data.get('partition'))}, {run.partition['clients']} clients"
            schemes.setdefault(scheme, run.partition["label_counts"])
    return partition_chart(dict(list(schemes.items())[:4]), key) if schemes else None


def partition_chart(counted: Mapping[str, Any], key: str) -> Chart:
    """Draw samples by client and class; the first 100 clients. `counted`: scheme -> samples [clients, classes]."""
    maps = [Heat([[int(n) or None for n in row] for row in table[:SHOWN_CLIENTS]], title=name) for name, table in counted.items()]
    cut = f", the first {SHOWN_CLIENTS} of them" if any(len(table) > SHOWN_CLIENTS for table in counted.values()) else ""
    caption = f"Training samples by client{cut} and class, of one seed of each way to divide the data."
    return heat_chart(key, "Labels by client", caption, maps, ("client", "class", "samples"), kind="partition")


Shares = dict[str, float]  # name -> percent


def masks(study: StudyResult, key: str) -> Chart | None:
    """Draw the density of masks by layer and their composition by kind of weight. Cells with the same masks, or nearly, are one row."""
    rows: list[tuple[CellResult, Shares, Shares]] = []
    for cell in (cell for table in study.tables for cell in table.cells):
        layers, kinds = mask_shares(cell)
        if layers and not any(_near(layers, a, c.label == cell.label) and _near(kinds, b, c.label == cell.label) for c, a, b in rows):
            rows.append((cell, layers, kinds))
    n = counts(len(cell.runs) for cell, *_ in rows)
    opening = f"{clean(study.name)}: mean over seeds ({n}). Cells with the same masks, or nearly, are one row."
    return _mask_views(key, opening, [(label(cell.label), layers, kinds) for cell, layers, kinds in rows]) if rows else None


def _near(a: Shares, b: Shares, same_cell: bool) -> bool:
    return a.keys() == b.keys() and all(abs(a[name] - b[name]) <= 2 * same_cell for name in a)


def mask_chart(masks: Mapping[str, Mask], key: str) -> Chart:
    """Draw the density by layer and the composition by kind of weight of masks in memory."""
    layers = [{name: 100 * active / of for name, active, of in mask.by_layer() if of} for mask in masks.values()]
    kinds = [{kind: 100 * row["share"] for kind, row in mask.composition().items()} for mask in masks.values()]
    return _mask_views(key, "", list(zip(masks, layers, kinds, strict=True)))


def _mask_views(key: str, opening: str, rows: Sequence[tuple[str, Shares, Shares]]) -> Chart:
    columns, names = list(dict.fromkeys(layer for _, layers, _ in rows for layer in layers)), vega.distinct([name for name, *_ in rows])
    density = Heat([[layers.get(layer) for layer in columns] for _, layers, _ in rows], names, columns, "trainable weights by layer (%)")
    shares = {name: kinds for name, (_, _, kinds) in zip(names, rows, strict=True)}
    below = vega.bar_view(shares, "composition of the mask by kind of weight (%)", 700)
    views = [vega.heat_view(density, ("", "", "trainable (%)"), 100), below]
    caption = f"{opening} Above: trainable weights by layer; below: composition of the mask by kind of weight.".strip()
    chart = vega.build((key, "Places of the masks", caption, "masks"), views, 1, True, min(190, 20 + 6 * max(map(len, names))))
    return replace(chart, spec={**chart.spec, "resolve": {"scale": {"color": "independent"}}})


# --- analyses


def along(groups: Sequence[Sequence[Analysis]], kind: str, key: str) -> Chart | None:
    """Draw validation accuracy along task vectors ("sweep") or between models ("interpolate"), as far as all of them were measured."""
    series = [_over_seeds(" to ".join(map(label, group[0].labels)), [a.found for a in group], "val_accuracy") for group in groups]
    if not series:
        return None
    last = max(min(max(x for x, _ in each.points) for each in series), *(each.ring or 0.0 for each in series))
    series = [replace(each, points=[(x, y) for x, y in each.points if x <= last]) for each in series]
    what, x = "between two models", "α: 0 is the first model, 1 the second"
    if kind == "sweep":
        what, x = "along the task vector", "α of θ₀ + α·τ"
    rings = "with the highest mean" if max(map(len, groups)) > 1 else "chosen on validation"
    caption = f"Validation accuracy {what}; {_spread(series)}; rings: α {rings}."
    return line_chart(key, f"Accuracy {what}", caption, series, x, VALIDATION, ACCURACY, kind)


def _over_seeds(name: str, found: Sequence[Mapping[str, Any]], metric: str, panel: str = "") -> Series:
    """Return the mean at every α that all seeds have. The ring of one seed is at its chosen α, of several where their mean is highest."""
    lines = [{float(point["alpha"]): float(point[metric]) for point in each["points"]} for each in found]
    points = [(x, summarise([line[x] for line in lines])) for x in sorted(set.intersection(*map(set, lines)))]
    chosen = float((found[0].get("chosen") or found[0]["after"])["alpha"])
    return Series(name, points, chosen if len(lines) == 1 else max(points, key=lambda point: point[1].mean)[0], panel, 100)


def disentanglement(analysis: Analysis | Sequence[Analysis], key: str) -> Chart | None:
    """Draw ξ over α of both vectors; of several seeds with the same α their mean."""
    group = [analysis] if isinstance(analysis, Analysis) else list(analysis)
    first = group[0].found
    if not first.get("xi"):
        return None
    same = [a.found["xi"] for a in group if a.found.get("alphas") == first["alphas"] and a.found.get("xi")]
    xi = [[sum(values) / len(same) for values in zip(*rows, strict=True)] for rows in zip(*same, strict=True)]
    names = group[0].labels if len(group[0].labels) == len(first["names"]) else list(map(str, first["names"]))
    return xi_chart(xi, first["alphas"], names, key, f" Mean over seeds ({counts([len(same)])}).")


def xi_chart(xi: Sequence[Sequence[float]], alphas: Sequence[float], names: Sequence[str], key: str, opening: str = "") -> Chart:
    """Draw the disentanglement error ξ (a fraction) over α of the first vector (up) and of the second (across)."""
    ticks, (up, across) = [f"{alpha:g}" for alpha in alphas], map(label, names[:2])
    heat = Heat([[100 * value for value in row] for row in reversed(xi)], ticks[::-1], ticks)
    caption = f"Disentanglement error ξ of {up} and {across}: percent of predictions that the other vector changes.{opening}"
    return heat_chart(key, "Disentanglement error ξ (%)", caption, [heat], (f"α of {up}", f"α of {across}", "ξ (%)"), 100, kind="xi")


def forgetting(group: Sequence[Analysis], key: str) -> Chart | None:
    """Draw validation accuracy on the classes of subtracted clients and on all others over α."""
    series = []
    for metric, panel in (("val_target", "its classes"), ("val_control", "all other classes")):
        for number in [client["client"] for client in group[0].found["clients"]]:
            found = [c for analysis in group for c in analysis.found["clients"] if c["client"] == number]
            line = _over_seeds(f"client {number}", found, metric, panel)
            series.append(line if len(found) == 1 else replace(line, ring=None))
    if not series:
        return None
    opening = "on the classes of the client whose update is subtracted α times, and on all others"
    rings = "; rings: α chosen on validation" if len(group) == 1 else ""
    caption = f"{label(label_of(group[0]))}: validation accuracy {opening}; {_spread(series)}{rings}."
    style = replace(ACCURACY, share=False)
    return line_chart(key, "Forgetting a client", caption, series, "α subtracted", VALIDATION, style, "forget")


def forgotten_cost(groups: Sequence[Sequence[Analysis]], key: str) -> Chart | None:
    """Draw the accuracy left on a client's classes against the points that the others lose; None for a single cell."""
    series = []
    for analysis, client in ((a, client) for group in groups for a in group for client in a.found["clients"]):
        points = {float(p["alpha"]): p for p in sorted(client["points"], key=lambda p: float(p["alpha"]))}
        start = next(iter(points.values()))["val_control"]
        line = {alpha: (100 * (start - p["val_control"]), 100 * p["val_target"]) for alpha, p in points.items()}
        chosen, note = line[float(client["after"]["alpha"])], f"client {client['client']}, seed {analysis.seed}"
        series += [
            Series(label(analysis.labels[0]), points, ring, note=note)
            for points, ring in ((list(line.values()), None), ([chosen], chosen[0]))
        ]
    if len({each.label for each in series}) < 2:
        return None
    caption = (
        "The cost of subtracting a client's vector: a line per client and seed, from α = 0 on the left; rings: α chosen on validation."
    )
    x, y = "points lost on all other classes", "accuracy on its classes (%)"
    return line_chart(key, "The cost of forgetting", caption, series, x, y, replace(ACCURACY, path=True), "forgotten")


def trials(search: SearchResult, key: str) -> Chart | None:
    """Draw the trials of a search: validation accuracy against each numeric parameter."""
    drawn = [(f"trial {t['number']}", "best" if t["number"] == search.best else str(t["state"]), t) for t in search.trials]
    series = []
    for parameter in search.keys:
        for name, group, trial in [*drawn, ("default", "default", search.default)]:
            value, score = trial["params"].get(parameter), trial.get("value")
            if isinstance(value, int | float) and score is not None:
                series.append(Series(group, [(float(value), 100 * float(score))], panel=parameter, note=name))
    if not series:
        return None
    bounds, below = _frame([100 * float(trial["value"]) for trial in search.trials if trial.get("value") is not None] or [0.0])
    caption = f"Search {clean(search.name)}: validation accuracy of each trial (n = 1 each) against each parameter."
    caption += f" Below the frame: {below} trial{'s' * (below > 1)}." if below else ""
    style = Style(None, joined=False, bounds=bounds, share=False)
    return line_chart(key, "Trials", caption, series, "", VALIDATION, style, kind="trials")
