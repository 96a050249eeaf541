"""Spaces of hyper-parameters: YAML that a user can copy and edit (fedlens/conf/search/*.yaml).

    question: Which rates suit clients of few classes?         purpose of the search
    where: {embedded: [overrides…], cifar100: [overrides…]}    places; the first is the default of --on
    set: [overrides…]                                          for every trial
    space:
      optim.lr: {low: 1e-4, high: 0.3, log: true}              integers where the key is an integer; or {embedded: {…}, cifar100: {…}}
      optim.momentum: {low: 0.0, high: 0.95, step: 0.05}
      optim.clip_norm: {choices: [null, 0.1, 1.0]}
    trials: 24                                                 how many runs; --trials overrides it
    seed: 0                                                    of the sampler; the runs have the seed of the configuration
    pruning: {warmup: 2, startup: 5}                           prune from the third evaluation on, after five complete trials

The default configuration is the first trial, so the space must contain it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedlens.config import Config, keys, known_keys, value_of
from fedlens.errors import UserError, bad_value, first_line, unknown
from fedlens.overrides import compose, normalise, to_config
from fedlens.study import yaml_files
from fedlens.study.yaml_files import MAPPING, OVERRIDES, REQUIRED, TEXT, Field, Place, is_number, override_text, read_fields, whole


def _are_choices(values: Any) -> bool:
    single = isinstance(values, list) and all(value is None or isinstance(value, int | float | str) for value in values)
    return single and 0 < len({str(value) for value in values}) == len(values)


SPACE = {
    "question": TEXT,
    "where": Field(),
    "set": OVERRIDES,
    "space": MAPPING,
    "trials": whole(1, 20),
    "seed": whole(0, 0),
    "pruning": MAPPING,
}
PRUNING = {"warmup": whole(0, 1), "startup": whole(1, 5)}
NUMBER, WHOLE_NUMBER = Field(REQUIRED, "a number", is_number), Field(REQUIRED, "a whole number", lambda value: type(value) is int)
CHOICES = {"choices": Field(REQUIRED, "a list of different single values, without low and high", _are_choices)}
# Not searched: experiment and model.name set other keys too, and all trials must share one validation set.
FIXED = {"experiment", "model.name", "seed", "device", "data.name", "data.root", "data.download", "data.val_fraction", "train.test"}


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
        """Return a sampled number with six digits, within the range."""
        if self.choices or self.whole or value == self.default:
            return value
        return min(max(float(f"{value:.6g}"), self.low), self.high)


@dataclass(frozen=True)
class Space:
    """A search space with its default configuration, budget and pruning."""

    name: str
    question: str
    place: str
    experiment: list[str]  # overrides that all trials share
    base: Config  # the default configuration, with train.test=false
    dimensions: list[Dimension]
    trials: int
    seed: int
    warmup: int
    startup: int

    def configuration(self, params: Mapping[str, Any]) -> Config:
        """Return the default configuration with these values."""
        return _changed(self.base, params)


def read_space(name: str, *, place: str | None = None, trials: int | None = None, overrides: Sequence[str] = ()) -> Space:
    """Read a space by name or path. Keys that `overrides` set are not searched."""
    path = yaml_files.yaml_path("search", name)
    content, where = yaml_files.read_yaml("search", path), f"search: {path.stem}"
    fields = read_fields(content, SPACE, where, trials=trials)
    at = yaml_files.read_place(content, place, "search")
    pruning = read_fields(fields["pruning"], PRUNING, f"{where}: pruning")
    for text in overrides:
        if text.startswith(("run.dir=", "run.if_exists=", "run.trackers=")):
            raise UserError(f"search: leave out {text!r}: trials have folders of their own and no trackers.")
    experiment = [*map(str, [*at.overrides, *fields["set"], *overrides])]
    base = compose([*experiment, "train.test=false"])
    if base.data.val_fraction == 0:
        raise bad_value("data.val_fraction", base.data.val_fraction, "> 0, because a search decides on a validation set")
    overridden = {text.split("=")[0] for text in normalise(overrides)}
    dimensions = [_dimension(str(key), entry, at, base) for key, entry in fields["space"].items() if key not in overridden]
    if not dimensions:
        raise UserError(f"space: {path} has nothing to search; add key: {{low, high, log or step}} or key: {{choices: […]}}.")
    numbers = {"trials": fields["trials"], "seed": fields["seed"], **pruning}
    return Space(path.stem, str(fields["question"]), at.name, experiment, base, dimensions, **numbers)


def _dimension(key: str, entry: Any, place: Place, base: Config) -> Dimension:
    if key not in known_keys():
        raise unknown("space: key", key, known_keys())
    if key in FIXED or key.startswith("run.") or key not in keys() or keys()[key].kind not in (int, float, bool, str):
        raise UserError(f"space: {key} cannot be searched; choose a key with a single value that leaves data and validation as they are.")
    entry = place.pick(entry, f"space: {key}", mapping=True)
    dimension = (_choices if isinstance(entry, Mapping) and "choices" in entry else _range)(
        key, entry, value_of(base, key), keys()[key].kind
    )
    for value in dimension.choices or (dimension.low, dimension.high):
        _changed(base, {key: value})  # raises if the configuration does not allow it
    return dimension


def _changed(base: Config, params: Mapping[str, Any]) -> Config:
    config = OmegaConf.structured(base)
    for key, value in params.items():
        try:
            OmegaConf.update(config, key, value)
        except OmegaConfBaseException as error:
            raise UserError(f"space: {key}: {first_line(error)}.") from None
    return to_config(config)


def _choices(key: str, entry: Any, default: Any, kind: type) -> Dimension:
    values = read_fields(entry, CHOICES, f"space: {key}")["choices"]
    if default not in values:
        raise bad_value(f"space: {key}: choices", values, f"a list with the default, {default!r}, which is the first trial")
    return Dimension(key, default, choices=tuple(float(value) if kind is float and type(value) is int else value for value in values))


def _range(key: str, entry: Any, default: Any, kind: type) -> Dimension:
    if kind not in (int, float):
        raise bad_value(f"space: {key}", entry, "{choices: […]}, because it is not a number")
    number = WHOLE_NUMBER if kind is int else NUMBER
    log_scale = Field(False, "true or false", lambda value: isinstance(value, bool))
    fields = {"low": number, "high": number, "step": replace(number, default=None), "log": log_scale}
    low, high, step, log = read_fields(entry, fields, f"space: {key}").values()
    if not low < high:
        raise bad_value(f"space: {key}: low", low, f"< high ({high!r})")
    if log and (low <= 0 or step is not None):
        raise bad_value(f"space: {key}: log", log, "false, or low > 0 and no step")
    if step is not None and (step <= 0 or not _on_grid(high, low, step)):
        raise bad_value(f"space: {key}: step", step, "> 0 and divide high - low")
    if default is None or not low <= default <= high or (step is not None and not _on_grid(default, low, step)):
        grid = "" if step is None else f" in steps of {step}"
        raise UserError(f"space: {key}: its default, {default!r}, is not in {low} to {high}{grid}; widen the range: it is the first trial.")
    return Dimension(key, default, low, high, step, log, kind is int)


def _on_grid(value: float, low: float, step: float) -> bool:
    return abs((value - low) / step - round((value - low) / step)) < 1e-8


def as_overrides(params: Mapping[str, Any]) -> list[str]:
    """Return values as overrides of the command line."""
    return [f"{key}={override_text(value)}" for key, value in params.items()]
