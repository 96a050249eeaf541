"""Reading of plans and search spaces: YAML that users write, checked key by key."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedlens.errors import UserError, bad_value, first_line, unknown
from fedlens.overrides import choices, parse_yaml


def yaml_path(kind: str, name: str) -> Path:
    """Return the path of a YAML file, or that of the built-in plan or space called `name`. kind: "study" or "search"."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in choices(kind):
        raise unknown(kind, name, choices(kind))
    return Path(__file__).parents[1] / "conf" / kind / f"{name}.yaml"


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
    for key in mapping if keys is not None else ():
        if key not in (keys or ()):
            raise unknown(f"{where}: key", str(key), keys or ())
    return mapping


def at_place(value: Any, place: str, places: Collection[str], where: str) -> Any:
    """Return a value that may be set per place: a mapping has one entry per place, anything else holds for all."""
    return check_keys(value, places, where).get(place) if isinstance(value, Mapping) else value


def override_list(value: Any, where: str) -> list[str]:
    if value is not None and not isinstance(value, list):
        raise bad_value(where, value, "a list of key=value")
    return [str(text) for text in value or []]


def whole_number(value: Any, field: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise bad_value(field, value, f"a whole number >= {least}")
    return value


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
