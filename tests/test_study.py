"""Plans of many runs and their execution."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import FAST
from omegaconf import OmegaConf

from fedlens.cli import main
from fedlens.config import choices
from fedlens.errors import UserError
from fedlens.study.plans import plan_file, read_plan
from fedlens.study.runner import Study

QUICK = [
    *FAST,
    "federated.clients=10",
    "federated.rounds=2",
    "federated.eval_every=1",
    "federated.local_steps=1",
    "optim.batch_size=8",
    "mask.samples=5",
]
PLAN = """
question: Which?
seeds: 2
where: {small: [train.epochs=1], large: [train.epochs=2]}
set: [optim.momentum=0.5]
tables:
  - name: steps
    cases:
      IID: [experiment=fedavg_iid]
      Nc=2: [experiment=fedavg_noniid, data.classes_per_client=2]
      large only: {large: [experiment=centralized]}
    grid: {federated.local_steps: [1, 2]}
    local_steps_in_all: 4
  - name: again
    cases: {the same: [experiment=fedavg_iid, federated.local_steps=2, federated.rounds=2]}
"""


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def test_a_plan_is_every_case_with_every_value_and_seed(plan_path: Path) -> None:
    plan = read_plan(str(plan_path), overrides=FAST)
    assert (plan.name, plan.place, plan.question) == ("plan", "small", "Which?")
    assert [(p.cell.label, p.seed) for p in plan.runs[:4]] == [("IID, local_steps 1", 0), ("IID, local_steps 1", 1), ("IID, local_steps 2", 0), ("IID, local_steps 2", 1)]  # fmt: skip
    assert {(p.config.federated.local_steps, p.config.federated.rounds) for p in plan.runs} == {(1, 4), (2, 2)}  # J·R = 4
    assert all(p.config.optim.momentum == 0.5 for p in plan.runs)
    assert len(plan.runs) == 10 and len({p.name for p in plan.runs}) == 8  # two tables share a run
    large = read_plan(str(plan_path), place="large", seeds=1)
    assert {p.cell.case for p in large.runs} == {"IID", "Nc=2", "large only", "the same"}


@pytest.mark.parametrize("name", sorted(set(choices("study")) - {"full"}))
def test_every_ready_made_plan_is_sound_on_both_data_sets(name: str) -> None:
    for place in ("embedded",) if name == "quick" else ("embedded", "cifar100"):
        plan = read_plan(name, place=place, seeds=1)
        assert plan.runs and plan.question
        rounds = {p.config.federated.local_steps * p.config.federated.rounds for p in plan.runs if p.cell.table == "Nc and J"}
        assert len(rounds) <= 1


def test_the_full_study_is_all_the_others_but_the_quick_one() -> None:
    assert set(OmegaConf.load(plan_file("full")).include) == set(choices("study")) - {"full", "quick"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("tables: []", "has no tables"),
        ("tables: [{name: a, casses: {}}]", "casses"),
        ("seed: 3\ntables: [{name: a}]", "did you mean 'seeds'"),
        ("seeds: 0\ntables: [{name: a}]", "seeds"),
        ("tables: [{name: a, cases: {x: no}}]", "a list of key=value"),
        ("tables: [{name: a, cases: {x: {hear: []}}}]", "did you mean 'here'"),
        ("tables: [{name: a, set: [optim.lrr=1]}]", "optim.lrr"),
        ("tables: [{name: a, grid: {optim.lr: [-1]}}]", "optim.lr"),
        ("a: [", "is not YAML"),
        ("- 1", "has no tables"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        read_plan(str(path))
    assert said in str(error.value) and "\n" not in str(error.value)
    for bad in ("no-such-plan", str(tmp_path / "none.yaml")):
        with pytest.raises(UserError):
            read_plan(bad)


def small_study(plan_path: Path, folder: Path, seeds: int = 1, **kw: bool | int) -> Study:
    return Study(read_plan(str(plan_path), seeds=seeds, overrides=QUICK), folder, **kw)  # type: ignore[arg-type]


def test_a_study_runs_what_is_missing_once_and_tells_n(plan_path: Path, tmp_path: Path) -> None:
    study = small_study(plan_path, tmp_path / "s", seeds=2)
    study.run()
    text = (tmp_path / "s" / "results.md").read_text()
    assert "Which?" in text and text.count("(n = 2)") == 2 * 5 and "±" in text
    assert len(list((tmp_path / "s" / "runs").iterdir())) == 6  # QUICK fixes J, so the values of the grid are one run
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s" / "runs").rglob("summary.json")}
    again = small_study(plan_path, tmp_path / "s", seeds=2)
    assert again.missing() == []
    again.run()
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "s" / "runs").rglob("summary.json")} == before
    assert (tmp_path / "s" / "results.md").read_text() == text


def test_a_failure_is_told_the_rest_goes_on_and_a_retry_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "tables: [{name: t, cases: {bad: [experiment=fedavg_iid, optim.lr=1e30, optim.clip_norm=null], good: [experiment=fedavg_iid]}}]"
    )
    arguments = ["study", str(path), "--out", str(tmp_path / "s"), *QUICK]
    assert main(arguments) == 2
    out = capsys.readouterr().out
    assert "## Failed" in out and "is finite" in out and "| good |" in out and "(n = 1)" in out
    assert list(json.loads((tmp_path / "s" / "failures.json").read_text()))
    plan = read_plan(str(path), overrides=QUICK)
    assert Study(plan, tmp_path / "s").missing() == [] and len(Study(plan, tmp_path / "s", retry=True).missing()) == 1


def test_two_jobs_give_the_tables_of_one(plan_path: Path, tmp_path: Path) -> None:
    one, two = small_study(plan_path, tmp_path / "one"), small_study(plan_path, tmp_path / "two", jobs=2)
    one.run()
    two.run()
    for name in ("results.md", "results.csv"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()


def test_a_study_that_is_killed_and_started_again_ends_with_the_same_tables(plan_path: Path, tmp_path: Path) -> None:
    whole = small_study(plan_path, tmp_path / "whole")
    whole.run()
    command = [sys.executable, "-m", "fedlens", "study", str(plan_path), "--out", str(tmp_path / "torn"), "--seeds", "1", *QUICK]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    runs = tmp_path / "torn" / "runs"
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None and not list(runs.glob("*/metrics.jsonl")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "torn" / "results.md").exists()
    small_study(plan_path, tmp_path / "torn").run()
    for name in ("results.md", "results.csv"):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "torn" / name).read_text()
