"""The one error that users see: one line that names the field, what was given and what is allowed."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend. The command line prints it as one line and exits with status 2."""


class Elsewhere(UserError):
    """Of the disk or the network, not of what was asked for: another time it may go well."""


def bad_value(field: str, given: object, allowed: str) -> UserError:
    """`optim.lr: -1 given, allowed is > 0`"""
    return UserError(f"{field}: {given!r} given, allowed is {allowed}")


def unknown(field: str, given: str, known: Iterable[str]) -> UserError:
    """An unknown name, with the nearest valid one first."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(names) if len(names) <= 20 else ", ".join(near or names[:20]) + ", …"
    return UserError(f"{field}: {given!r} is unknown; {hint}allowed is one of {listed}")


def first_line(error: BaseException) -> str:
    """An exception in one line, for an error that is shown as one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
