"""Registries: the named variants that a configuration can choose. Adding one is one function and one line.

A registry lives in the module of its built-in variants; HOMES says where, so that the configuration can list names without importing torch.

    @fl.register("merge rule")
    def agreeing_mean(deltas, weights, *, share=0.7): ...
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from fedlens.errors import UserError, unknown

T = TypeVar("T")
HOMES = {  # kind -> module:attribute of its registry
    "kind of weight": "fedlens.lens.mask:KINDS",
    "algorithm": "fedlens.training.algorithms:ALGORITHMS",
    "mask rule": "fedlens.lens.mask_rules:STRATEGIES",
    "merge rule": "fedlens.lens.merging:RULES",
    "metric": "fedlens.tasks.metrics:METRICS",
    "partition": "fedlens.data.partition:SCHEMES",
    "schedule": "fedlens.optim.schedules:SCHEDULES",
    "server optimizer": "fedlens.optim.server:SERVER",
}


class Registry(dict[str, T]):
    """Functions or classes by the name that a configuration chooses them by."""

    def __init__(self, kind: str, *members: T, supplied: tuple[str, ...] = ()) -> None:
        self.kind, self.supplied = kind, supplied  # `supplied`: keywords that the caller sets, not the user
        self.check: Callable[[str, dict[str, Any]], None] = lambda name, options: None  # raises for options that a variant refuses
        for member in members:
            self.register(member)

    def register(self, member: T, name: str | None = None) -> T:
        """Add a variant under its own name or another; return it, so that this works as a decorator."""
        self[name or str(member.__name__)] = member  # type: ignore[attr-defined]
        return member

    def choose(self, name: str, field: str) -> T:
        """Return the variant of this name; an unknown one is an error of the configuration key `field`."""
        if name not in self:
            raise unknown(field, name, self)
        return self[name]

    def describe(self, name: str) -> str:
        """Return the first line of a variant's docstring."""
        return (inspect.getdoc(self[name]) or "").partition("\n")[0]

    def options(self, name: str) -> dict[str, Any]:
        """Return the options of a variant, name -> default."""
        return options_of(self[name], self.supplied)  # type: ignore[arg-type]

    def __setitem__(self, name: str, member: T) -> None:
        if not callable(member):
            raise UserError(f"{self.kind} {name!r} must be a function or a class, got {type(member).__name__}.")
        super().__setitem__(name, member)


def registry(kind: str) -> Registry[Any]:
    """Return the registry of a kind of variant, importing the module that it lives in."""
    if kind not in HOMES:
        raise unknown("kind", kind, HOMES)
    module, _, name = HOMES[kind].partition(":")
    found: Registry[Any] = getattr(import_module(module), name)
    return found


def register(kind: str, name: str | None = None) -> Callable[[T], T]:
    """Return a decorator that adds a function or class to the registry of `kind`, under its own name or another."""
    return lambda member: registry(kind).register(member, name)


def options_of(member: Callable[..., Any], supplied: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the options of a variant, name -> default: its keyword-only parameters less those that the caller supplies."""
    parameters = inspect.signature(member).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in supplied}


def accepted(member: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the values that the signature names; all of them for a variant that takes **kwargs."""
    parameters = inspect.signature(member).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}


def check_options(field: str, name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise for an option that the variant `name` does not have, or a required one that is missing."""
    for option in given.keys() - known.keys():
        if not known:
            raise UserError(f"{field} must be empty for {name}, which has no options; got {option!r}.")
        raise unknown(f"{field} of {name}", option, known)
    for option, default in known.items():
        if default is inspect.Parameter.empty and option not in given:
            raise UserError(f"{field}.{option} must be set: {name} has no default for it.")
