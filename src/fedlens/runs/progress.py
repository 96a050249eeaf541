"""Progress for people: a bar on a terminal, nothing elsewhere (the log has the lines)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar(Protocol):
    def advance(self, steps: int = 1, note: str | None = None) -> None: ...


class _Silent:
    def advance(self, steps: int = 1, note: str | None = None) -> None:
        return


class _Rich:
    def __init__(self, progress: Progress, task: object) -> None:
        self.progress, self.task = progress, task

    def advance(self, steps: int = 1, note: str | None = None) -> None:
        if note is None:
            self.progress.update(self.task, advance=steps)  # type: ignore[arg-type]
        else:
            self.progress.update(self.task, advance=steps, note=note)  # type: ignore[arg-type]


@contextmanager
def progress_bar(title: str, total: int, done: int = 0, show: bool = True) -> Iterator[Bar]:
    if not show or not sys.stderr.isatty():
        yield _Silent()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Rich(progress, progress.add_task(title, total=total, completed=done, note=""))
