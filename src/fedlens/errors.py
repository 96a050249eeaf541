"""The errors that users see: one line that says what is wrong, what was expected and how to fix it."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A problem that the user can fix. The command line prints it as one line and exits with status 2."""


class Elsewhere(UserError):
    """A disk or network failure; retrying may succeed."""


def bad_value(field: str, value: object, expected: str) -> UserError:
    """Return the error for a value out of range: `optim.lr must be > 0, got -1.`"""
    return UserError(f"{field} must be {expected}, got {value!r}.")


def unknown(field: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name, with the nearest valid one."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed = ", ".join(names) if len(names) <= 20 else ", ".join(near or names[:20]) + ", …"
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UserError(f"{field} must be one of {listed}; got {name!r}.{hint}")


def first_line(error: BaseException) -> str:
    """Return an exception's message as one line, for an error that is shown as one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
