"""Every byte of a run is checked: damaged files are noticed, names in received files stay below their folder, a kill loses nothing."""

import json
import logging
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from test_study import MINE, QUICK, planned, pretend

import fedlens as fl
from fedlens.cli import main
from fedlens.errors import OneLine, UserError
from fedlens.files import below, sha256_of_file
from fedlens.runs import cache
from fedlens.runs.digests import damaged
from fedlens.runs.folder import RunFolder
from fedlens.runs.store import problems
from fedlens.study import runner
from fedlens.study.plan import read_plan
from fedlens.study.processes import ProcessWorker
from fedlens.study.runner import Study

# --- names in received files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\nb", "a\x1bb", "a\0b", "x" * 300, 5, None, ["a"]])
def test_only_plain_names_are_resolved_below_a_folder(tmp_path: Path, name: object) -> None:
    with pytest.raises(UserError, match="must be a plain name below"):
        below(tmp_path, name, "study.json: run")


def test_a_link_on_the_way_is_refused(tmp_path: Path) -> None:
    assert below(tmp_path, "runs/a", "run", depth=2) == tmp_path / "runs" / "a"
    (tmp_path / "real").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "real")
    with pytest.raises(UserError, match="is a link"):
        below(tmp_path, "runs/a", "run", depth=2)


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study that somebody sent, with a file of the user beside the folder that it is archived to."""
    pretend(monkeypatch)
    Study(read_plan(str(planned(tmp_path / "p.yaml", MINE)), overrides=QUICK), tmp_path / "received" / "s").run()
    (tmp_path / "mine.json").write_text("mine")
    return tmp_path / "received" / "s"


def edited(study: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((study / "study.json").read_text())
    change(content)
    (study / "study.json").write_text(json.dumps(content))


def everything(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def analysis(file: str) -> dict[str, Any]:
    return {"kind": "sweep", "title": "t", "labels": ["A"], "seed": 0, "options": {}, "file": file}


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "run above": lambda c: c["tables"][0]["cells"][0]["runs"].update({"0": "../../../own"}),
    "absolute run": lambda c: c["tables"][0]["cells"][0]["runs"].update({"0": "/tmp/own"}),
    "trial above": lambda c: c.update(
        tuned=[{"table": "one", "label": "A", "key": "optim.lr", "value": 1, "tried": [], "runs": ["../../../own"]}]
    ),
    "analysis above": lambda c: c["analyses"].append(analysis("../../mine.json")),
    "analysis of one part": lambda c: c["analyses"].append(analysis("mine.json")),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_received_study_that_names_files_outside_itself_is_refused_and_nothing_outside_is_written(
    received: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(next((received / "runs").iterdir()), tmp_path / "own")
    edited(received, HOSTILE[how])
    (received.parent / "mine.json").write_text("theirs")
    before = everything(tmp_path)
    for words in (["keep", str(received), "--out", str(tmp_path / "kept")], ["report", str(received), "--out", str(tmp_path / "report")]):
        capsys.readouterr()
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and "must be a plain name below" in line
    after = everything(tmp_path)
    assert {name: content for name, content in after.items() if not name.startswith(("kept/", "report/"))} == before


@pytest.mark.parametrize("place", ["environment.json", "metrics.jsonl", "run", "runs", "study.json", "study"])
def test_links_in_a_received_study_are_not_followed(received: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = sorted((received / "runs").iterdir())[0]
    target = {"run": run, "runs": received / "runs", "study.json": received / "study.json", "study": received}.get(place, run / place)
    moved = tmp_path / "elsewhere"
    target.rename(moved) if target.exists() else moved.write_text("secret: 4711")
    target.symlink_to(moved)
    assert main(["keep", str(received.parent), "--out", str(tmp_path / "kept")]) == 2
    assert "is a link" in capsys.readouterr().err or place == "study"
    assert b"4711" not in b"".join(everything(tmp_path / "kept").values())


def test_an_archive_with_a_link_is_not_written_through(received: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kept" / "s").mkdir(parents=True)
    (tmp_path / "kept" / "s" / "runs").symlink_to(tmp_path / "elsewhere")
    assert main(["keep", str(received), "--out", str(tmp_path / "kept")]) == 2
    assert "is a link" in capsys.readouterr().err and not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("text", ["\x1b[2J", "\a", "x\nerror: forged", "\r", "\x9b1m", "\udcff"])
def test_no_message_has_control_characters(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = str(UserError(f"no tensor {text}"))
    assert shown.isprintable() and shown.startswith("no tensor ")
    assert OneLine("%(message)s").format(logging.makeLogRecord({"msg": f"client {text}"})).isprintable()
    assert main(["resume", f"no-run-{text}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


# --- damaged files -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults() -> Iterator[Any]:
    """The harness of benchmarks/faults.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield import_module("faults")


@pytest.fixture(scope="module")
def small(faults: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict[str, Any]]:
    """A finished federated run with a mask and client vectors; its overrides; every number and bit of it."""
    root = tmp_path_factory.mktemp("small")
    overrides = [*faults.make_images(root / "images"), *faults.RUNS["federated"]]
    path = fl.run([*overrides, f"run.dir={root / 'whole' / 'run'}"]).path
    return path, overrides, faults.answers(path)


WAYS = ("deleted", "emptied", "half", "zeros", "one line less")


def test_a_damaged_file_of_a_finished_run_changes_no_answer_without_a_word(faults: Any, small: Any, tmp_path: Path) -> None:
    path, _, truth = small
    rng, found = random.Random(0), dict[str, str]()
    shutil.copytree(path, tmp_path / "run")
    assert faults.read_outcome(tmp_path / "run", truth) == "same"
    for file in (file.relative_to(path) for file in faults.files_of(path) if "checkpoints" not in file.parts):
        whole = (path / file).read_bytes()
        for way, content in faults.damages(whole, rng, 1):
            (tmp_path / "run" / file).unlink() if content is None else (tmp_path / "run" / file).write_bytes(content)
            found[f"{file}: {way}"] = faults.read_outcome(tmp_path / "run", truth)
            (tmp_path / "run" / file).write_bytes(whole)
    assert {what: outcome for what, outcome in found.items() if outcome not in ("same", "refused")} == {}
    assert {"refused"} == {outcome for what, outcome in found.items() if what.endswith(WAYS[:4])} and len(found) > 90


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        ("config.yaml", "seed: 0", "seed: 1", "config.yaml is damaged"),
        ("config.yaml", None, None, "not a run folder"),
        ("environment.json", '"threads": "1"', '"threads": "2"', "environment.json is damaged"),
        ("start.safetensors", None, None, "start.safetensors is damaged .it is missing"),
        ("mask.safetensors", None, None, "mask.safetensors is damaged .it is missing"),
        ("metrics.jsonl", "0.5", "0.6", "metrics.jsonl is damaged"),
        ("metrics.jsonl", None, None, "metrics.jsonl is damaged"),
        ("digests.json", None, None, "digests.json is damaged .it is missing"),
        ("digests.json", "a", "b", "digests.json is damaged"),
    ],
)
def test_an_interrupted_run_with_a_damaged_file_is_not_resumed(
    faults: Any, small: Any, tmp_path: Path, file: str, old: str | None, new: str, why: str
) -> None:
    harmed = faults.interrupted(small[0], tmp_path / "run") / file
    text = None if old is None else harmed.read_text()
    if text is None:
        harmed.unlink()
    else:
        assert old in text
        harmed.write_text(text.replace(str(old), new, 1))
    with pytest.raises(UserError, match=why) as error:
        fl.load_run(tmp_path / "run").resume()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors", "digests.json"])
@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(faults: Any, small: Any, tmp_path: Path, file: str, way: str) -> None:
    path, _, truth = small
    stopped = faults.interrupted(path, tmp_path / "run")
    harmed = sorted((stopped / "checkpoints").iterdir())[-1] / file
    content = dict(faults.damages(harmed.read_bytes(), random.Random(0), 0))[way]
    harmed.unlink() if content is None else harmed.write_bytes(content)
    assert problems(stopped) == ["the checkpoint of step 4 is damaged; a resume uses the one before"]
    assert faults.resume_outcome(stopped, truth) == "same"


@pytest.mark.parametrize(
    ("old", "new"), [('"step": 4', '"step": 3'), ('"stale": 0', '"stale": "0"'), ('"score": 0.', '"score": [], "x": 0.')]
)
def test_one_changed_value_in_a_checkpoint_falls_back_to_the_one_before_it(
    faults: Any, small: Any, tmp_path: Path, old: str, new: str
) -> None:
    path, _, truth = small
    stopped = faults.interrupted(path, tmp_path / "run")
    state = sorted((stopped / "checkpoints").iterdir())[-1] / "state.json"
    text = state.read_text().replace('"stale": 3', '"stale": 0')
    assert old in text
    state.write_text(text.replace(old, new, 1))
    assert faults.resume_outcome(stopped, truth) == "same"


@pytest.mark.parametrize("harm", [{"stale": "1"}, {"best_step": "1"}, {"best_score": []}, {"facts": 1}, {"seconds": None}, {"stale": True}])
def test_a_checkpoint_without_digests_and_with_a_wrong_type_is_unsound(tmp_path: Path, harm: dict[str, Any]) -> None:
    with RunFolder.create(tmp_path / "r", "a: 1\n", {}) as folder:
        for step in (1, 2):
            own = {"seconds": 1.0, "stale": 0, "best_score": 0.5, "best_step": step, "facts": {}}
            folder.save_checkpoint(step, {"a": torch.full((3,), float(step))}, {"score": 0.5, "session": own})
        folder.wait_for_checkpoint()
        for step in (1, 2):  # as format 2 wrote them
            place = folder.checkpoints / f"step-{step:09d}"
            (place / "digests.json").unlink()
            state = json.loads((place / "state.json").read_text()) | {"format": 2, "sha256": sha256_of_file(place / "tensors.safetensors")}
            state["session"] |= harm if step == 2 else {}
            (place / "state.json").write_text(json.dumps(state))
        found = folder.latest_checkpoint()
        assert found is not None and found.step == 1


def test_folders_that_are_not_checkpoints_are_ignored(faults: Any, small: Any, tmp_path: Path) -> None:
    path, _, truth = small
    stopped = faults.interrupted(path, tmp_path / "run")
    last = sorted((stopped / "checkpoints").iterdir())[-1]
    for name in ("step-backup", f"{last.name} (copy)", "step-9", "step-٠٠٠٠٠٠٠٠٩", "step-000000009"):
        shutil.copytree(last, last.with_name(name))
    (last.parent / "step-000000010").touch()
    assert faults.resume_outcome(stopped, truth) == "same"
    assert last.with_name("step-backup").is_dir()


def test_metrics_after_the_last_checkpoint_are_written_again_whatever_they_hold(faults: Any, small: Any, tmp_path: Path) -> None:
    path, _, truth = small
    stopped = faults.interrupted(path, tmp_path / "run")
    lines = (stopped / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_bytes(b"".join(lines[:4]) + b'{"step": 5, "val_accuracy": 7}\n\x00\xff\n{"st')
    assert faults.resume_outcome(stopped, truth) == "same"


def test_check_says_what_is_damaged_and_resume_makes_it_again(
    faults: Any, small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _, truth = small
    run = shutil.copytree(path, tmp_path / "run")
    assert main(["check", str(run)]) == 0 and capsys.readouterr().out == "1 runs: 1 intact\n"
    (run / "model.safetensors").write_bytes(b"")
    (run / "clients" / "1.safetensors").unlink()
    assert main(["check", str(tmp_path)]) == 2
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == ["clients/1.safetensors", "model.safetensors"] and "1 damaged" in last
    assert all(f"made again by: fedlens resume {run}" in line for line in lines)
    assert main(["resume", str(run)]) == 0
    assert main(["check", str(run)]) == 0 and faults.outcome(lambda: faults.answers(run), truth) == "same"
    (run / "start.safetensors").unlink()
    capsys.readouterr()
    assert main(["check", str(run)]) == 2 and "restore it from a copy, or repeat the run" in capsys.readouterr().out
    assert main(["resume", str(run)]) == 2 and fl.load_run(run).finished
    assert main(["check", str(tmp_path / "run" / "clients")]) == 2


def test_kept_runs_without_digests_pass_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "results" / "arithmetic-cifar100"
    assert main(["check", str(folder)]) == 0 and "without digests" in capsys.readouterr().out


def test_the_mask_of_a_sparse_run_without_its_weights_is_refused_not_none() -> None:
    runs = sorted((Path(__file__).parents[1] / "results" / "sparsity-cifar100" / "runs").iterdir())
    sparse = next(run for run in map(fl.load_run, runs) if run.summary.get("mask"))
    with pytest.raises(UserError, match=r"is sparse, but mask\.safetensors is missing"):
        _ = sparse.mask


def test_an_archived_run_has_new_digests(small: Any, tmp_path: Path) -> None:
    study = tmp_path / "s"
    shutil.copytree(small[0], study / "runs" / "a")
    table = {"name": "t", "cells": [{"label": "A", "case": "A", "values": {}, "runs": {"0": "a"}}]}
    content = {"name": "s", "place": "here", "question": "", "tables": [table], "analyses": [], "failures": {}}
    (study / "study.json").write_text(json.dumps(content))
    assert main(["keep", str(study), "--out", str(tmp_path / "kept")]) == 0
    kept = tmp_path / "kept" / "s" / "runs" / "a"
    assert json.loads((kept / "digests.json").read_text())["files"].keys() == {p.name for p in kept.iterdir()} - {"digests.json"}
    assert not damaged(kept) and (kept / "config.yaml").read_bytes() != (small[0] / "config.yaml").read_bytes()
    (study / "runs" / "a" / "summary.json").write_text('{"val_accuracy": 1.0}')
    assert main(["keep", str(study), "--out", str(tmp_path / "other")]) == 2


def test_the_noise_key_of_a_run_is_checked(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "r", "a: 1\n", {}) as folder:
        key = folder.secret()
        assert folder.secret() == key
        for harm in (lambda file: file.write_text("5\n"), Path.unlink):
            harm(tmp_path / "r" / "secret")
            with pytest.raises(UserError, match="secret is damaged"):
                folder.secret()


@pytest.mark.parametrize("harm", [lambda f: f.write_text("result 7"), lambda f: f.with_name("digests.json").unlink(), Path.unlink])
def test_a_damaged_result_in_the_shared_cache_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path))
    codec, made = (
        cache.Codec[str](lambda text, folder: (folder / "a").write_text(text) and None, lambda f: (f / "a").read_text()),
        list[str](),
    )

    def result() -> str:
        cache._memory.clear()
        return cache.cached("f" * 64, lambda: made.append("") or f"result {len(made)}", codec)

    assert [result(), result()] == ["result 1", "result 1"]
    harm(next(tmp_path.iterdir()) / "a")
    assert [result(), result()] == ["result 2", "result 2"]


# --- kills ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kill", "full disk"])
def test_a_run_that_was_killed_or_met_a_full_disk_at_any_operation_ends_with_the_same_bits(
    faults: Any, small: Any, tmp_path: Path, kind: str
) -> None:
    _, overrides, truth = small
    cases = list(faults.fault_cases(kind, overrides, tmp_path, truth, every=7))
    assert len(cases) >= 8 and {outcome for *_, outcome in cases} == {"same"}, cases


def test_what_a_dead_process_left_half_written_is_removed(faults: Any, small: Any, tmp_path: Path) -> None:
    stopped = faults.interrupted(small[0], tmp_path / "run")
    (stopped / "clients").mkdir()
    left = [stopped / "model.safetensors.part", stopped / "clients" / "0.safetensors.part"]
    for part in left:
        part.write_text("half")
    fl.load_run(stopped).resume()
    assert not any(part.exists() for part in left)


def test_a_name_is_on_disk_before_what_refers_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, sync, replace = list[str](), os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def named(source: Any, target: Any) -> None:
        events.append(f"name {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    with RunFolder.create(tmp_path / "r", "a: 1\n", {}) as folder:
        events.clear()
        mask = fl.Mask({"a": torch.tensor([True, False])}, {"a": torch.tensor([True, True])})
        folder.keep_start({"a": torch.zeros(2)}, mask)
        folder.keep_client_vectors({3: {"a": torch.ones(2)}}, {"a": torch.zeros(2)}, "")
        folder.finish({"val_accuracy": 0.5}, {"a": torch.zeros(2)})
    wanted = ["start.safetensors", "mask.safetensors", "digests.json", "3.safetensors", "model.safetensors", "summary.json", "digests.json"]
    assert [event.removeprefix("name ") for event in events if event.startswith("name")] == wanted
    for place, name in ((i, event.removeprefix("name ")) for i, event in enumerate(events) if event.startswith("name")):
        assert events[place - 1] == f"sync {name}.part"
        assert events[place + 1] == f"sync {'clients' if name == '3.safetensors' else 'r'}"


def test_a_run_whose_worker_was_killed_goes_on_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend(monkeypatch)
    plan = read_plan(str(planned(tmp_path / "p.yaml", MINE)), overrides=QUICK)
    study, real = Study(plan, tmp_path / "s"), runner.execute
    worker = ProcessWorker([sys.executable, "-c", "import os, signal; input(); os.kill(os.getpid(), signal.SIGKILL)"])
    victim = plan.runs[1].name

    def killed(config: Any) -> Any:
        return worker.do("") if Path(str(config.run.dir)).name == victim else real(config)

    monkeypatch.setattr(runner, "execute", killed)
    study.run()
    assert study.failures == {victim: "interrupted: its process was ended by SIGKILL"} and len(ran) == 3
    monkeypatch.setattr(runner, "execute", real)
    again = Study(plan, tmp_path / "s")
    assert not again.failures and [p.name for p in again.missing()] == [victim]
    again.run()
    assert not again.failures and ran[3:] == [victim]
