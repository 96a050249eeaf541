"""One HTML file that tells what studies and searches came to: tables that read without scripts, charts that answer to mouse and keyboard.

No request leaves the file. The numbers are embedded as JSON; assets/report.js draws them. The same results give the same bytes.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.report.html_analyses import SECTIONS, search_section
from fedlens.report.html_page import NONE, Cell, Page, finite, number, percent, rounded, view
from fedlens.report.markdown import TUNED, Took, failed, looked, reached, shown, tuned_rows
from fedlens.report.over_seeds import TITLES, UNITS, Measured, over_seeds, shared_heads
from fedlens.study.results import NEAR, CellResult, Gathered, StudyResult, TableResult
from fedlens.study.statistics import Summary, summarise

DOTS = 40  # drawn at first, one a row; the reader chooses others
POINTS = 120  # of a curve: longer ones are thinned
ROWS = 30  # of a heat map of cells; further ones are views of their own
VIEWS = 60  # partitions to choose from
MB = 1e6
DRIFT = {"drift_ratio": "drift ratio", "cosine": "cosine of two clients, mean", "sign_conflict": "sign conflict"}

ACCURACY = (
    "A dot is the mean test accuracy of a cell's runs, its whisker the 95 % confidence interval of that mean over seeds (a single run "
    "has none; an arrow: it goes on outside the frame). Whiskers of two cells may overlap though their paired difference is clear: the "
    "table of differences decides."
)
ROUNDS = (
    "Each line is the mean over a cell's seeds of the accuracy on validation images after a round; the band is the 95 % confidence "
    "interval of that mean (cut at the frame where two or three seeds leave it wide). Steep early means few rounds are needed; a "
    "saw-tooth often means that clients pull the model apart."
)
EPOCHS = (
    "The same for centralised training, which sees all data at once and counts epochs instead of rounds: the level that a federation "
    "may hope for."
)
BYTES = (
    "The same accuracies against what all clients together have sent up until then, on a logarithmic axis: left is cheaper. A sparse "
    "update that reaches the same height further left saves communication; each factor of 10 is the same distance."
)
DRIFTS = (
    "What clients' updates Δ of one round have to do with each other. Drift ratio: ‖mean Δ‖ / mean ‖Δ‖, the length of their mean over "
    "their mean length, 1 when all move alike, 1/√n when n equally long updates are unrelated, less when they cancel. Cosine: of pairs "
    "of updates, 0 when unrelated, negative when opposed. Sign conflict: the share of all movement that goes against the sign which its "
    "coordinate elects, 0 to 1/2; it is what TIES resolves."
)
PARTITIONS = (
    "Which labels each client holds: a row is a client, a column a class, the colour the number of training samples; blank is none. An "
    "IID split is an even carpet; few classes a client are few bright cells in each row, which is what drives clients apart."
)
MASKS = (
    "Where the weights that may move are. Density: of the weights of a layer or kind, the share that the mask lets train (mean over "
    "seeds). Share: how all weights of the mask are spread over kinds; a row adds up to 100 %."
)


def html_report(gathered: Gathered, title: str | None = None) -> str:
    """The whole file."""
    page = Page()
    for study in gathered.studies:
        _study(page, study)
    for search in gathered.searches:
        search_section(page, search)
    names = ", ".join(dict.fromkeys([s.name for s in gathered.studies] + [s.name for s in gathered.searches]))
    return page.html(title or f"fedlens report: {names}")


# --- a study


def _study(page: Page, study: StudyResult) -> None:
    page.heading(2, f"Study {study.name}")
    page.text(study.question)
    runs, lacking = len(study.runs), sum(cell.planned - len(cell.runs) for table in study.tables for cell in table.cells)
    missing = f" The tables lack {lacking} planned run{'s' * (lacking > 1)}." if lacking else ""
    page.text(f"Place: {study.place}. Finished runs: {runs}. Tables: {len(study.tables)}.{missing}", soft=True)
    for table in study.tables:
        _table(page, replace(table, target=table.aim), planned=table.target is not None, question=study.question)
        if tuned := tuned_rows(study, table):
            page.table(f"{table.name}: {TUNED[0].lower()}{TUNED[1:-1]}.", ["Cell", "Key", "Value", "Tried"], tuned)
    cells = _distinct(study)
    _partitions(page, cells)
    _masks(page, cells)
    for kind, section in SECTIONS.items():
        if found := [a for a in study.analyses if a.kind == kind]:
            section(page, found, _names(study))
            _measured(page, over_seeds(study)[kind])
    if study.failures:
        page.heading(3, f"Failures of {study.name}")
        rows = [[of or run, run if of else NONE, why] for of, run, why in failed(study)]
        page.table("What failed, and why.", ["Of", "Run or file", "Why"], rows)


def _measured(page: Page, found: Sequence[Measured]) -> None:
    """Of analyses that were made of several seeds."""
    if max(row.n for row in found) < 2:
        return
    heads, kind = shared_heads(found), found[0].kind
    rows: list[list[Cell | str]] = [
        [shown(row.label), *(_stat(row.numbers.get(key), row.scale(key)) for key in heads), number(str(row.n), row.n)] for row in found
    ]
    said = f"{TITLES[kind]}: means over seeds. {UNITS[kind]}"
    page.table(said, ["Of", *heads.values(), "Seeds"], rows)


def _distinct(study: StudyResult) -> list[CellResult]:
    """Cells that have runs, each once though it be in several tables."""
    found: dict[tuple[Path, ...], CellResult] = {}
    for cell in (cell for table in study.tables for cell in table.cells if cell.runs):
        found.setdefault(tuple(run.path for run in cell.runs.values()), cell)
    return list(found.values())


def _names(study: StudyResult) -> dict[str, str]:
    """run folder -> the cell and seed that it is known by here."""
    return {run.name: f"{shown(cell.label)} (seed {seed})" for cell in reversed(_distinct(study)) for seed, run in cell.runs.items()}


def _table(page: Page, table: TableResult, planned: bool, question: str) -> None:
    page.heading(3, table.name)
    page.text(table.question if table.question != question else "")
    if not table.cells:
        return
    aim = f"{percent(table.aim)} %" if table.aim is not None else "the target"
    why = "as planned" if planned else f"{100 * NEAR:g} % of the best mean of this table"
    target = (
        f" Target: a validation accuracy of {aim}, {why}, counted at the first evaluation that reaches it; means are over the seeds that did. {looked(table)}"
        if table.aim is not None
        else ""
    )
    seeds = {seed for cell in table.cells for seed in cell.runs}
    header = ["Cell", "Seeds", "Test accuracy, %", "Validation accuracy, %", "MB sent up", f"Rounds to {aim}", f"MB to {aim}", "Reached by"]
    header += [name.removeprefix("test_") + ", %" for name in table.further_metrics]
    rows = [[*_result(table, cell, seeds), *(_stat(cell.summary(name), 100) for name in table.further_metrics)] for cell in table.cells]
    if table.sends:
        page.table(f"{table.name}: results.{target}", header, rows)
    else:
        page.table(f"{table.name}: results.", header[:4], [row[:4] for row in rows])
    _differences(page, table)
    dots = [
        {
            "label": shown(c.label),
            "c": i,
            "points": [
                {"row": shown(c.label), "at": rounded(100 * s.mean), "low": rounded(s.low, 100), "high": rounded(s.high, 100), "n": s.n}
            ],
        }
        for i, c in enumerate(table.cells)
        if (s := c.summary("test_accuracy")) is not None
    ]
    page.chart(
        "dots",
        f"Test accuracy: {table.name}",
        ACCURACY,
        [{"x": "test accuracy", "unit": "%", "series": dots, "limit": DOTS}] if dots else [],
    )
    validation = {"y": "validation accuracy", "unit": "%"}
    accuracy = _lines(_series(table, "round", "val_accuracy", 100))
    page.chart("lines", f"Validation accuracy by round: {table.name}", ROUNDS, view(accuracy, x="round", whole=True, **validation))
    epochs = _series(table, "epoch", "val_accuracy", 100)
    page.chart(
        "lines", f"Validation accuracy by epoch, centralised: {table.name}", EPOCHS, view(epochs, x="epoch", whole=True, **validation)
    )
    sent = _lines(_series(table, "round", "val_accuracy", 100, at="bytes_up"))
    page.chart(
        "lines", f"Accuracy by bytes sent: {table.name}", BYTES, view(sent, x="MB sent up, all clients", xunit="MB", log=True, **validation)
    )
    drift = [
        v
        for key, name in DRIFT.items()
        for v in view(_series(table, "round", key), name=name, x="round", whole=True, y=name, refs=_unrelated(table, key))
    ]
    page.chart("lines", f"Client drift by round: {table.name}", DRIFTS, drift, "measure")


def _result(table: TableResult, cell: CellResult, seeds: set[int]) -> list[Cell | str]:
    lacking = cell.planned - len(cell.runs)
    missing = sorted(seeds - cell.runs.keys())
    which = f"seed{'s' * (lacking > 1)} {', '.join(map(str, missing))} missing" if len(missing) == lacking else f"{lacking} missing"
    counted = Cell(f"{len(cell.runs)} of {cell.planned}", which if lacking else "", len(cell.runs))
    found = [
        counted,
        _stat(cell.summary("test_accuracy"), 100),
        _stat(cell.summary("val_accuracy"), 100),
        _stat(cell.summary("bytes_up"), 1 / MB),
    ]
    if not any(m.get("bytes_up") is not None for run in cell.runs.values() for m in run.metrics):
        return [shown(cell.label), *found, NONE, NONE, NONE]
    cost, there = reached(table, cell)[0], len(table.cost(cell)["rounds"])
    arrived = Cell(f"{there} of {len(cell.runs)}", "", there)
    return [shown(cell.label), *found, _took(cost.get("rounds"), 1, 1), _took(cost.get("bytes_up"), 1 / MB, 2), arrived]


def _took(took: Took | None, scale: float, digits: int) -> Cell:
    if took is None:
        return NONE
    return Cell(took.text(scale), f"n = {took.found.n}", took.found.mean) if took.most else _stat(took.found, scale, digits)


def _stat(found: Summary | None, scale: float, digits: int = 2) -> Cell:
    if found is None:
        return NONE
    mean, sd, low, high = (None if v is None else f"{scale * v:z.{digits}f}" for v in (found.mean, found.sd, found.low, found.high))
    if not found.sd:  # one run, or runs that are all alike: no spread to speak of
        sd = low = None
    return Cell(mean + (f" ± {sd}" if sd else "") if mean else "–", (f"[{low}, {high}], " if low else "") + f"n = {found.n}", found.mean)


def _differences(page: Page, table: TableResult) -> None:
    if sum(bool(cell.of("test_accuracy")) for cell in table.cells) < 2:
        return
    rows: list[list[Cell | str]] = []
    for c in table.comparisons():
        interval = "–" if c.low is None or c.high is None else f"[{percent(c.low)}, {percent(c.high)}]"
        tests = [number("{:.2g}", p) for p in (c.p, c.p_adjusted)]
        rows.append(
            [
                shown(c.name_b),
                Cell(f"{100 * c.difference:+z.2f}", "", c.difference),
                Cell(interval, "", c.low),
                Cell(str(c.n), "", c.n),
                *tests,
            ]
        )
    rows += [[shown(name), NONE, NONE, Cell("0", "shares no seed", 0), NONE, NONE] for name in table.unshared()]
    first = table.compared_with if table.by_case else f"“{shown(table.compared_with)}”"
    tested = "t test, p adjusted for the tests of this table by Holm"
    caption = f"Paired differences of test accuracy to {first}, in points, over the seeds that both have; {tested}."
    page.table(caption, ["Cell", "Difference", "95 % CI", "n", "p", "p, Holm"], rows)


# --- curves


def _series(table: TableResult, x: str, y: str, scale: float = 1, at: str | None = None) -> list[dict[str, Any]]:
    found = [(i, cell, _curve(cell, x, y, scale, at)) for i, cell in enumerate(table.cells)]
    return [{"label": shown(cell.label), "c": i, "n": n, "points": points} for i, cell, (n, points) in found if points]


def _lines(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nothing where all are dots: what was evaluated once is in the table."""
    return series if any(len(each["points"]) > 1 for each in series) else []


def _curve(cell: CellResult, x: str, y: str, scale: float, at: str | None) -> tuple[int, list[list[float | None]]]:
    """(runs, [x, mean, low, high]) at every x that all runs have; `at` is drawn in the place of x, in MB, where it is above 0."""
    runs = [
        {m[x]: m for m in run.metrics if finite(m.get(y)) and finite(m.get(x)) and (at is None or finite(m.get(at)))}
        for run in cell.runs.values()
    ]
    runs = [run for run in runs if run]
    shared = sorted(set.intersection(*map(set, runs))) if runs else []
    step = math.ceil(len(shared) / POINTS) or 1
    kept = sorted({*shared[::step], *shared[-1:]})
    points = [
        [rounded(statistics.fmean(run[k][at] for run in runs) / MB) if at else k, *_band([scale * run[k][y] for run in runs])] for k in kept
    ]
    return len(runs), [p for p in points if not at or (p[0] or 0) > 0]


def _band(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    found = summarise(values)
    return rounded(found.mean), *(None if end is None else rounded(end) for end in (found.low, found.high))  # type: ignore[return-value]


def _unrelated(table: TableResult, key: str) -> list[dict[str, Any]]:
    """Where unrelated updates would lie, if all rounds have as many clients."""
    counts = {m["clients"] for cell in table.cells for run in cell.runs.values() for m in run.metrics if m.get("clients")}
    if key == "drift_ratio" and len(counts) == 1:
        return [{"at": rounded(1 / math.sqrt(n)), "text": f"{n} unrelated updates"} for n in counts]
    return [{"at": 0, "text": "unrelated updates"}] if key == "cosine" else []


# --- partitions and masks


def _partitions(page: Page, cells: Sequence[CellResult]) -> None:
    found: dict[str, list[str]] = {}
    parts: dict[str, Mapping[str, Any]] = {}
    for cell in cells:
        for seed, run in cell.runs.items():
            if run.partition is not None and run.partition.get("label_counts"):
                key = json.dumps(run.partition["label_counts"])
                parts.setdefault(key, run.partition)
                found.setdefault(key, []).append(f"{shown(cell.label)}, seed {seed}")
    views = [_partition(parts[key], names) for key, names in list(found.items())[:VIEWS]]
    if views:
        page.heading(3, "Partitions")
        left_out = f" The first {VIEWS} of {len(found)} different partitions." if len(found) > VIEWS else ""
        page.chart("heat", "Labels by client", PARTITIONS + left_out, views, "partition of")


def _partition(part: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    counts = part["label_counts"]
    sizes, held = [sum(row) for row in counts], [sum(n > 0 for n in row) for row in counts]
    note = f"{len(counts)} clients with {_span(sizes)} samples and {_span(held)} classes each."
    if part.get("tv_distance") is not None:
        note += f" Mean total variation distance of a client's labels from all clients' together: {part['tv_distance']:.2f} (0: IID)."
    if len(names) > 1:
        note += f" Shared by {len(names)} runs: {'; '.join(names[:6])}{'; …' if len(names) > 6 else ''}."
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    grid = {"rows": list(range(len(counts))), "columns": list(range(len(counts[0]))), "values": counts}
    return {"name": names[0] + more, "row": "client", "column": "class", "what": "samples", "sparse": True, "note": note, **grid}


def _masks(page: Page, cells: Sequence[CellResult]) -> None:
    sparse = [(shown(cell.label), masks) for cell in cells if (masks := [run.mask for run in cell.runs.values() if run.mask])]
    if not sparse:
        return
    page.heading(3, "Masks")
    rows: list[list[Cell | str]] = [
        [
            label,
            str(masks[0].get("strategy", "–")),
            _stat(summarise([float(m["density"]) for m in masks]), 100),
            number("{:,}", masks[0].get("active")),
        ]
        for label, masks in sparse
        if all(finite(m.get("density")) for m in masks)
    ]
    page.table("Masks: the share of the weights that may move, in %.", ["Cell", "Rule", "Density, %", "Weights (first seed)"], rows)
    views = []
    for name, measure in (("density by layer", _by_layer), ("density by kind of weight", _by_kind), ("share of the mask by kind", _shares)):
        for start in range(0, len(sparse), ROWS):
            part = sparse[start : start + ROWS]
            measured = [_means([measure(m) for m in masks]) for _, masks in part]
            columns = list(dict.fromkeys(column for row in measured for column in row))
            if columns:
                which = f", cells {start + 1} to {start + len(part)}" if len(sparse) > ROWS else ""
                view = {
                    "name": name + which,
                    "row": "",
                    "column": "",
                    "named": True,
                    "unit": "%",
                    "columns": columns,
                    "what": name.partition(" ")[0],
                }
                named = [f"{label} (n = {len(masks)})" for label, masks in part]
                views.append({**view, "rows": named, "values": [[row.get(column) for column in columns] for row in measured]})
    page.chart("heat", "Masks by layer and by kind of weight", MASKS, views)


def _by_layer(mask: Mapping[str, Any]) -> dict[str, float]:
    return {name: 100 * active / eligible for name, active, eligible in mask.get("by_layer") or [] if eligible}


def _by_kind(mask: Mapping[str, Any]) -> dict[str, float]:
    return {name: 100 * k["active"] / k["eligible"] for name, k in (mask.get("composition") or {}).items() if k["eligible"]}


def _shares(mask: Mapping[str, Any]) -> dict[str, float]:
    return {name: 100 * k["share"] for name, k in (mask.get("composition") or {}).items() if k["eligible"]}


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    return {key: rounded(statistics.fmean(f[key] for f in found if key in f)) for key in dict.fromkeys(key for f in found for key in f)}


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
