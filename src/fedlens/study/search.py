"""`fedlens search NAME`: search hyper-parameters by TPE (Bergstra et al., 2011) with Optuna, over a space (search_space.py).

The default configuration is trial 0. A trial's value is its best validation accuracy, that of the model that the run would keep. A trial below the
median of the complete ones at an evaluation is pruned. The test set is not read (train.test=false).

A search is a folder: search.db (Optuna's SQLite), runs/EXPERIMENT-HASH without weights, and search.json (results.py reads it). The values of a trial
depend on (seed, its number, the trials before it), so a search with one job that is killed and started again ends with the same search.json. With
more trials it continues. A configuration that several trials share is trained once.
"""

import json
import logging
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedlens.config import Config
from fedlens.errors import Elsewhere, UserError, bad_value, first_line
from fedlens.overrides import to_config
from fedlens.runs.identity import identity
from fedlens.runs.progress import progress_bar
from fedlens.runs.store import is_finished, read_metrics, read_summary, write_json
from fedlens.seeding import key as keyed
from fedlens.study.processes import Failure, WorkerPool, attempt, locked, serve
from fedlens.study.results import SEARCH_FILE, SearchResult, read_search
from fedlens.study.runner import placed, quiet, remove_weights
from fedlens.study.search_space import Dimension, Space, as_overrides
from fedlens.training.run import execute

log = logging.getLogger("fedlens")
DATABASE = "search.db"
RANDOM_TRIALS = 8  # before TPE has enough data


def optuna() -> Any:
    try:
        import optuna as module
    except ImportError:
        raise UserError("search: optuna is not installed; install it with: pip install 'fedlens[search]'.") from None
    module.logging.set_verbosity(module.logging.WARNING)
    return module


class PruningTracker:
    """Reports each evaluation of a run to Optuna, whose pruner may end the run."""

    def __init__(self, trial: Any, config: Config) -> None:
        self.trial, self.config = trial, config
        self.accuracies: dict[int, float] = {}  # step -> validation accuracy

    def log(self, metrics: Mapping[str, float], step: int, prune: bool = True) -> None:
        if "val_accuracy" not in metrics or step in self.accuracies:  # a resumed run repeats the steps after its checkpoint
            return
        self.trial.report(metrics["val_accuracy"], len(self.accuracies))
        self.accuracies[step] = metrics["val_accuracy"]
        is_last = metrics.get("round", 0) >= self.config.federated.rounds or metrics.get("epoch", 0) >= self.config.train.epochs
        if prune and not is_last and self.trial.should_prune():
            raise optuna().TrialPruned

    def finish(self, summary: Mapping[str, Any]) -> None:
        return


def run_trial(trial: Any, config: Config) -> Failure | None:
    """Run or resume a trial and delete its weights, unless the next start continues it. Return its failure, or None."""
    path = Path(config.run.dir or "")
    tracker, finished = PruningTracker(trial, config), is_finished(path)

    def watched() -> Failure | None:
        try:
            for line in read_metrics(path):
                tracker.log(line, line["step"], prune=not finished)
            with quiet():
                execute(config, watch=tracker)
        except optuna().TrialPruned:
            return Failure("worse than the median", "pruned")
        return None

    failure = attempt(watched)
    if failure is None or failure.cause != "elsewhere":
        remove_weights(path)
    return failure


def _percent(accuracy: float) -> str:
    return f"{100 * accuracy:.2f} %"


class Search:
    """A search in its folder."""

    def __init__(self, space: Space, folder: Path, *, jobs: int = 1) -> None:
        if jobs < 1:
            raise bad_value("--jobs", jobs, ">= 1")
        self.space, self.folder, self.jobs = space, folder, jobs
        self.pool = WorkerPool([sys.executable, "-m", "fedlens.study.search"], jobs)
        self.optuna = optuna()
        self.study: Any = None

    def run(self) -> SearchResult:
        with locked(self.folder), closing(self.pool):
            try:
                self._open()
                self._requeue_interrupted()
                self._run_trials()
            except self.optuna.exceptions.StorageInternalError as error:
                raise UserError(f"search: {self.folder / DATABASE} cannot be used ({first_line(error)}).") from None
            self._write()
        return read_search(self.folder)

    # --- the database

    def _open(self) -> None:
        """Open the database. A new one gets the default as its first trial; a creation that was killed is completed."""
        expected: dict[str, Any] = json.loads(json.dumps(self._metadata()))
        self.study = open_study(self.folder, (self.space.name, expected))
        stored = self.study.user_attrs["asked"]
        if changed := [name for name in expected if stored.get(name) != expected[name]]:
            raise UserError(f"--out: {self.folder} holds a search of another {' and '.join(changed)}; choose another folder.")
        if not self.study.get_trials(deepcopy=False):
            self.study.enqueue_trial({dimension.key: dimension.default for dimension in self.space.dimensions})

    def _metadata(self) -> dict[str, Any]:
        """Return what must not change when a search continues."""
        s = self.space
        return {
            "space": {dimension.key: asdict(dimension) for dimension in s.dimensions},
            "configuration": identity(s.base),
            "seed": s.seed,
            "pruning": {"warmup": s.warmup, "startup": s.startup},
        }

    def _requeue_interrupted(self) -> None:
        """Mark trials that were running when the last process ended as failed, and queue them again with the same parameters."""
        states, trials = self.optuna.trial.TrialState, self.study.get_trials(deepcopy=False)
        queued = {trial.user_attrs.get("again") for trial in trials}
        for trial in trials:
            if trial.state == states.RUNNING:
                params = trial.system_attrs.get("fixed_params") or trial.params
                # A trial without all of its parameters is not queued: the sampler draws the same ones again.
                if len(params) == len(self.space.dimensions) and trial.number not in queued:
                    self.study.enqueue_trial(params, user_attrs={"again": trial.number})
                self.study.tell(trial.number, state=states.FAIL)

    def finished(self) -> list[Any]:
        """Return the finished trials in order. Optuna's state FAIL marks interrupted trials; failed ones are PRUNED and have a reason."""
        states = self.optuna.trial.TrialState
        trials: list[Any] = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
        return trials

    # --- trials

    def _run_trials(self) -> None:
        total, done = self.space.trials, len(self.finished())
        log.info("search %s on %s: %d trials, %d to do", self.space.name, self.space.place, total, max(0, total - done))
        with progress_bar(self.space.name, max(total, done), done, lines=True) as bar:
            while done < total:
                batch = [self._next_trial(done + i) for i in range(min(self.jobs, total - done) if done else 1)]  # the default runs alone
                outcomes = list(self.pool.outcomes(batch, self._run_here, self._message))  # wait for all: a recorded trial may prune others
                for trial, failure in outcomes:
                    if failure and failure.cause == "elsewhere":
                        raise Elsewhere(f"search: {failure.why}; the same command continues.")
                    if failure and failure.cause != "pruned" and done == 0:
                        raise UserError(f"search: the default configuration fails: {failure.why}")
                    self._record(trial, failure)
                    done += 1
                result = self._write()
                value, default = (result.trials[i]["value"] for i in (result.best or 0, 0))
                bar.advance(len(batch), f"best {_percent(value)}, default {_percent(default)}")

    def _next_trial(self, number: int) -> Any:
        """Sample the next trial. Its randomness is keyed by its number."""
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

    def _config(self, trial: Any) -> Config:
        """Return a trial's configuration. Raise if its values are valid alone, but not together."""
        config = self.space.configuration(self._params(trial))
        config.run.keep_last = config.run.keep_best = 1
        return placed(config, self.folder / "runs" / f"{config.experiment}-{identity(config)}")

    def _run_here(self, trial: Any) -> Failure | None:
        return run_trial(trial, self._config(trial))

    def _message(self, trial: Any) -> list[Any]:
        return [str(self.folder), trial._trial_id, asdict(self._config(trial))]

    def _record(self, trial: Any, failure: Failure | None) -> None:
        if failure is None:
            value = read_summary(Path(self._config(trial).run.dir or ""))["val_accuracy"]
            self.study.tell(trial, value)
            text = f"complete, validation accuracy {_percent(value)}"
        else:
            if failure.cause != "pruned":  # a failed trial is stored as pruned, so that the sampler avoids its values
                trial.set_user_attr("why", failure.why)
            self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
            text = f"pruned: {failure.why}" if failure.cause == "pruned" else f"failed: {failure.why}"
        log.info("trial %d (%s) %s", len(self.finished()) - 1, " ".join(as_overrides(self._params(trial))), text)

    # --- results

    def _params(self, trial: Any) -> dict[str, Any]:
        return {d.key: d.rounded(trial.params[d.key]) for d in self.space.dimensions}

    def _entry(self, number: int, trial: Any) -> dict[str, Any]:
        """Return a finished trial as an entry of search.json. Its number does not count the interrupted ones."""
        accuracies = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
        why = trial.user_attrs.get("why")
        state = "failed" if why is not None else trial.state.name.lower()
        value = None if state == "failed" else trial.value if state == "complete" else max(accuracies)
        return {"number": number, "params": self._params(trial), "value": value, "state": state, "evaluations": accuracies, "why": why}

    def _write(self) -> SearchResult:
        """Write search.json: every trial in its order, without times."""
        trials = [self._entry(number, trial) for number, trial in enumerate(self.finished())]
        complete = [trial for trial in trials if trial["state"] == "complete"]
        best = max(complete, key=lambda trial: trial["value"], default={"number": None})  # among equals the first: the default wins ties
        default = {d.key: d.default for d in self.space.dimensions}
        result = SearchResult(
            name=self.space.name,
            place=self.space.place,
            question=self.space.question,
            objective="the best validation accuracy of a trial's evaluations; the test set is not read",
            experiment=self.space.experiment,
            keys=list(default),
            trials=trials,
            default={"params": default, "value": trials[0]["value"] if trials else None},
            best=best["number"],
        )
        write_json(self.folder / SEARCH_FILE, asdict(result))
        return result


def open_study(folder: Path, new: tuple[str, Mapping[str, Any]] | None = None) -> Any:
    """Return Optuna's study in a search's folder, with its pruner. `new`: create it if it is missing, with this name and metadata."""
    module = optuna()
    storage = module.storages.RDBStorage(_address(folder / DATABASE), engine_kwargs={"connect_args": {"timeout": 60}})
    if new is not None and not storage.get_all_studies():
        module.create_study(storage=storage, study_name=new[0], direction="maximize")
    study = module.load_study(study_name=None, storage=storage)
    if new is not None and "asked" not in study.user_attrs:
        study.set_user_attr("asked", new[1])
    pruning = study.user_attrs["asked"]["pruning"]
    study.pruner = module.pruners.MedianPruner(n_startup_trials=pruning["startup"], n_warmup_steps=pruning["warmup"])
    return study


def _address(file: Path) -> str:
    """Return the database's address, with the characters escaped that have a meaning there."""
    return f"sqlite:///{str(file).replace('%', '%25').replace('?', '%3F')}"


def _run_trial_task(message: list[Any]) -> Failure | None:
    """Run one trial in a worker process."""
    folder, trial, config = message
    return run_trial(optuna().trial.Trial(open_study(Path(folder)), trial), to_config(OmegaConf.create(config)))


if __name__ == "__main__":
    serve(_run_trial_task)
