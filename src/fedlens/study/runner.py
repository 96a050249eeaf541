"""`fedlens study NAME`: execute the missing runs of a plan. Finished runs are skipped, interrupted ones resume, failed ones are retried with --retry.

A study is a folder: runs/EXPERIMENT-HASH per configuration, analyses/ of finished runs, and study.json, which maps tables and cells to runs
(results.py reads it). A study that is killed and started again ends with the same tables.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedlens.config import Config
from fedlens.errors import UserError, bad_value, unknown
from fedlens.files import write_atomic
from fedlens.overrides import from_file, to_config
from fedlens.runs import digests
from fedlens.runs.cache import CACHE
from fedlens.runs.identity import identity
from fedlens.runs.progress import progress_bar
from fedlens.runs.store import CHECKPOINTS, CLIENTS_FOLDER, CONFIG_FILE, MODEL_FILE, SUMMARY_FILE, is_finished, read_summary, write_json
from fedlens.study.analyses import PlannedAnalysis, planned_analyses
from fedlens.study.archive import run_names
from fedlens.study.plan import Plan, PlanCell, PlannedRun, changed
from fedlens.study.processes import INTERRUPTED, Failure, WorkerPool, attempt, locked, serve
from fedlens.study.results import STUDY_FILE, StudyResult, read_study, run_folder
from fedlens.study.tune import FAILED, LineSearch, line_searches, with_chosen_values
from fedlens.training.run import execute

log = logging.getLogger("fedlens")
TUNING = "tuning: "  # prefix of the failures of cells whose search was interrupted


class Study:
    """A plan, its folder and its progress."""

    def __init__(
        self, plan: Plan, folder: Path, *, jobs: int = 1, retry: bool = False, tables: Sequence[str] = (), replace: bool = False
    ) -> None:
        """Read the state of a study. `tables`: run only these (none: all). `replace`: accept a folder with finished runs that the plan lacks."""
        self.untuned, self.folder, self.replace = plan, folder, replace
        if jobs < 1:
            raise bad_value("--jobs", jobs, ">= 1")
        self.pool = WorkerPool([sys.executable, "-m", "fedlens.study.runner"], jobs)
        names = [table.name for table in plan.tables]
        if wrong := [name for name in tables if name not in names]:
            raise unknown("--table", wrong[0], names)
        self.tables = set(tables or names)
        before = {} if retry else _read(folder / STUDY_FILE)
        self.failed_trials: dict[str, str] = before.get("unfit", {})  # run -> reason
        self._apply_tuning()
        missing = {p.name for p in self.plan.runs if not self.finished(p)}
        missing |= {a.file for a in self.analyses if not (folder / a.file).is_file()}
        self.failures: dict[str, str] = {
            name: why for name, why in before.get("failures", {}).items() if name in missing and not why.startswith(INTERRUPTED)
        }

    def _apply_tuning(self) -> None:
        """Update the plan with the values that the finished trials decide."""
        self.searches = line_searches(self.untuned, self._score)
        self.plan = with_chosen_values(self.untuned, self.searches)
        self.analyses = planned_analyses(self.plan)

    def _score(self, trial: PlannedRun) -> float | None:
        if trial.name in self.failed_trials:
            return FAILED
        return float(read_summary(self.path(trial))["val_accuracy"]) if self.finished(trial) else None

    def path(self, planned: PlannedRun) -> Path:
        return self.folder / "runs" / planned.name

    def finished(self, planned: PlannedRun) -> bool:
        return is_finished(self.path(planned))

    def selected(self) -> list[PlannedRun]:
        """Return the runs of the selected tables: each configuration once, in the order of the plan."""
        return list({planned.name: planned for planned in self.plan.runs if planned.cell.table in self.tables}.values())

    def missing(self) -> list[PlannedRun]:
        """Return the selected runs that are neither finished nor known to fail."""
        return [p for p in self.selected() if not self.finished(p) and p.name not in self.failures]

    def listing(self) -> str:
        """Return a line per selected run: its name, unless a value is to be tuned, its seed and its cell."""
        untuned = {cell: search.spec.key for search in self.searches if search.next for cell in search.spec.cells}
        lines = []
        for planned in (p for p in self.plan.runs if p.cell.table in self.tables):
            name = f"({untuned[planned.cell]} to be tuned)" if planned.cell in untuned else planned.name
            lines.append(f"{name}  seed {planned.seed}  {planned.cell.table}: {planned.cell.label}")
        return "\n".join(lines)

    def run(self) -> StudyResult:
        with locked(self.folder), closing(self.pool):
            if not self.replace and (lost := self.lost_runs()):
                raise UserError(
                    f"--out: {self.folder} has {len(lost)} finished runs that this plan lacks, such as {lost[0]}; "
                    "choose another --out, or --replace to leave them out of the tables."
                )
            return self._run()

    def lost_runs(self) -> list[str]:
        """Return the finished runs in study.json that the plan lacks. Runs that differ only in the value of a tuned key are not lost."""
        planned = {p.name for p in self.plan.runs} | {name for search in self.searches for name in search.metadata()["runs"]}
        named = dict.fromkeys(run_names(_read(self.folder / STUDY_FILE)))
        lacking = [name for name in named if name not in planned and is_finished(run_folder(self.folder, name))]
        if not lacking:
            return []
        specs = self.untuned.tuning
        cells = [changed(p.config, s.key, s.default) for s in specs for p in self.untuned.runs if p.cell in s.cells]
        known = {identity(config) for config in (*cells, *(s.base for s in specs))}
        return [name for name in lacking if not known & self._identities_at_defaults(name)]

    def _identities_at_defaults(self, name: str) -> set[str]:
        """Return the identities that a run would have at the default of each tuned key."""
        try:
            digests.verify(run_folder(self.folder, name), CONFIG_FILE)
            config = from_file(run_folder(self.folder, name) / CONFIG_FILE)
        except UserError:
            return set()
        return {identity(changed(config, spec.key, spec.default)) for spec in self.untuned.tuning}

    def _run(self) -> StudyResult:
        self._write_study_file()  # so that a report can be made at any time
        with _cache(self.folder / "cache"):
            self._tune()
            todo, total = self.missing(), len(self.selected())
            log.info("study %s on %s: %d runs, %d to do", self.plan.name, self.plan.place, total, len(todo))
            self._write_study_file()
            with progress_bar(self.plan.name, total, total - len(todo), lines=True) as bar:
                for planned, failure in self._execute(todo):
                    label = f"{planned.cell.label}, seed {planned.seed}"
                    if failure:
                        self._note(planned.name, label, failure.why)
                    else:
                        shutil.rmtree(self.path(planned) / CHECKPOINTS, ignore_errors=True)
                    bar.advance(1, f"{label}{self._result_text(planned)}")
        self._analyse()
        self._write_study_file()
        return read_study(self.folder)

    def _tune(self) -> None:
        """Run trials until every selected cell has its value; keep their numbers and delete their weights.

        A failure of the device or the disk does not count against a value: its cell is skipped, and the next start tries it again."""
        interrupted: dict[str, str] = {}  # trial -> reason
        self.failures = {name: why for name, why in self.failures.items() if not why.startswith(TUNING)}
        while active := [s for s in self.searches if s.next and s.spec.cell.table in self.tables and not _interruption(s, interrupted)]:
            trials = {(trial := s.spec.trial(k)).name: (trial, f"{s.spec.key} {s.spec.value(k):g}") for s in active for k in s.next}
            log.info("study %s: %d short runs to tune %d cells", self.plan.name, len(trials), len(active))
            with progress_bar("tuning", len(trials), lines=True) as bar:
                for trial, failure in self._execute([trial for trial, _ in trials.values()]):
                    if failure is None:
                        remove_weights(self.path(trial))
                    else:
                        (self.failed_trials if failure.cause == "values" else interrupted)[trial.name] = failure.why
                    self._apply_tuning()
                    self._write_study_file()
                    bar.advance(1, f"{trial.cell.label}, {trials[trial.name][1]}{self._result_text(trial)}")
        for search in self.searches:
            self._note_untuned(search, _interruption(search, interrupted))

    def _note_untuned(self, search: LineSearch, why: str | None) -> None:
        """Record a failure for the runs of a cell whose search was interrupted, or ended without a value."""
        spec = search.spec
        if why is None and search.value is None and not search.next:
            why = f"no value of {spec.key} trains; tried {', '.join(f'{spec.value(k):g}' for k in sorted(search.tried))}"
        for planned in self.plan.runs:
            if why is not None and planned.cell in spec.cells and planned.name not in self.failures:
                self._note(planned.name, f"{planned.cell.label}, seed {planned.seed}", why)

    def _result_text(self, planned: PlannedRun) -> str:
        """Return ": 89.15 % on the test set, 58 s" for a finished run, else nothing."""
        summary = _read(self.path(planned) / SUMMARY_FILE)
        for key, name in (("test_accuracy", "the test set"), ("val_accuracy", "validation")):
            if summary.get(key) is not None:
                return f": {100 * summary[key]:.2f} % on {name}, {summary['seconds']:.0f} s"
        return ""

    def _note(self, name: str, label: str, why: str) -> None:
        """Record the failure of a run or an analysis."""
        self.failures[name] = why
        log.error("%s: %s", label, why)
        self._write_study_file()

    def _analyse(self) -> None:
        todo = [a for a in self.analyses if not (self.folder / a.file).is_file() and a.file not in self.failures]
        todo = [a for a in todo if all(map(self.finished, a.runs))]
        measurable = [a for a in todo if all((self.path(planned) / MODEL_FILE).is_file() for planned in a.runs)]
        if without := len(todo) - len(measurable):
            log.info("%d analyses are skipped: the weights of their runs are not in %s", without, self.folder)
        with progress_bar("analyses", len(self.analyses), len(self.analyses) - len(measurable), lines=True) as bar:
            for analysis in measurable:
                label = f"{analysis.title}, seed {analysis.seed}"
                if failure := attempt(self._measure, analysis):
                    self._note(analysis.file, label, failure.why)
                bar.advance(1, label)

    def _measure(self, analysis: PlannedAnalysis) -> None:
        (self.folder / analysis.file).parent.mkdir(exist_ok=True)
        with quiet():
            write_json(self.folder / analysis.file, analysis.measure(self.folder / "runs"))

    def _write_study_file(self) -> None:
        """Write study.json: the plan, and the names of its runs and analyses."""
        cells: dict[PlanCell, dict[int, str]] = {}
        for planned in self.plan.runs:
            cells.setdefault(planned.cell, {})[planned.seed] = planned.name
        rows = {cell: {"label": cell.label, "case": cell.case, "values": dict(cell.values), "runs": runs} for cell, runs in cells.items()}
        tables = [{**asdict(t), "cells": [row for cell, row in rows.items() if cell.table == t.name]} for t in self.plan.tables]
        content = {
            "name": self.plan.name,
            "place": self.plan.place,
            "question": self.plan.question,
            "tables": tables,
            "analyses": [{key: getattr(a, key) for key in ("kind", "title", "labels", "seed", "options", "file")} for a in self.analyses],
            "tuned": [search.metadata() for search in self.searches],
            "unfit": self.failed_trials,
            "failures": self.failures,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / STUDY_FILE, content)

    def _execute(self, todo: Sequence[PlannedRun]) -> Iterator[tuple[PlannedRun, Failure | None]]:
        """Yield each run with its failure, in the order of the plan."""

        def config(planned: PlannedRun) -> Config:
            return placed(planned.config, self.path(planned))

        return self.pool.outcomes(todo, lambda planned: _execute_quietly(config(planned)), lambda planned: asdict(config(planned)))


def _interruption(search: LineSearch, interrupted: Mapping[str, str]) -> str | None:
    """Return why this search cannot go on now, or None. `interrupted`: trial -> reason."""
    names = [search.spec.trial(k).name for k in search.next]
    return next((f"{TUNING}{interrupted[name]}" for name in names if name in interrupted), None)


def placed(config: Config, folder: Path) -> Config:
    """Return the configuration of a run of a study or search: its folder, continued if it exists, and no progress bar of its own."""
    run = replace(config.run, dir=str(folder), if_exists="resume", progress=False)
    return replace(config, run=run)


def remove_weights(run: Path) -> None:
    """Delete the checkpoints, models and client vectors of a finished run, and first their digests."""
    if listed := digests.read(run):
        left = {name: digest for name, digest in listed.items() if not name.endswith(".safetensors")}
        write_atomic(run / digests.FILE, digests.to_text(left))
    for folder in (CHECKPOINTS, CLIENTS_FOLDER):
        shutil.rmtree(run / folder, ignore_errors=True)
    for file in run.glob("*.safetensors"):
        file.unlink()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Share features and masks between all runs, including those in worker processes, unless the user has set a cache folder."""
    if ours := CACHE not in os.environ:
        os.environ[CACHE] = str(folder.resolve())
    try:
        yield
    finally:
        if ours:
            del os.environ[CACHE]


@contextmanager
def quiet() -> Iterator[None]:
    """Show only warnings of a run on the screen; all its lines go to its log.txt."""
    levels = {handler: handler.level for handler in log.handlers if type(handler) is logging.StreamHandler}
    for handler in levels:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler, level in levels.items():
            handler.setLevel(level)


def _execute_quietly(config: Config) -> None:
    with quiet():
        execute(config)


if __name__ == "__main__":
    serve(lambda config: attempt(lambda: _execute_quietly(to_config(OmegaConf.create(config)))))
