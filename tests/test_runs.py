"""The run folder: atomic, exact on resume, honest about damage."""

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAST, SIDE, accept, few_images
from processes import finished, killed_and_resumed
from safetensors import SafetensorError

import fedlens as fl
from fedlens.cli import main
from fedlens.errors import UserError
from fedlens.overrides import compose
from fedlens.runs import folder as folders
from fedlens.runs import store
from fedlens.runs.environment import commit, commit_of
from fedlens.runs.folder import RunFolder
from fedlens.runs.store import is_finished, read_metrics, read_model, read_summary
from fedlens.runs.trackers import TRACKERS
from fedlens.training import centralized
from fedlens.training import run as execute


def folder(path: Path, **kw: int) -> RunFolder:
    return RunFolder.create(path, "a: 1\n", {}, **kw)


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    with folder(tmp_path / "r") as run:
        tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2, dtype=torch.bfloat16)}
        run.save_checkpoint(7, tensors, {"x": 0.1})
        found = run.latest_checkpoint()
        assert found is not None
        assert found.step == 7
        assert found.state["x"] == 0.1
        assert all(torch.equal(found.tensors[n], t) for n, t in tensors.items())


def test_the_last_and_the_best_are_kept_and_of_equals_the_earlier(tmp_path: Path) -> None:
    with folder(tmp_path / "r", keep_last=2, keep_best=1) as run:
        for step, score in enumerate([0.1, 0.9, 0.9, 0.3, 0.4, 0.2]):
            run.save_checkpoint(step, {"a": torch.zeros(1)}, {"score": score})
        run.wait_for_checkpoint()
        assert store.steps_of(run.path) == [1, 4, 5]


@pytest.mark.parametrize("harm", ["truncate", "flip", "empty", "no_state", "garbage_state"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    with folder(tmp_path / "r") as run:
        for step in (1, 2):
            run.save_checkpoint(step, {"a": torch.full((100,), float(step))}, {})
        run.wait_for_checkpoint()
        file = run.checkpoints / "step-000000002" / ("state.json" if "state" in harm else "tensors.safetensors")
        data = bytearray(file.read_bytes())
        if harm == "truncate":
            file.write_bytes(data[: len(data) // 2])
        elif harm == "flip":
            data[-5] ^= 1
            file.write_bytes(data)
        elif harm == "no_state":
            file.unlink()
        else:
            file.write_bytes(b"" if harm == "empty" else b"{")
        store.log.propagate = True
        found = run.latest_checkpoint()
        assert found is not None
        assert found.step == 1
        assert "step 2 is damaged" in caplog.text


def test_a_checkpoint_whose_best_is_damaged_is_passed_over_too(tmp_path: Path) -> None:
    with folder(tmp_path / "r", keep_last=3) as run:
        run.save_checkpoint(1, {"a": torch.zeros(1)}, {"score": 0.1, "session": {"best_step": 1}})
        run.save_checkpoint(2, {"a": torch.zeros(1)}, {"score": 0.9, "session": {"best_step": 2}})
        run.save_checkpoint(3, {"a": torch.zeros(1)}, {"score": 0.5, "session": {"best_step": 2}})
        run.wait_for_checkpoint()
        (run.checkpoints / "step-000000002" / "tensors.safetensors").write_bytes(b"")
        found = run.latest_checkpoint()
        assert found is not None
        assert found.step == 1


def test_metrics_after_the_checkpoint_are_dropped_with_a_torn_last_line(tmp_path: Path) -> None:
    with folder(tmp_path / "r") as run:
        for step in (1, 2, 3):
            run.append_metrics({"step": step})
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "lo')
        assert [m["step"] for m in read_metrics(run.path)] == [1, 2, 3]
        run.rewind_metrics(2)
        assert [m["step"] for m in read_metrics(run.path)] == [1, 2]


@pytest.mark.parametrize("line", ["{", "{}", "5", '{"step": "one"}', "\x00\x00", ""])
def test_a_damaged_line_of_metrics_is_named_and_what_follows_it_is_not_lost(tmp_path: Path, line: str) -> None:
    with folder(tmp_path / "r") as run:
        file = run.path / "metrics.jsonl"
        file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
        before = file.read_bytes()
        for reading in (lambda: read_metrics(run.path), lambda: run.rewind_metrics(3)):
            with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 must be a record with its step") as error:
                reading()
            assert "\n" not in str(error.value)
        assert file.read_bytes() == before
        file.write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(UserError, match="line 2"):  # it has an end, so no kill has torn it
            read_metrics(run.path)


def test_a_damaged_or_missing_file_of_a_finished_run_is_one_line_that_says_so(tmp_path: Path) -> None:
    with folder(tmp_path / "r") as run:
        with pytest.raises(UserError, match="is not finished; resume it"):
            read_summary(run.path)
        run.finish({"val_accuracy": 0.5}, {"a": torch.zeros(100)})
        assert read_summary(run.path) == {"val_accuracy": 0.5} and is_finished(run.path)
        model = run.path / "model.safetensors"
        for whole in (model.read_bytes()[:200], b""):
            model.write_bytes(whole)
            with pytest.raises(UserError, match=r"model\.safetensors is damaged \(") as error:
                read_model(run.path)
            assert "\n" not in str(error.value)
        model.unlink()
        with pytest.raises(UserError, match=r"is finished, but model\.safetensors is missing"):
            read_model(run.path)
        for damaged in ("", "{", "[]", "{}"):
            (run.path / "summary.json").write_text(damaged)
            assert not is_finished(run.path)
            with pytest.raises(UserError, match=r"summary\.json is damaged.*.*Remove it and resume: fedlens resume"):
                read_summary(run.path)


def test_arithmetic_on_what_was_kept_or_is_damaged_is_one_line(
    fast_run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fast_run("r", "train.epochs=0")
    (run.path / "model.safetensors").write_bytes((run.path / "model.safetensors").read_bytes()[:1000])
    capsys.readouterr()  # what the run said
    for words in (["sweep", str(run.path)], ["negate", str(run.path), "--out", str(tmp_path / "n.st")]):
        assert main(["arith", *words]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and "model.safetensors is damaged" in said[0]
    (run.path / "model.safetensors").unlink()
    assert main(["arith", "sweep", str(run.path)]) == 2
    assert "model.safetensors is missing" in capsys.readouterr().err


def test_two_processes_cannot_hold_one_run(tmp_path: Path) -> None:
    with folder(tmp_path / "r"), pytest.raises(UserError, match="in use"):
        RunFolder.open(tmp_path / "r")
    RunFolder.open(tmp_path / "r").close()


def test_a_start_that_is_refused_leaves_the_run_that_another_began_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, held, real = tmp_path / "r", list[RunFolder](), execute.set_up

    def meanwhile(config: Any) -> Any:
        held.append(folder(path))
        return real(config)

    monkeypatch.setattr(execute, "set_up", meanwhile)
    with pytest.raises(UserError, match="already holds a run"):
        execute.execute(compose([*FAST, f"run.dir={path}"]))
    held[0].close()
    assert (path / "config.yaml").read_text() == "a: 1\n"


def test_a_run_that_another_made_and_left_before_the_lock_was_ours_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = folders.take_lock

    def late(path: Path) -> Any:
        (path / "config.yaml").write_text("of: another\n")
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(folders, "take_lock", late)
        with pytest.raises(UserError, match="already holds a run"):
            execute.execute(compose([*FAST, f"run.dir={tmp_path / 'r'}"]))
    assert (tmp_path / "r" / "config.yaml").read_text() == "of: another\n"
    RunFolder.open(tmp_path / "r").close()  # the lock was given back


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder(tmp_path / "r") as run:
        run.save_checkpoint(1, {"a": torch.zeros(1)}, {})
        run.wait_for_checkpoint()
        monkeypatch.setattr(folders, "save_file", full)
        run.save_checkpoint(2, {"a": torch.zeros(1)}, {})
        with pytest.raises(UserError, match="no space left on device; earlier checkpoints are intact"):
            run.save_checkpoint(3, {"a": torch.zeros(1)}, {})  # the next one says it
        assert [p.name for p in run.checkpoints.iterdir()] == ["step-000000001"]
        found = run.latest_checkpoint()
        assert found is not None
        assert found.step == 1


def test_a_full_disk_at_the_last_checkpoint_is_told_at_the_end_unless_something_else_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(path: Path, then: Callable[[], object]) -> None:
        with folder(path) as run:
            run.save_checkpoint(1, {"a": torch.zeros(1)}, {})
            then()

    monkeypatch.setattr(folders, "save_file", full)
    with pytest.raises(UserError, match="no space left"):
        train(tmp_path / "r", lambda: None)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "s", lambda: 1 // 0)
    RunFolder.open(tmp_path / "r").close()  # the lock was given back


def torn_by_a_full_disk(_: object, file: Path) -> None:
    """As safetensors does it: an error of its own, and half a file."""
    Path(file).write_bytes(b"half")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_full_disk_under_the_first_or_the_last_weights_is_one_line_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "save_file", torn_by_a_full_disk)
    with folder(tmp_path / "r") as run:
        for write in (lambda: run.keep_start({"a": torch.zeros(1)}, None), lambda: run.finish({}, {"a": torch.zeros(1)})):
            with pytest.raises(UserError, match=r"No space left on device .*; earlier checkpoints are intact"):
                write()
            assert not list(run.path.glob("*.safetensors*"))


def test_a_run_that_a_full_disk_ends_before_it_trained_leaves_no_folder(
    fast_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "save_file", torn_by_a_full_disk)
    with pytest.raises(UserError, match=r"start\.safetensors cannot be written"):
        fast_run("r", "head=linear", "train.epochs=1")
    assert not (tmp_path / "r").exists()


def test_training_goes_on_while_a_checkpoint_of_where_it_was_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, writing = threading.Event(), folders.save_file

    def slow(*given: Any) -> None:
        assert release.wait(60)
        writing(*given)

    monkeypatch.setattr(folders, "save_file", slow)
    with folder(tmp_path / "r") as run:
        weights, state = torch.zeros(3), {"counts": {"dropped": 0}}
        run.save_checkpoint(1, {"w": weights}, state)
        weights += 1  # before anything is on disk
        state["counts"]["dropped"] = 5
        assert store.steps_of(run.path) == []
        release.set()
        found = run.latest_checkpoint()
        assert found is not None and found.tensors["w"].tolist() == [0, 0, 0] and found.state["counts"] == {"dropped": 0}


def test_a_large_checkpoint_is_not_held_in_memory_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    writing = folders.save_file
    monkeypatch.setattr(folders, "COPIED", 1000)
    monkeypatch.setattr(folders, "save_file", lambda *given: (threads.append(threading.current_thread().name), writing(*given)))
    with folder(tmp_path / "r") as run:
        run.save_checkpoint(1, {"w": torch.zeros(250)}, {})
        run.save_checkpoint(2, {"w": torch.zeros(251)}, {})
        assert store.steps_of(run.path) == [1, 2]
    assert [name == threading.current_thread().name for name in threads] == [False, True]


def test_log_lines_are_timestamp_level_message(fast_run: Callable[..., Any]) -> None:
    run = fast_run("r", "train.epochs=1")
    lines = (run.path / "log.txt").read_text().splitlines()
    assert lines
    for line in lines:
        stamp, level, message = line.split(" | ", 2)
        assert time.strptime(stamp.split(",")[0], "%Y-%m-%d %H:%M:%S")
        assert level == "INFO"
        assert message


def test_the_saved_configuration_reproduces_the_run(fast_run: Callable[..., Any], tmp_path: Path) -> None:
    from fedlens.overrides import from_file
    from fedlens.runs.identity import identity
    from fedlens.training.run import execute

    first = fast_run("first", "seed=5", "optim.lr=0.003", "train.epochs=1")
    config = from_file(first.path / "config.yaml", [f"run.dir={tmp_path / 'second'}"])
    second = execute(config)
    assert identity(first.config) == identity(second.config)
    assert same(first.state, second.state)


def test_weights_that_a_run_wrote_are_known_by_what_they_hold_and_others_by_their_name(tmp_path: Path) -> None:
    from fedlens.runs.identity import identity

    def known(place: str, name: str, content: bytes) -> str:
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / name).write_bytes(content)
        return identity(compose([*FAST, f"model.weights={tmp_path / place / name}"]))

    for name in ("model.safetensors", "start.safetensors"):
        assert known("a", name, b"one") == known("b", name, b"one") != known("c", name, b"other")
        assert known("a", name, b"one more") != known("b", name, b"one")  # the same place, written again
    assert known("a", "dino.pth", b"one") == known("b", "dino.pth", b"other")
    assert known("a", "dino.pth", b"one") == known("b", "dino.pth", b"other")
    (tmp_path / "d" / "model.safetensors").mkdir(parents=True)
    assert identity(compose([*FAST, f"model.weights={tmp_path / 'd' / 'model.safetensors'}"]))  # whoever reads it says what is wrong


def test_a_run_is_known_by_the_weights_that_it_began_with(fast_run: Callable[..., Any], tmp_path: Path) -> None:
    from fedlens.study.results import group

    for place, seed in (("a", 0), ("b", 0), ("c", 1)):
        fast_run(place, "train.epochs=0", f"seed={seed}")
    for place, seed in (("a", 0), ("b", 1)):
        fast_run(f"on-{place}", "train.epochs=0", f"seed={seed}", f"model.weights={tmp_path / place / 'model.safetensors'}")
    (tmp_path / "c" / "model.safetensors").replace(tmp_path / "a" / "model.safetensors")
    (tmp_path / "b" / "model.safetensors").unlink()
    (cell,) = group([tmp_path / "on-a", tmp_path / "on-b"])
    assert sorted(cell.runs) == [0, 1]  # one cell of two seeds, whatever lies in those places now
    with pytest.raises(UserError, match="another configuration"):
        fast_run("on-a", "train.epochs=0", "seed=0", f"model.weights={tmp_path / 'a' / 'model.safetensors'}", "run.if_exists=resume")


def test_a_run_that_is_pinned_to_fewer_cores_takes_no_more_threads_than_those(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlens.training.run import _cores

    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert _cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert _cores() == 64


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_killed_twenty_times_and_resumed_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    overrides = [
        *FAST,
        f"data.root={few_images()}",
        "data.val_fraction=0.25",
        "train.epochs=16",
        "optim.batch_size=18",
        "model.dropout=0.1",
        "model.freeze_blocks=3",
        "run.checkpoint_minutes=0",
        "train.label_smoothing=0.1",
    ]
    whole = finished(tmp_path / "whole", overrides)
    torn = killed_and_resumed(tmp_path / "torn", overrides, kills=20, seed=1, step=whole.summary["seconds"] / whole.summary["steps"])
    assert same(whole.state, torn.state)
    assert without_time(whole.metrics) == without_time(torn.metrics)
    timed = ("seconds", "images_per_second")
    assert {k: v for k, v in whole.summary.items() if k not in timed} == {k: v for k, v in torn.summary.items() if k not in timed}


def test_a_run_whose_newest_checkpoint_is_torn_still_ends_with_the_same_bits(fast_run: Callable[..., Any], tmp_path: Path) -> None:
    whole = fast_run("whole", "train.epochs=3", "run.keep_last=3")
    torn = fast_run("torn", "train.epochs=3", "run.keep_last=3")
    (torn.path / "summary.json").unlink()
    newest = sorted((torn.path / "checkpoints").iterdir())[-1] / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    assert same(fl.load_run(torn.path).resume().state, whole.state)
    assert "damaged" in (torn.path / "log.txt").read_text()


def test_a_run_goes_on_with_as_many_threads_as_it_began_with(fast_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen, real = fast_run("r", "head=linear", "train.epochs=1"), list[int](), centralized.train
    assert json.loads((run.path / "environment.json").read_text())["threads"] == "1"
    (run.path / "summary.json").unlink()

    def watched(*given: Any) -> Any:
        seen.append(torch.get_num_threads())
        return real(*given)

    monkeypatch.setattr(centralized, "train", watched)
    torch.set_num_threads(2)
    try:
        run.resume()
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def other_images(run: fl.Run) -> None:
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace(f"image_size: {SIDE}", "image_size: 56"))


def without(part: str, key: str) -> Callable[[fl.Run], None]:
    def harm(run: fl.Run) -> None:
        for file in (run.path / "checkpoints").rglob("state.json"):
            state = json.loads(file.read_text())
            del state[part][key]
            file.write_text(json.dumps(state))

    return harm


@pytest.mark.parametrize(
    ("experiment", "harm", "why"),
    [
        ("centralized", other_images, "Error.*state_dict"),
        ("centralized", without("training", "scaler"), "no 'scaler'"),
        ("fedavg_iid", other_images, "Error.*state_dict"),
        ("fedavg_iid", without("totals", "dropped"), "no 'dropped'"),
        ("fedavg_iid", without("session", "seconds"), "no 'seconds'"),
        ("centralized", without("session", "facts"), "no 'facts'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_run_is_one_line(
    fast_run: Callable[..., Any], experiment: str, harm: Callable[[fl.Run], None], why: str
) -> None:
    few = ["federated.clients=3", "federated.participation=1", "federated.local_steps=1", "federated.rounds=1"]
    run = fast_run("r", f"experiment={experiment}", "head=linear", "train.epochs=1", *few)
    (run.path / "summary.json").unlink()
    harm(run)
    accept(run.path)
    with pytest.raises(UserError, match=rf"the checkpoint of step \d+ does not fit the run's config\.yaml \({why}") as error:
        run.resume()
    assert "\n" not in str(error.value)


def test_nothing_but_the_test_figures_depends_on_the_test_labels(
    fast_run: Callable[..., Any], shuffle_test_labels: Callable[[], None]
) -> None:
    honest = fast_run("honest")
    shuffle_test_labels()
    blind = fast_run("blind")
    assert blind.summary["test_accuracy"] < 0.2 < honest.summary["test_accuracy"]
    assert same(honest.state, blind.state)
    assert without_time(honest.metrics) == without_time(blind.metrics)
    for a, b in zip(*(sorted((r.path / "checkpoints").rglob("tensors.safetensors")) for r in (honest, blind)), strict=True):
        assert a.read_bytes() == b.read_bytes()
    assert honest.summary["ridge"] == blind.summary["ridge"]
    assert honest.summary["best_epoch"] == blind.summary["best_epoch"]


def test_a_finished_run_reads_as_an_object(fast_run: Callable[..., Any]) -> None:
    run = fast_run("r", "train.epochs=1")
    assert run.finished
    assert {"test_accuracy", "val_accuracy", "seconds"} <= run.summary.keys()
    assert run.metrics[0]["epoch"] == 1
    assert run.state["head.weight"].shape == (10, 128)
    assert run.config.train.epochs == 1
    assert run.resume() is run
    told = json.loads((run.path / "environment.json").read_text())
    assert told["torch"] == torch.__version__ and told["commit"] == commit()


def test_a_run_knows_the_commit_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("a = 1\n")
    git("init")
    assert commit_of(package) is None  # files inside some repository, not of it
    commit_of.cache_clear()
    git("add", ".")
    git("commit", "-m", "first")
    assert commit_of(package) == git("rev-parse", "HEAD")
    commit_of.cache_clear()
    (tmp_path / "notes.txt").write_text("beside the code")
    git("add", ".")
    assert commit_of(package) == git("rev-parse", "HEAD")
    commit_of.cache_clear()
    (package / "__init__.py").write_text("a = 2\n")
    assert commit_of(package) == git("rev-parse", "HEAD") + "+changes"
    commit_of.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert commit_of(package) is None  # no git
    commit_of.cache_clear()
    monkeypatch.setenv("FEDLENS_COMMIT", "abc1234")
    assert commit() == "abc1234"


def test_if_exists_resume_goes_on_and_another_configuration_is_refused(fast_run: Callable[..., Any]) -> None:
    first = fast_run("r", "train.epochs=1")
    again = fast_run("r", "train.epochs=1", "run.if_exists=resume")
    assert again.summary == first.summary
    with pytest.raises(UserError, match="another configuration"):
        fast_run("r", "train.epochs=2", "run.if_exists=resume")
    with pytest.raises(UserError, match="already holds a run"):
        fast_run("r", "train.epochs=1")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_trackers_get_every_metric_of_the_run(fast_run: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"mlflow": "mlflow", "wandb": "wandb", "tensorboard": "tensorboard"}[name])
    run = fast_run("r", f"run.trackers=[{name}]")
    want = [m["val_accuracy"] for m in run.metrics]
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run.path / "tensorboard"))
        events.Reload()
        assert [e.value for e in events.Scalars("val_accuracy")] == pytest.approx(want)
    elif name == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=(run.path / "mlruns").resolve().as_uri())
        history = client.get_metric_history((run.path / "mlflow-id.txt").read_text(), "val_accuracy")
        assert [h.value for h in history] == pytest.approx(want)
    else:
        assert list((run.path / "wandb").glob("offline-run-*/run-*.wandb"))


class Recorder:
    """A tracker that may be out of reach from the start, or from this step on."""

    def __init__(self, *_: object, lost: int | None = None) -> None:
        self.steps, self.lost, self.finished = list[int](), lost, False
        if lost == 0:
            raise ConnectionError("no route to host\nand a trace of many lines")

    def log(self, _: object, step: int) -> None:
        if self.lost is not None and step >= self.lost:
            raise ConnectionError("no route to host")
        self.steps.append(step)

    def finish(self, _: object) -> None:
        self.finished = True


def test_a_tracker_that_cannot_be_begun_is_one_line(fast_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "wandb", lambda *given: Recorder(*given, lost=0))
    with pytest.raises(UserError, match=r"run\.trackers: wandb cannot be started: no route to host$"):
        fast_run("r", "run.trackers=[wandb]")
    assert not (tmp_path / "r").exists()


def test_a_tracker_that_is_lost_on_the_way_is_left_out_and_one_who_watches_ends_the_run(
    fast_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, sound = Recorder(lost=2), Recorder()
    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: lost)
    monkeypatch.setitem(TRACKERS, "mlflow", lambda *_: sound)
    options = ["head=linear", "data.val_fraction=0.8", "optim.batch_size=120", "train.epochs=3"]
    run = fast_run("r", *options, "run.trackers=[wandb,mlflow]")
    assert run.finished and sound.steps == [1, 2, 3] and sound.finished
    assert lost.steps == [1] and not lost.finished
    assert (run.path / "log.txt").read_text().count("WARNING | tracker wandb: no route to host; the run continues without it") == 1
    with pytest.raises(ConnectionError):
        execute.execute(compose([*FAST, *options, f"run.dir={tmp_path / 's'}"]), watch=Recorder(lost=2))
    assert not fl.load_run(tmp_path / "s").finished
