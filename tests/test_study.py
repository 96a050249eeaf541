"""Plans of many runs and their execution."""

import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BOMB, FAST, MERGE_BOMB
from omegaconf import OmegaConf
from processes import start

from fedlens.cli import main
from fedlens.config import Config
from fedlens.errors import Elsewhere, UserError
from fedlens.overrides import choices, compose, to_yaml
from fedlens.report.content import report
from fedlens.report.markdown import csv_rows, markdown
from fedlens.report.over_seeds import measurements, numbers_of
from fedlens.runs import cache as shared
from fedlens.runs.identity import identity
from fedlens.runs.store import is_finished, write_json
from fedlens.study import runner
from fedlens.study.analyses import planned_analyses
from fedlens.study.archive import merged
from fedlens.study.plan import PlannedRun, read_plan
from fedlens.study.processes import ProcessWorker, WorkerPool, environment_of, locked
from fedlens.study.results import Gathered, gather
from fedlens.study.runner import Study
from fedlens.study.tune import FAILED, LineSearch, line_searches, with_chosen_values
from fedlens.study.yaml_files import yaml_path
from fedlens.training.run import execute

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


def test_a_plan_has_a_run_for_every_case_value_and_seed(plan_path: Path) -> None:
    plan = read_plan(str(plan_path), overrides=FAST)
    assert (plan.name, plan.place, plan.question) == ("plan", "small", "Which?")
    assert [(p.cell.label, p.seed) for p in plan.runs[:4]] == [("IID, local_steps 1", 0), ("IID, local_steps 1", 1), ("IID, local_steps 2", 0), ("IID, local_steps 2", 1)]  # fmt: skip
    assert {(p.config.federated.local_steps, p.config.federated.rounds) for p in plan.runs} == {(1, 4), (2, 2)}  # J·R = 4
    assert all(p.config.optim.momentum == 0.5 for p in plan.runs)
    assert len(plan.runs) == 10 and len({p.name for p in plan.runs}) == 8  # two tables share a run
    large = read_plan(str(plan_path), place="large", seeds=1)
    assert {p.cell.case for p in large.runs} == {"IID", "Nc=2", "large only", "the same"}


@pytest.mark.parametrize("name", sorted(set(choices("study")) - {"full"}))
def test_every_built_in_plan_can_be_read_for_each_of_its_places(name: str) -> None:
    places = list(OmegaConf.load(yaml_path("study", name)).where)
    assert places == {"quick": ["embedded"], "rates": ["cifar100"], "layerscale": ["cifar100"]}.get(name, ["embedded", "cifar100"])
    for place in places:
        plan = read_plan(name, place=place, seeds=1)
        assert plan.runs and plan.question
        rounds = {p.config.federated.local_steps * p.config.federated.rounds for p in plan.runs if p.cell.table == "Nc and J"}
        assert len(rounds) <= 1


def test_the_help_lists_every_built_in_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    message = capsys.readouterr().out.replace(",", " ").replace(";", " ").split()
    assert set(choices("study")) <= set(message)


@pytest.mark.parametrize(("place", "seeds"), [("embedded", 3), ("cifar100", 1)])
def test_analyses_of_every_plan_are_about_its_own_cells(place: str, seeds: int) -> None:
    whole = planned_analyses(read_plan("full", place=place, seeds=seeds))
    parts = [planned_analyses(read_plan(name, place=place, seeds=seeds)) for name in OmegaConf.load(yaml_path("study", "full")).include]
    assert [each.file for each in whole] == [each.file for part in parts for each in part]


def test_masks_of_one_cell_are_compared_between_neighbouring_seeds_once(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("set: [experiment=fedavg_iid_sparse]\ntables: [{name: t, cases: {a: []}}]\nanalyses: [{kind: masks, of: a, seeds: 3}]")
    pairs = {n: [tuple(run.seed for run in each.runs) for each in planned_analyses(read_plan(str(path), seeds=n))] for n in (1, 2, 3)}
    assert pairs == {1: [], 2: [(0, 1)], 3: [(0, 1), (1, 2), (2, 0)]}


def test_the_full_study_is_all_others_that_run_in_both_places_but_the_hand_in() -> None:
    both = {name for name in choices("study") if {"embedded", "cifar100"} <= set(OmegaConf.load(yaml_path("study", name)).get("where", {}))}
    assert set(OmegaConf.load(yaml_path("study", "full")).include) == both - {"full", "handin"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tables: []", "has no tables"),
        ("tables: [{name: a, casses: {}}]", "casses"),
        ("seed: 3\ntables: [{name: a}]", "Did you mean 'seeds'"),
        ("seeds: 0\ntables: [{name: a}]", "seeds"),
        ("tables: [{name: a, cases: {x: no}}]", "a list of key=value"),
        ("tables: [{name: a, cases: {x: {hear: []}}}]", "Did you mean 'here'"),
        ("tables: [{name: a, set: [optim.lrr=1]}]", "optim.lrr"),
        ("tables: [{name: a, grid: {optim.lr: [-1]}}]", "optim.lr"),
        ("tables: [{name: a}, {name: a}]", "two tables are called 'a'"),
        ("tables: {a: 1}", "has no tables"),
        ("tables: [{name: a, grid: {optim.lr: 0.1}}]", "list of values"),
        ("tables: [{name: a, cases: [x]}]", "table a: cases must be a mapping, got ['x']."),
        ("tables: [{name: a, evaluations: 0}]", "table a: evaluations must be a whole number >= 1, got 0."),
        ("where: {here: []}\ntables: [{name: a, local_steps_in_all: {there: 5}}]", "there"),
        ("tables: [{name: a, cases: {IID: []}, special: [{case: IDD, set: []}]}]", "fits no run"),
        ("seeds: 2.5\ntables: [{name: a}]", "seeds must be a number of seeds, or a list of seeds >= 0; at most 1000, got 2.5."),
        ("include: [quick]\nseeds: 1", "seeds"),
        ("include: [quick, quick]", "two tables are called"),
        ("tables: [{name: a, grid: {model.weights: [a/w.pth, b/w.pth]}}]", "only in the folder"),
        ("a: [", "cannot be read as YAML"),
        (BOMB, "more than 20,000 values"),
        (MERGE_BOMB, "more than 20,000 values"),
        ("question: &a [*a]\ntables: [{name: a}]", "more than 20,000 values"),
        ("question: " + "[" * 100, "more than 30 levels"),
        (f"question: {'x' * 2**18}", "more than 262,144 characters"),
        (f"seeds: 1{':1' * 1000}", "more than 2,000 characters in a value"),
        ('question: "\\x24{oc.env:HOME}"', "contains an interpolation"),
        ("question: !!python/name:os.system", "names a type"),
        (
            f"tables: [{{name: a, grid: {{optim.lr: &v [{'1,' * 81}], optim.momentum: *v, seed: *v, server.lr: *v}}}}]",
            "more than 10,000 runs",
        ),
        ("seeds: 99999999999\ntables: [{name: a}]", "at most 1000"),
        ("tables: [{name: a, cases: 5}]", "table a: cases must be a mapping, got 5."),
        ("tables: [{name: a, tune: {by: 1}}]", "table a: tune: by must be a factor > 1, got 1."),
        ("tables: [{name: a, tune: {length: 2}}]", "table a: tune: length must be a fraction of the run's length in (0, 1], got 2."),
        ("tables: [{name: a, tune: {tries: 2}}]", "table a: tune: tries must be a whole number >= 3, got 2."),
        ("tables: [{name: a, tune: {key: optim.lrr}}]", "optim.lr"),
        ("tables: [{name: a, tune: {key: optim.weight_decay}}]", "must be a number > 0, where the search starts"),
        ("tables: [{name: a, tune: {kee: optim.lr}}]", "key"),
        ("tables: [{name: a, cases: {x: []}, tune: {like: [x]}}]", "like must be a mapping from a cell's label to another's, got ['x']."),
        ("tables: [{name: a, cases: {x: [], y: [seed=1]}, tune: {like: {x: z}}}]", "like must be one of x, y; got 'z'."),
        ("tables: [{name: a, cases: {x: [], y: [seed=1]}, tune: {like: {x: y, y: x}}}]", "takes another's"),
        ("tables: [{name: a, tune: [optim.lr]}]", "table a: tune must be a mapping, got list."),
        ("tables: [{name: a, set: [head=linear, data.val_fraction=0], tune: {by: 3}}]", "a validation set"),
        ("tables: [{name: a, against: first}]", "table a: against must be case, got 'first'"),
        ("- 1", "has no tables"),
        (
            "tables: [{name: a, grid: {optim.lr: []}}]",
            "table a: grid: optim.lr must be a list of one or more values, or of lists of them, got [].",
        ),
        (
            "tables: [{name: a, grid: {optim.lr: [{low: 1}]}}]",
            "table a: grid: optim.lr must be a list of one or more values, or of lists of them, got [{'low': 1}].",
        ),
        ("tables: [{name: a, grid: {5: [1]}}]", "'5=1'"),
        ("where: [train.epochs=1]\ntables: [{name: a}]", "where must be a mapping, got list."),
        ("where: {x: [], y: []}\ntables: [{name: a, cases: {b: {y: []}}}]", "has no case on x"),
        ("tables: [{name: a, target: eighty}]", "table a: target must be a validation accuracy in (0, 1], got 'eighty'."),
        ("tables: [{name: a, target: 80}]", "table a: target must be a validation accuracy in (0, 1], got 80."),
        ("tables: [{name: a, target: true}]", "table a: target must be a validation accuracy in (0, 1], got True."),
        ("tables: [{name: a, special: 5}]", "table a: special must be a list of mappings, got 5."),
        ("tables: [{name: a, tune: {by: .inf}}]", "table a: tune: by must be a factor > 1, got inf."),
        ("include: quick", "include must be a list of plans, such as [quick, mine.yaml], got 'quick'."),
        ("include: []", "include must be a list of plans, such as [quick, mine.yaml], got []."),
        ("include: [1]", "include must be a list of plans, such as [quick, mine.yaml], got [1]."),
    ],
    ids=lambda text: text[:40],
)
def test_an_invalid_plan_raises_a_one_line_error(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        read_plan(str(path))
    assert message in str(error.value) and "\n" not in str(error.value)
    for bad in ("no-such-plan", str(tmp_path / "none.yaml")):
        with pytest.raises(UserError):
            read_plan(bad)


def test_a_plan_that_includes_itself_raises_a_one_line_error(tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    for text in (f"include: [{one}]", f"include: [{other}]"):
        one.write_text(text)
        other.write_text(f"include: [{one}]")
        with pytest.raises(UserError, match=r"^study: include: '.*one.yaml' includes itself") as error:
            read_plan(str(one))
        assert "\n" not in str(error.value)


def test_null_and_lists_are_values_of_a_grid(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "set: [experiment=fedavg_iid_sparse]\ntables:\n"
        "  - {name: clip, grid: {optim.clip_norm: [null, 1.0], optim.nesterov: [true]}}\n"
        "  - {name: kinds, grid: {mask.without: [[query], [key, patch embedding]]}, special: [{mask.without: [query], set: [optim.lr=0.5]}]}\n"
        "  - {name: within, grid: {mask.within: [[patch embedding, norm]]}}\n"
        "  - {name: texts, grid: {mask.without: ['[query]', '[key,value]']}}\n"
    )
    runs = read_plan(str(tmp_path / "p.yaml"), seeds=1).runs
    assert [p.cell.label for p in runs[:4]] == [
        "clip_norm null, nesterov True",
        "clip_norm 1.0, nesterov True",
        "without [query]",
        "without [key,patch embedding]",
    ]
    assert [p.config.optim.clip_norm for p in runs[:2]] == [None, 1.0]
    assert [(p.config.mask.without, p.config.optim.lr == 0.5) for p in runs[2:4]] == [
        (["query"], True),
        (["key", "patch embedding"], False),
    ]
    assert "patch embedding" not in runs[4].config.mask.without and "query" in runs[4].config.mask.without
    assert [p.config.mask.without for p in runs[5:]] == [["query"], ["key", "value"]]


def tables(folder: Path) -> tuple[str, str]:
    """What a report says of a study."""
    gathered = gather([folder])
    return markdown(report(gathered)), csv_rows(gathered)


def small_study(plan_path: Path, folder: Path, seeds: int = 1, **kw: bool | int) -> Study:
    return Study(read_plan(str(plan_path), seeds=seeds, overrides=QUICK), folder, **kw)  # type: ignore[arg-type]


def test_a_study_executes_missing_runs_once_and_reports_n(plan_path: Path, tmp_path: Path) -> None:
    study = small_study(plan_path, tmp_path / "s", seeds=2)
    found = study.run()
    assert found.question == "Which?" and [len(table.cells) for table in found.tables] == [4, 1]
    assert all(cell.planned == len(cell.runs) == 2 for table in found.tables for cell in table.cells)
    text = tables(tmp_path / "s")
    assert "±" in text[0] and not list((tmp_path / "s" / "runs").glob("*/checkpoints"))
    assert (
        len(list((tmp_path / "s" / "runs").iterdir())) == 4
    )  # QUICK fixes J and rounds, so the values of the grid, and both tables' IID, are one run
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s" / "runs").rglob("summary.json")}
    again = small_study(plan_path, tmp_path / "s", seeds=2)
    assert again.missing() == []
    again.run()
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "s" / "runs").rglob("summary.json")} == before
    assert tables(tmp_path / "s") == text


def test_a_failure_is_reported_the_other_runs_continue_and_retry_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "tables: [{name: t, cases: {bad: [experiment=fedavg_iid, optim.lr=1e30, optim.clip_norm=null], good: [experiment=fedavg_iid]}}]"
    )
    arguments = ["study", str(path), "--out", str(tmp_path / "s"), "--no-report", *QUICK]
    assert main(arguments) == 2
    out = capsys.readouterr().out
    assert "### Failures" in out and "is finite" in out and "| good |" in out and "(n = 1)" in out
    assert list(json.loads((tmp_path / "s" / "study.json").read_text())["failures"])
    plan = read_plan(str(path), overrides=QUICK)
    assert Study(plan, tmp_path / "s").missing() == [] and len(Study(plan, tmp_path / "s", retry=True).missing()) == 1


def test_two_jobs_give_the_tables_of_one(plan_path: Path, tmp_path: Path) -> None:
    one, two = small_study(plan_path, tmp_path / "one"), small_study(plan_path, tmp_path / "two", jobs=2)
    one.run()
    two.run()
    assert tables(tmp_path / "one") == tables(tmp_path / "two")
    assert all(worker._process is None for worker in two.pool.workers), "none is left"


def test_a_failure_in_a_worker_process_is_reported_and_the_other_runs_continue(plan_path: Path, tmp_path: Path) -> None:
    study = small_study(plan_path, tmp_path / "s", jobs=2)
    bad, good = study.missing()
    (tmp_path / "s" / "runs").mkdir(parents=True)
    study.path(bad).write_text("a file where the run's folder should be")
    study.run()
    assert list(study.failures) == [bad.name] and "is not an empty folder" in study.failures[bad.name] and study.finished(good)


def test_a_study_that_is_killed_and_started_again_ends_with_the_same_tables(plan_path: Path, tmp_path: Path) -> None:
    whole = small_study(plan_path, tmp_path / "whole")
    whole.run()
    process = start(["study", str(plan_path), "--out", str(tmp_path / "torn"), "--seeds", "1", *QUICK])
    runs = tmp_path / "torn" / "runs"
    while process.exitcode is None and not list(runs.glob("*/metrics.jsonl")):
        process.join(0.01)
    process.kill()
    process.join()
    assert len(list(runs.glob("*/summary.json"))) < len(list((tmp_path / "whole" / "runs").iterdir()))
    small_study(plan_path, tmp_path / "torn").run()
    assert tables(tmp_path / "whole") == tables(tmp_path / "torn")


ANALYSED = """
set: [experiment=fedavg_noniid, data.classes_per_client=1, federated.participation=1.0]
tables:
  - name: t
    cases: {whole: [federated.client_vectors=true], A: ["federated.exclude=[5,6,7,8,9]"], B: ["federated.exclude=[0,1,2,3,4]"], no 2: ["federated.exclude=[2]"], S: [experiment=fedavg_noniid_sparse], T: [experiment=fedavg_noniid_sparse, mask.density=0.3]}
analyses:
  - {kind: sweep, of: whole, grid: [0, 1]}
  - {kind: interpolate, of: [A, B], grid: [0, 0.5, 1]}
  - {kind: interference, of: [A, B], grid: [0, 1], samples: 10}
  - {kind: interference, of: whole, clients: [0, 1], grid: [0, 1], samples: 10}
  - {kind: masks, of: [S, T]}
  - {kind: forget, of: [whole, no 2], clients: [0, 2], grid: [0, 1]}
"""


def test_a_study_analyses_its_finished_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(ANALYSED)
    monkeypatch.setattr(shared, "_memory", type(shared._memory)())  # so that what is kept on disk is made
    plan = read_plan(str(path), overrides=[text for text in QUICK if "val_fraction" not in text])
    found = Study(plan, tmp_path / "s").run()
    assert not found.failures
    assert [a.kind for a in found.analyses] == ["sweep", "interpolate", "interference", "interference", "masks", "forget"]
    assert found.analyses[1].title == "From A to B" and found.analyses[2].found["xi"] is not None
    assert found.analyses[4].title == "Overlap of the masks of S and T"
    assert 0.06 < found.analyses[4].found["iou"] < 1 / 3 and found.analyses[4].found["chance"] == pytest.approx(0.03 / 0.37, rel=1e-3)
    kept, left = found.analyses[5].found["clients"]
    assert found.analyses[5].title == "Forgetting clients of whole" and "retrained" not in kept
    assert left["retrained"]["test_target"] <= left["before"]["test_target"]  # nobody taught the class of client 2
    assert left["reheaded"]["test_target"] == 0, "no sums of its class are in that head"
    assert left["reheaded"]["test_control"] >= left["before"]["test_control"] - 0.02 and "reheaded" not in kept
    (_, of_kept), (_, of_left) = measurements(found.analyses[5])
    assert of_left["target_without"] == left["retrained"]["test_target"] and "target_without" not in of_kept
    assert of_left["target_head"] == 0 and of_left["others_head"] == left["reheaded"]["test_control"]
    assert numbers_of(replace(found.analyses[5], found={"clients": [left]}))["target_head"] == 0
    text = markdown(report(Gathered([found])))
    assert "| trained without it: its classes |" in text and "| head without it: all others |" in text
    assert str(tmp_path) not in "".join(file.read_text() for file in (tmp_path / "s" / "analyses").iterdir())
    assert list((tmp_path / "s" / "cache").iterdir())
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "s" / "analyses").iterdir()}
    Study(plan, tmp_path / "s").run()
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "s" / "analyses").iterdir()} == stamps
    (tmp_path / "s" / "analyses").rename(tmp_path / "analyses")
    for planned in plan.runs:  # what is kept of a study without its weights is still its tables and figures
        (tmp_path / "s" / "runs" / planned.name / "model.safetensors").unlink()
    assert not Study(plan, tmp_path / "s").run().failures  # nothing failed: the weights are elsewhere
    (tmp_path / "analyses").rename(tmp_path / "s" / "analyses")
    assert len(gather([tmp_path / "s"]).studies[0].analyses) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{kind: sweap, of: whole}", "Did you mean 'sweep'"),
        ("{kind: sweep, of: hole}", "Did you mean 'whole'"),
        ("{kind: sweep, of: [whole, A]}", "sweep of must be 1 cell, got 'whole, A'."),
        ("{kind: sweep, of: whole, samples: 3}", "samples"),
        ("{kind: interference, of: whole}", "2 to 8 cells"),
        ("{kind: forget, of: whole}", "forget: clients must be a list of clients, got None."),
        ("{kind: forget, of: whole, clients: 3}", "forget: clients must be a list of clients, got 3."),
        ("{kind: forget, of: A, clients: [0]}", "federated.client_vectors=true"),
        ("{kind: forget, of: whole, clients: [0, 10]}", "client 10 takes part in no round of seed 0; choose from 0, 1, 2"),
        ("{kind: sweep, of: whole, seeds: two}", "seeds must be a whole number >= 1, got 'two'."),
        ("{kind: sweep, of: unread}", "train.test=false"),
        ("sweep", "a list of mappings"),
        (
            "{kind: sweep, of: whole, grid: nonsense}",
            "analyses: sweep: grid must be start:stop:count, or a list of numbers, got 'nonsense'.",
        ),
        ("{kind: interpolate, of: [A, B], grid: 5}", "grid must be start:stop:count, or a list of numbers, got 5."),
        ("{kind: interference, of: [A, B], grid: [a]}", "grid must be start:stop:count, or a list of numbers, got ['a']."),
        ("{kind: interference, of: [A, B], samples: 0}", "samples must be a whole number >= 1, got 0."),
        ("{kind: forget, of: whole, clients: [0], grid: [-1, 1]}", "grid must be numbers >= 0, because forgetting subtracts"),
        ("{kind: forget, of: whole, clients: [0], keep: most}", "keep must be in [0, 1], got 'most'."),
    ],
)
def test_an_invalid_analysis_raises_a_one_line_error_before_any_run(tmp_path: Path, given: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    tables = ANALYSED.partition("analyses:")[0].replace("whole: [", "unread: [train.test=false], whole: [")
    path.write_text(tables + f"analyses: [{given}]\n")
    with pytest.raises(UserError) as error:
        Study(read_plan(str(path), overrides=QUICK), tmp_path / "s")
    assert message in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "s").exists()


def test_special_overrides_apply_to_matching_combinations_only(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        PLAN.replace(
            "    local_steps_in_all: 4\n",
            "    special: [{case: IID, federated.local_steps: 2, set: [optim.lr=0.5]}, {place: large, set: [optim.lr=0.7]}]\n    evaluations: 2\n",
        )
    )
    runs = [p for p in read_plan(str(path), seeds=1, overrides=["federated.rounds=6"]).runs if p.cell.table == "steps"]
    rates = {p.cell.label: p.config.optim.lr for p in runs}
    assert (
        rates["IID, local_steps 2"] == 0.5 and list(rates.values()).count(0.5) == 1 and {p.config.federated.eval_every for p in runs} == {3}
    )
    assert {p.config.optim.lr for p in read_plan(str(path), place="large", seeds=1).runs if p.cell.case == "Nc=2"} == {0.7}


def test_runs_without_a_study_are_grouped_by_the_settings_that_differ(tmp_path: Path) -> None:
    for name, more in {"a": ["seed=0"], "b": ["seed=1"], "c": ["seed=0", "optim.lr=0.001"]}.items():
        assert main(["run", "experiment=fedavg_iid", *QUICK, *more, f"run.dir={tmp_path / 'runs' / name}"]) == 0
    (study,) = gather([tmp_path]).studies
    assert {cell.label: sorted(cell.runs) for cell in study.tables[0].cells} == {"fedavg_iid, lr 0.03": [0, 1], "fedavg_iid, lr 0.001": [0]}
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no finished run"):
        gather([tmp_path / "empty"])
    with pytest.raises(UserError, match="not a folder"):
        gather([tmp_path / "none"])


RESULTS = Path(__file__).parents[1] / "results"


@pytest.mark.parametrize("name", sorted(folder.name.removesuffix("-cifar100") for folder in RESULTS.glob("*-cifar100")))
def test_published_runs_belong_to_the_built_in_plans(name: str) -> None:
    """A resumed study must recognise its finished runs by name."""
    weights = "dinov2_vits14.pth" if name == "layerscale" else "dino_vits16_from_dinov2.pth"
    plan = read_plan(name, place="cifar100", overrides=[f"model.weights=anywhere/{weights}"])
    study = Study(plan, RESULTS / f"{name}-cifar100")
    kept = {run.name for run in (study.folder / "runs").iterdir()}
    trials = {trial for search in study.searches for trial in search.metadata()["runs"]}
    assert kept and kept <= {planned.name for planned in study.plan.runs} | trials


def test_an_archive_gives_the_same_tables_without_weights_and_can_be_resumed(
    plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "s", tmp_path / "kept"
    small_study(plan_path, tmp_path / "first" / "s", seeds=1).run()
    assert main(["keep", str(tmp_path / "first"), "--out", str(out)]) == 0
    assert f"{out / 's'}: 2 runs added\n" == capsys.readouterr().out
    files = {p.name for p in out.rglob("*") if p.is_file()}
    assert files == {"study.json", "config.yaml", "digests.json", "environment.json", "metrics.jsonl", "partition.json", "summary.json"}
    assert not any(str(tmp_path) in p.read_text() for p in out.rglob("*") if p.is_file())  # it may be published
    on = small_study(plan_path, out / "s", seeds=2)
    assert {p.seed for p in on.missing()} == {1}
    small_study(plan_path, whole, seeds=2).run()
    assert main(["keep", str(whole), "--out", str(out)]) == 0 and "2 runs added; 2 were already there" in capsys.readouterr().out
    assert tables(out / "s") == tables(whole)
    assert main(["keep", str(tmp_path / "first"), "--out", str(out)]) == 0
    assert tables(out / "s") == tables(whole)  # a part does not replace the whole
    metadata = json.loads((whole / "study.json").read_text())
    metadata["tables"][0]["cells"][0]["label"] = "renamed"
    metadata["tables"].pop()
    (whole / "study.json").write_text(json.dumps(metadata))
    assert main(["keep", str(whole), "--out", str(out)]) == 0  # a cell is known by its runs, and a table that a later plan lacks stays
    first, second = gather([out / "s"]).studies[0].tables
    assert [cell.label for cell in first.cells] == ["renamed", "IID, local_steps 2", "Nc=2, local_steps 1", "Nc=2, local_steps 2"]
    assert second.name == "again" and len(second.cells[0].runs) == 2 and "not in the plan" not in capsys.readouterr().out
    assert main(["keep", str(out), "--out", str(out)]) == 2 and "is already in" in capsys.readouterr().err
    assert main(["keep", str(tmp_path), "--out", str(out)]) == 2 and main(["keep", str(out / "s" / "runs"), "--out", "x"]) == 2


def test_the_path_is_part_of_the_identity_for_image_folders_only(tmp_path: Path) -> None:
    def name(*overrides: str) -> str:
        return identity(compose([*overrides]))

    assert name("data=folder", "data.root=a") != name("data=folder", "data.root=b")
    assert name("data=cifar100", "data.root=a") == name("data=cifar100", "data.root=b")
    assert name("model.weights=a/w.pth") == name("model.weights=b/w.pth") != name("model.weights=b/v.pth")


def test_a_study_is_locked_and_drops_failures_of_finished_runs(plan_path: Path, tmp_path: Path) -> None:
    study = small_study(plan_path, tmp_path / "s")
    with locked(study.folder), pytest.raises(UserError, match="in use by another process"):
        study.run()
    write_json(study.folder / "study.json", {"failures": {"other-1": "gone", study.plan.runs[0].name: "why"}})
    assert small_study(plan_path, tmp_path / "s").failures == {study.plan.runs[0].name: "why"}
    summary = study.path(study.plan.runs[0]) / "summary.json"
    summary.parent.mkdir(parents=True)
    summary.write_text('{"val_accuracy": 0.5}')
    assert small_study(plan_path, tmp_path / "s").failures == {}
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="--out"):
            small_study(plan_path, folder).run()
    with pytest.raises(UserError, match="--jobs must be >= 1, got 0"):
        small_study(plan_path, tmp_path / "s", jobs=0)


def test_a_run_that_was_killed_before_it_was_one_is_begun_again(tmp_path: Path) -> None:
    config = read_plan("quick", seeds=1, overrides=QUICK).runs[2].config
    config.run.dir, config.run.if_exists = str(tmp_path / "r"), "resume"
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    for name in ("lock", "environment.json", "config.yaml.part"):
        (tmp_path / "r" / name).touch()
    assert execute(config).finished
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    config.run.dir = str(tmp_path / "mine")
    with pytest.raises(UserError, match="not an empty folder"):
        execute(config)


TUNED = """
seeds: 2
set: [experiment=fedavg_iid]
tables:
  - name: optimizers
    cases: {plain: [optim.momentum=0, optim.lr=0.01], heavy: [optim.momentum=0.9]}
    tune: {key: optim.lr, by: 10, length: 0.5, tries: 4}
"""


def of_lr(best: float, broken: float = float("inf")) -> Callable[[PlannedRun], float | None]:
    """A validation accuracy with one peak; what is above `broken` fails."""
    return lambda trial: FAILED if trial.config.optim.lr > broken else 1 / (1 + abs(math.log(trial.config.optim.lr / best)))


@pytest.mark.parametrize(
    ("best", "broken", "value", "tried"),
    [
        (0.01, math.inf, 0.01, [0.001, 0.01, 0.1]),
        (0.1, math.inf, 0.1, [0.001, 0.01, 0.1, 1.0]),
        (0.001, math.inf, 0.001, [0.0001, 0.001, 0.01, 0.1]),
        (100.0, math.inf, 1.0, [0.001, 0.01, 0.1, 1.0]),  # tries are spent
        (0.1, 0.05, 0.01, [0.001, 0.01, 0.1]),  # beyond the edge nothing trains
        (0.1, 5e-4, 0.0001, [0.0001, 0.001, 0.01, 0.1]),
        (0.1, 1e-9, None, [0.0001, 0.001, 0.01, 0.1]),
    ],
)
def test_a_line_search_ends_where_both_neighbours_are_worse(
    tmp_path: Path, best: float, broken: float, value: float | None, tried: list[float]
) -> None:
    (tmp_path / "p.yaml").write_text(TUNED)
    plan = read_plan(str(tmp_path / "p.yaml"), overrides=QUICK)
    plain, heavy = line_searches(plan, of_lr(best, broken))
    assert not plain.next and plain.value == value and [v for v, _ in plain.metadata()["tried"]] == tried
    assert plain.metadata()["value"] == value and all((score is None) == (v > broken) for v, score in plain.metadata()["tried"])
    runs = [p for p in with_chosen_values(plan, [plain, heavy]).runs if p.cell.case == "plain"]
    assert [p.config.optim.lr for p in runs] == [value or 0.01] * 2 and all(p.config.train.test for p in runs)
    assert all(p.config.federated.rounds == 2 for p in runs) and plain.spec.base.federated.rounds == 1 and not plain.spec.base.train.test


def test_the_next_values_do_not_depend_on_the_order_in_which_trials_end(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(TUNED)
    tune = read_plan(str(tmp_path / "p.yaml"), overrides=QUICK).tuning[0]
    assert (
        LineSearch(tune, {}).next == [0, 1, -1]
        and LineSearch(tune, {1: 0.5}).next == [0, -1]
        and LineSearch(tune, {0: 0.5, -1: 0.6}).next == [1]
    )
    assert (
        LineSearch(tune, {0: 0.5, 1: 0.4, -1: 0.6}).next == [-2] and LineSearch(tune, {0: 0.5, 1: 0.5, -1: 0.5}).best == 0
    )  # on a plateau it stays
    assert read_plan(str(tmp_path / "p.yaml"), overrides=[*QUICK, "optim.lr=0.1"]).tuning == []  # message on the command line


def test_cells_that_must_be_trained_alike_share_a_line_search(tmp_path: Path) -> None:
    text = TUNED.replace("heavy: [optim.momentum=0.9]", "again: [optim.momentum=0, optim.lr=0.01, federated.client_vectors=true]")
    (tmp_path / "p.yaml").write_text(text.replace("tries: 4}", "tries: 4, like: {plain: again}}"))
    plan = read_plan(str(tmp_path / "p.yaml"), overrides=QUICK)
    (search,) = line_searches(plan, of_lr(0.1))
    assert search.metadata()["label"] == "again; plain" and not search.spec.trial(0).config.federated.client_vectors
    assert {p.config.optim.lr for p in with_chosen_values(plan, [search]).runs} == {0.1} and len(plan.runs) == 4


def test_the_set_of_tune_applies_to_short_runs_only(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(TUNED.replace("tries: 4", "tries: 4, set: [federated.dropout_rate=0.5, train.precision=bf16]"))
    plan = read_plan(str(tmp_path / "p.yaml"), overrides=QUICK)
    short = plan.tuning[0].trial(0).config
    assert (short.federated.dropout_rate, short.train.precision) == (0.5, "bf16")
    assert {(p.config.federated.dropout_rate, p.config.train.precision) for p in plan.runs} == {(0.0, "auto")}
    last = read_plan(str(tmp_path / "p.yaml"), overrides=[*QUICK, "train.precision=fp32"])
    assert {c.train.precision for c in (last.tuning[0].trial(0).config, *(p.config for p in last.runs))} == {"fp32"}
    for wrong, why in (
        ("optim.batchsize=3", r"Did you mean 'optim\.batch_size'"),
        ("federated.rounds=7", r"set must be any key but optim\.lr, which is tuned, .* got 'federated\.rounds=7'"),
        ("optim.lr=3.0", "which is tuned"),
        ("data.val_fraction=0", "No validation set"),
    ):
        (tmp_path / "p.yaml").write_text(TUNED.replace("tries: 4", f"tries: 4, set: [{wrong}]"))
        with pytest.raises(UserError, match=why):
            read_plan(str(tmp_path / "p.yaml"), overrides=[word for word in QUICK if not word.startswith(wrong.split("=")[0])])


def test_a_study_tunes_first_and_resumes_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "p.yaml").write_text(TUNED)
    plan = read_plan(str(tmp_path / "p.yaml"), overrides=QUICK)
    assert main(["study", str(tmp_path / "p.yaml"), "--plan", "--out", str(tmp_path / "s"), *QUICK]) == 0
    real, ran = runner.execute, list[tuple[float, bool]]()

    def stopped(config: Config) -> object:
        if len(ran) == 4:
            raise KeyboardInterrupt
        ran.append((config.optim.lr, config.train.test))
        if config.optim.lr > 1:
            raise UserError("not finite")
        return real(config)

    monkeypatch.setattr(runner, "execute", stopped)
    with pytest.raises(KeyboardInterrupt):
        Study(plan, tmp_path / "s").run()
    assert not any(test for _, test in ran)
    monkeypatch.setattr(runner, "execute", lambda config: ran.append((config.optim.lr, config.train.test)) or real(config))
    study = Study(plan, tmp_path / "s")
    monkeypatch.setattr(logging.getLogger("fedlens"), "handlers", [caplog.handler])
    caplog.set_level("INFO", "fedlens")
    found = study.run()
    lines = "\n".join(caplog.messages)  # where there is no terminal: what is done, what it came to, what is left
    assert re.search(r"tuning: 1 of \d+.*: (plain|heavy), optim.lr [\d.]+: \d+\.\d\d % on validation, \d+ s", lines)
    assert re.search(r"p: 1 of 4, \d+ (s|min) left: plain, seed 0: \d+\.\d\d % on the test set, \d+ s", lines)
    assert re.search(r"p: 4 of 4: heavy, seed 1: ", lines)
    assert len(ran) == len(set(study.failed_trials)) + len(found.trials) + len(found.runs) and len(found.runs) == 4  # nothing twice
    assert [tuned.value for tuned in found.tuned] == [p.config.optim.lr for p in study.plan.runs[::2]]
    assert all(dict(tuned.tried)[tuned.value] == max(score or 0 for _, score in tuned.tried) for tuned in found.tuned)
    assert not any(list(run.path.glob("*.safetensors")) for run in found.trials) and all(
        run.summary["test_accuracy"] is None for run in found.trials
    )
    assert "values chosen on validation in short runs" in tables(tmp_path / "s")[0]
    Study(plan, tmp_path / "s").run()
    assert len(ran) == len(set(study.failed_trials)) + len(found.trials) + len(found.runs)


def test_one_table_can_be_run_alone(plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_path.write_text(PLAN + TUNED.partition("tables:")[2].replace("cases: {plain", "set: [experiment=fedavg_iid]\n    cases: {plain"))
    arguments = ["study", str(plan_path), "--out", str(tmp_path / "s"), "--no-report", "--seeds", "1", *QUICK]
    assert main([*arguments, "--table", "agian"]) == 2 and "Did you mean 'again'" in capsys.readouterr().err
    assert (
        main([*arguments, "--plan", "--table", "again", "--table", "steps"]) == 0 and len(capsys.readouterr().out.splitlines()) == 5 + 1
    )  # the estimate
    assert main([*arguments, "--table", "again"]) == 0
    assert len(list((tmp_path / "s" / "runs").iterdir())) == 1  # no trial of the table that is tuned
    found = gather([tmp_path / "s"]).studies[0]
    assert not found.failures and [len(cell.runs) for cell in found.tables[1].cells] == [1] and found.tuned[0].value is None


def pretend(monkeypatch: pytest.MonkeyPatch, score: Callable[[Config], float] = lambda config: 0.5) -> list[str]:
    """Runs leave their files at once, without training. What was run comes back, by its folder's name."""
    ran: list[str] = []

    def finish(config: Config) -> None:
        folder = Path(str(config.run.dir))
        ran.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config))
        (folder / "metrics.jsonl").write_text('{"step": 1, "val_accuracy": 0.5}\n')
        (folder / "model.safetensors").touch()
        accuracy = score(config)
        write_json(folder / "summary.json", {"test_accuracy": accuracy - 0.01 * config.seed, "val_accuracy": accuracy, "seconds": 1.0})

    monkeypatch.setattr(runner, "execute", finish)
    return ran


def peaked(config: Config) -> float:
    return 1 / (1 + abs(math.log(config.optim.lr / (0.1 if config.optim.momentum else 0.001))))


MINE = """
seeds: 2
set: [experiment=fedavg_iid]
tables:
  - {name: one, cases: {A: [optim.lr=0.1], B: [optim.lr=0.2]}}
"""
TWO = TUNED.replace("name: optimizers", "name: t1") + TUNED.partition("tables:\n")[2].replace("name: optimizers", "name: t2")


def planned(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_another_plan_needs_replace_to_use_the_folder_of_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = pretend(monkeypatch)
    folder = tmp_path / "studies" / "mine-here"
    monkeypatch.chdir(tmp_path)
    first, other = planned(tmp_path / "p1" / "mine.yaml", MINE), planned(tmp_path / "p2" / "mine.yaml", MINE.replace("0.2", "0.3"))
    assert main(["study", str(first), "--no-report"]) == 0 and len(ran) == 4
    metadata = (folder / "study.json").read_bytes()
    for words, lost in (([str(other)], 2), ([str(first), "optim.momentum=0"], 4), ([str(first), "--seeds", "1"], 2)):
        capsys.readouterr()
        assert main(["study", *words, "--no-report"]) == 2
        message = capsys.readouterr().err.splitlines()
        assert (
            len(message) == 1
            and f"has {lost} finished runs that this plan lacks" in message[0]
            and "another --out, or --replace" in message[0]
        )
        assert (folder / "study.json").read_bytes() == metadata and len(ran) == 4
    assert main(["study", str(other), "--plan"]) == 0  # looking is free
    assert main(["study", str(other), "--no-report", "--replace"]) == 0 and len(ran) == 6
    assert main(["study", str(other), "--no-report"]) == 0 and len(ran) == 6
    assert len(list((folder / "runs").iterdir())) == 6


def test_a_plan_that_grew_continues_without_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend(monkeypatch)
    path, folder = tmp_path / "p.yaml", tmp_path / "s"
    more = "  - {name: two, cases: {C: [optim.lr=0.4]}}\n"
    for text, tables, runs in (
        (MINE.replace("seeds: 2", "seeds: 1"), [], 2),
        (MINE, [], 4),
        (MINE + more, ["two"], 6),
        (MINE + more.replace("two", "three") + more.replace("0.4", "0.4, optim.momentum=0"), ["one"], 6),
    ):
        Study(read_plan(str(planned(path, text)), overrides=QUICK), folder, tables=tables).run()
        assert len(ran) == len(set(ran)) == runs


def test_a_study_that_is_tuned_again_continues_without_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend(monkeypatch, peaked)
    path, folder = tmp_path / "p.yaml", tmp_path / "s"

    def study(text: str, **kw: bool) -> Study:
        return Study(read_plan(str(planned(path, text)), overrides=QUICK), folder, **kw)  # type: ignore[arg-type]

    study(TUNED.replace("    tune", "    # tune")).run()  # each at its own value
    assert len(ran) == 4
    study(TUNED.replace("tries: 4", "tries: 3")).run()
    before = {p.name for p in study(TUNED.replace("tries: 4", "tries: 3")).plan.runs}
    again = study(TUNED.replace("tries: 4", "tries: 9").replace("by: 10", "by: 4"))
    again.run()
    assert before != {p.name for p in again.plan.runs} and not again.missing()  # other values, and what had the old ones is no loss
    metadata = json.loads((folder / "study.json").read_text())
    metadata["unfit"] = {again.searches[0].spec.trial(0).name: "not finite"}
    write_json(folder / "study.json", metadata)
    study(TUNED.replace("tries: 4", "tries: 9").replace("by: 10", "by: 4"), retry=True).run()
    with pytest.raises(UserError, match="finished runs that this plan lacks"):  # a value that is message is not tuned
        Study(read_plan(str(path), overrides=[*QUICK, "optim.lr=7"]), folder).run()


@pytest.mark.parametrize("damage", ["", "{", "{}", "[1]"])
def test_a_run_with_a_damaged_summary_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    ran = pretend(monkeypatch, peaked)
    plan, folder = read_plan(str(planned(tmp_path / "p.yaml", TUNED)), overrides=QUICK), tmp_path / "s"
    first = Study(plan, folder)
    first.run()
    trial, run = first.searches[0].spec.trial(0), first.plan.runs[0]
    text, before = tables(folder), len(ran)
    for harmed in (trial, run):
        (first.path(harmed) / "summary.json").write_text(damage)
    again = Study(plan, folder)
    assert not again.finished(trial)
    monkeypatch.setattr(runner, "execute", once_more(runner.execute, [trial.name, run.name]))
    again.run()
    assert ran[before:] == [trial.name, run.name] and tables(folder) == text


def once_more(execute: Callable[[Config], object], names: list[str]) -> Callable[[Config], object]:
    """As the real one: a folder with an intact summary is left as it is."""

    def go(config: Config) -> object:
        folder = Path(str(config.run.dir))
        assert folder.name in names and not is_finished(folder)
        return execute(config)

    return go


def test_archiving_the_parts_of_a_study_one_by_one_gives_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, peaked)
    plan = read_plan(str(planned(tmp_path / "p.yaml", TWO)), overrides=QUICK)
    for where, only in (("whole", []), ("m1", ["t1"]), ("m2", ["t2"])):
        Study(plan, tmp_path / where / "s", tables=only).run()
    for order in (["m1", "m2"], ["m2", "m1"], ["m1", "m2", "m1"]):
        out = tmp_path / "-".join(order)
        for part in order:
            assert main(["keep", str(tmp_path / part / "s"), "--out", str(out)]) == 0
        assert tables(out / "s") == tables(tmp_path / "whole" / "s")
        assert json.loads((out / "s" / "study.json").read_text()) == json.loads((tmp_path / "whole" / "s" / "study.json").read_text())
        study = Study(plan, out / "s")
        assert not study.missing() and not study.lost_runs()
    assert "another configuration" not in capsys.readouterr().out


def test_parts_with_other_seeds_and_cells_are_one_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    texts = [MINE.replace("seeds: 2", f"seeds: [{seed}]") for seed in (1, 0)] + [MINE.replace("A: [optim.lr=0.1], B", "C")]
    for i, text in enumerate([MINE, *texts]):
        plan = read_plan(str(planned(tmp_path / "p.yaml", text)), overrides=QUICK)
        Study(plan, tmp_path / str(i) / "s").run()
    for i in (1, 2):
        assert main(["keep", str(tmp_path / str(i)), "--out", str(tmp_path / "kept")]) == 0
    assert tables(tmp_path / "kept" / "s") == tables(tmp_path / "0" / "s")
    assert main(["keep", str(tmp_path / "3"), "--out", str(tmp_path / "kept")]) == 0
    assert [(cell.label, len(cell.runs)) for cell in gather([tmp_path / "kept"]).studies[0].tables[0].cells] == [("A", 2), ("C", 2)]
    assert "cells that only the archive has: one: A" in capsys.readouterr().out  # B has another name now


def test_seeds_of_two_configurations_are_never_one_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    for i, text in enumerate([MINE, MINE.replace("seeds: 2", "seeds: [1, 2]").replace("0.2", "0.3")]):
        Study(read_plan(str(planned(tmp_path / "p.yaml", text)), overrides=QUICK), tmp_path / str(i) / "s").run()
        assert main(["keep", str(tmp_path / str(i)), "--out", str(tmp_path / "kept")]) == 0
    assert "cells with another configuration than before: B; not in the plan: fedavg_iid-" in capsys.readouterr().out
    a, b = gather([tmp_path / "kept"]).studies[0].tables[0].cells
    assert list(a.runs) == [0, 1, 2] and {run.config["optim"]["lr"] for run in b.runs.values()} == {0.3} and list(b.runs) == [1, 2]


def metadata(runs: dict[str, str], **more: object) -> dict[str, object]:
    """study.json of one cell, A, and a sweep of it that is known by its first run."""
    cell = {"label": "A", "case": "A", "values": {}, "runs": runs}
    sweep = {
        "kind": "sweep",
        "title": "of A",
        "labels": ["A"],
        "seed": 0,
        "options": {},
        "file": f"analyses/{next(iter(runs.values()))}.json",
    }
    head = {"name": "s", "place": "here", "question": "", "tables": [{"name": "t", "cells": [cell]}], "analyses": [sweep]}
    return {**head, "tuned": [], "unfit": {}, "failures": {}, **more}


def test_merged_parts_keep_the_analyses_and_failures_of_their_remaining_runs(tmp_path: Path) -> None:
    def finish(name: str, rate: float) -> None:
        planned(tmp_path / "runs" / name / "config.yaml", f"seed: {name[-1]}\noptim: {{lr: {rate}}}")
        write_json(tmp_path / "runs" / name / "summary.json", {"val_accuracy": 0.5})

    def files(whole: dict[str, Any]) -> list[str]:
        return [each["file"] for each in whole["analyses"]]

    finish("a0", 0.1)
    planned(tmp_path / "analyses" / "a0.json", "{}")
    old, new = (
        metadata({"0": "a0", "1": "a1"}, failures={"a1": "no memory"}),
        metadata({"0": "b0", "1": "b1"}, failures={"b1": "no memory"}),
    )
    whole = merged(old, new, tmp_path)  # nothing of the new one is finished
    assert files(whole) == ["analyses/a0.json"] and whole["tables"][0]["cells"][0]["runs"] == {"0": "a0", "1": "b1"}
    assert whole["failures"] == {"b1": "no memory"}
    finish("a1", 0.1)
    assert merged(old, metadata({"1": "a1"}), tmp_path)["failures"] == {}
    finish("b0", 0.2)
    whole = merged(old, new, tmp_path)
    assert files(whole) == ["analyses/b0.json"] and whole["tables"][0]["cells"][0]["runs"] == {"0": "b0", "1": "b1"}


def test_studies_of_one_folder_name_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    for name in ("n1", "n2"):
        plan = read_plan(str(planned(tmp_path / f"{name}.yaml", MINE)), overrides=QUICK)
        Study(plan, tmp_path / name / "sp").run()
    one, two, out = str(tmp_path / "n1" / "sp"), str(tmp_path / "n2" / "sp"), tmp_path / "kept"
    assert main(["keep", one, two, "--out", str(out)]) == 2 and not out.exists()
    assert f"{one} and {two} would both be {out / 'sp'}" in capsys.readouterr().err
    assert main(["keep", one, str(tmp_path / "n1"), "--out", str(out)]) == 0  # the same one twice
    before = (out / "sp" / "study.json").read_bytes()
    assert main(["keep", two, "--out", str(out)]) == 2 and "holds the study 'n1' on here" in capsys.readouterr().err
    assert (out / "sp" / "study.json").read_bytes() == before


def raising(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[str]:
    """Experiments of all runs that a study begins; that number `at` raises."""
    real, calls = runner.execute, list[str]()

    def execute_or_raise(config: Config) -> object:
        calls.append(config.experiment)
        if len(calls) == at:
            raise error
        return real(config)

    monkeypatch.setattr(runner, "execute", execute_or_raise)
    return calls


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("out of memory"), "OutOfMemoryError: out of memory"),
        (Elsewhere("run.dir: no space left on device"), "run.dir: no space left on device"),
    ],
)
def test_a_failure_of_device_or_disk_does_not_count_against_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    (tmp_path / "p.yaml").write_text(TUNED)
    plan = read_plan(str(tmp_path / "p.yaml"), overrides=QUICK)
    raising(monkeypatch, 1, error)
    found = Study(plan, tmp_path / "s").run()
    plain, heavy = found.tables[0].cells
    assert not plain.runs and len(heavy.runs) == 2 and set(found.failures.values()) == {f"tuning: {why}"}
    again = Study(plan, tmp_path / "s")
    assert not again.failed_trials
    assert len(again.run().tables[0].cells[0].runs) == 2 and not again.failures  # the next start has the memory


def test_a_study_that_is_killed_while_tuning_can_be_archived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.yaml").write_text(TUNED)
    plan = read_plan(str(tmp_path / "p.yaml"), overrides=QUICK)
    calls = raising(monkeypatch, 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Study(plan, tmp_path / "s").run()
    assert main(["keep", str(tmp_path / "s"), "--out", str(tmp_path / "kept")]) == 0
    found = Study(plan, tmp_path / "kept" / "s").run()
    assert len(calls) == 1 + len(found.trials) + len(found.runs)  # what was kept is not run again; one was killed


def test_a_cell_without_a_working_value_fails_and_the_others_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.yaml").write_text(TUNED)
    plan, real = read_plan(str(tmp_path / "p.yaml"), seeds=1, overrides=QUICK), runner.execute

    def failing(config: Config) -> object:
        if config.optim.momentum == 0:
            raise UserError("not finite")
        return real(config)

    monkeypatch.setattr(runner, "execute", failing)
    study = Study(plan, tmp_path / "s")
    found = study.run()
    assert list(study.failures.values()) == ["no value of optim.lr trains; tried 0.0001, 0.001, 0.01, 0.1"]
    assert [cell.label for cell in found.tables[0].cells if cell.runs] == ["heavy"]
    again = Study(plan, tmp_path / "s")
    assert again.missing() == [] and again.failures == study.failures and Study(plan, tmp_path / "s", retry=True).failed_trials == {}


WORKING = """
import os, sys, time
from fedlens.study.processes import serve

def do(task):
    if task == "die":
        raise MemoryError("no room")
    if task == "sleep":
        time.sleep(60)
    print("this is no answer")
    return {"why": task, "cause": "values"} if sys.argv[1:] else {"task": task, "process": os.getpid()}

serve(do)
"""


def test_a_worker_is_reused_and_replaced_after_its_process_ends() -> None:
    worker = ProcessWorker([sys.executable, "-c", WORKING])
    first, second = worker.do("a"), worker.do("b\n")
    assert first["task"] == "a" and second == {"task": "b\n", "process": first["process"]} and first["process"] != os.getpid()
    with pytest.raises(ChildProcessError, match=r"^MemoryError: no room$"):
        worker.do("die")
    third = worker.do("c")
    assert third["process"] != first["process"]
    worker.retire()
    assert worker.do("d")["process"] != third["process"]
    worker.retire()


INTERRUPTED = """
import os, signal, sys, threading, time
from fedlens.study.processes import Failure, WorkerPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background is born without it
pool, begun = WorkerPool([sys.executable, "-c", sys.argv[1], "failures"], 2), []

def message(task):
    begun.append(task)
    return task

assert [(task, failure.why) for task, failure in pool.outcomes("abc", None, message)] == [("a", "a"), ("b", "b"), ("c", "c")]
processes = [worker._process for worker in pool.workers]
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
before = time.monotonic()
try:
    list(pool.outcomes(["sleep", "sleep", "d"], None, message))
except KeyboardInterrupt:
    assert time.monotonic() - before < 30  # they would have slept for 60
    assert begun[3:] == ["sleep", "sleep"] and all(process.poll() is not None for process in processes if process)
    print("interrupted")
"""


def test_an_interrupt_ends_busy_workers_and_starts_no_new_task() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, WORKING], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "interrupted\n", done.stderr


def test_the_others_continue_after_a_worker_that_died_and_the_order_stays() -> None:
    pool = WorkerPool([sys.executable, "-c", WORKING, "failures"], 2)
    found = [(task, failure and failure.why) for task, failure in pool.outcomes(["die", "b", "c", "d"], pytest.fail, str)]
    assert found == [("die", "MemoryError: no room"), ("b", "b"), ("c", "c"), ("d", "d")]
    pool.close()
    assert all(worker._process is None for worker in pool.workers)


def test_a_busy_worker_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write('"a"\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["task"] == "a"
        process.stdin.write('"sleep"\n')
        process.stdin.close()
        assert process.wait(30) == 1


def test_workers_share_the_gpus_of_their_parent_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert [environment_of(place, 3)["CUDA_VISIBLE_DEVICES"] for place in range(3)] == ["4", "5", "4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [environment_of(place, 2)["CUDA_VISIBLE_DEVICES"] for place in range(2)] == ["0", "1"]
    script = "import time; from fedlens.deploy.worker import end_with_parent; end_with_parent(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 1
