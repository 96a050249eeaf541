"""Progress: a bar on a terminal; otherwise nothing for a run, whose log has the lines, and one line per run of a study."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

log = logging.getLogger("fedlens")


class Bar:
    """Progress that is not shown."""

    def advance(self, steps: int = 1, note: str | None = None) -> None: ...


class _Lines(Bar):
    def __init__(self, title: str, total: int, done: int) -> None:
        self.title, self.total, self.done, self.here = title, total, done, 0
        self.started = time.monotonic()

    def advance(self, steps: int = 1, note: str | None = None) -> None:
        self.done, self.here = self.done + steps, self.here + steps
        left = (time.monotonic() - self.started) / self.here * (self.total - self.done)
        soon = f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left" if left > 0 else ""
        log.info("%s: %d of %d%s%s", self.title, self.done, self.total, soon, f": {note}" if note else "")


class _Rich(Bar):
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task = progress, task

    def advance(self, steps: int = 1, note: str | None = None) -> None:
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self.progress.update(self.task, advance=steps, **fields)


@contextmanager
def progress_bar(title: str, total: int, done: int = 0, show: bool = True, lines: bool = False) -> Iterator[Bar]:
    """Show progress; `lines`: print one line per step where there is no terminal."""
    if not show or not sys.stderr.isatty():
        yield _Lines(title, total, done) if show and lines else Bar()
        return
    title_column, note_column = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (title_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note_column)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Rich(progress, progress.add_task(title, total=total, completed=done, note=""))
