"""`fedlens search NAME`: hyper-parameters by TPE (Bergstra et al., 2011) under Optuna, over a space (search_space.py).

The default configuration is trial 0. A trial's value is the best validation accuracy of its evaluations: that of the model that the run would keep.
A trial that is below the median of the complete ones at an evaluation is pruned. The test set is not read (train.test=false).

A search is a folder: search.db (Optuna's SQLite), runs/EXPERIMENT-HASH without weights, and search.json (results.py reads it). What a trial
tries is a function of (seed, its number, the trials before it): killed at any moment and started again, a search with one job ends with the same
search.json; asked for more trials, it goes on. The same configuration is trained once, however often it is tried.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedlens.config import Config
from fedlens.errors import Elsewhere, UserError, first_line
from fedlens.overrides import from_file, to_yaml
from fedlens.runs.identity import identity
from fedlens.runs.progress import progress_bar
from fedlens.runs.store import CHECKPOINTS, read_metrics, write_atomic, write_json
from fedlens.seeding import key as keyed
from fedlens.study.processes import Worker, Workers, locked, work
from fedlens.study.results import SEARCH_FILE, SearchResult, read_search
from fedlens.study.runner import quiet
from fedlens.study.search_space import Dimension, Space, as_overrides
from fedlens.training.run import execute

log = logging.getLogger("fedlens")
DATABASE = "search.db"
RANDOM_TRIALS = 8  # before TPE has enough to go by


def optuna() -> Any:
    try:
        import optuna as found
    except ImportError:
        raise UserError("search: optuna is not installed; install it with: pip install 'fedlens[search]'") from None
    found.logging.set_verbosity(found.logging.WARNING)
    return found


class Pruned(Exception):
    """Ends a trial that is not worth its remaining evaluations."""


class Watch:
    """Sees a trial's lines of metrics: every evaluation goes to Optuna, whose pruner may end the run."""

    def __init__(self, trial: Any, config: Config) -> None:
        self.trial, self.config = trial, config
        self.seen: dict[int, float] = {}  # step -> validation accuracy

    def log(self, metrics: Mapping[str, float], step: int, prune: bool = True) -> None:
        if "val_accuracy" not in metrics or step in self.seen:  # a run that goes on writes again what came after its checkpoint
            return
        self.trial.report(metrics["val_accuracy"], len(self.seen))
        self.seen[step] = metrics["val_accuracy"]
        is_last = metrics.get("round", 0) >= self.config.federated.rounds or metrics.get("epoch", 0) >= self.config.train.epochs
        if prune and not is_last and self.trial.should_prune():
            raise Pruned

    def finish(self, summary: Mapping[str, Any]) -> None:
        return


def conduct(trial: Any, config: Config, path: Path) -> dict[str, Any]:
    """Train what a trial asks for, or what is missing of it: {state: complete | pruned | failed | stopped, value, why, broken}. Its weights are not kept.
    `broken`: it was the device or torch that failed, and may fail for all that comes after in this process."""
    watch, finished = Watch(trial, config), (path / "summary.json").is_file()
    try:
        for line in read_metrics(path):
            watch.log(line, line["step"], prune=not finished)
        with quiet():
            run = execute(config, watch=watch)
        outcome = {"state": "complete", "value": run.summary["val_accuracy"], "why": None}
    except Pruned:
        outcome = {"state": "pruned", "value": max(watch.seen.values()), "why": None}
    except Elsewhere as error:  # says nothing of these values; what the run kept, the next start goes on from
        return {"state": "stopped", "value": None, "why": first_line(error)}
    except (UserError, RuntimeError) as error:  # a loss that is not finite, a device that is too small
        outcome = {"state": "failed", "value": None, "why": first_line(error), "broken": not isinstance(error, UserError)}
    shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    return outcome


class Search:
    def __init__(self, space: Space, folder: Path, *, jobs: int = 1) -> None:
        self.space, self.folder, self.jobs = space, folder, jobs
        self.workers = Workers([sys.executable, "-m", "fedlens.study.search"], jobs)
        self.optuna = optuna()
        self.study: Any = None

    def run(self) -> SearchResult:
        with locked(self.folder):
            try:
                self._open()
                self._take_over()
                self._try()
            except self.optuna.exceptions.StorageInternalError as error:
                raise UserError(f"search: {self.folder / DATABASE} cannot be used ({first_line(error)})") from None
            finally:
                self.workers.close()
            self._tell()
        return read_search(self.folder)

    # --- the database

    def _open(self) -> None:
        """Made whole under another name, with the default as its first trial, so that there is never half of one."""
        file, part = self.folder / DATABASE, self.folder / f"{DATABASE}.part"
        asked = self._asked()
        if not file.exists():
            part.unlink(missing_ok=True)
            storage = self.optuna.storages.RDBStorage(_address(part))
            new = self.optuna.create_study(storage=storage, study_name=self.space.name, direction="maximize")
            new.set_user_attr("asked", asked)
            new.enqueue_trial({dimension.key: dimension.default for dimension in self.space.dimensions})
            storage.remove_session()
            storage.engine.dispose()
            os.replace(part, file)
        self.study = open_study(self.folder)
        there = self.study.user_attrs.get("asked")
        if there != json.loads(json.dumps(asked)):
            changed = [name for name in asked if not isinstance(there, dict) or there.get(name) != json.loads(json.dumps(asked[name]))]
            raise UserError(f"--out: {self.folder} holds a search of another {' and '.join(changed)}; choose another folder")

    def _asked(self) -> dict[str, Any]:
        """What must not change when a search goes on."""
        s = self.space
        return {
            "space": {dimension.key: asdict(dimension) for dimension in s.dimensions},
            "configuration": identity(s.base),
            "seed": s.seed,
            "pruning": {"warmup": s.warmup, "startup": s.startup},
        }

    def _take_over(self) -> None:
        """Trials that were running when the last process ended: failed, and tried again with the same parameters."""
        states, trials = self.optuna.trial.TrialState, self.study.get_trials(deepcopy=False)
        again = {trial.user_attrs.get("again") for trial in trials}
        for trial in trials:
            if trial.state == states.RUNNING:
                params = trial.system_attrs.get("fixed_params") or trial.params
                if (
                    len(params) == len(self.space.dimensions) and trial.number not in again
                ):  # else: not all drawn yet, and drawn again alike
                    self.study.enqueue_trial(params, user_attrs={"again": trial.number})
                self.study.tell(trial.number, state=states.FAIL)

    def finished(self) -> list[Any]:
        """Trials that count, in their order. Optuna's failed ones are those that were interrupted; ours are pruned, with the reason."""
        states = self.optuna.trial.TrialState
        found: list[Any] = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
        return found

    # --- trials

    def _try(self) -> None:
        total, done = self.space.trials, len(self.finished())
        log.info("search %s on %s: %d trials, %d of them to do", self.space.name, self.space.place, total, max(0, total - done))
        with progress_bar(self.space.name, max(total, done), done, lines=True) as bar:
            while done < total:
                asked = [self._ask(done + i) for i in range(min(self.jobs, total - done) if done else 1)]  # the default alone
                for trial, outcome in zip(asked, self._conducted(asked), strict=True):
                    if outcome["state"] == "stopped":
                        raise Elsewhere(f"search: {outcome['why']}; the same command goes on")
                    if done == 0 and outcome["state"] == "failed":
                        raise UserError(f"search: the default configuration fails: {outcome['why']}")
                    self._finish(trial, outcome)
                    done += 1
                self._tell()
                bar.advance(len(asked), self._best_so_far())

    def _ask(self, number: int) -> Any:
        """The next trial. Its randomness is keyed by its number, like all of ours."""
        seed = keyed(self.space.seed, "search", number) % 2**32
        self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS)
        return self.study.ask({d.key: self._distribution(d) for d in self.space.dimensions})

    def _distribution(self, d: Dimension) -> Any:
        kinds = self.optuna.distributions
        if d.choices:
            return kinds.CategoricalDistribution(d.choices)
        if d.whole:
            return kinds.IntDistribution(int(d.low), int(d.high), log=d.log, step=int(d.step or 1))
        return kinds.FloatDistribution(d.low, d.high, log=d.log, step=d.step)

    def _conducted(self, asked: Sequence[Any]) -> list[dict[str, Any]]:
        """What became of each. Several at a time run in processes of their own, and the next ones wait for them: their order decides nothing."""
        try:
            wanted = [self._configuration(trial) for trial in asked]
        except UserError as error:  # values that are each allowed, but not together
            if len(asked) > 1:
                return [outcome for trial in asked for outcome in self._conducted([trial])]
            return [{"state": "failed", "value": None, "why": str(error)}]
        if len(asked) == 1:
            return [conduct(asked[0], wanted[0], Path(wanted[0].run.dir or ""))]
        return [outcome for _, outcome in self.workers.each(self._apart, list(zip(asked, wanted, strict=True)))]

    def _configuration(self, trial: Any) -> Config:
        config = self.space.configuration(self._params(trial))
        config.run.dir, config.run.if_exists = str(self.folder / "runs" / f"{config.experiment}-{identity(config)}"), "resume"
        config.run.progress, config.run.keep_last, config.run.keep_best = False, 1, 1
        return config

    def _apart(self, worker: Worker, asked: tuple[Any, Config]) -> dict[str, Any]:
        trial, config = asked
        wanted = self.folder / "configs" / f"{trial.number}.yaml"
        wanted.parent.mkdir(exist_ok=True)
        write_atomic(wanted, to_yaml(config))
        try:
            outcome: dict[str, Any] = worker.do([str(self.folder), trial._trial_id, str(wanted)])
        except ChildProcessError as error:
            return {"state": "failed", "value": None, "why": str(error)}
        if outcome.get("broken"):
            worker.retire()
        return outcome

    def _finish(self, trial: Any, outcome: Mapping[str, Any]) -> None:
        states = self.optuna.trial.TrialState
        if outcome["state"] == "failed":  # to the sampler a failure is a trial that was pruned: it keeps away from there
            trial.set_user_attr("why", outcome["why"])
        if outcome["state"] == "complete":
            self.study.tell(trial, outcome["value"])
        else:
            self.study.tell(trial, state=states.PRUNED)
        number, value = len(self.finished()) - 1, outcome["value"]
        told = f"failed: {outcome['why']}" if value is None else f"{outcome['state']}, validation accuracy {100 * value:.2f} %"
        log.info("trial %d (%s) %s", number, " ".join(as_overrides(self._params(trial))), told)

    # --- what came of it

    def _params(self, trial: Any) -> dict[str, Any]:
        return {d.key: d.rounded(trial.params[d.key]) for d in self.space.dimensions}

    def _trials(self) -> list[dict[str, Any]]:
        """Numbered without the interrupted ones."""
        found = []
        for number, trial in enumerate(self.finished()):
            seen = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
            why = trial.user_attrs.get("why")
            state = "failed" if why is not None else trial.state.name.lower()
            value = None if state == "failed" else trial.value if state == "complete" else max(seen)
            found.append({"number": number, "params": self._params(trial), "value": value, "state": state, "evaluations": seen, "why": why})
        return found

    def _tell(self) -> None:
        """search.json: every trial in its order, no times."""
        trials = self._trials()
        default = {d.key: d.default for d in self.space.dimensions}
        told = {
            "name": self.space.name,
            "place": self.space.place,
            "question": self.space.question,
            "objective": "the best validation accuracy of a trial's evaluations; the test set is not read",
            "experiment": self.space.experiment,
            "keys": list(default),
            "trials": trials,
            "default": {"params": default, "value": trials[0]["value"] if trials else None},
            "best": best_of(trials),
        }
        write_json(self.folder / SEARCH_FILE, told)

    def _best_so_far(self) -> str:
        trials = self._trials()
        best = best_of(trials)
        return "" if best is None else f"best {100 * trials[best]['value']:.2f} %, default {100 * trials[0]['value']:.2f} %"


def best_of(trials: Sequence[Mapping[str, Any]]) -> int | None:
    """The complete trial of the highest value, the earliest of equal ones: the default, where nothing beats it."""
    complete = [trial for trial in trials if trial["state"] == "complete"]
    return min(complete, key=lambda trial: (-trial["value"], trial["number"]))["number"] if complete else None


def open_study(folder: Path) -> Any:
    """The study of a search's folder, with its pruner."""
    found = optuna()
    storage = found.storages.RDBStorage(_address(folder / DATABASE), engine_kwargs={"connect_args": {"timeout": 60}})
    study = found.load_study(study_name=None, storage=storage)
    pruning = study.user_attrs["asked"]["pruning"]
    study.pruner = found.pruners.MedianPruner(n_startup_trials=pruning["startup"], n_warmup_steps=pruning["warmup"])
    return study


def _address(file: Path) -> str:
    """A path in an address: what has a meaning there is escaped."""
    return f"sqlite:///{str(file).replace('%', '%25').replace('?', '%3F')}"


def search_folder(space: Space, given: str | None) -> Path:
    return Path(given) if given else Path("searches") / f"{space.name}-{space.place}"


def _told(task: list[Any]) -> dict[str, Any]:
    """In another process: one trial, and what became of it."""
    folder, trial, config = task
    wanted = from_file(Path(config))
    return conduct(optuna().trial.Trial(open_study(Path(folder)), trial), wanted, Path(wanted.run.dir or ""))


if __name__ == "__main__":
    work(_told)
