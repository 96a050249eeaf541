"""Results of finished runs, read from their folders: tables of cells, the runs of each cell by seed, and analyses. Needs no model and no data.

study.json, written by runner.py, maps tables and cells to runs. Runs without a study are grouped here: those that differ only in their seed are one
cell, labelled by the settings in which it differs from the others.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from fedlens.errors import UserError, check_utf8, first_line
from fedlens.files import below
from fedlens.runs import digests
from fedlens.runs.identity import known_by
from fedlens.runs.store import has_summary, read_environment, read_metrics, read_summary, runs_below
from fedlens.runs.trackers import flat
from fedlens.study.plan import cell_label
from fedlens.study.statistics import Comparison, Summary, compare, rounds_and_bytes_to, summarise, unpaired

STUDY_FILE = "study.json"
SEARCH_FILE = "search.json"
NEAR = 0.95  # default target of "rounds to" and "bytes to", as a fraction of the best cell's validation accuracy


@dataclass(frozen=True)
class RunResult:
    """One finished run."""

    path: Path
    seed: int

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        return read_summary(self.path)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_metrics(self.path)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return read_config(self.path)

    @cached_property
    def partition(self) -> Mapping[str, Any] | None:
        """Partition statistics and label_counts [clients, classes] of a federated run, else None."""
        digests.verify(self.path, "partition.json")
        return _json(self.path / "partition.json") if digests.written(self.path, "partition.json") else None

    @property
    def mask(self) -> Mapping[str, Any] | None:
        """Facts about the mask of a sparse run (density, active, composition, by_layer, bytes_up, …), else None."""
        mask: Mapping[str, Any] | None = self.summary.get("mask")
        return mask

    def curve(self, x: str, y: str) -> list[tuple[float, float]]:
        """Return the points (x, y) of all lines of metrics in which both are finite: a loss may overflow for a step."""
        points = [(float(m[x]), float(m[y])) for m in self.metrics if m.get(x) is not None and m.get(y) is not None]
        return [point for point in points if all(map(math.isfinite, point))]


@dataclass(frozen=True)
class CellResult:
    """One entry of a table: runs that differ in their seed."""

    label: str
    case: str
    values: Mapping[str, Any]  # key -> value of the plan's grid
    runs: Mapping[int, RunResult]  # seed -> finished run
    planned: int  # number of runs, finished or not

    def of(self, key: str) -> dict[int, float]:
        """Return seed -> a number of the runs' summaries."""
        return {seed: float(run.summary[key]) for seed, run in self.runs.items() if run.summary.get(key) is not None}

    def summary(self, key: str) -> Summary | None:
        values = self.of(key)
        return summarise(values) if values else None

    def over_rounds(self, key: str) -> Summary | None:
        """Summarise each seed's mean of a metric over its rounds. None if a seed lacks the metric."""
        curves = [[y for _, y in run.curve("round", key)] for run in self.runs.values()]
        return summarise([sum(ys) / len(ys) for ys in curves]) if curves and all(curves) else None

    def mean_curve(self, x: str, y: str, most: int = sys.maxsize) -> list[tuple[float, Summary]]:
        """Return (x, summary of y over seeds) for every x that all seeds have; of more than `most` only every n-th and the last."""
        curves = [dict(run.curve(x, y)) for run in self.runs.values()]
        shared = sorted(set.intersection(*map(set, curves))) if curves else []
        return [(at, summarise([c[at] for c in curves])) for at in [*shared[: -1 : -(-len(shared) // most) or 1], *shared[-1:]]]


def further_metrics(runs: Iterable[RunResult]) -> list[str]:
    """Return the test metrics beside accuracy and loss that any of the runs has."""
    names = (name for run in runs for name in run.summary if name.startswith("test_") and name not in ("test_accuracy", "test_loss"))
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class TableResult:
    """A table and its cells."""

    name: str
    question: str
    cells: list[CellResult]
    target: float | None = None  # validation accuracy
    by_case: bool = False  # compare with the first cell of the same case, not of the table

    @property
    def further_metrics(self) -> list[str]:
        """The metrics of the test set beside accuracy and loss: the summary keys that train.metrics added."""
        return further_metrics(run for cell in self.cells for run in cell.runs.values())

    def comparisons(self, key: str = "test_accuracy", *, pooled: bool = False) -> list[Comparison]:
        """Return every cell's difference to its baseline cell, paired or with pooled variance, with Holm's correction over the table."""
        named, baselines = self._compared(key)
        return compare(named, baselines, pooled=pooled) if len(named) > 1 else []

    def unshared(self, key: str = "test_accuracy") -> list[str]:
        """Return the labels of cells without a common seed with their baseline cell."""
        named, baselines = self._compared(key)
        return [label for _, label in unpaired(named, baselines)] if named else []

    @cached_property
    def compared_with(self) -> str:
        """The label of the baseline cell, or its description where each case has its own."""
        return "the first cell of its case" if self.by_case else next(iter(self._compared("test_accuracy")[0]), "")

    def _compared(self, key: str) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
        """Return label -> seed -> value of the cells that have values, and label -> label of the baseline cell."""
        cells = [cell for cell in self.cells if cell.of(key)]
        first: dict[str, str] = {}
        for cell in cells:
            first.setdefault(cell.case if self.by_case else "", cell.label)
        return {cell.label: cell.of(key) for cell in cells}, {cell.label: first[cell.case if self.by_case else ""] for cell in cells}

    @cached_property
    def aim(self) -> float | None:
        """The validation accuracy that "rounds to" and "bytes to" refer to."""
        if self.target is not None:
            return self.target
        means = [s.mean for cell in self.cells if (s := cell.summary("val_accuracy")) is not None]
        return NEAR * max(means) if means else None

    @cached_property
    def sends(self) -> bool:
        """True if a run sends updates; only then reports have columns of traffic and of rounds to the aim."""
        return any(cell.summary("bytes_up") for cell in self.cells)

    def cost(self, cell: CellResult) -> dict[str, dict[int, float]]:
        """Return {"rounds", "bytes_up"}, each seed -> cost to reach the aim, without the seeds that did not reach it."""
        costs: dict[str, dict[int, float]] = {"rounds": {}, "bytes_up": {}}
        for seed, run in cell.runs.items():
            if self.aim is not None and any(m.get("bytes_up") is not None and m.get("val_accuracy") is not None for m in run.metrics):
                for key, value in rounds_and_bytes_to(run.metrics, self.aim).items():
                    if value is not None:
                        costs[key][seed] = float(value)
        return costs

    def at_first(self, cell: CellResult) -> bool:
        """Return True if a seed had reached the aim at its first evaluation, so that its cost is only an upper bound."""
        return any(cell.runs[seed].curve("round", "val_accuracy")[0][0] == at for seed, at in self.cost(cell)["rounds"].items())

    @cached_property
    def looks(self) -> list[list[float]]:
        """The rounds of the evaluations of every federated run."""
        runs = [run for cell in self.cells for run in cell.runs.values()]
        return [[at for at, _ in curve] for run in runs if (curve := run.curve("round", "val_accuracy"))]


@dataclass(frozen=True)
class Analysis:
    """The result of an analysis; study/analyses.py describes the kinds."""

    kind: str  # sweep, interpolate, interference, masks, forget
    title: str
    labels: list[str]  # of its cells
    seed: int
    found: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the plan: grid, clients, …


@dataclass(frozen=True)
class Tuned:
    """The search for a cell's value of one key (study/tune.py)."""

    table: str
    label: str
    key: str
    value: float | None  # None: not chosen yet, or no value trains
    tried: list[tuple[float, float | None]]  # value, validation accuracy; None: failed
    runs: list[RunResult]

    @property
    def at_an_end(self) -> bool:
        """True if the chosen value is the lowest or highest that was tried, so that a better one may lie beyond."""
        values = [value for value, _ in self.tried]
        return self.value is not None and self.value in (min(values), max(values))

    @property
    def at_an_edge(self) -> bool:
        """True if a neighbour of the chosen value failed or has less than half its accuracy, so that longer runs may fail too."""
        ordered = sorted(self.tried, key=lambda pair: pair[0])
        values = [value for value, _ in ordered]
        if self.value not in values:
            return False
        at = values.index(self.value)
        best = ordered[at][1] or 0.0
        return any((score or 0.0) < best / 2 for _, score in ordered[max(0, at - 1) : at + 2])


@dataclass(frozen=True)
class StudyResult:
    """The tables and analyses of a study."""

    name: str
    place: str
    question: str
    tables: list[TableResult]
    analyses: list[Analysis] = field(default_factory=list)
    failures: Mapping[str, str] = field(default_factory=dict)  # run or analysis file -> reason
    tuned: list[Tuned] = field(default_factory=list)
    planned: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # run or analysis file -> (cell or title, seed)

    @property
    def trials(self) -> list[RunResult]:
        """The finished short runs of `tuned`, without duplicates."""
        return list({run.path: run for tuned in self.tuned for run in tuned.runs}.values())

    @property
    def runs(self) -> list[RunResult]:
        """The finished runs of all tables, without duplicates."""
        return list({run.path: run for table in self.tables for cell in table.cells for run in cell.runs.values()}.values())


@dataclass(frozen=True)
class SearchResult:
    """A search over hyper-parameters on validation (search.py); it does not read the test set."""

    name: str
    place: str
    question: str
    objective: str
    experiment: list[str]  # the overrides that all trials share
    keys: list[str]
    trials: Sequence[Mapping[str, Any]]  # {number, params: key -> value, value: validation accuracy, state: complete | pruned | failed}
    default: Mapping[str, Any]  # {params, value} of the default configuration
    best: int | None  # number of a trial


@dataclass(frozen=True)
class Gathered:
    """The contents of a report."""

    studies: list[StudyResult]
    searches: list[SearchResult] = field(default_factory=list)


def gather(paths: Sequence[str | Path]) -> Gathered:
    """Read all studies and searches below the paths. Other finished runs there form one study named `runs`."""
    study_folders: list[Path] = []
    search_folders: list[Path] = []
    other_runs: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"report: {path} is not a folder; pass run folders, study folders, or folders that contain them.")
        of_studies, of_searches = (sorted(file.parent for file in path.rglob(name)) for name in (STUDY_FILE, SEARCH_FILE))
        study_folders, search_folders = study_folders + of_studies, search_folders + of_searches
        finished = list(filter(has_summary, runs_below(path)))
        other_runs += [folder for folder in finished if not any(folder.is_relative_to(owner) for owner in (*of_studies, *of_searches))]
    for folder in (*study_folders, *search_folders, *other_runs):
        check_utf8(folder, "report")
    studies = [read_study(folder) for folder in _distinct(study_folders)]
    searches = [read_search(folder) for folder in _distinct(search_folders)]
    if other_runs:
        studies.append(StudyResult("runs", "here", "", [TableResult("runs", "", group(_distinct(other_runs)))]))
    if not searches and not any(study.runs for study in studies):
        raise UserError(f"report: no finished run in {', '.join(map(str, paths))}.")
    return Gathered(studies, searches)


def _distinct(folders: Iterable[Path]) -> list[Path]:
    """Return the folders without duplicates, of which some may be links."""
    distinct: dict[Path, Path] = {}
    for folder in folders:
        distinct.setdefault(folder.resolve(), folder)
    return list(distinct.values())


def read_search(folder: Path) -> SearchResult:
    content = _json(folder / SEARCH_FILE)
    try:
        return SearchResult(**{"place": "", "objective": "", **content})
    except TypeError as error:
        raise UserError(f"report: {folder / SEARCH_FILE} is not the file of a search ({first_line(error)}).") from None


def read_study(folder: Path) -> StudyResult:
    content = _json(folder / STUDY_FILE)
    try:
        tables = [_table(folder, table, str(content["question"])) for table in content["tables"]]
        analyses = [
            Analysis(a["kind"], a["title"], list(a["labels"]), int(a["seed"]), _json(file), a.get("options", {}))
            for a in content["analyses"]
            if (file := analysis_file(folder, a)).is_file()
        ]
        tuned = [_tuned(folder, each) for each in content.get("tuned", [])]
        head = (content["name"], content["place"], content["question"])
        return StudyResult(*head, tables, analyses, content["failures"], tuned, _planned(content))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"report: {folder / STUDY_FILE} is not the file of a study ({first_line(error)}).") from None


def run_folder(study: Path, name: object) -> Path:
    """Return the folder of a run that a study's file names."""
    return below(study, f"runs/{name}", f"report: a run of {study / STUDY_FILE}", depth=2)


def analysis_file(study: Path, entry: Mapping[str, Any]) -> Path:
    """Return the file of an analysis that a study's file names."""
    return below(study, entry["file"], f"report: an analysis of {study / STUDY_FILE}", depth=2)


def _planned(content: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return run or analysis file -> (cell or title, seed). A run that several tables share gets its first cell."""
    planned = {a["file"]: (str(a["title"]), int(a["seed"])) for a in content["analyses"]}
    for cell in (cell for table in content["tables"] for cell in table["cells"]):
        for seed, run in cell["runs"].items():
            planned.setdefault(run, (str(cell["label"]), int(seed)))
    return planned


def _tuned(folder: Path, entry: Mapping[str, Any]) -> Tuned:
    finished = [path for name in entry["runs"] if has_summary(path := run_folder(folder, name))]
    tried = [(float(value), score) for value, score in entry["tried"]]
    return Tuned(entry["table"], entry["label"], entry["key"], entry["value"], tried, [RunResult(path, 0) for path in finished])


def _table(folder: Path, table: Mapping[str, Any], question: str) -> TableResult:
    cells = []
    for cell in table["cells"]:
        named = {int(seed): run_folder(folder, name) for seed, name in cell["runs"].items()}
        finished = {seed: RunResult(path, seed) for seed, path in named.items() if has_summary(path)}
        cells.append(CellResult(cell["label"], cell["case"], cell["values"], finished, len(named)))
    return TableResult(table["name"], table.get("question") or question, cells, table.get("target"), table.get("by_case", False))


# --- runs without a study


def config_without_seed(run: Path) -> dict[str, Any]:
    """Return the settings that determine a run's result, except the seed."""
    known = known_by(read_config(run), read_environment(run).get("weights"))
    return {key: value for key, value in known.items() if key != "seed"}


def group(folders: Iterable[Path]) -> list[CellResult]:
    """Return one cell per configuration. Of two runs with the same configuration and seed, the later folder counts."""
    groups: dict[str, tuple[dict[str, Any], dict[int, RunResult]]] = {}
    for folder in folders:
        settings, seed = flat(config_without_seed(folder)), int(read_config(folder).get("seed", 0))
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), (settings, {}))[1][seed] = RunResult(folder, seed)
    every = [settings for settings, _ in groups.values()]
    varied = [key for key in dict.fromkeys(key for each in every for key in each) if len({str(each.get(key)) for each in every}) > 1]
    cells: dict[str, CellResult] = {}
    for settings, runs in groups.values():
        case = str(settings.get("experiment", "run"))
        values = {key: settings[key] for key in varied if settings.get(key) is not None and key != "experiment"}
        label = cell_label(case, values.items())
        label = next(name for name in chain([label], (f"{label} ({i})" for i in count(2))) if name not in cells)
        cells[label] = CellResult(label, case, values, runs, len(runs))
    return list(cells.values())


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a run's config.yaml, unchecked, so that files of any version can be read."""
    digests.verify(folder, "config.yaml")
    try:  # with libyaml, where it is there: a report reads hundreds of files
        content = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise UserError(f"report: {folder / 'config.yaml'} cannot be read as YAML ({first_line(error)}).") from None
    if not isinstance(content, dict):
        raise UserError(f"report: {folder / 'config.yaml'} is not a configuration.")
    return {str(key): value for key, value in content.items()}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"report: {path} cannot be read ({first_line(error)}).") from None
