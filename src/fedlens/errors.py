"""The errors that users see: one line that says what is wrong, what was expected and how to fix it."""

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class UserError(Exception):
    """A problem that the user can fix. The command line prints it as one line and exits with status 2."""

    def __str__(self) -> str:
        return clean_text(super().__str__())


class Elsewhere(UserError):
    """A disk or network failure; retrying may succeed."""


def clean_text(text: str) -> str:
    """Return a text as one line, with control characters and what is not UTF-8 as escapes: a received name must not forge a line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class OneLine(logging.Formatter):
    """A log format whose messages have no control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = clean_text(record.message)
        return super().formatMessage(record)


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


def check_utf8(name: object, field: str) -> None:
    """Raise for a name that is not UTF-8: reports, logs and JSON could not hold it."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise UserError(f"{field}: {clean_text(str(name))} is not UTF-8; rename it.") from None


def optional(module: str, extra: str, field: str) -> Any:
    """Import a library that not every installation has; if it is missing, the error names the extra of fedlens that installs it."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError(f"{field} needs {module}; install it with: pip install 'fedlens[{extra}]'") from None


@contextmanager
def system_errors() -> Iterator[None]:
    """Report a failure of the operating system, or memory that runs out, as one line."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        reason = first_line(error)
        if isinstance(error, OSError) and error.strerror and not isinstance(error, BrokenPipeError):
            raise Elsewhere(f"{error.filename or 'a file or standard output'}: {error.strerror.lower()}.") from error
        if isinstance(error, RecursionError):
            raise UserError("a value, or the content of a file, is nested too deeply.") from error
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in reason:
            fix = "try a smaller optim.batch_size, train.eval_batch_size or model.image_size; earlier checkpoints are intact"
            raise UserError(f"device: out of memory; {fix} ({reason})") from error
        raise


def first_line(error: BaseException) -> str:
    """Return an exception's message as one line, for an error that is shown as one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
