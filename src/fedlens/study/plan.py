"""Plans of many runs: YAML that a user can copy and edit (fedlens/conf/study/*.yaml).

    question: How do heterogeneity and local steps hurt?      what the study is for
    seeds: 3                                                  0, 1, 2; or a list
    where: {embedded: [overrides…], cifar100: [overrides…]}   the first one unless --on says otherwise
    set: [overrides…]                                         for every run
    tables:
      - name: Nc and J
        set: [overrides…]                                     for every run of this table
        cases: {IID: [overrides…], Nc=50: {cifar100: […]}}    place by place: left out where its place has none
        grid: {federated.local_steps: [4, 8, 16]}             every case with every combination; null and lists are values too
        special:                                              what only some combinations get
          - {case: IID, federated.local_steps: 16, place: cifar100, set: [optim.lr=1e-4]}
        local_steps_in_all: 800                               J·R is this for every run: rounds follow J; or {cifar100: 800}
        evaluations: 10                                       so many a run, however many rounds it has
        target: 0.85                                          validation accuracy that rounds and bytes are counted to
        against: case                                         differences are to the first cell of the same case; without it to the table's first cell
        tune: {key: optim.lr, by: 3, length: 0.2, tries: 7}   every cell gets the value that validation prefers for it; or {cifar100: {…}}: see tuning.py
                                                              like: {half B: half A} in it: a cell that takes the value of another;
                                                              set: [overrides…] in it: of the short runs alone, smaller images for one
    analyses: […]                                             what is measured on finished runs: see analyses.py; or {cifar100: […]}

`include: [NAME, …]` instead of tables makes one study of several. A run is known by the hash of its whole configuration, so tables share the runs that they have in common.
"""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedlens.config import Config, known_keys
from fedlens.errors import UserError, bad_value, first_line, unknown
from fedlens.overrides import choices, compose, with_values
from fedlens.runs.identity import identity
from fedlens.study.search_space import spelled

PLAN_KEYS = {"question", "seeds", "where", "set", "tables", "analyses", "include"}
TABLE_KEYS = {"name", "question", "set", "cases", "grid", "special", "local_steps_in_all", "evaluations", "target", "against", "tune"}
# of a short run, by its being one: not for `set` of `tune` to say
DECIDED = {"seed", "train.test", "train.epochs", "federated.rounds", "federated.eval_every", "federated.client_vectors"}
TUNE_KEYS = {"key", "by", "length", "tries", "like", "set"}
SPECIAL_KEYS = {"case", "place", "set"}


def labelled(case: str, values: Iterable[tuple[str, Any]]) -> str:
    """IID, local_steps 4"""
    return ", ".join(filter(None, [case, *(f"{key.rsplit('.', 1)[-1]} {_shown(value)}" for key, value in values)]))


def _shown(value: Any) -> str:
    return spelled(value) if value is None or isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True)
class Cell:
    """One entry of a table, to be run with several seeds."""

    table: str
    case: str
    values: tuple[tuple[str, Any], ...]  # of the grid

    @property
    def label(self) -> str:
        return labelled(self.case, self.values)


@dataclass(frozen=True)
class Planned:
    """One run of the plan."""

    cell: Cell
    seed: int
    config: Config

    @property
    def name(self) -> str:
        return f"{self.config.experiment}-{identity(self.config)}"


@dataclass(frozen=True)
class Tune:
    """A cell whose value of `key` is still to be chosen: in short runs of the plan's first seed, on validation alone."""

    cell: Cell
    key: str
    by: float  # the factor between neighbours
    tries: int
    short: Config  # of the cell's own value
    like: tuple[Cell, ...] = ()  # others that take what this one gets

    @property
    def cells(self) -> tuple[Cell, ...]:
        return (self.cell, *self.like)

    @property
    def own(self) -> float:
        return float(_get(self.short, self.key))

    def value(self, k: int) -> float:
        """k factors above the cell's own, to three digits."""
        return float(f"{self.own * self.by**k:.3g}") if k else self.own

    def trial(self, k: int) -> Planned:
        return Planned(self.cell, self.short.seed, changed(self.short, self.key, self.value(k)))


@dataclass(frozen=True)
class Table:
    name: str
    question: str = ""
    target: float | None = None
    by_case: bool = False


@dataclass(frozen=True)
class Asked:
    """An analysis as a plan has it."""

    given: Mapping[str, Any]
    tables: tuple[str, ...]  # whose cells it may name: those of its own plan


@dataclass(frozen=True)
class Plan:
    name: str
    question: str
    place: str
    runs: list[Planned]
    tables: list[Table] = field(default_factory=list)
    analyses: list[Asked] = field(default_factory=list)
    tunes: list[Tune] = field(default_factory=list)


def plan_file(name: str) -> Path:
    """A YAML file by its path, or a ready-made plan by its name."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in choices("study"):
        raise unknown("study", name, choices("study"))
    return Path(__file__).parents[1] / "conf" / "study" / f"{name}.yaml"


def read_plan(name: str, *, place: str | None = None, seeds: int | None = None, overrides: Sequence[str] = ()) -> Plan:
    """Every run of a plan, each with its whole, checked configuration. Overrides come last and hold for all."""
    plan = _read(name, place, seeds, overrides, ())
    if not plan.runs:
        raise UserError(f"study: {name} has no case on {plan.place}; allowed is a place that its cases name")
    return plan


def _read(name: str, place: str | None, seeds: int | None, overrides: Sequence[str], within: tuple[Path, ...]) -> Plan:
    """`within`: the plans that include this one."""
    path = plan_file(name)
    if path.resolve() in within:
        raise UserError(f"study: include: {name!r} given in a plan that it includes itself, allowed are other plans")
    content = _content(path)
    if isinstance(content, dict) and content.get("include") is not None:
        _known(content, {"question", "include"}, f"study {path.stem}, which includes others,")
        parts = [_read(other, place, seeds, overrides, (*within, path.resolve())) for other in _included(content["include"])]
        return _together(path.stem, str(content.get("question", "")), parts)
    if not isinstance(content, dict) or not isinstance(content.get("tables"), list) or not content["tables"]:
        raise UserError(f"study: {path} has no tables; its keys are {', '.join(sorted(PLAN_KEYS))}")
    _known(content, PLAN_KEYS, f"study {path.stem}")
    places: Mapping[str, Any] = content.get("where") or {"here": []}
    _known(places, places, "where")
    place = place or next(iter(places))
    if place not in places:
        raise unknown("--on", place, places)
    common = [*_texts(places[place], "where"), *_texts(content.get("set"), "set")]
    for table in content["tables"]:
        _known(table, TABLE_KEYS, f"table {table.get('name') if isinstance(table, Mapping) else table}")
    tables = [Table(_name(table), str(table.get("question", "")), _target(table), _by_case(table)) for table in content["tables"]]
    _distinct([table.name for table in tables])
    cells = [found for table in content["tables"] for found in _cells(table, place, places, common, overrides)]
    runs = [Planned(cell, seed, _seeded(config, seed)) for cell, config in cells for seed in _seeds(content, seeds)]
    _told_apart(runs)
    filled = [table for table in tables if any(cell.table == table.name for cell, _ in cells)]
    tunes = []
    for table in content["tables"]:
        own = [(cell, config) for cell, config in cells if cell.table == _name(table)]
        tunes += _tunes(table, own, place, places, _seeds(content, seeds)[0], overrides)
    named = tuple(table.name for table in filled)
    analyses = [Asked(given, named) for given in _analyses(content.get("analyses"), place, places)]
    return Plan(path.stem, str(content.get("question", "")), place, runs, filled, analyses, tunes)


def _content(path: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, ValueError) as error:
        raise UserError(f"study: {path} cannot be read ({first_line(error)})") from None
    except Exception as error:  # yaml's own errors share no public base with the above
        raise UserError(f"study: {path} is not YAML ({first_line(error)})") from None


def _included(given: Any) -> list[str]:
    if not isinstance(given, list) or not given or not all(isinstance(name, str) for name in given):
        raise bad_value("study: include", given, "a list of plans, such as [quick, mine.yaml]")
    return given


def _together(name: str, question: str, parts: Sequence[Plan]) -> Plan:
    """One plan of several."""
    runs = [planned for part in parts for planned in part.runs]
    tables = [table for part in parts for table in part.tables]
    _distinct([table.name for table in tables])
    analyses = [analysis for part in parts for analysis in part.analyses]
    tunes = [tune for part in parts for tune in part.tunes]
    return Plan(name, question, parts[0].place, runs, tables, analyses, tunes)


def _target(table: Mapping[str, Any]) -> float | None:
    given = table.get("target")
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1):
        raise bad_value(f"study: target of table {_name(table)}", given, "a validation accuracy, 0 < target <= 1")
    return given


def _by_case(table: Mapping[str, Any]) -> bool:
    if table.get("against", "case") != "case":
        raise bad_value(f"study: against of table {_name(table)}", table["against"], "case, or nothing")
    return "against" in table


def _distinct(names: Sequence[str]) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"study: two tables are called {twice!r}; allowed is a name each")


def _told_apart(runs: Sequence[Planned]) -> None:
    """Data and weights are known by their names, wherever they lie; two of a name in one study would be taken for one another."""
    where: dict[str, tuple[str | None, str | None]] = {}
    for planned in runs:
        given = (planned.config.data.root, planned.config.model.weights)
        if where.setdefault(planned.name, given) != given:
            raise UserError(
                f"study: {planned.cell.label} differs from another cell only in the folder of its data or weights; allowed are other names"
            )


def _name(table: Mapping[str, Any]) -> str:
    return str(table.get("name", "results"))


def _analyses(given: Any, place: str, places: Collection[str]) -> list[Mapping[str, Any]]:
    if isinstance(given, Mapping):
        _known(given, places, "analyses")
        given = given.get(place)
    found = [] if given is None else given
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise UserError("study: analyses is not a list of mappings, such as {kind: sweep, of: IID}")
    return found


def _seeds(content: Mapping[str, Any], asked: int | None) -> list[int]:
    given = content.get("seeds", 1) if asked is None else asked
    found = list(range(given)) if isinstance(given, int) else given
    if not isinstance(found, list) or not found or not all(isinstance(seed, int) and seed >= 0 for seed in found):
        raise bad_value("seeds", given, "a number of seeds, or a list of seeds >= 0")
    return found


def _seeded(config: Config, seed: int) -> Config:
    return changed(config, "seed", seed)


def changed(config: Config, key: str, value: Any) -> Config:
    """The same with another value of a dotted key."""
    own = copy.deepcopy(config)
    *above, name = key.split(".")
    setattr(_get(own, ".".join(above)), name, value)
    return own


def _get(config: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), config) if key else config


def _tunes(
    table: Mapping[str, Any], cells: Sequence[tuple[Cell, Config]], place: str, places: Collection[str], seed: int, last: Sequence[str]
) -> list[Tune]:
    given, where = table.get("tune"), f"tune of {_name(table)}"
    if isinstance(given, Mapping) and set(given) <= set(places):  # place by place
        given = given.get(place)
    if given is None:
        return []
    _known(given, TUNE_KEYS, where)
    key, by, length, tries = str(given.get("key", "optim.lr")), given.get("by", 3), given.get("length", 0.2), given.get("tries", 7)
    fixed = {text.partition("=")[0] for text in last}  # said on the command line: not to be chosen, and not otherwise in short runs
    if key in fixed:
        return []
    if key not in known_keys():
        raise unknown(where, key, known_keys())
    if not (isinstance(by, int | float) and 1 < by < float("inf")):
        raise bad_value(f"{where}: by", by, "a factor > 1")
    if not (isinstance(length, int | float) and 0 < length <= 1):
        raise bad_value(f"{where}: length", length, "a part of the run's length, 0 < length <= 1")
    if not (isinstance(tries, int) and tries >= 3):
        raise bad_value(f"{where}: tries", tries, "a whole number >= 3")
    of_trials = [text for text in _texts(given.get("set"), f"set in {where}") if text.partition("=")[0] not in fixed]
    if decided := [text for text in of_trials if text.partition("=")[0] in {key, *DECIDED}]:
        raise bad_value(f"{where}: set", decided[0], f"any key but {key}, which is tuned, and {', '.join(sorted(DECIDED))}")
    followers = _followers(given.get("like", {}), [cell for cell, _ in cells], where)
    found = []
    for cell, config in cells:
        if any(cell in others for others in followers.values()):
            continue
        if not isinstance(own := _get(config, key), float) or own <= 0:
            raise bad_value(f"{where}: {key} of {cell.label}", own, "a number > 0 to begin with")
        short = _seeded(with_values(config, of_trials), seed)
        if short.data.val_fraction == 0:
            raise UserError(f"study: {where} chooses on a validation set, but data.val_fraction of {cell.label} is 0")
        short.train.test = False
        short.federated.rounds = max(1, round(length * config.federated.rounds))
        short.federated.eval_every = short.federated.rounds  # validation looks once, at the end of the schedule
        short.train.epochs = min(config.train.epochs, max(1, round(length * config.train.epochs)))
        short.federated.client_vectors = False
        found.append(Tune(cell, key, float(by), tries, short, tuple(followers.get(cell, ()))))
    return found


def _followers(given: Any, cells: Sequence[Cell], where: str) -> dict[Cell, list[Cell]]:
    """Cell that is tuned -> those that take its value."""
    if not isinstance(given, Mapping):
        raise bad_value(f"{where}: like", given, "a mapping from a cell's label to another's")
    known, found = {cell.label: cell for cell in cells}, dict[Cell, list[Cell]]()
    for follower, leader in given.items():
        for label in (follower, leader):
            if label not in known:
                raise unknown(f"{where}: like", str(label), list(known))
        if leader in given:
            raise UserError(f"study: {where}: like: {follower} takes the value of {leader}, which takes another's")
        found.setdefault(known[leader], []).append(known[follower])
    return found


def _cells(
    table: Mapping[str, Any], place: str, places: Collection[str], common: Sequence[str], last: Sequence[str]
) -> list[tuple[Cell, Config]]:
    name, grid, cases = _name(table), _grid(table), table.get("cases") or {"": []}
    if not isinstance(cases, Mapping):
        raise UserError(f"study: cases of {name} is {type(cases).__name__}, allowed is a mapping of name to list of key=value")
    total, evaluations = (_whole(table.get(key), f"{key} of {name}", place, places) for key in ("local_steps_in_all", "evaluations"))
    fixed = {text.partition("=")[0] for text in last}
    found: list[tuple[Cell, Config]] = []
    for case, given in cases.items():
        if isinstance(given, Mapping):
            _known(given, places, f"case {case}")
            if place not in given:
                continue
            given = given[place]
        own = _texts(given, f"case {case}")
        for values in product(*grid.values()):
            chosen = tuple(zip(grid, values, strict=True))
            special = _special(table, {"case": str(case), "place": place, **dict(chosen)})
            overrides = [*common, *_texts(table.get("set"), name), *own, *(_override(*pair) for pair in chosen), *special, *last]
            config = compose(overrides)
            if total is not None and "federated.rounds" not in fixed:
                config.federated.rounds = max(1, round(total / config.federated.local_steps))
            if evaluations is not None and "federated.eval_every" not in fixed:
                config.federated.eval_every = max(1, config.federated.rounds // evaluations)
            found.append((Cell(name, str(case), chosen), config))
    _all_used(table, place, [{"case": cell.case, "place": place, **dict(cell.values)} for cell, _ in found])
    return found


def _grid(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """key -> values, lists among them as tuples: a cell is known by its values."""
    given, where = table.get("grid") or {}, f"study: grid of {_name(table)}"
    if not isinstance(given, Mapping) or not all(isinstance(values, list) for values in given.values()):
        raise UserError(f"{where} is not a mapping of key to list of values")
    for key, values in given.items():
        plain = [each for value in values for each in (value if isinstance(value, list) else [value])]
        if not values or not all(each is None or isinstance(each, bool | int | float | str) for each in plain):
            raise bad_value(f"{where}: {key}", values, "a list of one or more values, or of lists of them")
    return {str(key): [tuple(value) if isinstance(value, list) else value for value in values] for key, values in given.items()}


def _override(key: str, value: Any) -> str:
    """What YAML has as text is an override's text: timm:NAME, "[query,key]"."""
    return f"{key}={value if isinstance(value, str) else spelled(value)}"


def _whole(given: Any, where: str, place: str, places: Collection[str]) -> int | None:
    """A number for all places, or place by place."""
    if isinstance(given, Mapping):
        _known(given, places, where)
        given = given.get(place)
    if given is not None and not (isinstance(given, int) and given >= 1):
        raise bad_value(where, given, "a whole number >= 1")
    return given


def _all_used(table: Mapping[str, Any], place: str, combinations: Sequence[Mapping[str, Any]]) -> None:
    for entry in _specials(table):
        if entry.get("place", place) == place and not any(_fits(entry, facts) for facts in combinations):
            raise UserError(f"study: special of {_name(table)} has an entry that fits no run: {entry}")


def _fits(entry: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(_shown(facts[key]) == _shown(value) for key, value in entry.items() if key != "set")


def _specials(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found, where = table.get("special") or [], f"special of {_name(table)}"
    if not isinstance(found, list):
        raise UserError(f"study: {where} is {type(found).__name__}, allowed is a list of mappings")
    for entry in found:
        _known(entry, SPECIAL_KEYS | set(table.get("grid") or {}), where)
    return found


def _special(table: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """The overrides of all entries that fit this combination."""
    found: list[str] = []
    for entry in _specials(table):
        if _fits(entry, facts):
            found += _texts(entry.get("set"), f"special of {_name(table)}")
    return found


def _texts(given: Any, where: str) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise UserError(f"study: {where} is {type(given).__name__}, allowed is a list of key=value")
    return [str(text) for text in given]


def _known(mapping: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    if not isinstance(mapping, Mapping):
        raise UserError(f"study: {where} is {type(mapping).__name__}, allowed is a mapping")
    for key in mapping:
        if key not in keys:
            raise unknown(where, str(key), keys)
