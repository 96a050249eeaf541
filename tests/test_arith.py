"""`fedlens arith`: task arithmetic on finished runs, through the command line and the functions behind it."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAST, accept

import fedlens as fl
from fedlens.cli import main
from fedlens.errors import UserError
from fedlens.lens.merging import RULES
from fedlens.study import arith
from fedlens.study.arith import PointEvaluator, default_alphas, interpolate_runs, load_vector, sweep_run
from fedlens.study.forget import DEFAULT_ALPHAS, forget_client, scan_alphas
from fedlens.study.interference import interference_of_runs
from fedlens.training.run import Run

FEDERATION = [
    *FAST,
    "federated.clients=10",
    "federated.local_steps=2",
    "federated.rounds=2",
    "federated.eval_every=1",
    "federated.client_vectors=true",
    "optim.batch_size=8",
]
COMMANDS = ("add", "negate", "scale", "merge", "sweep", "interpolate", "forget", "interference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def central(folder: Path) -> Run:
    return fl.run([*FAST, "train.epochs=1", f"run.dir={folder / 'central'}"])


@pytest.fixture(scope="module")
def fed(folder: Path) -> Run:
    """A client is a class, and all take part in both rounds."""
    return fl.run([*FEDERATION, "experiment=fedavg_noniid", "federated.participation=1", "optim.lr=0.02", f"run.dir={folder / 'fed'}"])


@pytest.fixture(scope="module")
def sparse(folder: Path) -> Run:
    """Two classes a client, so each is on two clients; three clients a round."""
    options = ["experiment=fedavg_noniid_sparse", "data.classes_per_client=2", "mask.strategy=random", "federated.participation=0.3"]
    return fl.run([*FEDERATION, *options, f"run.dir={folder / 'sparse'}"])


def result(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_arith_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["arith", command, "--help"])
    assert stop.value.code == 0
    assert f"example: fedlens arith {command}" in capsys.readouterr().out


# --- new vectors


def test_add_negate_and_scale_are_the_algebra_of_task_vectors(
    central: Run, fed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = str(central.path), str(fed.path)
    new = {name: str(tmp_path / f"{name}.safetensors") for name in ("add", "negate", "scale", "again")}
    assert main(["arith", "add", a, b, "--out", new["add"]]) == 0
    shown = capsys.readouterr().out
    tau_a, tau_b = central.task_vector(), fed.task_vector()
    assert f"{tau_a.norm():.4g}" in shown and f"{tau_a.cosine(tau_b):+.3f}" in shown and "density" in shown
    assert main(["arith", "negate", a, "--out", new["negate"]]) == 0
    assert main(["arith", "scale", b, "-0.5", "--out", new["scale"]]) == 0
    assert main(["arith", "negate", new["negate"], "--out", new["again"]]) == 0  # a file is an input too
    assert load_vector(new["add"]) == tau_a + tau_b
    assert load_vector(new["negate"]) == -tau_a
    assert load_vector(new["scale"]) == tau_b * -0.5
    assert load_vector(new["again"]) == tau_a
    for factor in ("-1e-3", "-2.5E+1", "-.5e2", "-3."):
        assert main(["arith", "scale", b, factor, "--out", new["scale"]]) == 0
        assert load_vector(new["scale"]) == tau_b * float(factor)


def test_the_mean_of_one_vector_is_itself(fed: Run, tmp_path: Path) -> None:
    out = tmp_path / "tau.safetensors"
    assert main(["arith", "merge", str(fed.path), "--rule", "mean", "--out", str(out)]) == 0
    assert load_vector(out) == fed.task_vector()


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_merges_runs(central: Run, fed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(arith, "FISHER_SAMPLES", 3)
    out = tmp_path / "tau.safetensors"
    given = {"ties": {"density": 0.1}, "dare": {"drop": 0.3, "seed": 1}, "trimmed_mean": {"trim": 0.2}}.get(rule, {})
    options = [word for name, value in given.items() for word in ("--option", f"{name}={value}")]
    assert main(["arith", "merge", str(central.path), str(fed.path), "--rule", rule, "--weights", "1,2", *options, "--out", str(out)]) == 0
    vectors = [central.task_vector(), fed.task_vector()]
    if rule == "fisher":
        given = {"fishers": [arith.run_fisher(run.path) for run in (central, fed)]}
    assert load_vector(out) == fl.merge(vectors, rule, [1, 2], **given)


# --- along a line


def test_a_sweep_passes_through_the_start_and_the_end_of_its_run(fed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arith", "sweep", str(fed.path), "--alphas=-0.5:1.5:3", "--out", str(tmp_path)]) == 0
    assert "chosen on validation" in capsys.readouterr().out
    found = result(tmp_path / "sweep.json")
    assert [p["alpha"] for p in found["points"]] == [-0.5, 0.5, 1.5]
    assert found["end"]["test_accuracy"] == fed.summary["test_accuracy"]
    assert found["end"]["test_loss"] == fed.summary["test_loss"]
    assert found["start"]["val_accuracy"] == pytest.approx(fed.summary["ridge"]["val_accuracy"])
    evaluator = PointEvaluator(fed)
    evaluator.bench.model.load_state_dict(fed.start)
    assert found["start"]["test_accuracy"] == evaluator.bench.evaluate(evaluator.bank(evaluator.bench.dataset.test))[1]
    assert found["chosen"]["val_accuracy"] == max(p["val_accuracy"] for p in found["points"])
    with (tmp_path / "sweep.csv").open() as file:
        assert [float(row["alpha"]) for row in csv.DictReader(file)] == [-0.5, 0.5, 1.5]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "sweep.svg").read_text()


def test_a_sweep_along_its_own_vector_from_a_file_is_the_same_sweep(fed: Run, tmp_path: Path) -> None:
    fed.task_vector().save(tmp_path / "tau.safetensors")
    own, file = sweep_run(fed, None, "0,2"), sweep_run(fed, tmp_path / "tau.safetensors", "0,2")
    assert file["end"]["test_loss"] == pytest.approx(own["end"]["test_loss"], abs=1e-5)
    assert file["points"][1]["val_loss"] == pytest.approx(own["points"][1]["val_loss"], abs=1e-5)


def test_what_is_chosen_does_not_depend_on_the_test_set(fed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, forgot = sweep_run(fed, None, "0,1,4"), forget_client(fed, 3, grid="0,2,8")
    made = arith.set_up

    def shuffled(config: Any) -> Any:
        bench = made(config)
        bench.dataset.test.labels = bench.dataset.test.labels.roll(37)
        return bench

    monkeypatch.setattr(arith, "set_up", shuffled)
    other, forgot_too = sweep_run(fed, None, "0,1,4"), forget_client(fed, 3, grid="0,2,8")
    assert other["chosen"]["test_accuracy"] != honest["chosen"]["test_accuracy"]
    assert other["points"] == honest["points"] and other["chosen"]["alpha"] == honest["chosen"]["alpha"]
    assert forgot_too["points"] == forgot["points"] and forgot_too["after"]["alpha"] == forgot["after"]["alpha"]


def test_the_default_range_is_wider_for_a_sparse_vector(sparse: Run, fed: Run) -> None:
    ranges = [default_alphas(PointEvaluator(run).direction(run.task_vector())) for run in (fed, sparse)]
    assert [(r[0], r[-1]) for r in ranges] == [(-1.0, 2.0), (-1.0, 10.0)]
    assert all(0.0 in r and 1.0 in r for r in ranges) and len(ranges[0]) == 13


def test_interpolation_ends_at_the_two_runs(central: Run, fed: Run, tmp_path: Path) -> None:
    assert main(["arith", "interpolate", str(central.path), str(fed.path), "--alphas=0,0.5,1", "--out", str(tmp_path)]) == 0
    found = result(tmp_path / "interpolate.json")
    assert found["start"]["test_accuracy"] == central.summary["test_accuracy"]
    assert found["end"]["test_accuracy"] == fed.summary["test_accuracy"]
    assert found["notes"] == []


def test_a_run_that_trained_on_the_others_validation_images_is_named(fed: Run, folder: Path) -> None:
    other = fl.run([*FAST, "train.epochs=1", "seed=1", f"run.dir={folder / 'other-seed'}"])
    found = interpolate_runs(fed, other, "0,1")
    assert "another seed" in found["notes"][0]


def test_a_vector_remembers_what_it_was_learned_from(fed: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = fl.run([*FAST, "train.epochs=1", "seed=1", f"run.dir={folder / 'third-seed'}"])
    both = tmp_path / "both.safetensors"
    assert main(["arith", "merge", str(fed.path), str(other.path), "--rule", "median", "--out", str(both)]) == 0
    assert main(["arith", "scale", str(both), "0.5", "--out", str(both)]) == 0
    for words in (
        ["sweep", str(fed.path), str(both), "--alphas=0,1"],
        ["forget", str(fed.path), "--tau", str(both), "--classes", "8", "--alphas=0,1"],
    ):
        assert main(["arith", *words, "--out", str(tmp_path / words[0])]) == 0
        assert capsys.readouterr().out.count("note: third-seed has another seed") == 1
    assert sweep_run(fed, fed.task_vector(), "0,1")["notes"] == []


def test_what_a_client_added_says_in_its_file_which_images_it_may_have_seen(fed: Run) -> None:
    file = next((fed.path / "clients").glob("*.safetensors"))
    assert load_vector(file).origins == fed.task_vector().origins != frozenset()


def test_a_run_of_a_rule_that_is_not_known_here_can_be_looked_at_but_not_gone_on_with(fed: Run, tmp_path: Path) -> None:
    shutil.copytree(fed.path, tmp_path / "own")
    config = tmp_path / "own" / "config.yaml"
    config.write_text(config.read_text().replace("merge: mean", "merge: mine").replace("client_vectors: true", "client_vectors: false"))
    accept(tmp_path / "own")
    run = fl.load_run(tmp_path / "own")
    assert run.config.server.merge == "mine" and run.task_vector() == fed.task_vector()
    (tmp_path / "own" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"server\.merge must be .*got 'mine'"):
        run.resume()


# --- forgetting


def test_forgetting_with_alpha_zero_changes_nothing(fed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arith", "forget", str(fed.path), "--client", "4", "--alphas=0", "--out", str(tmp_path)]) == 0
    found = result(tmp_path / "forget-4.json")
    assert found["before"] == found["after"]
    assert "no α lowers" in capsys.readouterr().out


def test_negating_a_client_s_vector_as_any_task_is_forgetting_the_client(fed: Run, tmp_path: Path) -> None:
    as_client = forget_client(fed, 3, grid="0,2")
    tau, target = str(fed.path / "clients" / "3.safetensors"), ",".join(as_client["classes"])
    options = ["--tau", tau, "--classes", target, "--alphas=0,2", "--out", str(tmp_path)]
    assert main(["arith", "forget", str(fed.path), *options]) == 0
    found = result(tmp_path / "forget-tau.json")
    assert found["points"] == as_client["points"] and found["after"] == as_client["after"]


def test_shards_that_were_learned_apart_add_up_in_one_model(tmp_path: Path) -> None:
    options = [*FEDERATION, "experiment=fedavg_noniid", "federated.participation=1", "head=linear"]
    halves = [
        fl.run([*options, f"federated.exclude={others}", f"run.dir={tmp_path / name}"])
        for name, others in (("even", "[1,3,5,7,9]"), ("odd", "[0,2,4,6,8]"))
    ]
    assert all(torch.equal(t, halves[1].start[n]) for n, t in halves[0].start.items())  # the same θ₀
    tau = tmp_path / "both.safetensors"
    assert main(["arith", "add", *(str(run.path) for run in halves), "--out", str(tau)]) == 0
    together = halves[0].task_vector() + halves[1].task_vector()
    assert fl.TaskVector.load(tau) == together
    swept = sweep_run(halves[0], tau, "0,0.5,1")
    assert [p["alpha"] for p in swept["points"]] == [0, 0.5, 1]


def test_forgetting_lowers_the_target_and_keeps_the_control_on_validation(fed: Run, tmp_path: Path) -> None:
    assert main(["arith", "forget", str(fed.path), "--client", "3", "--out", str(tmp_path)]) == 0  # --alphas: until the control is lost
    found = result(tmp_path / "forget-3.json")
    before, after = found["before"], found["after"]
    assert len(found["classes"]) == 1 and found["shared_classes"] == [] and found["notes"] == []
    assert after["val_target"] < before["val_target"]
    assert after["val_control"] >= 0.95 * before["val_control"]
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".csv", ".svg", ".png"}


def test_target_and_control_together_are_the_whole_split(fed: Run) -> None:
    evaluator = PointEvaluator(fed)
    before = forget_client(fed, 0, grid="0")["before"]
    val = evaluator.bench.dataset.val
    (held,) = (evaluator.bench.dataset.class_names.index(c) for c in forget_client(fed, 0, grid="0")["classes"])
    share = float((val.labels == held).float().mean())
    whole = share * before["val_target"] + (1 - share) * before["val_control"]
    assert whole == pytest.approx(fed.summary["val_accuracy"], abs=1e-6)


def test_classes_that_other_clients_hold_too_are_said(sparse: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = next(iter(sparse.client_vectors()))
    assert main(["arith", "forget", str(sparse.path), "--client", str(client), "--alphas=0,5", "--out", str(tmp_path)]) == 0
    assert "the target is not client" in capsys.readouterr().out
    assert len(result(tmp_path / f"forget-{client}.json")["shared_classes"]) == 2


@pytest.mark.parametrize(
    ("target", "control", "last"),
    [
        (lambda a: max(0.0, 1 - a), lambda a: 0.9, 1.0),  # all forgotten
        (lambda a: 1.0, lambda a: 0.9 if a < 2 else 0.1, 2.25),  # the control is lost at 2, and again
        (lambda a: 1.0, lambda a: 0.9, 40.0),
    ],
)
def test_the_climb_ends_where_nothing_is_left_to_gain(target: Any, control: Any, last: float) -> None:
    points = scan_alphas(lambda a: {"val_target": target(a), "val_control": control(a)}, DEFAULT_ALPHAS, 0.95)
    assert points[0].alpha == 0 and points[-1].alpha == last


# --- interference


def test_interference_of_two_clients_draws_the_map(fed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--alphas=0:1:2", "--samples", "5", "--out", str(tmp_path)]
    assert main(["arith", "interference", str(fed.path), "--clients", "3,0", *out]) == 0
    assert "sign conflict" in capsys.readouterr().out
    found = result(tmp_path / "interference.json")
    one, other = (fed.client_vectors()[k] for k in (0, 3))
    assert found["pairs"][0]["cosine"] == pytest.approx(one.cosine(other), abs=1e-6)
    assert found["samples"] == [5, 5]
    assert found["xi"][0][0] == 0 and all(0 <= x <= 1 for row in found["xi"] for x in row)
    assert list(found["linearity"]) == ["client 3", "client 0"]  # as asked: each beside the images of its own classes
    assert (tmp_path / "interference.png").exists()


def test_interference_of_several_runs_has_every_pair_and_no_map(central: Run, fed: Run, sparse: Run) -> None:
    found = interference_of_runs([central, fed, sparse], "0,1", samples=4)
    assert len(found["pairs"]) == 3 and found["xi"] is None
    assert 0 <= found["sign_conflict"] <= 0.5


# --- mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "no-such-file", "--out", "x"], "no-such-file does not exist"),
        (["negate", "EMPTY", "--out", "x"], "is not a run folder"),
        (["negate", "FED", "--out", "FED/model.safetensors"], "exists and is not a task vector"),
        (["scale", "FED", "half", "--out", "x"], "factor must be a number, got 'half'"),
        (["merge", "FED", "--rule", "tie", "--out", "x"], "Did you mean 'ties'"),
        (["merge", "FED", "--weights", "1,2", "--out", "x"], "for each of 1"),
        (["merge", "FED", "--rule", "ties", "--option", "trim=0.1", "--out", "x"], "must be one of density"),
        (["merge", "FED", "--rule", "ties", "--option", "density=all", "--out", "x"], "a number"),
        (["merge", "FILE", "--rule", "fisher", "--out", "x"], "fisher needs run folders"),
        (["merge", "FED", "FILE", "--out", "x"], "task vector"),
        (["sweep", "no-such-run"], "is not a run folder"),
        (["sweep", "FED", "--alphas=0:1"], "start:stop:count"),
        (["sweep", "FED", "--out", "FED/config.yaml"], "--out"),
        (["sweep", "FED", "FILE"], "missing stranger"),
        (["interpolate", "FED", "EMPTY"], "is not a run folder"),
        (["forget", "CENTRAL", "--client", "0"], "federated.client_vectors=true"),
        (["forget", "FED", "--client", "12"], "client must be one that"),
        (["forget", "FED"], "pass either --client K, or --tau"),
        (["forget", "FED", "--client", "1", "--tau", "FED", "--classes", "1"], "pass either --client K, or --tau"),
        (["forget", "FED", "--tau", "FED", "--classes", "shoe"], "classes must be a number below 10 or one of"),
        (["forget", "FED", "--tau", "FED", "--classes", "0,1,2,3,4,5,6,7,8,9"], "no control"),
        (["forget", "FED", "--client", "one"], "a whole number"),
        (["forget", "FED", "--client", "1", "--alphas=-1,0"], ">= 0"),
        (["forget", "FED", "--client", "1", "--keep", "2", "--alphas=0"], "keep must be in [0, 1], got 2"),
        (["interference", "FED"], "must be >= 2, or 1 with --clients"),
        (["interference", "FED", "FED"], "appears twice"),
        (["interference", "FED", "--clients", "1,1"], "two or more different clients"),
        (["interference", "FED", "CENTRAL", "--clients", "0,1"], "--clients needs one run, got 2."),
        (["interference", "FED", "--clients", "0,1", "--samples", "0"], ">= 1"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    central: Run,
    fed: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    fl.TaskVector.between({"stranger": torch.zeros(2)}, {"stranger": torch.ones(2)}).save(tmp_path / "file.safetensors")
    monkeypatch.chdir(tmp_path)
    places = {"FED": str(fed.path), "CENTRAL": str(central.path), "EMPTY": "empty", "FILE": "file.safetensors"}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    before = {path: path.stat().st_mtime_ns for path in fed.path.rglob("*")}
    assert main(["arith", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error and error.startswith("error: ")
    assert {p.name for p in tmp_path.iterdir()} == {"empty", "file.safetensors"}
    assert {path: path.stat().st_mtime_ns for path in fed.path.rglob("*")} == before
