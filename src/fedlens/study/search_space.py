"""Spaces of hyper-parameters: YAML that a user can copy and edit (fedlens/conf/search/*.yaml).

    question: Which rates suit clients of few classes?         what the search is for
    where: {embedded: [overrides…], cifar100: [overrides…]}    the first one unless --on says otherwise
    set: [overrides…]                                          for every trial
    space:
      optim.lr: {low: 1e-4, high: 0.3, log: true}              whole numbers where the key is one; or place by place: {embedded: {…}, cifar100: {…}}
      optim.momentum: {low: 0.0, high: 0.95, step: 0.05}
      optim.clip_norm: {choices: [null, 0.1, 1.0]}
    trials: 24
    seed: 0                                                    of the sampler; that of the runs is the configuration's
    pruning: {warmup: 2, startup: 5}                           never before the third evaluation, nor before five trials are complete

The default configuration is the first trial, so it lies in the space.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedlens.config import Config, known_keys
from fedlens.errors import UserError, bad_value, first_line, unknown
from fedlens.overrides import choices, compose, normalise, to_config

SPACE_KEYS = {"question", "where", "set", "space", "trials", "seed", "pruning"}
FIXED = (
    "experiment",  # and the model: each brings values of other keys, which a name alone does not
    "model.name",
    "seed",
    "device",
    "data.name",
    "data.root",
    "data.download",
    "data.val_fraction",
    "train.test",
)  # one validation set for all trials


@dataclass(frozen=True)
class Dimension:
    """One key of the space: a range, or choices."""

    key: str
    default: Any
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()

    def rounded(self, value: Any) -> Any:
        """Six digits are enough of a number that was drawn."""
        if self.choices or self.whole or value == self.default:
            return value
        return min(max(float(f"{value:.6g}"), self.low), self.high)


@dataclass(frozen=True)
class Space:
    name: str
    question: str
    place: str
    experiment: list[str]  # the overrides that all trials share
    base: Config  # what they make; the test set is not read
    dimensions: list[Dimension]
    trials: int
    seed: int
    warmup: int
    startup: int

    def configuration(self, params: Mapping[str, Any]) -> Config:
        """That of `fedlens run` with these overrides, without the test set."""
        return _changed(self.base, params)


def read_space(name: str, *, place: str | None = None, trials: int | None = None, overrides: Sequence[str] = ()) -> Space:
    """A YAML file by its path, or a ready-made space by its name. What an override sets is not searched."""
    if not name.endswith((".yaml", ".yml")) and name not in choices("search"):
        raise unknown("search", name, choices("search"))
    path = Path(name) if name.endswith((".yaml", ".yml")) else Path(__file__).parents[1] / "conf" / "search" / f"{name}.yaml"
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # yaml's own errors share no public base with those of the disk
        raise UserError(f"search: {path} cannot be read ({first_line(error)})") from None
    _known(content, SPACE_KEYS, f"search {path.stem}")
    places = _known(content.get("where") or {"here": []}, None, "where")
    place = place or next(iter(places))
    if place not in places:
        raise unknown("--on", place, places)
    for text in overrides:
        if text.startswith(("run.dir=", "run.if_exists=", "run.trackers=")):
            raise UserError(f"override: {text!r} given, but the trials of a search have folders of their own and no trackers")
    experiment = [*_texts(places[place], f"where {place}"), *_texts(content.get("set"), "set"), *map(str, overrides)]
    base = compose([*experiment, "train.test=false"])
    if base.data.val_fraction == 0:
        raise UserError("data.val_fraction: 0.0 given, but a search decides on a validation set; allowed is > 0")
    set_here = {text.split("=")[0] for text in normalise(overrides)}
    given = {key: what for key, what in _known(content.get("space") or {}, None, "space").items() if key not in set_here}
    keys = known_keys()
    dimensions = [_dimension(str(key), what, place, places, base, keys) for key, what in given.items()]
    if not dimensions:
        raise UserError(f"space: nothing to search in {path}; allowed is key: {{low, high, log or step}} or {{choices: […]}}")
    pruning = _known(content.get("pruning") or {}, {"warmup", "startup"}, "pruning")
    return Space(
        path.stem,
        str(content.get("question", "")),
        place,
        experiment,
        base,
        dimensions,
        _count("trials", content.get("trials", 20) if trials is None else trials, 1),
        _count("seed", content.get("seed", 0), 0),
        _count("pruning.warmup", pruning.get("warmup", 1), 0),
        _count("pruning.startup", pruning.get("startup", 5), 1),
    )


def _dimension(key: str, given: Any, place: str, places: Collection[str], base: Config, known: Collection[str]) -> Dimension:
    if key not in known:
        raise unknown("space", key, known)
    kind, default = _kind(key), reduce(getattr, key.split("."), base)
    if key in FIXED or key.startswith("run.") or kind not in (int, float, bool, str):
        raise UserError(
            f"space: {key} cannot be searched; allowed is any single value that trains on the same data and is judged on the same"
        )
    if isinstance(given, Mapping) and given and set(given) <= set(places):
        given = given.get(place, {})
    given = _known(given, {"low", "high", "log", "step", "choices"}, f"space: {key}")
    if "choices" in given:
        found = _choices(key, given, default, kind)
        ends: Sequence[Any] = found.choices
    else:
        found = _range(key, given, default, kind)
        ends = (found.low, found.high)
    for value in ends:
        _changed(base, {key: value})
    return found


def _changed(base: Config, params: Mapping[str, Any]) -> Config:
    config = OmegaConf.structured(base)
    for key, value in params.items():
        try:
            OmegaConf.update(config, key, value)
        except OmegaConfBaseException as error:
            raise UserError(f"space: {key}: {first_line(error)}") from None
    return to_config(config)


def _choices(key: str, given: Mapping[str, Any], default: Any, kind: type) -> Dimension:
    found, allowed = given["choices"], "a list of different single values, without low and high"
    if not isinstance(found, list) or not found or len(given) > 1:
        raise bad_value(f"space: {key}: choices", found, allowed)
    if not all(isinstance(value, int | float | str | NoneType) for value in found) or len({str(value) for value in found}) < len(found):
        raise bad_value(f"space: {key}: choices", found, allowed)
    if default not in found:
        raise UserError(f"space: {key}: its default, {default!r}, is none of the choices, and it is the first trial; add it")
    return Dimension(key, default, choices=tuple(float(value) if kind is float and type(value) is int else value for value in found))


def _range(key: str, given: Mapping[str, Any], default: Any, kind: type) -> Dimension:
    number = int if kind is int else (int, float)
    values: list[Any] = [given.get(name) for name in ("low", "high", "step", "log")]
    low, high, step, is_log = values
    if kind not in (int, float):
        raise bad_value(f"space: {key}", dict(given), "choices, for it is no number")
    for name, value in (("low", low), ("high", high), *((("step", step),) if "step" in given else ())):
        if isinstance(value, bool) or not isinstance(value, number) or not abs(value) < float("inf"):
            raise bad_value(f"space: {key}: {name}", value, "a whole number" if kind is int else "a number")
    if not low < high:
        raise bad_value(f"space: {key}: low", low, f"below high, {high!r}")
    if is_log not in (None, True, False) or (is_log and low <= 0) or (is_log and step is not None):
        raise bad_value(f"space: {key}: log", is_log, "true or false; true with low > 0 and without step")
    if step is not None and (step <= 0 or not _on_grid(high, low, step)):
        raise bad_value(f"space: {key}: step", step, "> 0 and a whole part of high - low")
    if default is None or not low <= default <= high or (step is not None and not _on_grid(default, low, step)):
        grid = "" if step is None else f" in steps of {step}"
        raise UserError(
            f"space: {key}: its default, {default!r}, is not in {low} to {high}{grid}, and it is the first trial; widen the range"
        )
    return Dimension(key, default, low, high, step, bool(is_log), kind is int)


def _on_grid(value: float, low: float, step: float) -> bool:
    return abs((value - low) / step - round((value - low) / step)) < 1e-8


def _kind(key: str) -> Any:
    """The type of a key in the schema, without None."""
    found: Any = Config
    for part in key.split("."):
        found = get_type_hints(found)[part]
        options = [kind for kind in get_args(found) if kind is not NoneType]
        found = options[0] if NoneType in get_args(found) else found
    return found


def _known(mapping: Any, keys: Collection[str] | None, where: str) -> Mapping[str, Any]:
    if not isinstance(mapping, Mapping):
        raise UserError(f"{where}: {type(mapping).__name__} given, allowed is a mapping")
    for key in mapping if keys is not None else ():
        if key not in (keys or ()):
            raise unknown(where, str(key), keys or ())
    return mapping


def _texts(given: Any, where: str) -> list[str]:
    if given is not None and not isinstance(given, list):
        raise bad_value(where, given, "a list of key=value")
    return [str(text) for text in given or []]


def _count(field: str, given: Any, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise bad_value(field, given, f"a whole number >= {least}")
    return given


def as_overrides(params: Mapping[str, Any]) -> list[str]:
    """As on the command line."""
    return [f"{key}={spelled(value)}" for key, value in params.items()]


def spelled(value: Any) -> str:
    """A value of YAML as that of an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_element, value))}]"
    return str(value) if re.fullmatch(r"[\w.+/-]+", str(value)) else f"'{value}'"


def _element(value: Any) -> str:
    """In a list a name may have spaces, as kinds of weights do."""
    return value if isinstance(value, str) and re.fullmatch(r"\w+( \w+)*", value) else spelled(value)
