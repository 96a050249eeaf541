"""Plans and search spaces: YAML that users write. Each mapping has a table of its keys, which gives defaults, checks and errors."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from fedlens.config import CONF
from fedlens.errors import UserError, bad_value, first_line, unknown
from fedlens.overrides import choices, parse_yaml

REQUIRED = object()  # the default of a key that must be there


@dataclass(frozen=True)
class Field:
    """A key of a mapping. Where it is missing or null, it has its default."""

    default: Any = None
    expected: str = ""  # its values, in an error message
    holds: Callable[[Any], object] = lambda value: True
    per_place: bool = False  # instead of one value, it may be a mapping with a value per place


def whole(least: int, default: Any = None, per_place: bool = False) -> Field:
    """Declare a key that is a whole number."""
    return Field(default, f"a whole number >= {least}", lambda value: type(value) is int and value >= least, per_place)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def list_of(kind: type, fewest: int = 0) -> Callable[[Any], bool]:
    """Return a check for a list of values of one type."""
    return lambda value: isinstance(value, list) and len(value) >= fewest and all(isinstance(each, kind) for each in value)


TEXT = Field("")
MAPPING = Field({}, "a mapping", lambda value: isinstance(value, Mapping))
OVERRIDES = Field((), "a list of key=value", lambda value: isinstance(value, list))


@dataclass(frozen=True)
class Place:
    """The place that a plan or space is read for, such as embedded or cifar100."""

    name: str
    names: Collection[str]  # of all places
    overrides: Sequence[Any]

    def pick(self, value: Any, where: str, mapping: bool = False) -> Any:
        """Return the value for this place; anything but a mapping holds for all places. `mapping`: that value may itself be a mapping."""
        if not isinstance(value, Mapping) or (mapping and not set(value) <= set(self.names)):
            return value
        return check_keys(value, self.names, where).get(self.name)


def read_place(content: Mapping[str, Any], name: str | None, kind: str) -> Place:
    """Return the place with this name, or the first one under `where`."""
    places = check_keys(content.get("where") or {"here": []}, None, f"{kind}: where")
    name = name or next(iter(places))
    if name not in places:
        raise unknown("--on", name, places)
    return Place(name, places, override_list(places[name], f"{kind}: where: {name}"))


def yaml_path(kind: str, name: str) -> Path:
    """Return the path of a YAML file, or that of the built-in plan or space called `name`. kind: "study" or "search"."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in choices(kind):
        raise unknown(kind, name, choices(kind))
    return CONF / kind / f"{name}.yaml"


def read_yaml(kind: str, path: Path) -> Any:
    """Return the content of a YAML file as plain lists and mappings."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except Exception as error:  # the exceptions of YAML and those of the disk share no public base
        raise UserError(f"{kind}: {path} cannot be read as YAML ({first_line(error)}).") from None


def check_keys(mapping: Any, keys: Collection[str] | None, where: str) -> Mapping[str, Any]:
    """Return a mapping whose keys are all in `keys` (None: any key)."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{where} must be a mapping, got {type(mapping).__name__}.")
    if keys is not None and (wrong := [key for key in mapping if key not in keys]):
        raise unknown(f"{where}: key", str(wrong[0]), keys)
    return mapping


def read_fields(mapping: Any, fields: Mapping[str, Field], where: str, place: Place | None = None, **instead: Any) -> dict[str, Any]:
    """Return the value of every field, or the one in `instead`. Raise for an unknown key, and for a value that its field does not hold."""
    values, given = dict[str, Any](), check_keys(mapping, fields, where)
    for name, field in fields.items():
        value = given.get(name) if instead.get(name) is None else instead[name]
        if field.per_place and place is not None:
            value = place.pick(value, f"{where}: {name}")
        if value is None and field.default is not REQUIRED:
            value = field.default
        elif not field.holds(value):
            raise bad_value(f"{where}: {name}", value, field.expected)
        values[name] = value
    return values


def override_list(value: Any, where: str) -> Sequence[Any]:
    if value is not None and not OVERRIDES.holds(value):
        raise bad_value(where, value, OVERRIDES.expected)
    return value or ()


def override_text(value: Any) -> str:
    """Return a YAML value as the value of an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_element_text, value))}]"
    return str(value) if re.fullmatch(r"[\w.+/-]+", str(value)) else f"'{value}'"


def _element_text(value: Any) -> str:
    """Return an element of a list; unlike a single value, a name may contain spaces without quotes."""
    return value if isinstance(value, str) and re.fullmatch(r"\w+( \w+)*", value) else override_text(value)
