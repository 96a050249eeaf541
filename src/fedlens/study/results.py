"""What runs came to, read from their folders: tables of cells, a cell's runs by seed, and analyses beside them. Needs no model and no data.

A study's folder says how its runs belong together (study.json, written by runner.py). Other runs are grouped here: those that differ in nothing
but the seed are one cell, named by what sets it apart from the others.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedlens.errors import UserError, first_line
from fedlens.runs.identity import known_by
from fedlens.runs.store import read_environment, read_metrics, read_summary
from fedlens.study.plan import labelled
from fedlens.study.statistics import Comparison, Summary, compare, rounds_and_bytes_to, summarise, unpaired

STUDY_FILE = "study.json"
SEARCH_FILE = "search.json"
NEAR = 0.95  # of the best cell's validation accuracy: the target of "rounds and bytes to", unless a plan says otherwise


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
        """One a line of metrics.jsonl."""
        return read_metrics(self.path)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return read_config(self.path)

    @cached_property
    def partition(self) -> Mapping[str, Any] | None:
        """Statistics and label_counts [clients, classes], of a federated run."""
        file = self.path / "partition.json"
        return _json(file) if file.is_file() else None

    @property
    def mask(self) -> Mapping[str, Any] | None:
        """density, active, composition (kind of weight -> …), by_layer, bytes_up, …, of a sparse run."""
        found: Mapping[str, Any] | None = self.summary.get("mask")
        return found

    def curve(self, x: str, y: str) -> list[tuple[float, float]]:
        """The points of metrics.jsonl that have both."""
        return [(float(m[x]), float(m[y])) for m in self.metrics if m.get(x) is not None and m.get(y) is not None]


@dataclass(frozen=True)
class CellResult:
    """One entry of a table: runs that differ in their seed."""

    label: str
    case: str
    values: Mapping[str, Any]  # of the plan's grid
    runs: Mapping[int, RunResult]  # seed -> run; those that are finished
    planned: int

    def of(self, key: str) -> dict[int, float]:
        """seed -> a number of the summary."""
        return {seed: float(run.summary[key]) for seed, run in self.runs.items() if run.summary.get(key) is not None}

    def summary(self, key: str) -> Summary | None:
        found = self.of(key)
        return summarise(found) if found else None

    def over_rounds(self, key: str) -> Summary | None:
        """Of each seed the mean of a metric over its rounds; None where a seed has none."""
        curves = [[y for _, y in run.curve("round", key)] for run in self.runs.values()]
        return summarise([sum(ys) / len(ys) for ys in curves]) if curves and all(curves) else None

    def mean_curve(self, x: str, y: str) -> list[tuple[float, Summary]]:
        """At every x that all seeds have: mean and interval of y."""
        curves = [dict(run.curve(x, y)) for run in self.runs.values()]
        shared = set.intersection(*(set(c) for c in curves)) if curves else set()
        return [(at, summarise([c[at] for c in curves])) for at in sorted(shared)]


@dataclass(frozen=True)
class TableResult:
    name: str
    question: str
    cells: list[CellResult]
    target: float | None = None  # validation accuracy
    by_case: bool = False  # a cell is compared with the first of its own case, else with the first of all

    def comparisons(self, key: str = "test_accuracy") -> list[Comparison]:
        """Every cell minus the one it is compared with on the seeds that they share, with Holm's correction over the table."""
        named, baselines = self._compared(key)
        return compare(named, baselines) if len(named) > 1 else []

    def unshared(self, key: str = "test_accuracy") -> list[str]:
        """Cells that share no seed with the one that they are compared with."""
        named, baselines = self._compared(key)
        return [label for _, label in unpaired(named, baselines)] if named else []

    @cached_property
    def compared_with(self) -> str:
        """The label of the cell that all others are compared with, or what it is for each."""
        return "the first cell of its case" if self.by_case else next(iter(self._compared("test_accuracy")[0]), "")

    def _compared(self, key: str) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
        """label -> seed -> value, of cells that have any; label -> label of the cell that it is compared with."""
        found = [cell for cell in self.cells if cell.of(key)]
        first: dict[str, str] = {}
        for cell in found:
            first.setdefault(cell.case if self.by_case else "", cell.label)
        return {cell.label: cell.of(key) for cell in found}, {cell.label: first[cell.case if self.by_case else ""] for cell in found}

    @cached_property
    def aim(self) -> float | None:
        """The validation accuracy that rounds and bytes are counted to."""
        if self.target is not None:
            return self.target
        means = [s.mean for cell in self.cells if (s := cell.summary("val_accuracy")) is not None]
        return NEAR * max(means) if means else None

    @cached_property
    def sends(self) -> bool:
        """Something is federated: else no report has columns of traffic and of rounds to the aim."""
        return any(cell.summary("bytes_up") for cell in self.cells)

    def cost(self, cell: CellResult) -> dict[str, dict[int, float]]:
        """{"rounds", "bytes_up"}: seed -> what it took to the aim; a seed that did not get there is missing."""
        found: dict[str, dict[int, float]] = {"rounds": {}, "bytes_up": {}}
        for seed, run in cell.runs.items():
            if self.aim is not None and any(m.get("bytes_up") is not None and m.get("val_accuracy") is not None for m in run.metrics):
                for key, value in rounds_and_bytes_to(run.metrics, self.aim).items():
                    if value is not None:
                        found[key][seed] = float(value)
        return found

    def at_first(self, cell: CellResult) -> bool:
        """A seed had reached the aim when validation first looked: how long before is not known, and its cost is an upper bound."""
        return any(cell.runs[seed].curve("round", "val_accuracy")[0][0] == at for seed, at in self.cost(cell)["rounds"].items())

    @cached_property
    def looks(self) -> list[list[float]]:
        """The rounds after which validation looked, of every federated run."""
        runs = [run for cell in self.cells for run in cell.runs.values()]
        return [[at for at, _ in curve] for run in runs if (curve := run.curve("round", "val_accuracy"))]


@dataclass(frozen=True)
class Analysis:
    """What was measured on finished runs: see study/analyses.py for what each kind finds."""

    kind: str  # sweep, interpolate, interference, forget
    title: str
    labels: list[str]  # the cells that it is about
    seed: int
    found: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # that the plan gave: grid, clients, …


@dataclass(frozen=True)
class Tuned:
    """How a cell came to its value of one key: see study/tune.py."""

    table: str
    label: str
    key: str
    value: float | None  # None: not chosen yet, or nothing trains
    tried: list[tuple[float, float | None]]  # value, validation accuracy; None: failed
    runs: list[RunResult]

    @property
    def at_an_end(self) -> bool:
        """Nothing was tried on one side of the chosen value: it may have more to give."""
        values = [value for value, _ in self.tried]
        return self.value is not None and self.value in (min(values), max(values))

    @property
    def at_an_edge(self) -> bool:
        """A value next to the chosen one failed or has less than half of its accuracy: another seed or a longer run may fall over it."""
        ordered = sorted(self.tried, key=lambda pair: pair[0])
        values = [value for value, _ in ordered]
        if self.value not in values:
            return False
        at = values.index(self.value)
        best = ordered[at][1] or 0.0
        return any((score or 0.0) < best / 2 for _, score in ordered[max(0, at - 1) : at + 2])


@dataclass(frozen=True)
class StudyResult:
    name: str
    place: str
    question: str
    tables: list[TableResult]
    analyses: list[Analysis] = field(default_factory=list)
    failures: Mapping[str, str] = field(default_factory=dict)  # run, or file of an analysis -> why
    tuned: list[Tuned] = field(default_factory=list)
    planned: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # run, or file of an analysis -> cell or title, and seed

    @property
    def trials(self) -> list[RunResult]:
        """The finished short runs behind `tuned`, each once."""
        return list({run.path: run for tuned in self.tuned for run in tuned.runs}.values())

    @property
    def runs(self) -> list[RunResult]:
        """Each once."""
        return list({run.path: run for table in self.tables for cell in table.cells for run in cell.runs.values()}.values())


@dataclass(frozen=True)
class SearchResult:
    """A search over hyper-parameters (search.py): validation decides, the test set is not read."""

    name: str
    question: str
    experiment: list[str]  # the overrides that all trials share
    keys: list[str]
    trials: list[Mapping[str, Any]]  # {number, params: key -> value, value: validation accuracy or None, state: complete | pruned | failed}
    default: Mapping[str, Any]  # {params, value}: the configuration as it comes
    best: int | None  # number of a trial


@dataclass(frozen=True)
class Gathered:
    """All that a report is about."""

    studies: list[StudyResult]
    searches: list[SearchResult] = field(default_factory=list)


def gather(paths: Sequence[str | Path]) -> Gathered:
    """Studies and searches by their folders; all other runs below the paths as one study of their own, named `runs`."""
    planned: list[Path] = []
    loose: list[Path] = []
    searched: list[Path] = []
    for given in map(Path, paths):
        if not given.is_dir():
            raise UserError(f"report: {given} is not a folder; allowed are run folders, study folders, and folders of them")
        inside, found = (sorted(file.parent for file in given.rglob(name)) for name in (STUDY_FILE, SEARCH_FILE))
        planned, searched = planned + inside, searched + found
        finished = sorted(file.parent for file in given.rglob("summary.json") if (file.parent / "config.yaml").is_file())
        loose += [folder for folder in finished if not any(folder.is_relative_to(owner) for owner in (*inside, *found))]
    studies, searches = [read_study(folder) for folder in _once(planned)], [read_search(folder) for folder in _once(searched)]
    if loose:
        studies.append(StudyResult("runs", "here", "", [TableResult("runs", "", group(_once(loose)))]))
    if not searches and not any(study.runs for study in studies):
        raise UserError(f"report: no finished run in {', '.join(map(str, paths))}")
    return Gathered(studies, searches)


def _once(folders: Iterable[Path]) -> list[Path]:
    """Each folder once, whatever ways lead to it."""
    found: dict[Path, Path] = {}
    for folder in folders:
        found.setdefault(folder.resolve(), folder)
    return list(found.values())


def read_search(folder: Path) -> SearchResult:
    content = _json(folder / SEARCH_FILE)
    try:
        return SearchResult(**{name: content[name] for name in ("name", "question", "experiment", "keys", "trials", "default", "best")})
    except (KeyError, TypeError) as error:
        raise UserError(f"report: {folder / SEARCH_FILE} is not a search's ({first_line(error)})") from None


def read_study(folder: Path) -> StudyResult:
    content = _json(folder / STUDY_FILE)
    try:
        tables = [_table(folder, table, str(content["question"])) for table in content["tables"]]
        analyses = [
            Analysis(a["kind"], a["title"], list(a["labels"]), int(a["seed"]), _json(folder / a["file"]), a.get("options", {}))
            for a in content["analyses"]
            if (folder / a["file"]).is_file()
        ]
        tuned = [_tuned(folder, each) for each in content.get("tuned", [])]
        return StudyResult(
            content["name"], content["place"], content["question"], tables, analyses, content["failures"], tuned, _planned(content)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"report: {folder / STUDY_FILE} is not a study's ({first_line(error)})") from None


def _planned(content: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """What a failure is of: of a run that several tables share, its first cell."""
    found = {a["file"]: (str(a["title"]), int(a["seed"])) for a in content["analyses"]}
    for cell in (cell for table in content["tables"] for cell in table["cells"]):
        for seed, run in cell["runs"].items():
            found.setdefault(run, (str(cell["label"]), int(seed)))
    return found


def _tuned(folder: Path, each: Mapping[str, Any]) -> Tuned:
    finished = [folder / "runs" / name for name in each["runs"] if (folder / "runs" / name / "summary.json").is_file()]
    tried = [(float(value), score) for value, score in each["tried"]]
    return Tuned(each["table"], each["label"], each["key"], each["value"], tried, [RunResult(path, 0) for path in finished])


def _table(folder: Path, table: Mapping[str, Any], question: str) -> TableResult:
    cells = []
    for cell in table["cells"]:
        named = {int(seed): folder / "runs" / name for seed, name in cell["runs"].items()}
        finished = {seed: RunResult(path, seed) for seed, path in named.items() if (path / "summary.json").is_file()}
        cells.append(CellResult(cell["label"], cell["case"], cell["values"], finished, len(named)))
    return TableResult(table["name"], table.get("question") or question, cells, table.get("target"), table.get("by_case", False))


# --- runs that no study planned


def but_for_the_seed(run: Path) -> dict[str, Any]:
    """What a run's result depends on besides its seed; its weights as they were when it began."""
    known = known_by(read_config(run), read_environment(run).get("weights"))
    return {key: value for key, value in known.items() if key != "seed"}


def group(folders: Iterable[Path]) -> list[CellResult]:
    found: dict[str, list[tuple[dict[str, Any], RunResult]]] = {}
    for folder in folders:
        flat, seed = dict(_flat(but_for_the_seed(folder))), int(read_config(folder).get("seed", 0))
        found.setdefault(json.dumps(flat, sort_keys=True, default=str), []).append((flat, RunResult(folder, seed)))
    flats = [members[0][0] for members in found.values()]
    varied = [key for key in dict.fromkeys(key for flat in flats for key in flat) if len({str(flat.get(key)) for flat in flats}) > 1]
    cells: list[CellResult] = []
    for members in found.values():
        flat = members[0][0]
        values = {key: flat[key] for key in varied if flat.get(key) is not None and key != "experiment"}
        label, taken = labelled(str(flat.get("experiment", "run")), values.items()), {cell.label for cell in cells}
        label = next(name for name in chain([label], (f"{label} ({i})" for i in count(2))) if name not in taken)
        runs = {run.seed: run for _, run in members}  # the same configuration twice: the later folder counts
        cells.append(CellResult(label, str(flat.get("experiment", "run")), values, runs, len(runs)))
    return cells


def read_config(folder: Path) -> dict[str, Any]:
    """A run's config.yaml as it is, whatever version wrote it."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    except Exception as error:  # yaml's own errors share no public base with those of the disk
        raise UserError(f"report: {folder / 'config.yaml'} cannot be read ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise UserError(f"report: {folder / 'config.yaml'} is not a configuration")
    return {str(key): value for key, value in content.items()}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"report: {path} cannot be read ({first_line(error)})") from None
