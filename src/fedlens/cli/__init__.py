"""The command line. arguments.py declares the commands; the other modules have a function for each, which takes its arguments by name.

An error that the user can fix is one line on stderr and exit status 2.
"""

import io
import logging
import os
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import suppress

from fedlens.cli.arguments import parser as parser
from fedlens.errors import OneLine, UserError, check_utf8, system_errors

log = logging.getLogger("fedlens")


def _prepare_streams() -> None:
    """Make all three standard streams usable: the shell may have closed them, and a path may not be UTF-8."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends; the next file would get its number
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_unwritable_output() -> None:
    """Send what standard output cannot take to /dev/null: Python would fail on it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    _prepare_streams()
    top = parser()
    args, rest = top.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    elif rest:
        args.overrides += rest  # key=value after an option
    if not log.handlers:
        console = logging.StreamHandler()
        console.setFormatter(OneLine("%(message)s"))
        log.addHandler(console)
        log.setLevel(logging.INFO)
        log.propagate = False
    try:
        with system_errors():
            for word in sys.argv[1:] if argv is None else argv:
                check_utf8(word, "argument")
            options = {name: value for name, value in vars(args).items() if name not in ("command", "part", "call")}
            status: int = pkgutil.resolve_name(args.call)(**options)  # imported now: the heavy modules are not for --help
            sys.stdout.flush()
            return status
    except UserError as error:
        with suppress(OSError):
            print(f"error: {error}", file=sys.stderr)
        _drop_unwritable_output()
        return 2
    except BrokenPipeError:  # the reader of a pipe has closed it
        _drop_unwritable_output()
        return 141
    except KeyboardInterrupt:
        again = args.command in ("study", "search")
        how = "the same command continues with what is missing" if again else "continue an interrupted run with: fedlens resume RUN"
        print(f"stopped; {how}", file=sys.stderr)
        return 130
