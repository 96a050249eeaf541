"""How a configuration is composed: from Hydra's YAML and overrides, or from the file that a run folder keeps.

`compose` is what both `fedlens run` and `fl.run` call. An unknown key is an error that names the nearest.
"""

import copy
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from fedlens.config import Config, known_keys, validate
from fedlens.config import choices as choices
from fedlens.errors import UserError, first_line, unknown
from fedlens.lens.mask import KINDS

ConfigStore.instance().store(name="schema", node=Config)
GROUPS = ("experiment", "data", "model")


def _other_kinds(value: str) -> list[str]:
    given = [kind.strip() for kind in value.strip().removeprefix("[").removesuffix("]").split(",")]
    if wrong := next((kind for kind in given if kind not in KINDS), None):
        raise unknown("mask.within", wrong, KINDS)
    return [kind for kind in KINDS if kind not in given]


def normalise(overrides: Sequence[str]) -> list[str]:
    """Check each override's key before Hydra sees it, and spell out our shorthands.

    `model=timm:NAME`, `model=hf:NAME` and `data=hf:NAME` choose the adapter and name what it adapts; `sparsity=0.9` (or
    `mask.sparsity`) is `mask.density=0.1`, for every strategy alike, in sweeps too; `mask.within=[value]` is `mask.without` of all other kinds.
    """
    keys = set(known_keys())
    done: list[str] = []
    for text in overrides:
        name, _, value = text.partition("=")
        if name in ("model", "data") and value.startswith(("timm:", "hf:")):
            done += [f"{name}={value.split(':', 1)[0]}", f"{name}.name={_quoted(value)}"]
            continue
        if name in _text_keys():
            text = f"{name}={_as_text(value)}"
        if name in ("sparsity", "mask.sparsity", "density"):
            text = f"mask.density={value if name == 'density' else _densities(text, value)}"
        if name == "mask.within":
            text = f"mask.without=[{','.join(_other_kinds(value))}]"
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise UserError(f"override: {text!r} is not key=value ({first_line(error)})") from None
        key = str(parsed.key_or_group)
        if parsed.is_delete() or parsed.is_add() or parsed.is_force_add():
            raise UserError(f"override: {text!r} given, allowed is key=value (keys can be neither added nor deleted)")
        if key in GROUPS:
            if not parsed.is_sweep_override() and value not in choices(key):
                raise unknown(key, value, choices(key))
        elif not key.startswith("hydra") and key not in keys:
            raise unknown("key", key, keys)
        done.append(text)
    return done


@cache
def _text_keys() -> frozenset[str]:
    """Keys whose value is a text."""
    schema = _schema()
    found = set()
    for key in known_keys():
        section, _, name = key.rpartition(".")
        node = (OmegaConf.select(schema, section) if section else schema)._get_node(name)
        if isinstance(node, StringNode):
            found.add(key)
    return frozenset(found)


def _as_text(value: str) -> str:
    """The value of a key that is a text, quoted where Hydra's grammar would refuse it or make a number of it: a path may have any letters. `~/` is home."""
    if value.startswith("~/"):
        value = str(Path(value).expanduser())
    try:
        parsed = OverridesParser.create().parse_override(f"x={value}")
    except HydraException:
        return _quoted(value)
    if parsed.is_sweep_override():
        return value
    return value if isinstance(parsed.value(), str | None) else _quoted(value)


def _quoted(value: str) -> str:
    """In Hydra's quotes: a backslash counts only before a quote, and at the end."""
    inner = re.sub(r"(\\*)(')", r"\1\1\\\2", value)
    inner = re.sub(r"(\\+)$", r"\1\1", inner)
    return f"'{inner}'"


def _densities(text: str, value: str) -> str:
    try:
        return ",".join(repr(round(1 - float(v), 12)) for v in value.split(","))
    except ValueError:
        raise UserError(f"override: {text!r} given, allowed is a number below 1, the fraction that does not train") from None


def compose(overrides: Sequence[str]) -> Config:
    """Overrides as on the command line -> a validated configuration.

    Values are put on top of what the groups give, as Hydra does it; what the groups give is composed once a process: a study has hundreds of configurations.
    """
    wanted = normalise(overrides)
    groups = tuple(text for text in wanted if text.partition("=")[0] in GROUPS)
    try:
        values = OverridesParser.create().parse_overrides([text for text in wanted if text not in groups])
        if any(value.is_sweep_override() or value.is_hydra_override() for value in values):
            return to_config(_by_hydra(tuple(wanted)))  # which says what is wrong with it
        return _on_top(copy.deepcopy(_by_hydra(groups)), values)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"override: {_what_failed(error, wanted)}") from None


def _on_top(composed: DictConfig, values: Sequence[Override], to_train: bool = True) -> Config:
    """The configuration with these single values, as Hydra sets them."""
    for value in values:
        OmegaConf.update(composed, str(value.key_or_group), value.value(), merge=True)
    return to_config(composed, to_train)


@cache
def _by_hydra(overrides: tuple[str, ...]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_module("fedlens.conf", version_base="1.3"):
        return hydra_compose("config", list(overrides))


def _what_failed(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's message without its stack: which value did not fit which type."""
    cause = error.__cause__ or error
    line = first_line(cause)
    key = getattr(cause, "full_key", None) or next((o for o in overrides if o.split("=")[0] in str(error)), "")
    return f"{key}: {line}" if key and key not in line else line


@cache
def _schema() -> DictConfig:
    return OmegaConf.structured(Config)  # type: ignore[no-any-return]


def to_config(composed: DictConfig, to_train: bool = True) -> Config:
    try:
        whole = OmegaConf.merge(_schema(), composed)
        config = OmegaConf.to_object(whole)
    except OmegaConfBaseException as error:
        raise UserError(f"{getattr(error, 'full_key', None) or 'config'}: {first_line(error)}") from None
    assert isinstance(config, Config)
    return validate(config, to_train=to_train)


def with_values(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with overrides of single keys on top."""
    if not overrides:
        return config
    try:
        return _on_top(OmegaConf.structured(config), OverridesParser.create().parse_overrides(normalise(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"override: {first_line(error)}") from None


def from_file(path: Path, overrides: Sequence[str] = (), *, to_train: bool = True) -> Config:
    """A saved configuration, with overrides on top. Groups are no longer a choice: the file has what they gave.

    `to_train` False: it is only looked at, and may name rules of somebody's own that this process does not have."""
    try:
        saved = OmegaConf.load(path)
    except (OSError, ValueError) as error:
        raise UserError(f"config: {path} cannot be read ({error})") from None
    except Exception as error:  # yaml's own errors share no public base with the above
        raise UserError(f"config: {path} is not YAML ({first_line(error)})") from None
    if not isinstance(saved, DictConfig):
        raise UserError(f"config: {path} is not a mapping of keys")
    wanted = normalise(overrides)
    if groups := [text for text in wanted if text.partition("=")[0] in GROUPS]:
        raise UserError(f"override: {groups[0]!r} given, allowed on top of {path} are single keys: it has what its groups gave")
    try:
        values = OverridesParser.create().parse_overrides(wanted)
        if sweep := next((value for value in values if value.is_sweep_override()), None):
            raise UserError(f"override: {sweep.input_line!r} given, allowed is one value")
        return _on_top(OmegaConf.merge(_schema(), saved), values, to_train)  # type: ignore[arg-type]
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"config: {first_line(error)}") from None


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))
