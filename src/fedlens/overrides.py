"""How a configuration is composed: from Hydra's YAML and overrides, or from the file in a run folder.

Both `fedlens run` and `fl.run` call `compose`. An unknown key is an error that names the nearest one.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from fedlens.config import CONF, MOVED, Config, keys, known_keys, upgraded, validate
from fedlens.config import choices as choices
from fedlens.errors import UserError, first_line, unknown
from fedlens.registry import registry

log = logging.getLogger("fedlens")
ConfigStore.instance().store(name="schema", node=Config)
GROUPS = ("experiment", "data", "model")
MAX_YAML = {"characters": 2**18, "values": 20_000, "levels": 30, "characters in a value": 2000}  # of YAML from outside
DICTS = tuple(f"{path}." for path, key in keys().items() if isinstance(key.default, dict))  # keys that hold options by name
TEXTS = {path for path, key in keys().items() if key.kind is str}


def _other_kinds(value: str) -> list[str]:
    kinds, within = list(registry("kind of weight")), [kind.strip() for kind in value.strip(" []").split(",")]
    for kind in within:
        if kind not in kinds:
            raise unknown("mask.within", kind, kinds)
    return [kind for kind in kinds if kind not in within]


def normalise(overrides: Sequence[str]) -> list[str]:
    """Check each override's key before Hydra sees it, and expand the shorthands.

    `model=timm:NAME`, `model=hf:NAME` and `data=hf:NAME` choose the adapter and name what it adapts. `sparsity=0.9` (or `mask.sparsity`) is
    `mask.density=0.1`, in sweeps too. `mask.within=[value]` is `mask.without` of all other kinds. `trainer=federated` without an experiment
    is `experiment=fedavg_iid`. A key of version 0.2 that has moved is read with a warning.
    """
    done: list[str] = []
    named = {text.partition("=")[0] for text in overrides}
    for text in overrides:
        name, _, value = text.partition("=")
        if name in MOVED:
            rule_key, _, option, _ = MOVED[name]
            text = f"{rule_key}_options.{option}={value}"
            log.warning("%s is deprecated: it is now %s_options.%s", name, rule_key, option)
        elif name in ("model", "data") and value.startswith(("timm:", "hf:")):
            done.append(f"{name}={value.partition(':')[0]}")
            text = f"{name}.name={quoted(value)}"
        elif name == "trainer" and "experiment" not in named and value in ("centralized", "federated"):
            value = "fedavg_iid" if value == "federated" else value
            text = f"experiment={value}"
        elif name in TEXTS:
            text = f"{name}={_as_text(value)}"
        elif name in ("sparsity", "mask.sparsity", "density"):
            text = f"mask.density={value if name == 'density' else _densities(text, value)}"
        elif name == "mask.within":
            text = f"mask.without=[{','.join(_other_kinds(value))}]"
        done.append(_checked(text, value))
    return done


def _checked(text: str, value: str) -> str:
    """Return an override whose key and form are valid."""
    try:
        parsed = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError) as error:
        raise UserError(f"override: {text!r} is not key=value ({first_line(error)}).") from None
    key = str(parsed.key_or_group)
    if parsed.is_delete() or parsed.is_add() or parsed.is_force_add():
        raise UserError(f"override must be key=value, got {text!r}: keys can be neither added nor deleted.")
    if key in GROUPS:
        if not parsed.is_sweep_override() and value not in choices(key):
            raise unknown(key, value, choices(key))
    elif not key.startswith(("hydra", *DICTS)) and key not in known_keys():
        raise unknown("key", key, known_keys())
    return text


def _as_text(value: str) -> str:
    """Return the value of a text key, quoted where Hydra's grammar would reject it or read a number: a path may have any letters."""
    if value.startswith("~/"):
        value = str(Path(value).expanduser())
    try:
        parsed = OverridesParser.create().parse_override(f"x={value}")
    except (HydraException, ValueError):  # ValueError: thousands of digits
        return quoted(value)
    if parsed.is_sweep_override():
        return value
    return value if isinstance(parsed.value(), str | None) else quoted(value)


def quoted(value: str | Path) -> str:
    """Return text or a path as the value of an override, quoted for Hydra's grammar."""
    return QuotedString(str(value), Quote.single).with_quotes()


def _densities(text: str, value: str) -> str:
    try:
        return ",".join(repr(round(1 - float(v), 12)) for v in value.split(","))
    except ValueError:
        raise UserError(f"override: sparsity must be a number below 1, the share that does not train; got {text!r}.") from None


def compose(overrides: Sequence[str]) -> Config:
    """Return the validated configuration of overrides as on the command line.

    Single values are put on top of what the groups set, as Hydra does; the groups are composed once per process, because a study has
    hundreds of configurations.
    """
    if isinstance(overrides, str) or not isinstance(overrides, Sequence) or not all(isinstance(text, str) for text in overrides):
        raise UserError(f"overrides must be a list such as ['experiment=centralized', 'seed=3'], got {type(overrides).__name__}.")
    wanted = normalise(_without_unused_options(overrides))
    groups = tuple(text for text in wanted if text.partition("=")[0] in GROUPS or text.startswith("hydra"))
    with _one_line("override", wanted):
        composed = copy.deepcopy(_by_hydra(groups))
        composed.optim.lr = learning_rate_of(groups)
        return _on_top(composed, [text for text in wanted if text not in groups])


def _without_unused_options(overrides: Sequence[str]) -> list[str]:
    """Drop options of version 0.2 whose rule is not chosen: there they had no effect."""
    chosen = dict(text.split("=", 1) for text in overrides if "=" in text)
    used = []
    for text in overrides:
        name = text.partition("=")[0]
        if name in MOVED and MOVED[name][1] not in chosen.get(MOVED[name][0], "").split(","):
            log.warning("%s is deprecated and has no effect without %s=%s", name, *MOVED[name][:2])
        else:
            used.append(text)
    return used


@cache
def learning_rate_of(groups: tuple[str, ...]) -> float:
    """Return the learning rate of a model in an experiment, from conf/rates.yaml."""
    chosen = {"model": "tiny", "experiment": "centralized"} | dict(text.split("=", 1) for text in groups)
    rates = OmegaConf.select(OmegaConf.load(CONF / "rates.yaml"), chosen["model"])
    return float(rates.get(chosen["experiment"], rates["default"]))


@cache
def _by_hydra(groups: tuple[str, ...]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_module("fedlens.conf", version_base="1.3"):
        return hydra_compose("config", list(groups))


def _on_top(composed: DictConfig, overrides: Sequence[str], to_train: bool = True) -> Config:
    """Return the configuration with these overrides of single keys, as Hydra sets them."""
    OmegaConf.set_struct(composed, False)  # options of rules are not in the schema; all other keys have been checked
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            raise UserError(f"override must be one value, got {override.input_line!r}.")
        OmegaConf.update(composed, str(override.key_or_group), override.value(), merge=True)
    return to_config(composed, to_train)


@contextmanager
def _one_line(what: str, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Report an error of Hydra or OmegaConf without its stack: which value did not fit which type."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        line = first_line(cause)
        key = getattr(cause, "full_key", None) or next((text for text in overrides if text.split("=")[0] in str(error)), "")
        raise UserError(f"{what}: {line}" if not key or key in line else f"{what}: {key}: {line}") from None


@cache
def _schema() -> DictConfig:
    return OmegaConf.structured(Config)  # type: ignore[no-any-return]


def to_config(composed: DictConfig, to_train: bool = True) -> Config:
    """Return a composed configuration as validated dataclasses."""
    with _one_line("config"):
        config = OmegaConf.to_object(OmegaConf.merge(_schema(), composed))
    assert isinstance(config, Config)
    return validate(config, to_train=to_train)


def with_values(config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration with overrides of single keys on top."""
    wanted = normalise(overrides)
    with _one_line("override", wanted):
        return _on_top(OmegaConf.structured(config), wanted)


def from_file(path: Path, overrides: Sequence[str] = (), *, to_train: bool = True) -> Config:
    """Return a saved configuration with overrides of single keys on top. The file has what its groups set, so groups cannot be changed.

    `to_train` False: it is only read, and may name rules that this process does not know.
    """
    try:
        saved = parse_yaml(path.read_text(encoding="utf-8"))  # a received run must not read this machine's environment
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"config: {path} cannot be read as YAML ({first_line(error)}).") from None
    if not isinstance(saved, dict):
        raise UserError(f"config: {path} is not a mapping of keys.")
    wanted = normalise(overrides)
    if groups := [text for text in wanted if text.partition("=")[0] in GROUPS]:
        raise UserError(f"override: only single keys can be set on top of {path}, got {groups[0]!r}.")
    with _one_line("config"):
        return _on_top(OmegaConf.merge(_schema(), upgraded(saved)), wanted, to_train)  # type: ignore[arg-type]


def parse_yaml(text: str) -> Any:
    """Return YAML that may come from anyone as plain lists and mappings; raise ValueError if it is too large or holds an interpolation.

    Aliases count as what they stand for: a few hundred bytes could make 10⁹ values. An interpolation ${…} could read environment variables.
    """
    _bound("characters", len(text))
    anchors: dict[str | None, tuple[int, int]] = {}  # anchor -> values and levels of what it names
    open_: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # the collections around the current place: anchor, values and levels so far
    for event in yaml.parse(text, yaml.SafeLoader):
        if getattr(event, "tag", None) not in (None, "!"):
            raise ValueError(f"it names a type, {event.tag!r}; write the value alone")
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, 1, 1))
            _bound("levels", len(open_))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, values, levels = open_.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor, values, levels = event.anchor, 1, 0
            _bound("characters in a value", len(event.value))
            if "${" in event.value:  # here, because escapes have been read
                raise ValueError("it contains an interpolation ${…}; write the value itself")
        elif isinstance(event, yaml.AliasEvent):
            anchor, (values, levels) = None, anchors.get(event.anchor, (MAX_YAML["values"] + 1, 0))  # an unknown one may contain itself
        else:
            continue
        anchors[anchor] = values, levels
        around, so_far, deepest = open_[-1]
        open_[-1] = around, so_far + values, max(deepest, levels + 1)
        _bound("values", so_far + values)
        _bound("levels", len(open_) + levels)
    return yaml.load(text, Loader=get_yaml_loader())  # safe, with the numbers of YAML 1.2


def _bound(what: str, count: int) -> None:
    if count > MAX_YAML[what]:
        raise ValueError(f"it has more than {MAX_YAML[what]:,} {what}")


def to_yaml(config: Config) -> str:
    """Return a configuration as YAML, all keys and values."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
