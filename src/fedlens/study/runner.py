"""`fedlens study NAME`: execute what a plan lacks. Finished runs are skipped, interrupted ones go on, failed ones are told and retried on demand.

A study is a folder: runs/EXPERIMENT-HASH for every configuration, analyses/ of finished runs, and study.json, which says how they belong
together (results.py reads it). Killed at any moment and started again, it ends with the same tables.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fedlens.errors import Elsewhere, UserError, bad_value, first_line, unknown
from fedlens.overrides import from_file, to_yaml
from fedlens.runs.cache import CACHE
from fedlens.runs.identity import identity
from fedlens.runs.progress import progress_bar
from fedlens.runs.store import CHECKPOINTS, MODEL_FILE, SUMMARY_FILE, is_finished, read_summary, write_atomic, write_json
from fedlens.study.analyses import wanted
from fedlens.study.archive import runs_of
from fedlens.study.plan import Cell, Plan, Planned, changed
from fedlens.study.processes import Worker, Workers, locked, work
from fedlens.study.results import STUDY_FILE, StudyResult, read_study
from fedlens.study.tune import FAILED, Climb, climbs, settled
from fedlens.training.run import execute

log = logging.getLogger("fedlens")
TUNING = "tuning: "  # begins what is said of cells whose search was stopped


class Study:
    def __init__(
        self, plan: Plan, folder: Path, *, jobs: int = 1, retry: bool = False, tables: Sequence[str] = (), replace: bool = False
    ) -> None:
        """`tables`: only what these need is run; none: all. `replace`: also where the folder has finished runs that the plan lacks."""
        self.asked, self.folder, self.jobs, self.replace = plan, folder, jobs, replace
        if jobs < 1:
            raise bad_value("--jobs", jobs, ">= 1")
        self.workers = Workers([sys.executable, "-m", "fedlens.study.runner"], jobs)
        names = [table.name for table in plan.tables]
        if wrong := [name for name in tables if name not in names]:
            raise unknown("--table", wrong[0], names)
        self.tables = set(tables or names)
        told = {} if retry else _read(folder / STUDY_FILE)
        self.unfit: dict[str, str] = told.get("unfit", {})  # trial that failed -> why
        self._settle()
        known = told.get("failures", {})
        lacking = {p.name for p in self.plan.runs if not self.finished(p)}
        lacking |= {w.file for w in self.wanted if not (folder / w.file).is_file()}
        self.failures: dict[str, str] = {name: why for name, why in known.items() if name in lacking}  # run or analysis -> why

    def _settle(self) -> None:
        """The plan as far as finished trials decide it."""
        self.climbs = climbs(self.asked, self._score)
        self.plan = settled(self.asked, self.climbs)
        self.wanted = wanted(self.plan)

    def _score(self, trial: Planned) -> float | None:
        if trial.name in self.unfit:
            return FAILED
        return float(read_summary(self.path(trial))["val_accuracy"]) if self.finished(trial) else None

    def path(self, planned: Planned) -> Path:
        return self.folder / "runs" / planned.name

    def finished(self, planned: Planned) -> bool:
        return is_finished(self.path(planned))

    def missing(self) -> list[Planned]:
        """Each configuration once, in the order of the plan; known failures only when a retry was asked for."""
        unique = {planned.name: planned for planned in self.plan.runs if planned.cell.table in self.tables}
        return [p for p in unique.values() if not self.finished(p) and p.name not in self.failures]

    def run(self) -> StudyResult:
        with locked(self.folder):
            self._check_folder()
            try:
                return self._run()
            finally:
                self.workers.close()

    def _check_folder(self) -> None:
        """A plan that grew, or that is tuned further, goes on; one that would leave finished runs out of the tables has to say so."""
        lost = [] if self.replace else self._lost()
        if lost:
            raise UserError(
                f"--out: {self.folder} has {len(lost)} finished runs that this plan lacks, such as {lost[0]}; "
                "allowed is another --out, or --replace, which leaves them out of the tables"
            )

    def _lost(self) -> list[str]:
        """Finished runs that study.json names and the plan has not, at no value of what it tunes."""
        planned = {p.name for p in self.plan.runs} | {name for climb in self.climbs for name in climb.told()["runs"]}
        named = dict.fromkeys(runs_of(_read(self.folder / STUDY_FILE)))
        lacking = [name for name in named if name not in planned and is_finished(self.folder / "runs" / name)]
        known = self._at_their_own_values() if lacking else set()
        return [name for name in lacking if not known & self._known_by(name)]

    def _at_their_own_values(self) -> set[str]:
        """Cells that are tuned and their trials, whichever value is chosen."""
        cells = [changed(p.config, t.key, t.own) for t in self.asked.tunes for p in self.asked.runs if p.cell in t.cells]
        return {identity(config) for config in (*cells, *(t.short for t in self.asked.tunes))}

    def _known_by(self, name: str) -> set[str]:
        """What a run would be known by at the own value of each cell that is tuned."""
        try:
            config = from_file(self.folder / "runs" / name / "config.yaml")
        except UserError:
            return set()
        return {identity(changed(config, key, own)) for key, own in {(t.key, t.own) for t in self.asked.tunes}}

    def _run(self) -> StudyResult:
        self._tell()  # a report of what is there can be made, and kept, at any time
        with _cache(self.folder / "cache"):
            self._tune()
        todo = self.missing()
        total = len({p.name for p in self.plan.runs if p.cell.table in self.tables})
        log.info("study %s on %s: %d runs, %d of them to do", self.plan.name, self.plan.place, total, len(todo))
        self._tell()
        with _cache(self.folder / "cache"), progress_bar(self.plan.name, total, total - len(todo), lines=True) as bar:
            for planned, error in self._executed(todo):
                self._note(planned.name, f"{planned.cell.label}, seed {planned.seed}", error)
                if error is None:
                    shutil.rmtree(
                        self.path(planned) / CHECKPOINTS, ignore_errors=True
                    )  # what a finished run needs is in its model.safetensors
                bar.advance(1, f"{planned.cell.label}, seed {planned.seed}{self._came_to(planned)}")
        self._analyse()
        self._tell()
        return read_study(self.folder)

    def _tune(self) -> None:
        """Trials until every cell that is to be tuned has its value. Of a trial only its numbers are kept. One that the device or the disk stopped
        says nothing about its value: its cell is not run, and the next start tries it again."""
        stopped: dict[str, str] = {}
        self.failures = {name: why for name, why in self.failures.items() if not why.startswith(TUNING)}
        while going := [c for c in self.climbs if c.next and c.tune.cell.table in self.tables and not self._halted(c, stopped)]:
            tries = [(climb.tune, k) for climb in going for k in climb.next]
            todo = {tune.trial(k).name: tune.trial(k) for tune, k in tries}
            value = {tune.trial(k).name: f"{tune.key} {tune.value(k):g}" for tune, k in tries}
            log.info("study %s: %d short runs to tune %d cells", self.plan.name, len(todo), len(going))
            with progress_bar("tuning", len(todo), lines=True) as bar:
                for trial, error in self._executed(list(todo.values())):
                    if isinstance(error, Broken):
                        stopped[trial.name] = error
                    elif error is not None:
                        self.unfit[trial.name] = error
                    else:
                        shutil.rmtree(self.path(trial) / CHECKPOINTS, ignore_errors=True)
                        for weights in self.path(trial).glob("*.safetensors"):
                            weights.unlink()
                    self._settle()
                    self._tell()
                    bar.advance(1, f"{trial.cell.label}, {value[trial.name]}{self._came_to(trial)}")
        for climb in self.climbs:
            why = self._halted(climb, stopped)
            if why is None and climb.value is None and not climb.next:
                why = f"no value of {climb.tune.key} trains; tried {', '.join(f'{climb.tune.value(k):g}' for k in sorted(climb.tried))}"
            if why is not None:
                for planned in self.plan.runs:
                    if planned.cell in climb.tune.cells and planned.name not in self.failures:
                        self._note(planned.name, f"{planned.cell.label}, seed {planned.seed}", why)

    def _halted(self, climb: Climb, stopped: Mapping[str, str]) -> str | None:
        """Why this cell's search cannot go on now."""
        return next((f"{TUNING}{stopped[t.name]}" for t in map(climb.tune.trial, climb.next) if t.name in stopped), None)

    def _came_to(self, planned: Planned) -> str:
        """ ": 89.15 % on the test set, 58 s" of a run that is finished."""
        summary = _read(self.path(planned) / "summary.json")
        found = [
            (summary[key], name)
            for key, name in (("test_accuracy", "the test set"), ("val_accuracy", "validation"))
            if summary.get(key) is not None
        ]
        return f": {100 * found[0][0]:.2f} % on {found[0][1]}, {summary['seconds']:.0f} s" if found else ""

    def _note(self, name: str, label: str, error: str | None) -> None:
        if error is not None:
            self.failures[name] = error
            log.error("%s: %s", label, error)
            self._tell()

    def _analyse(self) -> None:
        todo = [w for w in self.wanted if not (self.folder / w.file).is_file() and w.file not in self.failures]
        todo = [w for w in todo if all(self.finished(planned) for planned in w.runs)]
        without = [w for w in todo if not all((self.path(planned) / MODEL_FILE).is_file() for planned in w.runs)]
        if without:
            log.info("%d analyses are left out: the weights of their runs are not in %s", len(without), self.folder)
        todo = [w for w in todo if w not in without]
        with progress_bar("analyses", len(self.wanted), len(self.wanted) - len(todo), lines=True) as bar:
            for each in todo:
                (self.folder / each.file).parent.mkdir(exist_ok=True)
                with quiet():
                    error = _attempt(lambda each=each: write_json(self.folder / each.file, each.measure(self.folder / "runs")))  # type: ignore[misc]
                self._note(each.file, f"{each.title}, seed {each.seed}", error)
                bar.advance(1, f"{each.title}, seed {each.seed}")

    def _tell(self) -> None:
        """study.json: what was planned. Run folders and analyses are found by what it says."""
        cells: dict[Cell, dict[int, str]] = {}
        for planned in self.plan.runs:
            cells.setdefault(planned.cell, {})[planned.seed] = planned.name
        told = {
            "name": self.plan.name,
            "place": self.plan.place,
            "question": self.plan.question,
            "tables": [
                {
                    **asdict(table),
                    "cells": [
                        {"label": cell.label, "case": cell.case, "values": dict(cell.values), "runs": runs}
                        for cell, runs in cells.items()
                        if cell.table == table.name
                    ],
                }
                for table in self.plan.tables
            ],
            "analyses": [
                {"kind": w.kind, "title": w.title, "labels": w.labels, "seed": w.seed, "options": w.options, "file": w.file}
                for w in self.wanted
            ],
            "tuned": [climb.told() for climb in self.climbs],
            "unfit": self.unfit,
            "failures": self.failures,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / STUDY_FILE, told)

    def _executed(self, todo: Sequence[Planned]) -> Iterator[tuple[Planned, str | None]]:
        """Each run with what went wrong, in the order of the plan. One at a time in this process; more in as many other processes, one a GPU where
        there are several."""
        if self.jobs == 1:
            for planned in todo:
                yield planned, _attempt(partial(self._here, planned))
            return
        yield from self.workers.each(lambda worker, planned: _attempt(partial(self._apart, planned, worker)), todo)

    def _prepared(self, planned: Planned) -> None:
        summary = self.path(planned) / SUMMARY_FILE
        if summary.is_file() and not self.finished(planned):
            log.warning("%s is damaged: its run is done again", summary)
            summary.rename(summary.with_name(f"{SUMMARY_FILE}.damaged"))
        planned.config.run.dir, planned.config.run.if_exists = str(self.path(planned)), "resume"
        planned.config.run.progress = False

    def _here(self, planned: Planned) -> None:
        self._prepared(planned)
        with quiet():
            execute(planned.config)

    def _apart(self, planned: Planned, worker: Worker) -> None:
        self._prepared(planned)
        wanted = self.folder / "configs" / f"{planned.name}.yaml"
        wanted.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(wanted, to_yaml(planned.config))
        told = worker.do(str(wanted))
        if told and told["broken"]:
            worker.retire()  # a device that failed may fail for all that comes after
        if told:
            raise (ChildProcessError if told["broken"] else UserError)(told["error"])


class Broken(str):
    """What the device or the disk said: another time it may go well."""

    __slots__ = ()


def _attempt(work: Callable[[], None]) -> str | None:
    try:
        work()
    except (Elsewhere, ChildProcessError) as error:
        return Broken(error)
    except UserError as error:
        return str(error)
    except (RuntimeError, OSError) as error:  # told, and the others go on
        return Broken(f"{type(error).__name__}: {first_line(error)}")
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Features and masks are computed once for all runs, those in other processes included; a folder that the user named stays."""
    if CACHE in os.environ:
        yield
        return
    os.environ[CACHE] = str(folder.resolve())
    try:
        yield
    finally:
        del os.environ[CACHE]


@contextmanager
def quiet() -> Iterator[None]:
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


def _told(config: str) -> dict[str, Any] | None:
    """In another process: one run, and what went wrong."""

    def run() -> None:
        execute(from_file(Path(config)))

    error = _attempt(run)
    return None if error is None else {"error": error, "broken": isinstance(error, Broken)}


if __name__ == "__main__":
    work(_told)
