"""Plans of many runs: YAML that a user can copy and edit (fedlens/conf/study/*.yaml).

    question: How do heterogeneity and local steps hurt?      purpose of the study, the heading of its answer
    seeds: 3                                                  0, 1, 2; or a list
    where: {embedded: [overrides…], cifar100: [overrides…]}   places; the first is the default of --on
    set: [overrides…]                                         for every run
    tables:
      - name: Nc and J                                        name for --table and for the files of a report
        question: How many local steps are too many?          purpose of the table (default: none)
        set: [overrides…]                                     for every run of this table; or {cifar100: [overrides…]}
        cases: {IID: [overrides…], Nc=50: {cifar100: […]}}    a case with one entry per place is skipped where its place is missing
        grid: {federated.local_steps: [4, 8, 16]}             every case with every combination; null and lists are values too
        special:                                              additional overrides of some combinations
          - {case: IID, federated.local_steps: 16, place: cifar100, set: [optim.lr=1e-4]}
        local_steps_in_all: 800                               J·R of every run, so that rounds follow J; or {cifar100: 800}
        evaluations: 10                                       evaluations per run, whatever its number of rounds
        target: 0.85                                          validation accuracy for the columns "rounds to" and "bytes to"
        against: case                                         compare with the first cell of the same case (default: of the table)
        tune: {key: optim.lr, by: 3, length: 0.2, tries: 7}   choose the key's value per cell on validation, see tune.py; or {cifar100: {…}}
                                                              like: {half B: half A}: the first cell takes the value of the second;
                                                              set: [overrides…]: for the short runs only, such as smaller images
    analyses: […]                                             measurements on finished runs, see analyses.py; or {cifar100: […]}

`include: [NAME, …]` instead of tables joins several studies. A run is named by the hash of its whole configuration, so tables share common runs.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedlens.config import Config, known_keys, value_of
from fedlens.errors import UserError, bad_value, unknown
from fedlens.overrides import compose, with_values
from fedlens.runs.identity import identity
from fedlens.study import yaml_files
from fedlens.study.yaml_files import (
    MAPPING,
    OVERRIDES,
    TEXT,
    Field,
    Place,
    check_keys,
    is_number,
    list_of,
    override_list,
    read_fields,
    whole,
)

MAX_RUNS = 10_000  # of one plan
SET_BY_TUNING = {"seed", "train.test", "train.epochs", "federated.rounds", "federated.eval_every", "federated.client_vectors"}


def _are_seeds(value: Any) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= 1000 and all(type(seed) is int and seed >= 0 for seed in value)
    return type(value) is int and 0 < value <= 1000


def _is_grid(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(values, list) for values in value.values())


PLAN = {
    "question": TEXT,
    "seeds": Field(1, "a number of seeds, or a list of seeds >= 0; at most 1000", _are_seeds),
    "where": Field(),
    "set": OVERRIDES,
    "tables": Field(),
    "analyses": Field((), "a list of mappings, such as {kind: sweep, of: IID}", list_of(Mapping), per_place=True),
}
INCLUDING = {
    "question": TEXT,
    "include": Field([], "a list of plans, such as [quick, mine.yaml]", list_of(str, fewest=1)),
}
TABLE = {
    "name": Field("results"),
    "question": TEXT,
    "set": replace(OVERRIDES, per_place=True),
    "cases": Field({"": []}, "a mapping", MAPPING.holds),
    "grid": Field({}, "a mapping of key to list of values", _is_grid),
    "special": Field([], "a list of mappings", list_of(Mapping)),
    "local_steps_in_all": whole(1, per_place=True),
    "evaluations": whole(1, per_place=True),
    "target": Field(None, "a validation accuracy in (0, 1]", lambda value: is_number(value) and 0 < value <= 1),
    "against": Field(None, "case", lambda value: value == "case"),
    "tune": Field(),
}
TUNE = {
    "key": Field("optim.lr"),
    "by": Field(3, "a factor > 1", lambda value: is_number(value) and value > 1),
    "length": Field(0.2, "a fraction of the run's length in (0, 1]", lambda value: is_number(value) and 0 < value <= 1),
    "tries": whole(3, 7),
    "like": Field({}, "a mapping from a cell's label to another's", MAPPING.holds),
    "set": OVERRIDES,
}


def cell_label(case: str, values: Iterable[tuple[str, Any]]) -> str:
    """Return the label of a cell, such as "IID, local_steps 4"."""
    return ", ".join(filter(None, [case, *(f"{key.rsplit('.', 1)[-1]} {_shown(value)}" for key, value in values)]))


def _shown(value: Any) -> str:
    return yaml_files.override_text(value) if value is None or isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True)
class PlanCell:
    """One entry of a table, to be run with several seeds."""

    table: str
    case: str
    values: tuple[tuple[str, Any], ...]  # (key, value) of the grid

    @property
    def label(self) -> str:
        return cell_label(self.case, self.values)


@dataclass(frozen=True)
class PlannedRun:
    """One run of the plan."""

    cell: PlanCell
    seed: int
    config: Config

    @property
    def name(self) -> str:
        return f"{self.config.experiment}-{identity(self.config)}"


@dataclass(frozen=True)
class TuningSpec:
    """A key whose value is chosen per cell: on validation, in short runs with the plan's first seed."""

    cell: PlanCell
    key: str
    factor: float  # between neighbouring values
    tries: int
    base: Config  # of the short run at the cell's default value
    followers: tuple[PlanCell, ...] = ()  # cells that take the value chosen here

    @property
    def cells(self) -> tuple[PlanCell, ...]:
        return (self.cell, *self.followers)

    @property
    def default(self) -> float:
        return float(value_of(self.base, self.key))

    def value(self, k: int) -> float:
        """Return the default times factor^k, to three digits."""
        return float(f"{self.default * self.factor**k:.3g}") if k else self.default

    def trial(self, k: int) -> PlannedRun:
        return PlannedRun(self.cell, self.base.seed, changed(self.base, self.key, self.value(k)))


@dataclass(frozen=True)
class PlanTable:
    """A table's own settings; its cells are in the runs. study.json has these fields under these names."""

    name: str
    question: str = ""
    target: float | None = None
    by_case: bool = False


@dataclass(frozen=True)
class AnalysisSpec:
    """An entry of `analyses`, as it is in the plan."""

    options: Mapping[str, Any]
    tables: tuple[str, ...]  # tables of its own plan: the only ones whose cells it may name


@dataclass(frozen=True)
class Plan:
    """All runs, tables, analyses and tuned keys of a study."""

    name: str
    question: str
    place: str
    runs: list[PlannedRun]
    tables: list[PlanTable] = field(default_factory=list)
    analyses: list[AnalysisSpec] = field(default_factory=list)
    tuning: list[TuningSpec] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"study: two tables are called {twice!r}; rename one of them.")


@dataclass(frozen=True)
class _Context:
    """Settings that all tables of a plan share."""

    place: Place
    common: Sequence[Any]  # overrides of the place and of the whole plan
    last: Sequence[str]  # overrides of the command line, which win over all others

    @property
    def fixed(self) -> set[str]:
        """Keys that the command line sets."""
        return {text.partition("=")[0] for text in self.last}


def read_plan(name: str, *, place: str | None = None, seeds: int | None = None, overrides: Sequence[str] = ()) -> Plan:
    """Read a plan by name or path: every run with its complete, checked configuration. `overrides` win over those of the plan."""
    plan = _read(name, place, seeds, overrides, ())
    if not plan.runs:
        raise UserError(f"study: {name} has no case on {plan.place}; choose with --on a place that its cases name.")
    return plan


def _read(name: str, place: str | None, seeds: int | None, overrides: Sequence[str], including: tuple[Path, ...]) -> Plan:
    """Read a plan. `including`: the plans that include this one, to detect a cycle."""
    path = yaml_files.yaml_path("study", name)
    if path.resolve() in including:
        raise UserError(f"study: include: {name!r} includes itself, directly or through another plan.")
    content, where = yaml_files.read_yaml("study", path), f"study: {path.stem}"
    if isinstance(content, Mapping) and content.get("include") is not None:
        fields = read_fields(content, INCLUDING, f"{where}, which includes other plans")
        parts = [_read(other, place, seeds, overrides, (*including, path.resolve())) for other in fields["include"]]
        lists = {key: [entry for part in parts for entry in getattr(part, key)] for key in ("runs", "tables", "analyses", "tuning")}
        return Plan(path.stem, str(fields["question"]), parts[0].place, **lists)
    if not isinstance(content, Mapping) or not isinstance(content.get("tables"), list) or not content["tables"]:
        raise UserError(f"study: {path} has no tables; its keys are {', '.join(sorted([*PLAN, 'include']))}.")
    at = yaml_files.read_place(content, place, "study")
    fields = read_fields(content, PLAN, where, at, seeds=seeds)
    return _with_tables(path.stem, fields, _Context(at, [*at.overrides, *fields["set"]], overrides))


def _with_tables(name: str, fields: Mapping[str, Any], context: _Context) -> Plan:
    tables = [_read_table(entry, context.place) for entry in fields["tables"]]
    seeds = list(range(fields["seeds"])) if isinstance(fields["seeds"], int) else fields["seeds"]
    if len(seeds) * sum(len(table["cases"]) * math.prod(map(len, table["grid"].values())) for table in tables) > MAX_RUNS:
        raise UserError(f"study: this plan has more than {MAX_RUNS:,} runs; use fewer values, cases or seeds.")
    runs, filled, tuning = list[PlannedRun](), list[PlanTable](), list[TuningSpec]()
    for table in tables:
        if cells := _cells(table, context):
            runs += [PlannedRun(cell, seed, changed(config, "seed", seed)) for cell, config in cells for seed in seeds]
            filled.append(PlanTable(table["name"], str(table["question"]), table["target"], table["against"] is not None))
            tuning += _tuning(table, cells, context, seeds[0])
    _check_unambiguous(runs)
    analyses = [AnalysisSpec(entry, tuple(table.name for table in filled)) for entry in fields["analyses"]]
    return Plan(name, str(fields["question"]), context.place.name, runs, filled, analyses, tuning)


def _check_unambiguous(runs: Sequence[PlannedRun]) -> None:
    """Raise if two runs differ only in a folder: identity ignores folders, so that one run would stand for both."""
    folders: dict[str, tuple[str | None, str | None]] = {}
    for planned in runs:
        here = (planned.config.data.root, planned.config.model.weights)
        if folders.setdefault(planned.name, here) != here:
            raise UserError(f"study: {planned.cell.label} differs from another cell only in the folder of its data or weights; rename it.")


def changed(config: Config, key: str, value: Any) -> Config:
    """Return a copy of a configuration with another value of a dotted key."""
    config = copy.deepcopy(config)
    section, _, name = key.rpartition(".")
    setattr(value_of(config, section) if section else config, name, value)
    return config


# --- tables


def _read_table(entry: Any, place: Place) -> dict[str, Any]:
    """Return the fields of a table and, as `where`, its place in an error message. Lists in a grid become tuples, so that a cell is hashable."""
    name = str(entry.get("name") or "results") if isinstance(entry, Mapping) else str(entry)
    where = f"study: table {name}"
    fields = read_fields(entry, TABLE, where, place)
    for key, values in fields["grid"].items():
        plain = [each for value in values for each in (value if isinstance(value, list) else [value])]
        if not values or not all(each is None or isinstance(each, bool | int | float | str) for each in plain):
            raise bad_value(f"{where}: grid: {key}", values, "a list of one or more values, or of lists of them")
    grid = {str(key): [tuple(value) if isinstance(value, list) else value for value in values] for key, values in fields["grid"].items()}
    for special in fields["special"]:
        check_keys(special, {"case", "place", "set", *grid}, f"{where}: special")
    return {**fields, "name": name, "where": where, "grid": grid}


def _cells(table: Mapping[str, Any], context: _Context) -> list[tuple[PlanCell, Config]]:
    """Return every case with every combination of the grid, and its configuration."""
    cells, unused = list[tuple[PlanCell, Config]](), list(table["special"])
    for case, entry in table["cases"].items():
        where = f"{table['where']}: case {case}"
        own = context.place.pick(entry, where)
        if isinstance(entry, Mapping) and context.place.name not in entry:
            continue
        for values in product(*table["grid"].values()):
            cell = PlanCell(table["name"], str(case), tuple(zip(table["grid"], values, strict=True)))
            special = [each for each in table["special"] if _matches(each, cell, context.place.name)]
            unused = [each for each in unused if each not in special]
            overrides = [
                *context.common,
                *table["set"],
                *override_list(own, where),
                *(f"{key}={value if isinstance(value, str) else yaml_files.override_text(value)}" for key, value in cell.values),
                *(text for each in special for text in override_list(each.get("set"), f"{table['where']}: special: set")),
                *context.last,
            ]
            cells.append((cell, _with_length(compose([*map(str, overrides)]), table, context.fixed)))
    for each in unused:
        if each.get("place", context.place.name) == context.place.name:
            raise UserError(f"{table['where']}: special has an entry that fits no run: {each}.")
    return cells


def _with_length(config: Config, table: Mapping[str, Any], fixed: set[str]) -> Config:
    """Set the number of rounds and of evaluations that a table gives to all of its runs, unless the command line does."""
    fed = config.federated
    if table["local_steps_in_all"] is not None and "federated.rounds" not in fixed:
        fed.rounds = max(1, round(table["local_steps_in_all"] / fed.local_steps))
    if table["evaluations"] is not None and "federated.eval_every" not in fixed:
        fed.eval_every = max(1, fed.rounds // table["evaluations"])
    return config


def _matches(special: Mapping[str, Any], cell: PlanCell, place: str) -> bool:
    facts = {"case": cell.case, "place": place, **dict(cell.values)}
    return all(_shown(facts[key]) == _shown(value) for key, value in special.items() if key != "set")


# --- tuned keys


def _tuning(table: Mapping[str, Any], cells: Sequence[tuple[PlanCell, Config]], context: _Context, seed: int) -> list[TuningSpec]:
    """Return what a table tunes. A key that the command line sets is not tuned, and its value holds for short runs too."""
    where = f"{table['where']}: tune"
    entry = context.place.pick(table["tune"], where, mapping=True)
    if entry is None:
        return []
    tune = read_fields(entry, TUNE, where)
    key = str(tune["key"])
    if key in context.fixed:
        return []
    if key not in known_keys():
        raise unknown(f"{where}: key", key, known_keys())
    overrides = [text for text in map(str, tune["set"]) if text.partition("=")[0] not in context.fixed]
    if wrong := [text for text in overrides if text.partition("=")[0] in {key, *SET_BY_TUNING}]:
        raise bad_value(f"{where}: set", wrong[0], f"any key but {key}, which is tuned, and {', '.join(sorted(SET_BY_TUNING))}")
    followers = _followers(tune["like"], [cell for cell, _ in cells], f"{where}: like")
    specs = []
    for cell, config in cells:
        if any(cell in others for others in followers.values()):
            continue
        if not isinstance(value := value_of(config, key), float) or value <= 0:
            raise bad_value(f"{where}: {key} of {cell.label}", value, "a number > 0, where the search starts")
        short = _short_run(cell, config, overrides, tune["length"], seed)
        specs.append(TuningSpec(cell, key, float(tune["by"]), tune["tries"], short, tuple(followers.get(cell, ()))))
    return specs


def _short_run(cell: PlanCell, config: Config, overrides: Sequence[str], length: float, seed: int) -> Config:
    short = changed(with_values(config, overrides), "seed", seed)
    if short.data.val_fraction == 0:
        raise UserError(f"study: tune chooses on a validation set, but data.val_fraction of {cell.label} is 0; set it > 0.")
    short.train.test = False
    short.federated.rounds = max(1, round(length * config.federated.rounds))
    short.federated.eval_every = short.federated.rounds  # one evaluation, at the end of the schedule
    short.train.epochs = min(config.train.epochs, max(1, round(length * config.train.epochs)))
    short.federated.client_vectors = False
    return short


def _followers(like: Mapping[str, str], cells: Sequence[PlanCell], where: str) -> dict[PlanCell, list[PlanCell]]:
    """Return the cells that take the value of another: tuned cell -> its followers."""
    by_label, followers = {cell.label: cell for cell in cells}, dict[PlanCell, list[PlanCell]]()
    for follower, leader in like.items():
        for label in (follower, leader):
            if label not in by_label:
                raise unknown(where, str(label), by_label)
        if leader in like:
            raise UserError(f"{where}: {follower} takes the value of {leader}, which takes another's; name a cell that is tuned.")
        followers.setdefault(by_label[leader], []).append(by_label[follower])
    return followers
