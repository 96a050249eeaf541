"""Views of results that tables, charts and papers share: grids of two dimensions, masks, rates, and analyses as means over seeds."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from fedlens.report.blocks import unique
from fedlens.study.results import Analysis, CellResult, Gathered, StudyResult, TableResult
from fedlens.study.statistics import Summary, summarise

LENGTH = "client_norm"  # metric: mean length of a round's updates
AGREEMENT = ("cosine", "sign_conflict")  # the drift ratio follows from the cosine where updates are equally long
GEOMETRY = {"drift_ratio": "drift ratio", "cosine": "cosine", "sign_conflict": "sign conflict"}
PLAIN = ("alpha", "cosine", "sign_conflict", "drift_ratio", "gap", "iou", "chance", "norm")  # other numbers are fractions, shown in percent
ENDS = {"alpha": "α by validation", "chosen": "test there"}
HEADS = {  # kind -> number -> column
    "sweep": {"start": "test at α = 0", "end": "test at α = 1", **ENDS},
    "interpolate": {"start": "test of the first", "end": "test of the second", **ENDS},
    "interference": {"cosine": "cosine", "sign_conflict": "sign conflict", "xi": "ξ(1, 1)"},
    "masks": {"iou": "intersection over union", "chance": "of random masks"},
    "forget": {
        **{"target_before": "its classes before", "target_after": "its classes after"},
        **{"others_before": "all others before", "others_after": "all others after"},
        **{"target_without": "trained without it: its classes", "others_without": "trained without it: all others"},
        **{"target_head": "head without it: its classes", "others_head": "head without it: all others", "alpha": "α by validation"},
    },
}
PARTS = {"target": "test_target", "others": "test_control"}
FURTHER = {
    "val": "validation there",
    "norm": "‖τ‖",
    "drift_ratio": "drift ratio",
    "gap": "gap if linear",
    "agreement": "agreement if linear",
}
TITLES = {
    "sweep": "Along task vectors",
    "interpolate": "Between two models",
    "interference": "Interference of task vectors",
    "masks": "Overlap of masks",
    "forget": "Forgetting clients by negation",
}
UNITS = "Accuracies, ξ and agreement in percent; of several clients or pairs the mean."


# --- tables and cells


def table_keys(gathered: Gathered) -> list[list[str]]:
    """Return, per study, the key of each of its tables: the name of its files, and the anchor on the page."""
    keys = iter(unique([f"{study.name} {table.name}" for study in gathered.studies for table in study.tables]))
    return [[next(keys) for _ in study.tables] for study in gathered.studies]


@dataclass(frozen=True)
class Layout:
    """A table in two dimensions: cases down, values of the one key of its grid across."""

    key: str
    cases: list[str]
    values: list[Any]
    cells: Mapping[tuple[str, str], CellResult]  # (case, text of the value) -> cell

    def at(self, case: str, value: Any) -> CellResult | None:
        return self.cells.get((case, str(value)))


def layout(table: TableResult) -> Layout | None:
    """Return the table in two dimensions. None unless its grid has exactly one key, and there are several cases and several values."""
    keys = {tuple(cell.values) for cell in table.cells}
    if [len(key) for key in keys] != [1]:
        return None
    ((key,),) = keys
    cases = list(dict.fromkeys(cell.case for cell in table.cells))
    values = list({str(cell.values[key]): cell.values[key] for cell in table.cells}.values())
    if min(len(cases), len(values)) < 2:
        return None
    return Layout(key, cases, values, {(cell.case, str(cell.values[key])): cell for cell in table.cells})


def grid_text(value: Any) -> str:
    """Return a value of a grid; a list without its brackets."""
    inside = str(value).strip("[]").strip()
    return ", ".join(part.strip() for part in inside.split(",")) if inside else "none"


def beside(tables: Sequence[TableResult]) -> list[tuple[str, list[CellResult | None]]]:
    """Return tables side by side: every label with the cell that each table has under it."""
    labels = dict.fromkeys(cell.label for table in tables for cell in table.cells)
    named = [{cell.label: cell for cell in table.cells} for table in tables]
    return [(label, [cells.get(label) for cells in named]) for label in labels]


def rate_of(cell: CellResult) -> float | None:
    """Return the learning rate that all runs share. A ridge head takes no step and has none."""
    settings = [run.config.get("optim") for run in cell.runs.values() if run.summary.get("steps") != 0]
    rates = {float(optim["lr"]) for optim in settings if isinstance(optim, Mapping) and optim.get("lr") is not None}
    return rates.pop() if len(rates) == 1 else None


def mask_shares(cell: CellResult) -> tuple[dict[str, float], dict[str, float]]:
    """Return means over seeds in percent: the density by layer, and the share of the mask by kind of weight."""
    masks = [mask for run in cell.runs.values() if (mask := run.mask)]
    return (
        _means({layer: 100 * active / eligible for layer, active, eligible in mask["by_layer"] if eligible} for mask in masks),
        _means({kind: 100 * row["share"] for kind, row in mask["composition"].items() if row["eligible"]} for mask in masks),
    )


# --- analyses


@dataclass(frozen=True)
class Measured:
    """Analyses of one kind and of the same cells: the summary of each number over seeds."""

    kind: str
    label: str
    numbers: Mapping[str, Summary]  # those that all seeds have

    @property
    def n(self) -> int:
        return next(iter(self.numbers.values())).n

    def scale(self, number: str) -> float:
        return 1 if number in PLAIN else 100


def measurements(analysis: Analysis) -> list[tuple[str, dict[str, float]]]:
    """Return name -> numbers: one entry per analysis, per pair of task vectors, or per client."""
    content, name = analysis.found, label_of(analysis)
    if analysis.kind == "masks":
        return [(name, {key: float(content[key]) for key in ("iou", "chance")})]
    if analysis.kind == "interference":
        called = dict(zip(map(str, content["names"]), analysis.labels, strict=False)) if len(analysis.labels) > 1 else {}
        named = [(" and ".join(called.get(str(pair[end]), str(pair[end])) for end in "ab"), pair) for pair in content["pairs"]]
        return [(both, {key: float(pair[key]) for key in GEOMETRY} | _of_both(content)) for both, pair in named]
    if analysis.kind == "forget":
        clients = content["clients"]
        return [(f"{analysis.labels[0]}: client {c['client']} ({', '.join(map(str, c['classes']))})", _of_client(c)) for c in clients]
    chosen = content["chosen"]
    numbers = {end: content[end]["test_accuracy"] for end in ("start", "end", "chosen")}
    numbers |= {"alpha": chosen["alpha"], "val": chosen["val_accuracy"], "norm": content.get("norm")}
    return [(name, {key: float(value) for key, value in numbers.items() if value is not None})]


def _of_client(client: Mapping[str, Any]) -> dict[str, float]:
    """Return test accuracies on a client's classes and on all others: before, after, and of models that never saw it."""
    times = {"before": "before", "after": "after", "retrained": "without", "reheaded": "head"}
    measured = [(client[time], name) for time, name in times.items() if client.get(time)]
    numbers = {f"{part}_{name}": float(scores[key]) for scores, name in measured for part, key in PARTS.items()}
    return numbers | {"alpha": float(client["after"]["alpha"])}


def _of_both(content: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers of a pair as a whole: ξ at α = 1, and how linear the model is at the largest α, mean over its task vectors."""
    numbers = {}
    if content.get("xi") and 1.0 in content["alphas"]:
        one = content["alphas"].index(1.0)
        numbers["xi"] = content["xi"][one][one]
    ends = [points[-1] for points in (content.get("linearity") or {}).values()]
    return numbers | _means({key: end[key] for key in ("gap", "agreement") if end[key] is not None and isfinite(end[key])} for end in ends)


def numbers_of(analysis: Analysis) -> dict[str, float]:
    """Return the numbers of one analysis; of several pairs or clients their means."""
    return _means(numbers for _, numbers in measurements(analysis))


def of_seeds(study: StudyResult, kind: str) -> list[list[Analysis]]:
    """Return groups of analyses of the same cells with the same options, one analysis per seed."""
    groups: dict[tuple[str, str], list[Analysis]] = {}
    for analysis in study.analyses:
        if analysis.kind == kind:
            groups.setdefault((label_of(analysis), json.dumps(analysis.options, sort_keys=True)), []).append(analysis)
    return list(groups.values())


def over_seeds(study: StudyResult) -> dict[str, list[Measured]]:
    """Return, per kind of analysis, the summaries of every group."""
    kinds = dict.fromkeys(analysis.kind for analysis in study.analyses)
    return {kind: [_measured(group) for group in of_seeds(study, kind)] for kind in kinds}


def _measured(group: Sequence[Analysis]) -> Measured:
    seeds = [numbers_of(analysis) for analysis in group]
    shared = [key for key in HEADS[group[0].kind] if all(key in numbers for numbers in seeds)]
    return Measured(group[0].kind, label_of(group[0]), {key: summarise([numbers[key] for numbers in seeds]) for key in shared})


def label_of(analysis: Analysis) -> str:
    """Return the analysed cells, with the names of clients where they matter."""
    first = analysis.labels[0]
    if analysis.kind == "forget":
        clients = [str(client["client"]) for client in analysis.found["clients"]]
        return f"{first}: client{'s' if len(clients) > 1 else ''} {', '.join(clients)}"
    if len(analysis.labels) == 1 and analysis.kind == "interference":
        return f"{first}: {' and '.join(map(str, analysis.found['names']))}"
    return f"{first}, between seeds" if len(analysis.labels) == 1 and analysis.kind == "masks" else " and ".join(analysis.labels)


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every number that all rows have."""
    listed = list(rows)
    names = [name for name in listed[0] if all(name in row for row in listed)] if listed else []
    return {name: fmean(row[name] for row in listed) for name in names}
