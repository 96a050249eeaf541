"""Plans of many runs: YAML that a user can copy and edit (fedlens/conf/study/*.yaml).

    question: How do heterogeneity and local steps hurt?      purpose of the study
    seeds: 3                                                  0, 1, 2; or a list
    where: {embedded: [overrides…], cifar100: [overrides…]}   places; the first is the default of --on
    set: [overrides…]                                         for every run
    tables:
      - name: Nc and J
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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

from fedlens.config import Config, known_keys
from fedlens.errors import UserError, bad_value, unknown
from fedlens.overrides import compose, with_values
from fedlens.runs.identity import identity
from fedlens.study.yaml_files import at_place, check_keys, override_list, override_text, read_yaml, whole_number, yaml_path

PLAN_KEYS = {"question", "seeds", "where", "set", "tables", "analyses", "include"}
TABLE_KEYS = {"name", "question", "set", "cases", "grid", "special", "local_steps_in_all", "evaluations", "target", "against", "tune"}
TUNE_KEYS = {"key", "by", "length", "tries", "like", "set"}
SPECIAL_KEYS = {"case", "place", "set"}
MAX_RUNS = 10_000  # of one plan
SET_BY_TUNING = {"seed", "train.test", "train.epochs", "federated.rounds", "federated.eval_every", "federated.client_vectors"}


def cell_label(case: str, values: Iterable[tuple[str, Any]]) -> str:
    """Return the label of a cell, such as "IID, local_steps 4"."""
    return ", ".join(filter(None, [case, *(f"{key.rsplit('.', 1)[-1]} {_shown(value)}" for key, value in values)]))


def _shown(value: Any) -> str:
    return override_text(value) if value is None or isinstance(value, list | tuple) else str(value)


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
        return float(_get(self.base, self.key))

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

    place: str
    places: Collection[str]
    common: Sequence[str]  # overrides of the place and of the whole plan
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
    path = yaml_path("study", name)
    if path.resolve() in including:
        raise UserError(f"study: include: {name!r} includes itself, directly or through another plan.")
    content = read_yaml("study", path)
    if isinstance(content, dict) and content.get("include") is not None:
        check_keys(content, {"question", "include"}, f"study: {path.stem}, which includes other plans")
        names = content["include"]
        if not isinstance(names, list) or not names or not all(isinstance(other, str) for other in names):
            raise bad_value("study: include", names, "a list of plans, such as [quick, mine.yaml]")
        return _joined(path.stem, content, [_read(other, place, seeds, overrides, (*including, path.resolve())) for other in names])
    if not isinstance(content, dict) or not isinstance(content.get("tables"), list) or not content["tables"]:
        raise UserError(f"study: {path} has no tables; its keys are {', '.join(sorted(PLAN_KEYS))}.")
    check_keys(content, PLAN_KEYS, f"study: {path.stem}")
    return _with_tables(path.stem, content, place, seeds, overrides)


def _with_tables(name: str, content: Mapping[str, Any], place: str | None, seeds: int | None, overrides: Sequence[str]) -> Plan:
    places = check_keys(content.get("where") or {"here": []}, None, "study: where")
    place = place or next(iter(places))
    if place not in places:
        raise unknown("--on", place, places)
    common = [*override_list(places[place], "study: where"), *override_list(content.get("set"), "study: set")]
    context = _Context(place, places, common, overrides)
    for table in content["tables"]:
        check_keys(table, TABLE_KEYS, f"study: table {table.get('name') if isinstance(table, Mapping) else table}")
    tables = [_plan_table(table) for table in content["tables"]]
    seed_list = _seeds(content.get("seeds", 1) if seeds is None else seeds)
    _check_size(content["tables"], len(seed_list))
    cells = {_name(table): _cells(table, context) for table in content["tables"]}
    runs = [PlannedRun(cell, seed, changed(config, "seed", seed)) for part in cells.values() for cell, config in part for seed in seed_list]
    _check_unambiguous(runs)
    tuning = [spec for table in content["tables"] for spec in _tuning(table, cells[_name(table)], context, seed_list[0])]
    filled = [table for table in tables if cells[table.name]]
    analyses = [AnalysisSpec(entry, tuple(table.name for table in filled)) for entry in _analyses(content.get("analyses"), context)]
    return Plan(name, str(content.get("question", "")), place, runs, filled, analyses, tuning)


def _joined(name: str, content: Mapping[str, Any], parts: Sequence[Plan]) -> Plan:
    lists = {key: [entry for part in parts for entry in getattr(part, key)] for key in ("runs", "tables", "analyses", "tuning")}
    return Plan(name, str(content.get("question", "")), parts[0].place, **lists)


def _check_size(tables: Sequence[Mapping[str, Any]], seeds: int) -> None:
    """Raise before a plan with too many runs is expanded."""
    if seeds * sum(len(_cases(table)) * math.prod(map(len, _grid(table).values())) for table in tables) > MAX_RUNS:
        raise UserError(f"study: this plan has more than {MAX_RUNS:,} runs; use fewer values, cases or seeds.")


def _check_unambiguous(runs: Sequence[PlannedRun]) -> None:
    """Raise if two runs differ only in a folder: identity ignores folders, so that one run would stand for both."""
    folders: dict[str, tuple[str | None, str | None]] = {}
    for planned in runs:
        here = (planned.config.data.root, planned.config.model.weights)
        if folders.setdefault(planned.name, here) != here:
            raise UserError(f"study: {planned.cell.label} differs from another cell only in the folder of its data or weights; rename it.")


def _name(table: Mapping[str, Any]) -> str:
    return str(table.get("name", "results"))


def _plan_table(table: Mapping[str, Any]) -> PlanTable:
    name, target = _name(table), table.get("target")
    if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target <= 1):
        raise bad_value(f"study: target of table {name}", target, "a validation accuracy in (0, 1]")
    if table.get("against", "case") != "case":
        raise bad_value(f"study: against of table {name}", table["against"], "case")
    return PlanTable(name, str(table.get("question", "")), target, "against" in table)


def _analyses(entries: Any, context: _Context) -> list[Mapping[str, Any]]:
    entries = at_place(entries, context.place, context.places, "study: analyses")
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise bad_value("study: analyses", entries, "a list of mappings, such as {kind: sweep, of: IID}")
    return entries


def _seeds(value: Any) -> list[int]:
    seeds = list(range(min(value, 1001))) if isinstance(value, int) else value
    if not isinstance(seeds, list) or not 0 < len(seeds) <= 1000 or not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
        raise bad_value("seeds", value, "a number of seeds, or a list of seeds >= 0; at most 1000")
    return seeds


def changed(config: Config, key: str, value: Any) -> Config:
    """Return a copy of a configuration with another value of a dotted key."""
    config = copy.deepcopy(config)
    section, _, name = key.rpartition(".")
    setattr(_get(config, section), name, value)
    return config


def _get(config: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), config) if key else config


# --- tuned keys


def _tuning(table: Mapping[str, Any], cells: Sequence[tuple[PlanCell, Config]], context: _Context, seed: int) -> list[TuningSpec]:
    """Return what a table tunes. A key that the command line sets is not tuned, and its value holds for short runs too."""
    entry, where = table.get("tune"), f"study: tune of {_name(table)}"
    if isinstance(entry, Mapping) and set(entry) <= set(context.places):
        entry = entry.get(context.place)
    if entry is None:
        return []
    key, factor, length, tries = _tune_numbers(check_keys(entry, TUNE_KEYS, where), where)
    if key in context.fixed:
        return []
    if key not in known_keys():
        raise unknown(f"{where}: key", key, known_keys())
    overrides = [text for text in override_list(entry.get("set"), f"{where}: set") if text.partition("=")[0] not in context.fixed]
    if wrong := [text for text in overrides if text.partition("=")[0] in {key, *SET_BY_TUNING}]:
        raise bad_value(f"{where}: set", wrong[0], f"any key but {key}, which is tuned, and {', '.join(sorted(SET_BY_TUNING))}")
    followers = _followers(entry.get("like", {}), [cell for cell, _ in cells], f"{where}: like")
    leaders = [(cell, config) for cell, config in cells if not any(cell in others for others in followers.values())]
    for cell, config in leaders:
        if not isinstance(value := _get(config, key), float) or value <= 0:
            raise bad_value(f"{where}: {key} of {cell.label}", value, "a number > 0, where the search starts")
    return [
        TuningSpec(cell, key, factor, tries, _short_run(cell, config, overrides, length, seed), tuple(followers.get(cell, ())))
        for cell, config in leaders
    ]


def _tune_numbers(entry: Mapping[str, Any], where: str) -> tuple[str, float, float, int]:
    key, factor, length = str(entry.get("key", "optim.lr")), entry.get("by", 3), entry.get("length", 0.2)
    if not (isinstance(factor, int | float) and 1 < factor < float("inf")):
        raise bad_value(f"{where}: by", factor, "a factor > 1")
    if not (isinstance(length, int | float) and 0 < length <= 1):
        raise bad_value(f"{where}: length", length, "a fraction of the run's length in (0, 1]")
    return key, float(factor), length, whole_number(entry.get("tries", 7), f"{where}: tries", 3)


def _short_run(cell: PlanCell, config: Config, overrides: Sequence[str], length: float, seed: int) -> Config:
    short = changed(with_values(config, list(overrides)), "seed", seed)
    if short.data.val_fraction == 0:
        raise UserError(f"study: tune chooses on a validation set, but data.val_fraction of {cell.label} is 0; set it > 0.")
    short.train.test = False
    short.federated.rounds = max(1, round(length * config.federated.rounds))
    short.federated.eval_every = short.federated.rounds  # one evaluation, at the end of the schedule
    short.train.epochs = min(config.train.epochs, max(1, round(length * config.train.epochs)))
    short.federated.client_vectors = False
    return short


def _followers(like: Any, cells: Sequence[PlanCell], where: str) -> dict[PlanCell, list[PlanCell]]:
    """Return the cells that take the value of another: tuned cell -> its followers."""
    if not isinstance(like, Mapping):
        raise bad_value(where, like, "a mapping from a cell's label to another's")
    by_label, followers = {cell.label: cell for cell in cells}, dict[PlanCell, list[PlanCell]]()
    for follower, leader in like.items():
        for label in (follower, leader):
            if label not in by_label:
                raise unknown(where, str(label), list(by_label))
        if leader in like:
            raise UserError(f"{where}: {follower} takes the value of {leader}, which takes another's; name a cell that is tuned.")
        followers.setdefault(by_label[leader], []).append(by_label[follower])
    return followers


# --- cells


def _cells(table: Mapping[str, Any], context: _Context) -> list[tuple[PlanCell, Config]]:
    name, grid, cases = _name(table), _grid(table), _cases(table)
    special = _special_entries(table)
    in_all, evaluations = (_positive(table, key, context) for key in ("local_steps_in_all", "evaluations"))
    cells: list[tuple[PlanCell, Config]] = []
    for case, entry in cases.items():
        if isinstance(entry, Mapping) and context.place not in check_keys(entry, context.places, f"study: case {case}"):
            continue
        own = override_list(at_place(entry, context.place, context.places, case), f"study: case {case}")
        for values in product(*grid.values()):
            cell = PlanCell(name, str(case), tuple(zip(grid, values, strict=True)))
            extra = [text for each in special if _matches(each, cell, context.place) for text in override_list(each.get("set"), name)]
            shared = at_place(table.get("set"), context.place, context.places, f"study: set of {name}")
            overrides = [*context.common, *override_list(shared, f"study: set of {name}"), *own]
            config = compose(
                [
                    *overrides,
                    *(f"{key}={value if isinstance(value, str) else override_text(value)}" for key, value in cell.values),
                    *extra,
                    *context.last,
                ]
            )
            if in_all is not None and "federated.rounds" not in context.fixed:
                config.federated.rounds = max(1, round(in_all / config.federated.local_steps))
            if evaluations is not None and "federated.eval_every" not in context.fixed:
                config.federated.eval_every = max(1, config.federated.rounds // evaluations)
            cells.append((cell, config))
    for each in special:
        if each.get("place", context.place) == context.place and not any(_matches(each, cell, context.place) for cell, _ in cells):
            raise UserError(f"study: special of {name} has an entry that fits no run: {each}.")
    return cells


def _cases(table: Mapping[str, Any]) -> Mapping[str, Any]:
    return check_keys(table.get("cases") or {"": []}, None, f"study: cases of {_name(table)}")


def _grid(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return key -> values of a grid. Lists become tuples, so that a cell is hashable."""
    grid, where = table.get("grid") or {}, f"study: grid of {_name(table)}"
    if not isinstance(grid, Mapping) or not all(isinstance(values, list) for values in grid.values()):
        raise bad_value(where, grid, "a mapping of key to list of values")
    for key, values in grid.items():
        plain = [each for value in values for each in (value if isinstance(value, list) else [value])]
        if not values or not all(each is None or isinstance(each, bool | int | float | str) for each in plain):
            raise bad_value(f"{where}: {key}", values, "a list of one or more values, or of lists of them")
    return {str(key): [tuple(value) if isinstance(value, list) else value for value in values] for key, values in grid.items()}


def _positive(table: Mapping[str, Any], key: str, context: _Context) -> int | None:
    where = f"study: {key} of {_name(table)}"
    value = at_place(table.get(key), context.place, context.places, where)
    return None if value is None else whole_number(value, where, 1)


def _special_entries(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries, where = table.get("special") or [], f"study: special of {_name(table)}"
    if not isinstance(entries, list):
        raise bad_value(where, entries, "a list of mappings")
    return [check_keys(entry, SPECIAL_KEYS | set(table.get("grid") or {}), where) for entry in entries]


def _matches(entry: Mapping[str, Any], cell: PlanCell, place: str) -> bool:
    facts = {"case": cell.case, "place": place, **dict(cell.values)}
    return all(_shown(facts[key]) == _shown(value) for key, value in entry.items() if key != "set")
