"""`fedlens study NAME`: execute what a plan lacks. Finished runs are skipped, interrupted ones go on, failed ones are told and retried on demand.

A study is a folder: runs/EXPERIMENT-HASH for every configuration, failures.json, results.csv and results.md. Killed at any moment and
started again, it ends with the same tables.
"""

import csv
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from fedlens.config import to_yaml
from fedlens.errors import UserError, first_line
from fedlens.runs.progress import progress_bar
from fedlens.runs.store import write_atomic, write_json
from fedlens.study.plans import Plan, Planned
from fedlens.study.statistics import summarise
from fedlens.training.execute import Run, execute

log = logging.getLogger("fedlens")
SHOWN = ("test_accuracy", "val_accuracy", "rounds", "bytes_up", "bytes_down")  # not seconds: a study that was killed has the same tables


class Study:
    def __init__(self, plan: Plan, folder: Path, *, jobs: int = 1, retry: bool = False) -> None:
        self.plan, self.folder, self.jobs, self.retry = plan, folder, jobs, retry
        self.failures: dict[str, str] = _read(folder / "failures.json")
        if retry:
            self.failures = {}

    def path(self, planned: Planned) -> Path:
        return self.folder / "runs" / planned.name

    def missing(self) -> list[Planned]:
        """Each configuration once, in the order of the plan; known failures only when a retry was asked for."""
        unique = {planned.name: planned for planned in self.plan.runs}
        return [p for p in unique.values() if not (self.path(p) / "summary.json").is_file() and p.name not in self.failures]

    def run(self) -> None:
        todo = self.missing()
        total = len({p.name for p in self.plan.runs})
        log.info("study %s on %s: %d runs, %d of them to do", self.plan.name, self.plan.place, total, len(todo))
        with progress_bar(self.plan.name, total, total - len(todo)) as bar:
            for planned, error in self._executed(todo):
                if error is not None:
                    self.failures[planned.name] = error
                    log.error("%s, seed %d: %s", planned.cell.label, planned.seed, error)
                bar.advance(1, planned.cell.label)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "failures.json", self.failures)
        write_atomic(self.folder / "results.csv", self.csv())
        write_atomic(self.folder / "results.md", self.markdown())

    def _executed(self, todo: Sequence[Planned]) -> Iterator[tuple[Planned, str | None]]:
        """Each run with what went wrong, as they end. One at a time in this process; more in processes of their own, one a GPU where
        there are several."""
        if self.jobs == 1:
            for planned in todo:
                yield planned, _attempt(partial(self._here, planned))
            return
        places: SimpleQueue[int] = SimpleQueue()
        for place in range(self.jobs):
            places.put(place)
        with ThreadPoolExecutor(self.jobs) as pool:
            running = [(p, pool.submit(_attempt, partial(self._apart, p, places))) for p in todo]
            for planned, future in running:
                yield planned, future.result()

    def _prepared(self, planned: Planned) -> Path:
        planned.config.run.dir, planned.config.run.if_exists = str(self.path(planned)), "resume"
        return self.path(planned)

    def _here(self, planned: Planned) -> None:
        self._prepared(planned)
        planned.config.run.progress = False
        with _quiet():
            execute(planned.config)

    def _apart(self, planned: Planned, places: "SimpleQueue[int]") -> None:
        path = self._prepared(planned)
        planned.config.run.progress = False
        wanted = self.folder / "configs" / f"{planned.name}.yaml"
        wanted.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(wanted, to_yaml(planned.config))
        place = places.get()
        try:
            environment = os.environ.copy()
            if torch.cuda.device_count() > 1:
                environment["CUDA_VISIBLE_DEVICES"] = str(place % torch.cuda.device_count())
            else:
                environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.jobs)))
            command = [sys.executable, "-m", "fedlens", "run", "--config", str(wanted), f"run.dir={path}"]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
        finally:
            places.put(place)
        if done.returncode:
            raise UserError(([line for line in done.stderr.splitlines() if line.strip()] or ["no message"])[-1].removeprefix("error: "))

    # --- what it says

    def rows(self) -> list[dict[str, Any]]:
        """One a finished run of the plan."""
        found = []
        for planned in self.plan.runs:
            if (self.path(planned) / "summary.json").is_file():
                summary = Run(self.path(planned)).summary
                cell = planned.cell
                row: dict[str, Any] = {
                    "table": cell.table,
                    "case": cell.case,
                    **dict(cell.values),
                    "seed": planned.seed,
                    "run": planned.name,
                }
                found.append(row | {key: summary.get(key) for key in SHOWN})
        return found

    def csv(self) -> str:
        rows = self.rows()
        columns = list(dict.fromkeys(key for row in rows for key in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def markdown(self) -> str:
        """Mean ± standard deviation [95 % confidence interval] over seeds, with n, table by table."""
        parts = [f"# {self.plan.name}, on {self.plan.place}", "", self.plan.question, ""]
        rows = self.rows()
        for table in self.plan.tables:
            parts += [
                f"## {table}",
                "",
                "| | test accuracy, % | validation accuracy, % | MB sent by clients |",
                "| --- | --- | --- | --- |",
            ]
            for cell in dict.fromkeys(planned.cell for planned in self.plan.runs if planned.cell.table == table):
                same = [r for r in rows if (r["table"], r["case"]) == (table, cell.case) and all(r[k] == v for k, v in cell.values)]
                cells = [_mean([r[key] for r in same]) for key in ("test_accuracy", "val_accuracy")]
                sent = [r["bytes_up"] / 1e6 for r in same if r["bytes_up"] is not None]
                parts.append(
                    f"| {cell.label} | {cells[0]} | {cells[1]} | {sum(sent) / len(sent):,.0f} |"
                    if sent
                    else f"| {cell.label} | {cells[0]} | {cells[1]} | - |"
                )
            parts.append("")
        if self.failures:
            parts += ["## Failed", "", *(f"- {name}: {why}" for name, why in self.failures.items()), ""]
        return "\n".join(parts)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return summarise(known).text() if known else "-"


def _attempt(work: Callable[[], None]) -> str | None:
    try:
        work()
    except UserError as error:
        return str(error)
    except (RuntimeError, OSError) as error:  # of the device or the disk: told, and the others go on
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """A run's own lines go to its log.txt; the study's are enough for the screen."""
    screens = [h for h in log.handlers if type(h) is logging.StreamHandler]
    levels = [h.level for h in screens]
    for handler in screens:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler, level in zip(screens, levels, strict=True):
            handler.setLevel(level)


def study_folder(plan: Plan, given: str | None) -> Path:
    return Path(given) if given else Path("studies") / f"{plan.name}-{plan.place}"
