"""Hyper-parameter search: its spaces, what it may look at, and that nothing is lost when it is killed."""

import copy
import json
import math
import shlex
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import FAST
from processes import start
from small import shrink

from fedlens.cli import main
from fedlens.config import Config
from fedlens.errors import Elsewhere, UserError
from fedlens.overrides import choices, compose
from fedlens.runs.store import is_finished, read_metrics, write_json
from fedlens.study import search as search_module
from fedlens.study import search_space
from fedlens.study.processes import Failure, ProcessWorker, WorkerPool, locked
from fedlens.study.results import gather, read_search
from fedlens.study.runner import placed
from fedlens.study.search import Search
from fedlens.study.search_space import Space, as_overrides, read_space
from fedlens.training import bench as setup
from fedlens.training.run import run

pytest.importorskip("optuna")

QUICK = [
    *FAST,
    "federated.clients=10",
    "federated.participation=0.2",
    "federated.rounds=3",
    "federated.eval_every=1",
    "federated.local_steps=1",
    "optim.batch_size=8",
]
SPACE = """
question: Which?
where: {small: [optim.momentum=0.5], large: [optim.momentum=0.9]}
set: [experiment=fedavg_iid]
space:
  optim.lr: {low: 1.0e-3, high: 1, log: true}
  optim.clip_norm: {small: {choices: [null, 1]}, large: {choices: [null, 1, 2]}}
  federated.local_steps: {low: 1, high: 4}
  server.lr: {low: 0.5, high: 1.5, step: 0.1}
trials: 4
pruning: {warmup: 1, startup: 2}
"""
SCRIPT = """
import sys
from pathlib import Path

from fedlens.study.search import Search
from fedlens.study.search_space import read_space

Search(read_space(sys.argv[1], overrides=sys.argv[3:]), Path(sys.argv[2])).run()
"""
HOPELESS = "set: [experiment=fedavg_iid]\nspace: {optim.lr: {choices: [0.03, 5.0]}}\ntrials: 4\npruning: {warmup: 0, startup: 1}\n"


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra takes a quarter of a second, and most spaces here share their configuration."""
    monkeypatch.setattr(search_space, "compose", lambda overrides: copy.deepcopy(_composed(tuple(overrides))))


@cache
def _composed(overrides: tuple[str, ...]) -> Config:
    return compose(overrides)


def space_file(folder: Path, content: str = SPACE) -> str:
    path = folder / "mine.yaml"
    path.write_text(content)
    return str(path)


@cache
def _read(content: str) -> Space:
    with tempfile.TemporaryDirectory() as folder:
        return read_space(space_file(Path(folder), content), overrides=QUICK)


def small_space(content: str = SPACE, trials: int | None = None) -> Space:
    """Of QUICK runs; `federated.local_steps` is set by QUICK, so it is not searched."""
    return replace(_read(content), trials=trials or _read(content).trials)


def search_json(folder: Path) -> str:
    return (folder / "search.json").read_text()


# --- spaces


def test_a_space_distinguishes_integers_from_floats_and_places(tmp_path: Path) -> None:
    space = read_space(space_file(tmp_path))
    lr, clip, steps, server = space.dimensions
    assert (space.name, space.place, space.question, space.trials, space.warmup, space.startup) == ("mine", "small", "Which?", 4, 1, 2)
    assert (lr.log, lr.whole, lr.default, steps.whole, steps.default, server.step) == (True, False, 0.03, True, 4, 0.1)
    assert clip.choices == (None, 1.0) and isinstance(clip.choices[1], float)
    large = read_space(space_file(tmp_path), place="large", trials=9, overrides=["optim.lr=0.1", "seed=3"])
    assert [d.key for d in large.dimensions] == ["optim.clip_norm", "federated.local_steps", "server.lr"]  # what is set is not searched
    assert large.dimensions[0].choices == (None, 1.0, 2.0) and large.trials == 9
    params = {"optim.clip_norm": 2.0, "federated.local_steps": 3, "server.lr": 1.2}
    assert large.configuration(params) == compose([*large.experiment, *as_overrides(params), "train.test=false"])
    assert large.experiment == ["optim.momentum=0.9", "experiment=fedavg_iid", "optim.lr=0.1", "seed=3"]


@pytest.mark.parametrize("name", choices("search"))
def test_every_built_in_space_can_be_read_for_both_data_sets(name: str) -> None:
    for place in ("embedded", "cifar100"):
        assert read_space(name, place=place).question


def test_values_are_spelled_as_on_the_command_line() -> None:
    params = {"a": None, "b": True, "c": 1e-05, "d": "least_sensitive", "e": "hf:x y", "f": [None, 2, "mlp in", "a:b"]}
    assert as_overrides(params) == ["a=null", "b=true", "c=1e-05", "d=least_sensitive", "e='hf:x y'", "f=[null,2,mlp in,'a:b']"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("space: {optim.lr: {low: 1, high: 0.001}}", "optim.lr: low must be < high (0.001), got 1."),
        ("space: {optim.lr: {low: 0.001}}", "optim.lr: high must be a number, got None."),
        ("space: {optim.lr: {low: 0, high: 1, log: true}}", "log"),
        ("space: {optim.lr: {low: 0.001, high: 1, step: 0.7}}", "step"),
        ("space: {optim.lr: {low: x, high: 1}}", "optim.lr: low must be a number, got 'x'."),
        ("space: {optim.lr: {low: 0.1, high: 1}}", "its default, 0.01, is not in 0.1 to 1"),
        ("space: {optim.lr: {low: 0.001, hihg: 1}}", "Did you mean 'high'"),
        ("space: {optim.lr: 3}", "optim.lr must be a mapping, got int."),
        ("space: {optim.lrr: {low: 0, high: 1}}", "Did you mean 'optim.lr'"),
        ("space: {optim.momentum: {low: 0.0, high: 1.0}}", "got 1.0."),
        ("space: {optim.momentum: {choices: []}}", "without low and high, got []."),
        ("space: {optim.momentum: {choices: [0.9, 0.9]}}", "different"),
        ("space: {optim.momentum: {choices: [0.9, [1]]}}", "single values"),
        ("space: {optim.momentum: {choices: [0.9, much]}}", "optim.momentum"),
        ("space: {optim.momentum: {choices: [0.5, 0.8]}}", "choices must be a list with the default, 0.9"),
        ("space: {federated.local_steps: {low: 1, high: 8.5}}", "high must be a whole number, got 8.5"),
        ("space: {optim.schedule: {low: 1, high: 2}}", "choices"),
        ("space: {optim: {choices: [1]}}", "cannot be searched"),
        ("space: {seed: {low: 0, high: 9}}", "cannot be searched"),
        ("space: {experiment: {choices: [fedavg_iid, fedavg_iid_sparse]}}", "cannot be searched"),
        ("space: {data.val_fraction: {low: 0.1, high: 0.2}}", "cannot be searched"),
        ("space: {}", "nothing to search"),
        ("spaces: {}", "Did you mean 'space'"),
        ("trials: 0\nspace: {optim.momentum: {choices: [0.9]}}", "trials must be a whole number >= 1, got 0."),
        ("pruning: {warmup: -1}\nspace: {optim.momentum: {choices: [0.9]}}", "pruning: warmup must be a whole number >= 0, got -1."),
        ("set: [data.val_fraction=0, head=linear]\nspace: {optim.momentum: {choices: [0.9]}}", "data.val_fraction"),
        ("set: no\nspace: {optim.momentum: {choices: [0.9]}}", "a list of key=value"),
        ("a: [", "cannot be read"),
    ],
)
def test_an_invalid_space_raises_a_one_line_error(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_space(space_file(tmp_path, content))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_space_place_or_override_raises_a_one_line_error(tmp_path: Path) -> None:
    for name, options, message in (
        ("fedavg_nonid", {}, "Did you mean 'fedavg_noniid'"),
        (str(tmp_path / "none.yaml"), {}, "cannot be read"),
        (space_file(tmp_path), {"place": "smal"}, "Did you mean 'small'"),
        (space_file(tmp_path), {"overrides": ["run.trackers=[wandb]"]}, "no trackers"),
        (space_file(tmp_path), {"overrides": ["optim.lrr=1"]}, "optim.lr"),
    ):
        with pytest.raises(UserError, match=message):
            read_space(name, **options)  # type: ignore[arg-type]


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'fedlens\[search\]'"):
        Search(small_space(), tmp_path / "s")


# --- the order of trials, on a function in place of training


class Kill(BaseException):
    """As SIGKILL: nothing of ours catches it."""


def pretend(trial: Any, config: Config) -> Failure | None:
    """Best at lr = 0.1 and α = 1."""
    value = 0.9 - 0.1 * abs(math.log10(config.optim.lr) + 1) - 0.1 * abs(config.server.lr - 1)
    for step in range(3):
        trial.report(value * (step + 1) / 3, step)
        if step < 2 and trial.should_prune():
            return Failure("worse than the median", "pruned")
    Path(str(config.run.dir)).mkdir(parents=True, exist_ok=True)
    write_json(Path(str(config.run.dir)) / "summary.json", {"val_accuracy": value})
    return None


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "run_trial", pretend)


@pytest.mark.usefixtures("pretended")
def test_the_same_seed_tries_the_same_and_another_seed_something_else(tmp_path: Path) -> None:
    one, two = (Search(small_space(trials=11), tmp_path / name).run() for name in ("one", "two"))
    assert search_json(tmp_path / "one") == search_json(tmp_path / "two")
    assert [t["number"] for t in one.trials] == list(range(11)) and one.trials[0]["params"] == one.default["params"] == two.default[
        "params"
    ]
    assert len({json.dumps(t["params"]) for t in one.trials}) > 8
    other = Search(small_space(SPACE + "seed: 1\n", trials=3), tmp_path / "other").run()
    assert other.trials[0]["params"] == one.trials[0]["params"] and other.trials[1]["params"] != one.trials[1]["params"]
    best = max((t for t in one.trials if t["state"] == "complete"), key=lambda t: t["value"])
    assert one.best == best["number"] and best["value"] > one.default["value"] and "pruned" in {t["state"] for t in one.trials}


@pytest.mark.usefixtures("pretended")
def test_adding_trials_later_gives_the_same_search_as_all_at_once(tmp_path: Path) -> None:
    first = Search(small_space(trials=3), tmp_path / "parts").run()
    more = Search(small_space(trials=10), tmp_path / "parts").run()
    assert more.trials[:3] == first.trials and len(more.trials) == 10
    Search(small_space(trials=10), tmp_path / "whole").run()
    assert search_json(tmp_path / "parts") == search_json(tmp_path / "whole")
    Search(small_space(trials=2), tmp_path / "parts").run()  # fewer than there are: nothing to do, nothing lost
    assert search_json(tmp_path / "parts") == search_json(tmp_path / "whole")


@pytest.mark.usefixtures("pretended")
def test_killed_at_any_commit_to_its_database_a_search_ends_with_the_same_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy.orm import Session

    commit, count, at = Session.commit, 0, 0

    def torn(session: Session) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise Kill
        commit(session)

    monkeypatch.setattr(Session, "commit", torn)
    Search(small_space(trials=3), tmp_path / "whole").run()
    total, points = count, 6
    for at in sorted({1 + i * (total - 1) // (points - 1) for i in range(points)}):
        folder, count = tmp_path / f"torn-{at}", 0
        with pytest.raises(Kill):
            Search(small_space(trials=3), folder).run()
        count = total  # no more kills
        Search(small_space(trials=3), folder).run()
        assert search_json(folder) == search_json(tmp_path / "whole"), f"killed at commit {at} of {total}"


@pytest.mark.usefixtures("pretended")
def test_a_folder_is_for_one_search_and_one_process(tmp_path: Path) -> None:
    Search(small_space(trials=1), tmp_path / "s").run()
    with pytest.raises(UserError, match="another configuration"):
        Search(read_space(space_file(tmp_path), overrides=[*QUICK, "federated.rounds=4"]), tmp_path / "s").run()
    with pytest.raises(UserError, match="another seed"):
        Search(small_space(SPACE + "seed: 1\n"), tmp_path / "s").run()
    with pytest.raises(UserError, match="another space"):
        Search(small_space(SPACE.replace("high: 1,", "high: 2,")), tmp_path / "s").run()
    with locked(tmp_path / "s"), pytest.raises(UserError, match="in use by another process"):
        Search(small_space(), tmp_path / "s").run()


# --- with training


def test_a_search_prunes_deletes_weights_and_never_reads_the_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = setup.ImageTask.samples
    monkeypatch.setattr(setup.ImageTask, "samples", lambda task, split: sizes.append(len(split)) or real(task, split))
    found = Search(small_space(HOPELESS), tmp_path / "s").run()
    hopeless = [t for t in found.trials if t["params"]["optim.lr"] == 5.0]
    assert hopeless and all(t["state"] == "pruned" and len(t["evaluations"]) == 1 for t in hopeless)
    assert all(t["state"] == "complete" and len(t["evaluations"]) == 3 for t in found.trials if t not in hopeless)
    assert found.best == 0 and found.trials[0]["value"] == max(found.trials[0]["evaluations"]) == found.default["value"]
    assert set(sizes) == {540, 60} and len(sizes) == 4  # train and validation; each configuration is trained once
    folders = sorted((tmp_path / "s" / "runs").iterdir())
    assert len(folders) == 2 and not list((tmp_path / "s").rglob("*.safetensors"))
    told = json.loads(search_json(tmp_path / "s"))
    assert "test_" not in search_json(tmp_path / "s") and "not read" in told["objective"]
    assert [json.loads(f.read_text())["test_accuracy"] for f in tmp_path.rglob("summary.json")] == [None]
    assert gather([tmp_path / "s"]).searches == [read_search(tmp_path / "s")]


def test_a_failed_trial_is_reported_and_others_continue_but_the_default_must_work(tmp_path: Path) -> None:
    content = "set: [experiment=fedavg_iid]\nspace: {optim.lr: {choices: [0.03, 1.0e+30]}}\ntrials: 4\n"
    found = Search(small_space(content), tmp_path / "s").run()
    failed = [t for t in found.trials if t["state"] == "failed"]
    assert failed and len(found.trials) == 4 and all(t["value"] is None and "finite" in t["why"] for t in failed)
    assert found.best == 0
    broken = read_space(space_file(tmp_path, content), overrides=[*QUICK, f"data.root={tmp_path}"])
    with pytest.raises(UserError, match="the default configuration fails"):
        Search(broken, tmp_path / "broken").run()
    with pytest.raises(UserError, match="another configuration"):  # a folder of images is known by where it lies
        Search(small_space(content), tmp_path / "broken").run()


def test_a_search_that_is_killed_and_started_again_ends_with_the_same_trials(tmp_path: Path) -> None:
    path = space_file(tmp_path)
    Search(read_space(path, overrides=QUICK), tmp_path / "whole").run()
    script = tmp_path / "search.py"
    script.write_text(SCRIPT)
    process = start([path, str(tmp_path / "torn"), *QUICK], script)
    runs = tmp_path / "torn" / "runs"
    while process.exitcode is None and len(list(runs.glob("*/metrics.jsonl"))) < 2:
        process.join(0.01)
    process.kill()
    process.join()
    assert len(read_search(tmp_path / "torn").trials) < 4
    Search(read_space(path, overrides=QUICK), tmp_path / "torn").run()
    assert search_json(tmp_path / "whole") == search_json(tmp_path / "torn")
    states = [t.state.name for t in search_module.open_study(tmp_path / "torn").trials]
    assert states.count("FAIL") == 1 and len(states) == 5  # the one that was running is kept as failed, and tried again


def test_two_jobs_try_as_many_and_report_to_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], ProcessWorker._start
    monkeypatch.setattr(ProcessWorker, "_start", lambda self: (started.append(self.place), start(self))[1])
    found = Search(small_space(HOPELESS, trials=5), tmp_path / "s", jobs=2).run()
    assert sorted(started) == [0, 1]  # two processes for four trials; the first trial is alone
    assert len(found.trials) == 5 and found.trials[0]["state"] == "complete"
    assert all(len(t["evaluations"]) == (3 if t["state"] == "complete" else 1) for t in found.trials)
    assert not list((tmp_path / "s").rglob("*.safetensors"))


def test_a_worker_whose_device_failed_gets_no_other_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retired: list[int] = []
    search = Search(small_space(HOPELESS, trials=1), tmp_path / "s", jobs=2)
    monkeypatch.setattr(ProcessWorker, "retire", lambda self: retired.append(self.place))
    for cause in ("values", "device"):
        monkeypatch.setattr(ProcessWorker, "receive", lambda self, cause=cause: {"why": "CUDA error", "cause": cause})
        assert search.pool.workers[0].failure() == Failure("CUDA error", cause)
        assert retired == [0] * (cause == "device")


def test_the_failure_of_a_trial_says_whether_the_device_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = placed(small_space(HOPELESS, trials=1).base, tmp_path)
    for error, why, cause in (
        (RuntimeError("CUDA error: unspecified"), "RuntimeError: CUDA error: unspecified", "device"),
        (UserError("optim.lr: too high"), "optim.lr: too high", "values"),
    ):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(search_module, "execute", fails)
        assert search_module.run_trial(None, config) == Failure(why, cause)


# The program of a worker that is killed, once, after the second evaluation of a trial that is not the default.
KILLED = """
import os, signal, sys
from pathlib import Path
from fedlens.study import search
from fedlens.study.processes import serve

log, mark = search.PruningTracker.log, Path(sys.argv[1])

def log_and_die(tracker, metrics, step, prune=True):
    log(tracker, metrics, step, prune)
    if len(tracker.accuracies) == 2 and tracker.trial.number > 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

search.PruningTracker.log = log_and_die
serve(search._run_trial_task)
"""


def test_a_trial_whose_worker_was_killed_continues_at_the_next_start_and_does_not_count_as_failed(tmp_path: Path) -> None:
    space = replace(small_space(trials=3), startup=5)  # nothing is pruned
    Search(space, tmp_path / "whole", jobs=2).run()
    search = Search(space, tmp_path / "torn", jobs=2)
    search.pool = WorkerPool([sys.executable, "-c", KILLED, str(tmp_path / "mark")], 2)
    with pytest.raises(Elsewhere, match="interrupted: its process was ended by SIGKILL; the same command continues"):
        search.run()
    (interrupted,) = (run for run in (tmp_path / "torn" / "runs").iterdir() if not is_finished(run))
    before = len(read_metrics(interrupted))
    found = Search(space, tmp_path / "torn", jobs=2).run()
    assert before >= 1 and is_finished(interrupted), "it went on in its folder"
    assert [trial["state"] for trial in found.trials] == ["complete"] * 3
    assert search_json(tmp_path / "torn") == search_json(tmp_path / "whole")


def test_a_failure_of_the_disk_does_not_count_as_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, calls = space_file(tmp_path), search_module.execute, list[object]()

    def full(config: Any, **options: Any) -> Any:
        calls.append(config)
        if len(calls) == 2:
            raise Elsewhere("run.dir: no space left on device")
        return real(config, **options)

    monkeypatch.setattr(search_module, "execute", full)
    with pytest.raises(UserError, match="no space left on device; the same command continues"):
        Search(read_space(path, overrides=QUICK), tmp_path / "s").run()
    found = Search(read_space(path, overrides=QUICK), tmp_path / "s").run()
    assert len(found.trials) == 4 and all(trial["state"] != "failed" for trial in found.trials)


def test_on_the_embedded_default_the_command_prints_what_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shrink(monkeypatch)
    overrides = ["device=cpu", "federated.rounds=2", "federated.participation=0.1"]
    assert main(["search", "fedavg_iid", *overrides, "--trials", "3", "--out", str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out
    found = read_search(tmp_path / "s")
    assert found.best is not None and found.trials[found.best]["value"] >= found.default["value"] > 0.5
    line = next(line for line in out.splitlines() if line.strip().startswith("fedlens run"))
    words = shlex.split(line)[2:]
    assert "experiment=fedavg_iid" in words and "| default |" in out and words[-1] == "seed=1"
    again = run(
        [*words[:-1], "run.progress=false", f"run.dir={tmp_path / 'again'}"]
    )  # the same run: the best trial's value, and now the test set
    assert again.summary["val_accuracy"] == found.trials[found.best]["value"] and again.summary["test_accuracy"] > 0.5


def test_a_folder_s_name_may_have_what_means_something_in_an_address(tmp_path: Path) -> None:
    folder = tmp_path / "50%?x#&é"
    folder.mkdir()
    storage = search_module.optuna().storages.RDBStorage(search_module._address(folder / "search.db"))
    storage.engine.dispose()
    assert (folder / "search.db").is_file()
