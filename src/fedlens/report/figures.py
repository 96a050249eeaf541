"""Figures for papers: PDF and PNG, as wide as one column or two, the same bytes for the same runs."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedlens.files import write_atomic
from fedlens.report.drawing import (
    BANDED,
    COLORS,
    COLUMN,
    DASHES,
    PAGE,
    STYLE,
    Line,
    Panel,
    clean,
    heat,
    legend_below,
    line_figure,
    log_axis,
    names_abreast,
    new_figure,
    text_width,
)
from fedlens.report.markdown import (
    GEOMETRY,
    LENGTH,
    MB,
    Layout,
    Shares,
    counts,
    forget_text,
    grid_text,
    interference_texts,
    layout,
    mask_shares,
    shown,
    slug,
    sweep_text,
    table_stems,
    unique,
    vector_names,
)
from fedlens.report.over_seeds import of_seeds, titled
from fedlens.study.figures import MARKERS, SHOWN_CLIENTS, partition_figure, xi_figure
from fedlens.study.results import Analysis, CellResult, Gathered, RunResult, StudyResult, TableResult
from fedlens.study.statistics import Summary, summarise

SPREAD = 10  # between the shortest and the longest update, from which a figure of them tells something


@dataclass(frozen=True)
class FigureFile:
    """PATH.pdf and PATH.png."""

    path: Path  # without its suffix
    caption: str  # plain text
    label: str
    study: int  # its place among the studies
    table: int | None  # and that of the table that it is about; None: of the whole study
    kind: str
    size: tuple[float, float]  # inches

    @property
    def wide(self) -> bool:
        return self.size[0] > COLUMN


Drawn = tuple[str, str, Figure]  # kind, caption, figure


def write_figures(gathered: Gathered, folder: Path) -> list[FigureFile]:
    """All figures that the runs give, as FOLDER/NAME.pdf and .png."""
    folder.mkdir(parents=True, exist_ok=True)
    done: list[FigureFile] = []
    names, stems = unique([study.name for study in gathered.studies]), table_stems(gathered)
    with rc_context(STYLE):
        for i, study in enumerate(gathered.studies):
            for j, table in enumerate(study.tables):
                done += [_write(folder, stems[i][j], drawn, i, j) for drawn in _of_table(table)]
            done += [_write(folder, f"{names[i]}-study", drawn, i, None) for drawn in _of_study(study)]
    return done


def _write(folder: Path, stem: str, drawn: Drawn, study: int, table: int | None) -> FigureFile:
    kind, caption, figure = drawn
    name = f"{stem}-{slug(kind)}"
    for suffix, metadata in (("pdf", {"CreationDate": None, "Creator": None, "Producer": None}), ("png", {"Software": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=200, metadata=metadata)
        write_atomic(folder / f"{name}.{suffix}", buffer.getvalue())
        figure.set_layout_engine("none")  # laid out once is enough
    width, height = figure.get_size_inches()
    return FigureFile(folder / name, caption, f"fig:{name}", study, table, kind, (float(width), float(height)))


# --- of a table


def _of_table(table: TableResult) -> Iterator[Drawn]:
    grid, name = layout(table), shown(table.name)
    cells = [cell for cell in table.cells if cell.of("test_accuracy")]
    n = counts(cells)
    if not cells:
        return
    yield (
        "cells",
        f"{name}: test accuracy. Large points: mean over seeds ({n}); whiskers: 95 % t interval; small points: each seed.",
        dots_figure(cells),
    )
    if grid:
        yield "map", f"{name}: mean test accuracy (%) over seeds ({n}), ± half the width of the 95 % t interval.", _map(grid)
    federated = [cell for cell in cells if cell.mean_curve("round", "val_accuracy")]
    if not federated:
        return
    panels = [(shown(case), [cell for cell in federated if cell.case == case]) for case in grid.cases] if grid else [("", federated)]
    levels = {shown(c.label): 100 * s.mean for c in cells if c not in federated and (s := c.summary("val_accuracy"))}
    said = f"mean over seeds ({counts(federated)}), {_bands(max(len(of) for _, of in panels))}"
    said += "; horizontal: what is not federated, at its end" if levels else ""
    accuracy = "validation accuracy (%)"
    by_round = [Panel([_by_round(c, grid) for c in of], accuracy, title) for title, of in panels if of]
    if _has_lines(by_round):
        yield "rounds", f"{name}: validation accuracy by round; {said}.", line_figure(by_round, "round", levels, share=True)
    by_bytes = [Panel([_by_bytes(c, grid) for c in of], accuracy, title) for title, of in panels if of]
    if _has_lines(by_bytes):
        caption = f"{name}: validation accuracy against the MB that all clients sent (logarithmic); {said}."
        yield "bytes", caption, line_figure(by_bytes, "MB up", levels, share=True, log=True)
    drifting = [cell for cell in federated if all(cell.mean_curve("round", key) for key in GEOMETRY)]
    geometry = [Panel([_drift(c, key, grid) for c in drifting], y) for key, y in GEOMETRY.items()]
    if _has_lines(geometry):
        caption = f"{name}: geometry of the clients' updates by round; mean over seeds ({counts(drifting)}), {_bands(len(drifting))}."
        yield "drift", caption, line_figure(geometry, "round")
    if (by_length := length_figure(table)) is not None:
        caption = (
            f"{name}: test accuracy against how far a client moves in a round (norm of its update, mean over rounds; logarithmic). "
            f"Mean over seeds ({counts(federated)}), whiskers: 95 % t interval."
        )
        yield "length", caption, by_length


def _bands(lines: int) -> str:
    return "without intervals, as the lines are many" if lines > BANDED else "bands: 95 % t interval, cut where it leaves the frame"


def _has_lines(panels: Sequence[Panel]) -> bool:
    """Not only dots: runs that were evaluated once are told by the table."""
    return any(len(line.x) > 1 for panel in panels for line in panel.lines)


def _position(grid: Layout, cell: CellResult) -> int:
    return [str(value) for value in grid.values].index(str(cell.values[grid.key]))


def _value_line(cell: CellResult, grid: Layout | None, points: Sequence[tuple[float, Summary]]) -> Line:
    """In a panel of its case a line is called by its value alone, and looks the same in all of them, whatever a panel lacks."""
    if grid is None:
        return Line(shown(cell.label), *_apart(points))
    place = _position(grid, cell)
    return Line(f"{grid.key.rsplit('.', 1)[-1]} {grid_text(grid.values[place])}", *_apart(points), look=(place, place))


def _apart(points: Sequence[tuple[float, Summary]]) -> tuple[list[float], list[Summary]]:
    return [x for x, _ in points], [y for _, y in points]


def _by_round(cell: CellResult, grid: Layout | None) -> Line:
    return _value_line(cell, grid, cell.mean_curve("round", "val_accuracy"))


def _by_bytes(cell: CellResult, grid: Layout | None) -> Line:
    """At each round the mean of what was sent: seeds may send a little more or less."""
    sent = {at: s.mean * MB for at, s in cell.mean_curve("round", "bytes_up")}
    return _value_line(cell, grid, [(sent[at], y) for at, y in cell.mean_curve("round", "val_accuracy") if sent.get(at, 0) > 0])


def _drift(cell: CellResult, key: str, grid: Layout | None) -> Line:
    return Line(shown(cell.label), *_apart(cell.mean_curve("round", key)), scale=1, look=_look(cell, grid) if grid else None)


def _look(cell: CellResult, grid: Layout) -> tuple[int, int]:
    """A colour a case and a dash a value, or the other way round where dashes are too few for that: no two cells look the same."""
    case, place = grid.cases.index(cell.case), _position(grid, cell)
    if len(grid.values) <= len(DASHES) and len(grid.cases) <= len(COLORS):
        return case, place
    if len(grid.cases) <= len(DASHES) and len(grid.values) <= len(COLORS):
        return place, case
    number = case * len(grid.values) + place
    return number, number


def dots_figure(cells: Sequence[CellResult]) -> Figure:
    """A row a cell: the mean and its interval, below them every seed."""
    figure, axes = new_figure(COLUMN, 0.55 + 0.21 * len(cells))
    ax = axes[0]
    for row, cell in enumerate(cells):
        found = cell.summary("test_accuracy")
        assert found is not None
        color, marker, mean = COLORS[row % len(COLORS)], MARKERS[row % len(MARKERS)], 100 * found.mean
        if found.low is not None and found.high is not None:
            ax.plot([100 * max(0, found.low), 100 * min(1, found.high)], [row, row], color=color, linewidth=1.1, solid_capstyle="butt")
        seeds = [100 * value for _, value in sorted(cell.of("test_accuracy").items())]
        ax.scatter(seeds, [row + 0.28] * len(seeds), s=5, color="#777777", linewidths=0)
        ax.plot([mean], [row], marker=marker, markersize=4.5, color=color, linestyle="none")
    ax.set_yticks(range(len(cells)), [clean(shown(cell.label)) for cell in cells])
    ax.set(ylim=(len(cells) - 0.4, -0.6), xlabel="test accuracy (%)")
    ax.grid(axis="x", alpha=0.25, linewidth=0.5)
    return figure


def length_figure(table: TableResult) -> Figure | None:
    """Test accuracy against how far clients move; None where they all move about as far."""
    moved = {i: found.mean for i, cell in enumerate(table.cells) if cell.of("test_accuracy") and (found := cell.over_rounds(LENGTH))}
    moved = {i: length for i, length in moved.items() if length > 0}
    if len(moved) < 4 or max(moved.values()) < SPREAD * min(moved.values()):
        return None
    cells, lengths = [table.cells[i] for i in moved], list(moved.values())
    labels = [shown(cell.label) for cell in cells]
    abreast, named = names_abreast(COLUMN, labels), dict[str, Any]()
    figure, axes = new_figure(COLUMN, 2.1 + 0.15 * -(-len(labels) // abreast))
    ax = axes[0]
    for number, (cell, length) in enumerate(zip(cells, lengths, strict=True)):
        found = cell.summary("test_accuracy")
        assert found is not None
        color, marker, mean = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)], 100 * found.mean
        if found.low is not None and found.high is not None:
            ends = [100 * max(0, found.low), 100 * min(1, found.high)]
            ax.plot([length, length], ends, color=color, linewidth=1.1, solid_capstyle="butt")
        (named[labels[number]],) = ax.plot([length], [mean], marker=marker, markersize=4.5, color=color, linestyle="none")
    log_axis(ax, lengths)
    ax.set(xlabel="length of a client's update", ylabel="test accuracy (%)")
    ax.grid(alpha=0.25, linewidth=0.5)
    legend_below(figure, named, abreast)
    return figure


def _map(grid: Layout) -> Figure:
    found = [[cell.summary("test_accuracy") if (cell := grid.at(case, value)) else None for value in grid.values] for case in grid.cases]
    wide = len(grid.values) > 5
    figure, axes = new_figure(PAGE if wide else COLUMN, 0.7 + 0.34 * len(grid.cases))
    texts = [["—" if s is None else f"{100 * s.mean:.1f}" + _half(s) for s in row] for row in found]
    heat(
        axes[0],
        [[None if s is None else 100 * s.mean for s in row] for row in found],
        texts,
        list(map(shown, grid.cases)),
        list(map(grid_text, grid.values)),
    )
    axes[0].set(xlabel=clean(grid.key.rsplit(".", 1)[-1]))
    return figure


def _half(summary: Summary) -> str:
    return "" if summary.high is None else f"\n± {100 * (summary.high - summary.mean):.1f}"


# --- of a study


def _of_study(study: StudyResult) -> Iterator[Drawn]:
    if schemes := _partitions(study.runs):
        size = (PAGE if len(schemes) > 1 else COLUMN, 2.1)
        figure = partition_figure({clean(name): table for name, table in schemes.items()}, size)
        cut = f", the first {SHOWN_CLIENTS} of them" if any(len(table) > SHOWN_CLIENTS for table in schemes.values()) else ""
        yield (
            "partition",
            f"{shown(study.name)}: training samples by client{cut} and class, of one seed of each way to divide the data.",
            figure,
        )
    if masks := _masks(study):
        n = counts(cell for cell, _, _ in masks)
        caption = f"{shown(study.name)}: where the masks lie: share of each layer's weights that moves, and of what kind the weights are that move (%); mean over seeds ({n}). Cells with the same masks, or nearly, are one row, called as the first of them."
        yield "masks", caption, _mask_figure(masks)
    for kind, name in (("sweep", "alpha"), ("interpolate", "between")):
        groups, drawn = of_seeds(study, kind), along_figure(study, kind)
        if drawn is not None:
            what = "along the task vector" if kind == "sweep" else "on the line between two models"
            yield name, f"{shown(study.name)}: validation accuracy {what}, {_told_alphas([_alpha_line(g) for g in groups], groups)}", drawn
    yield from _interferences([group for group in of_seeds(study, "interference") if all(a.found.get("xi") for a in group)])
    yield from _forgettings(of_seeds(study, "forget"))
    forgotten = forgotten_figure(study)
    if forgotten is not None:
        caption = (
            f"{shown(study.name)}: what subtracting a client's vector costs. A line a client and seed, from α = 0 on the left: validation accuracy on its "
            "classes against what all others lose; markers: α chosen on validation."
        )
        yield "forgotten", caption, forgotten


def _seeds(groups: Sequence[Sequence[Analysis]]) -> str:
    counts = sorted({len(group) for group in groups})
    return f"mean and 95 % interval over seeds (n = {' or '.join(map(str, counts))})"


def _partitions(runs: Iterable[RunResult]) -> dict[str, NDArray[np.int64]]:
    """Up to four ways in which the data were divided: the first run of each."""
    found: dict[str, NDArray[np.int64]] = {}
    for run in runs:
        if run.partition is not None:
            found.setdefault(_scheme(run.config.get("data", {}), int(run.partition["clients"])), np.array(run.partition["label_counts"]))
    return dict(list(found.items())[:4])


def _scheme(data: Mapping[str, Any], clients: int) -> str:
    said = {"iid": "IID", "classes": f"Nc = {data.get('classes_per_client')}", "dirichlet": f"Dirichlet {data.get('alpha')}"}
    return f"{said.get(str(data.get('partition')), str(data.get('partition')))}, {clients} clients"


def _masks(study: StudyResult) -> list[tuple[CellResult, Shares, Shares]]:
    """Cells with masks, each mask once: percent by layer, percent by kind of weight. In another table under the same name it is another row
    only where a share differs by more than two points."""
    found: list[tuple[CellResult, Shares, Shares]] = []
    for cell in (cell for table in study.tables for cell in table.cells):
        layers, kinds = mask_shares(cell)
        points = [2 if cell.label == other.label else 0 for other, *_ in found]
        known = any(_near(layers, there, p) and _near(kinds, of, p) for (_, there, of), p in zip(found, points, strict=True))
        if layers and not known:
            found.append((cell, layers, kinds))
    return found


def _near(a: Shares, b: Shares, points: float) -> bool:
    return a.keys() == b.keys() and all(abs(a[name] - b[name]) <= points for name in a)


def _mask_figure(masks: Sequence[tuple[CellResult, Shares, Shares]]) -> Figure:
    """One map above the other in a column; where its numbers would touch, side by side on the page."""
    labels = [shown(cell.label) for cell, _, _ in masks]
    sides = {"share that moves, by layer (%)": [by for _, by, _ in masks], "what moves, by kind (%)": [by for *_, by in masks]}
    names = [list(dict.fromkeys(name for row in rows for name in row)) for rows in sides.values()]
    wants = [max(_heat_width(rows), text_width([title])) for title, rows in sides.items()]
    wide = text_width(labels) + max(wants) > COLUMN
    beside = wide and text_width(labels) + sum(wants) <= PAGE
    if beside:
        figure, axes = new_figure(PAGE, 1.2 + 0.19 * len(masks), columns=2, widths=[len(columns) for columns in names])
    else:
        figure, axes = new_figure(PAGE if wide else COLUMN, 1.9 + 0.36 * len(masks), rows=2)
    for ax, (title, rows), columns in zip(axes, sides.items(), names, strict=True):
        values = [[row.get(name) for name in columns] for row in rows]
        texts = [["" if value is None else f"{value:.0f}" for value in row] for row in values]
        heat(ax, values, texts, labels, columns, most=100, size=6)
        ax.set_title(title)
        ax.tick_params(labelleft=not beside or ax is axes[0])
        for tick in ax.get_xticklabels():
            tick.set(rotation=45, ha="right", rotation_mode="anchor")
    return figure


def _heat_width(rows: Sequence[Shares]) -> float:
    """Inches from which numbers of the maps' size stand apart."""
    digits = max((len(f"{value:.0f}") for row in rows for value in row.values()), default=0)
    return (0.02 + 0.053 * digits) * len({name for row in rows for name in row})


def along_figure(study: StudyResult, kind: str = "sweep") -> Figure | None:
    """Accuracy along task vectors ("sweep") or between models ("interpolate"), as far as all of them were swept and the best of any lies."""
    lines = [_alpha_line(group) for group in of_seeds(study, kind)]
    if not lines:
        return None
    last = max(min(max(line.x) for line in lines), *(line.ring or 0.0 for line in lines))
    cut = [
        replace(line, x=[x for x in line.x if x <= last], y=[y for x, y in zip(line.x, line.y, strict=True) if x <= last]) for line in lines
    ]
    return line_figure([Panel(cut, "validation accuracy (%)")], "α" if kind == "sweep" else "α: 0 is the first model, 1 the second")


def _alpha_line(group: Sequence[Analysis]) -> Line:
    label = " to ".join(map(shown, group[0].labels))
    return _over_seeds(
        label, [_points(a.found["points"], "val_accuracy") for a in group], [float(a.found["chosen"]["alpha"]) for a in group]
    )


def _told_alphas(lines: Sequence[Line], groups: Sequence[Sequence[Analysis]]) -> str:
    if max(map(len, groups)) > 1:
        return f"{_seeds(groups)}; rings: the α at which that mean is highest."
    told = "; ".join(f"{line.label}: {sweep_text(group[0].found)}" for line, group in zip(lines, groups, strict=True))
    return f"one run each (n = 1); rings: α chosen on validation. {told}."


def _points(points: Iterable[Mapping[str, Any]], key: str) -> dict[float, float]:
    return {float(point["alpha"]): float(point[key]) for point in points}


def _over_seeds(label: str, curves: Sequence[Mapping[float, float]], chosen: Sequence[float]) -> Line:
    """At every α that all seeds have. The ring of one curve is at the α that was chosen for it, of several where their mean is highest."""
    at = sorted(set.intersection(*map(set, curves)))
    means = [summarise([curve[x] for curve in curves]) for x in at]
    ring = chosen[0] if len(curves) == 1 else max(zip(means, at, strict=True), key=lambda pair: pair[0].mean)[1]
    return Line(label, at, means, ring=ring)


def _interferences(groups: Sequence[Sequence[Analysis]]) -> Iterator[Drawn]:
    for number, group in enumerate(groups, start=1):
        first, alphas = group[0], group[0].found["alphas"]
        same = [a for a in group if a.found["alphas"] == alphas]
        figure = xi_figure(np.mean([a.found["xi"] for a in same], axis=0).tolist(), alphas, [clean(name) for name in vector_names(first)])
        figure.set_size_inches(COLUMN, 2.7)
        seeds = "one seed, n = 1" if len(same) == 1 else f"mean over seeds, n = {len(same)}"
        told = f" {'; '.join(interference_texts(first))}." if len(same) == 1 else ""
        caption = (
            f"{shown(first.title)}: disentanglement error ξ in percent of the validation images of each one's classes "
            f"({' and '.join(str(n) for n in first.found['samples'])} images; {seeds}).{told}"
        )
        yield "xi" if number == 1 else f"xi {number}", caption, figure


def _forgettings(groups: Sequence[Sequence[Analysis]]) -> Iterator[Drawn]:
    for number, group in enumerate(groups, start=1):
        clients = [c["client"] for c in group[0].found["clients"]]
        panels = [
            Panel([_forget_line(group, client, key) for client in clients], y)
            for key, y in (("val_target", "its classes (%)"), ("val_control", "other classes (%)"))
        ]
        said = "validation accuracy on the classes of the client whose update is subtracted α times, and on all others"
        if len(group) == 1:
            told = "; ".join(map(forget_text, group[0].found["clients"]))
            caption = f"{shown(titled(group[0]))}, seed {group[0].seed} (n = 1): {said}; rings: α chosen on validation. {told}."
        else:
            caption = f"{shown(titled(group[0]))}: {said}, {_seeds([group])}, as far as all seeds were followed."
        yield "forget" if number == 1 else f"forget {number}", caption, line_figure(panels, "α subtracted")


def _forget_line(group: Sequence[Analysis], client: int, key: str) -> Line:
    found = [c for analysis in group for c in analysis.found["clients"] if c["client"] == client]
    line = _over_seeds(f"client {client}", [_points(c["points"], key) for c in found], [float(c["after"]["alpha"]) for c in found])
    return line if len(found) == 1 else replace(line, ring=None)


def forgotten_figure(study: StudyResult) -> Figure | None:
    """The clients' classes against what the others lose as more is subtracted; None where there is nothing to compare."""
    paths: dict[str, list[tuple[list[float], list[float], int]]] = {}  # of a cell: lost, left, the chosen point's place
    for analysis in study.analyses:
        for client in analysis.found["clients"] if analysis.kind == "forget" else []:
            points = sorted(client["points"], key=lambda point: point["alpha"])
            lost = [100 * (points[0]["val_control"] - point["val_control"]) for point in points]
            chosen = [point["alpha"] for point in points].index(client["after"]["alpha"])
            paths.setdefault(analysis.labels[0], []).append((lost, [100 * point["val_target"] for point in points], chosen))
    if len(paths) < 2:
        return None
    abreast = names_abreast(COLUMN, [shown(label) for label in paths])
    figure, axes = new_figure(COLUMN, 2.2 + 0.15 * (-(-len(paths) // abreast) - 1))
    ax, named = axes[0], dict[str, Any]()
    for number, (label, found) in enumerate(paths.items()):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        for lost, left, at in found:
            (line,) = ax.plot(lost, left, color=color, linewidth=0.9, alpha=0.75, marker=marker, markersize=4.5, markevery=[at])
            named.setdefault(shown(label), line)
    ax.set(xlabel="all other classes: points lost", ylabel="its classes (%)", ylim=(-2, 102))
    ax.grid(alpha=0.25, linewidth=0.5)
    legend_below(figure, named, abreast)
    return figure
