"""A run that was interrupted ends as if it had not been: every bit of it, every number of it, and every draw.

Also what a resume rests on: which model is the best, in what order files are written, what the noise is keyed by. All of it through runs and
their folders, so that it holds however the loops are written.
"""

import copy
import hashlib
import itertools
import json
import math
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import FAST, SIDE, accept, few_images
from safetensors.torch import load_file, save_file
from test_study import QUICK, TUNED, peaked, pretend
from torch import Tensor, nn

import fedlens as fl
from fedlens.engine.local_work import Update, Work, plan_round
from fedlens.engine.ranks import Ranks
from fedlens.errors import UserError
from fedlens.lens.merging import RULES
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import effective_steps
from fedlens.runs.folder import RunFolder
from fedlens.runs.store import write_json
from fedlens.study.plan import read_plan
from fedlens.study.results import NEAR, CellResult, RunResult, TableResult
from fedlens.study.runner import Study
from fedlens.tasks.image import Augment

# --- what these tests know of the inside of the package: re-point it here and nowhere else ------------------------------

EVALUATE = "fedlens.training.bench.Bench.measure"  # (bench, samples, model, index, metrics) -> loss, accuracy, …; only the choice of α gives an index
EPSILON = "fedlens.training.privacy.epsilon"  # (noise, rounds, delta) -> ε: the accountant, which is an extra
AUGMENT = "fedlens.tasks.image.shift_and_flip"  # (images, draws) -> images: what every training batch passes
MODEL = ("server.model.", "training.model.")  # how names begin in a checkpoint's tensors: federated, centralised
CLIENT, CONTROL = "ledger.", "algorithm.client."
STATE = {  # the contents of a checkpoint's state.json, and where
    "seconds": ("session", "seconds"),
    "stale": ("session", "stale"),
    "ridge": ("session", "facts", "ridge"),
    "mask": ("session", "facts", "mask"),
    "best_score": ("session", "best_score"),
    "best_step": ("session", "best_step"),
    "loss": ("training", "loss_sum"),
    "dropped": ("totals", "dropped"),
    "nonfinite": ("totals", "nonfinite"),
    "refused": ("totals", "refused"),
    "bytes_up": ("traffic", "bytes_up"),
    "bytes_down": ("traffic", "bytes_down"),
}
UNLIKE = {"seconds", "sha256"}  # of state.json: what differs between two runs that are the same
TIMES = {"seconds", "round_seconds", "images_per_second"}  # of metrics and summaries


def folder_of(run: fl.Run, step: int) -> Path:
    return run.path / "checkpoints" / f"step-{step:09d}"


def steps_of(run: fl.Run) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (run.path / "checkpoints").glob("step-*"))


def tensors_of(run: fl.Run, step: int, prefix: str | tuple[str, ...] = "") -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names begin with a prefix, without it."""
    tensors = load_file(folder_of(run, step) / "tensors.safetensors")
    prefixes = (prefix,) if isinstance(prefix, str) else prefix
    return {name.removeprefix(p): tensor for p in prefixes for name, tensor in tensors.items() if name.startswith(p)}


def state_of(run: fl.Run, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder_of(run, step) / "state.json").read_text())
    return found


def field(state: Mapping[str, Any], name: str) -> Any:
    for key in STATE[name]:
        state = state[key]
    return state


def change(run: fl.Run, step: int, values: Mapping[str, Any]) -> None:
    """Other values in a checkpoint's state.json."""
    state = state_of(run, step)
    for name, value in values.items():
        *path, last = STATE[name]
        inner = state
        for key in path:
            inner = inner[key]
        inner[last] = value
    (folder_of(run, step) / "state.json").write_text(json.dumps(state))
    accept(run.path)


# --- runs --------------------------------------------------------------------------------------------------------------


EVERY = ["run.checkpoint_minutes=0", "run.keep_last=1000"]  # a checkpoint after every step or round, and all of them stay
BASE = [*FAST, f"data.root={few_images()}", "data.val_fraction=0.25"]  # 90 images to train on, 30 for validation
CENTRAL = [*BASE, "experiment=centralized", "train.epochs=4", "optim.batch_size=24"]  # 4 steps an epoch
FED = [
    *BASE,
    "experiment=fedavg_noniid",
    "data.classes_per_client=2",
    "federated.clients=8",
    "federated.participation=0.5",
    "federated.local_steps=2",
    "federated.rounds=6",
    "federated.eval_every=2",
    "optim.batch_size=4",
]
PROBE = ["model.freeze_backbone=true"]  # only the head trains: the same loops with 1290 coordinates
BLOCK = ["model.freeze_blocks=3"]  # the last block trains
SPARSE = ["mask.strategy=least_sensitive", "mask.rounds=1", "mask.density=0.2", *BLOCK]
NOISE = ["data.partition=iid", "data.classes_per_client=null", "privacy.clip=0.01", "privacy.noise=0.5", *PROBE]


def counted(noise: float, rounds: int, delta: float) -> float:
    """In place of the accountant: it tells how many rounds it was asked about."""
    return noise * rounds


def run(path: Path, *overrides: str) -> fl.Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EPSILON, counted)
        return fl.run([*overrides, f"run.dir={path}"])


def resumed(unfinished: fl.Run) -> fl.Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EPSILON, counted)
        return unfinished.resume()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., fl.Run]]:
    """whole(overrides…) -> that run, finished, made once for all tests; they read it and copy it."""
    root, made = tmp_path_factory.mktemp("whole"), dict[tuple[str, ...], fl.Run]()

    def make(*overrides: str) -> fl.Run:
        if overrides not in made:
            made[overrides] = run(root / str(len(made)), *overrides)
        return made[overrides]

    yield make
    shutil.rmtree(root)  # a checkpoint of every step adds up


@pytest.fixture(autouse=True)
def leave_nothing(tmp_path: Path) -> Iterator[None]:
    """A test's copies are as large as its runs."""
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)


def cut(finished: fl.Run, path: Path, step: int, **values: Any) -> fl.Run:
    """A copy of a finished run as a kill leaves it whose last checkpoint is of `step`; its metrics are further on, and their last line is torn."""
    shutil.copytree(finished.path, path)
    for name in ("summary.json", "model.safetensors", "log.txt"):
        (path / name).unlink()
    shutil.rmtree(path / "clients", ignore_errors=True)
    left = fl.load_run(path)
    for later in steps_of(left):
        if later > step:
            shutil.rmtree(folder_of(left, later))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1000, "lo')
    change(left, step, values)
    return left


def without(content: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    """The content less these keys, at every depth."""
    return {key: without(value, keys) if isinstance(value, dict) else value for key, value in content.items() if key not in keys}


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def moved(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """b − a as one vector."""
    return torch.cat([(b[name] - a[name]).flatten() for name in a])


def assert_same(one: fl.Run, other: fl.Run, after: int) -> None:
    """Model, metrics, summary, clients' vectors, and every checkpoint after this step: all but times."""
    assert equal(one.state, other.state)
    assert [without(line, TIMES) for line in one.metrics] == [without(line, TIMES) for line in other.metrics]
    assert without(one.summary, TIMES) == without(other.summary, TIMES)
    assert steps_of(one) == steps_of(other)
    for step in steps_of(one):
        if step > after:
            assert equal(tensors_of(one, step), tensors_of(other, step)), f"tensors of step {step}"
            assert without(state_of(one, step), UNLIKE) == without(state_of(other, step), UNLIKE), f"state of step {step}"
    assert (one.path / "clients").is_dir() == (other.path / "clients").is_dir()
    if (one.path / "clients").is_dir():
        vectors = one.client_vectors(), other.client_vectors()
        assert vectors[0].keys() == vectors[1].keys()
        assert all(torch.equal(vectors[0][client].vector, vectors[1][client].vector) for client in vectors[0])


# --- a resumed run is the run -------------------------------------------------------------------------------------------

CENTRAL_RUNS = {
    "patience, ridge and dropout": [*CENTRAL, *EVERY, *PROBE, "train.patience=2", "model.dropout=0.5", "optim.lr=0.1"],
    "mask": [*CENTRAL, *EVERY, *SPARSE, "model.dropout=0.3", "train.label_smoothing=0.1"],
}
FED_RUNS = {
    "scaffold, server momentum, dropouts and refusals": [
        *FED,
        *EVERY,
        *PROBE,
        "federated.algorithm=scaffold",
        "server.optimizer=momentum",
        "server.momentum=0.5",
        "federated.dropout_rate=0.3",
        "server.norm_bound=0.02",
        "federated.client_metrics=true",
        "optim.schedule=constant",
    ],
    "client vectors": [*FED, *EVERY, *PROBE, "federated.client_vectors=true", "federated.dropout_rate=0.3"],
    "fednova and stragglers": [*FED, *EVERY, *PROBE, "federated.algorithm=fednova", "federated.straggler_rate=0.6", "train.precision=fp32"],
    "mask": [*FED, *EVERY, *SPARSE, "mask.scope=federated", "model.dropout=0.3"],
    "adam and noise": [*FED, *EVERY, *NOISE, "server.optimizer=adam", "server.lr=0.01"],
}


@pytest.mark.parametrize("step", [3, 4, 9], ids=["in the first epoch", "at an epoch's end", "in the third epoch"])
@pytest.mark.parametrize("name", CENTRAL_RUNS)
def test_a_centralised_run_that_is_resumed_is_the_run_itself(whole: Callable[..., fl.Run], tmp_path: Path, name: str, step: int) -> None:
    one = whole(*CENTRAL_RUNS[name])
    again = resumed(cut(one, tmp_path / "r", step, seconds=1000.0))
    assert_same(one, again, step)
    assert "resuming at step" in (again.path / "log.txt").read_text()
    assert_time_goes_on(again, step)


@pytest.mark.parametrize("round_", [1, 2, 5])
@pytest.mark.parametrize("name", FED_RUNS)
def test_a_federated_run_that_is_resumed_is_the_run_itself(whole: Callable[..., fl.Run], tmp_path: Path, name: str, round_: int) -> None:
    one = whole(*FED_RUNS[name])
    again = resumed(cut(one, tmp_path / "r", round_, seconds=1000.0))
    assert_same(one, again, round_)
    assert "resuming at round" in (again.path / "log.txt").read_text()
    assert_time_goes_on(again, round_)


def assert_time_goes_on(again: fl.Run, step: int) -> None:
    """From the seconds of the checkpoint, which were set to 1000."""
    later = [line["seconds"] for line in again.metrics if line["step"] > step]
    saved = [field(state_of(again, each), "seconds") for each in steps_of(again) if each >= step]
    assert 1000 < again.summary["seconds"] < 1600
    for times in ([1000.0, *later, again.summary["seconds"]], [*saved, again.summary["seconds"]]):
        assert times == sorted(times)


def test_the_runs_that_are_resumed_have_what_could_be_lost(whole: Callable[..., fl.Run]) -> None:
    """Otherwise the tests above would not look at it."""
    stale = whole(*CENTRAL_RUNS["patience, ridge and dropout"])
    assert any(field(state_of(stale, step), "stale") for step in steps_of(stale))
    some = whole(*FED_RUNS["scaffold, server momentum, dropouts and refusals"])
    assert some.summary["dropped"] > 0 and some.summary["refused"] > 0 and sum(line["clients"] for line in some.metrics) > 2
    assert "resuming" not in (stale.path / "log.txt").read_text()


# --- every field of a checkpoint comes back -----------------------------------------------------------------------------

ADDED = {"dropped": 700, "nonfinite": 70, "refused": 7, "bytes_up": 70_000, "bytes_down": 7_000}


def given(one: fl.Run, step: int) -> dict[str, Any]:
    """Values that no run would have, of what both loops save."""
    state = state_of(one, step)
    ridge, mask = field(state, "ridge"), field(state, "mask")
    return {
        "stale": 50,
        "best_score": 2.0,
        "best_step": 1,
        "ridge": {**ridge, "lambda": 123.0},
        "mask": {**mask, "scorings": 456},
        "seconds": 5000.0,
    }


@pytest.fixture(scope="module")
def federated_pair(whole: Callable[..., fl.Run], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[fl.Run, fl.Run]]:
    one, root = whole(*FED_RUNS["mask"]), tmp_path_factory.mktemp("fields")
    counts = {name: field(state_of(one, 2), name) + more for name, more in ADDED.items()}
    yield one, resumed(cut(one, root / "r", 2, **given(one, 2), **counts))
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def central_pair(whole: Callable[..., fl.Run], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[fl.Run, fl.Run]]:
    one, root = whole(*CENTRAL_RUNS["mask"]), tmp_path_factory.mktemp("fields")
    values = {**given(one, 5), "loss": field(state_of(one, 5), "loss") + 1000}
    yield one, resumed(cut(one, root / "r", 5, **values))
    shutil.rmtree(root)


@pytest.mark.parametrize("name", ADDED)
def test_a_federated_run_goes_on_counting_from_its_checkpoint(federated_pair: tuple[fl.Run, fl.Run], name: str) -> None:
    one, again = federated_pair
    for step in (3, 4, 6):
        assert field(state_of(again, step), name) == field(state_of(one, step), name) + ADDED[name]
    assert again.summary[name] == one.summary[name] + ADDED[name]
    if name in one.metrics[0] and name.startswith("bytes"):
        assert again.metrics[2][name] == one.metrics[2][name] + ADDED[name]


@pytest.mark.parametrize("loop", ["federated", "central"])
@pytest.mark.parametrize("name", ["stale", "best_score", "best_step", "ridge", "mask", "seconds"])
def test_what_a_checkpoint_says_is_said_by_the_next_one_and_by_the_summary(name: str, loop: str, request: pytest.FixtureRequest) -> None:
    one, again = request.getfixturevalue(f"{loop}_pair")
    step = 3 if loop == "federated" else 6  # the next one, which no evaluation has changed
    state, wanted = state_of(again, step), given(one, step - 1)
    if name == "seconds":
        assert field(state, name) > 5000 and again.summary["seconds"] > 5000
        return
    assert field(state, name) == wanted[name]
    last = max(steps_of(again))
    assert field(state_of(again, last), name) == (wanted[name] if name != "stale" else 52 if loop == "federated" else 53)
    best = {"best_score": ("val_accuracy", 2.0), "best_step": ("best_round", 1) if loop == "federated" else ("best_epoch", 0)}
    key, value = best.get(name, (name, wanted.get(name)))
    assert name == "stale" or again.summary[key] == value


def test_the_training_loss_of_an_epoch_has_what_was_before_the_checkpoint(central_pair: tuple[fl.Run, fl.Run], tmp_path: Path) -> None:
    one, again = central_pair
    assert field(state_of(again, 6), "loss") == pytest.approx(field(state_of(one, 6), "loss") + 1000)
    assert again.metrics[1]["train_loss"] == pytest.approx(one.metrics[1]["train_loss"] + 1000 / 4)
    assert again.metrics[2] == {**one.metrics[2], "seconds": again.metrics[2]["seconds"]}  # the next epoch begins at zero
    assert field(state_of(one, 3), "loss") > 0 == field(state_of(one, 4), "loss") == field(state_of(one, 8), "loss")
    ended = resumed(cut(one, tmp_path / "r", 8, loss=1000.0))
    assert ended.metrics[2]["train_loss"] == pytest.approx(one.metrics[2]["train_loss"] + 1000 / 4)


def as_version_0_2(run: fl.Run, step: int) -> None:
    """Rewrite a checkpoint with the names that version 0.2 used."""
    folder, state = folder_of(run, step), state_of(run, step)
    session, counts, clients, training = (state.pop(name, {}) for name in ("session", "totals", "traffic", "training"))
    old = {**{k: session[k] for k in ("seconds", "stale", "best_score", "best_step")}, **session["facts"]}
    if clients:
        traffic = {name: clients[name] for name in ("bytes_up", "bytes_down")}
        old |= {"counts": counts | traffic, "registry": clients["registry"]}
    else:
        old |= {"loss_sum": training["loss_sum"], "scaler": training["scaler"]}
    names = {
        "server.model.": "model.",
        "training.model.": "model.",
        "server.moment.": "server.",
        "training.momentum.": "momentum.",
        "algorithm.": "scaffold.",
        "ledger.": "client.",
    }
    renamed = {}
    for name, tensor in load_file(folder / "tensors.safetensors").items():
        prefix = next((each for each in names if name.startswith(each)), "")
        renamed[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(renamed, folder / "tensors.safetensors")
    digest = hashlib.sha256((folder / "tensors.safetensors").read_bytes()).hexdigest()
    kept = {name: state[name] for name in ("step", "score") if name in state}
    (folder / "state.json").write_text(json.dumps({"sha256": digest, **kept, **old}))
    (folder / "digests.json").unlink()


@pytest.mark.parametrize("options", [*CENTRAL_RUNS.values(), *list(FED_RUNS.values())[:2], FED_RUNS["adam and noise"]])
def test_a_checkpoint_of_version_0_2_is_resumed(tmp_path: Path, whole: Callable[..., fl.Run], options: list[str]) -> None:
    one = whole(*options)
    step = steps_of(one)[len(steps_of(one)) // 2]
    old = cut(one, tmp_path / "r", step)
    for each in steps_of(old):
        as_version_0_2(old, each)
    again = resumed(old)
    assert_same(one, again, step)


def test_a_checkpoint_of_a_later_version_is_refused_in_one_line(tmp_path: Path, whole: Callable[..., fl.Run]) -> None:
    one = whole(*CENTRAL, *EVERY, *PROBE)
    later = cut(one, tmp_path / "r", 3)
    for step in steps_of(later):
        state = state_of(later, step) | {"format": 4}
        (folder_of(later, step) / "state.json").write_text(json.dumps(state))
    accept(later.path)
    with pytest.raises(UserError, match=r"a later version of fedlens wrote the checkpoint .* upgrade fedlens"):
        resumed(later)


# --- the best is not always the last ------------------------------------------------------------------------------------


def scripted(patch: pytest.MonkeyPatch, accuracies: Sequence[float] = (), losses_of_alphas: Sequence[float] = ()) -> None:
    """Validation says these accuracies, one after the other, and these losses where α is chosen; the test set is evaluated in earnest."""
    real, said, tried = resolve_name(EVALUATE), iter(accuracies), iter(losses_of_alphas)

    def evaluate(bench: Any, bank: Any, model: Any = None, samples: Any = None, metrics: Any = None) -> dict[str, float]:
        if bank is bench.val and samples is None and accuracies:
            return {"loss": 1.0, "accuracy": next(said)}
        if samples is not None and losses_of_alphas:
            return {"loss": next(tried), "accuracy": 0.5}
        measured: dict[str, float] = real(bench, bank, model, samples, metrics)
        return measured

    patch.setattr(EVALUATE, evaluate)


SCRIPTS = [  # accuracies, patience -> how many evaluations there are, and which is the best
    ([0.2, 0.5, 0.4, 0.3, 0.9, 0.9], 2, 4, 2),
    ([0.5, 0.5, 0.6, 0.6, 0.6, 0.9], 2, 5, 3),  # of equals the first is the best, and the second has not improved on it
    ([0.3, 0.2, 0.4, 0.1, 0.5, 0.2], 2, 6, 5),  # each better one starts the count anew; the last evaluation is the end anyway
    ([0.1, 0.7, 0.7, 0.1, 0.7, 0.2], None, 6, 2),
    ([0.6, 0.5, 0.9, 0.9, 0.9, 0.9], 1, 2, 1),
]


def loss_on_the_test_set(run: fl.Run, state: Mapping[str, Tensor]) -> float:
    """Of this model on the test set, by public functions alone."""
    data = fl.load_dataset("folder", run.config.data.root, val_fraction=0.25)
    model = fl.create_model("tiny", 10, weights=None, image_size=SIDE).eval()
    model.load_state_dict(dict(state))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))
    with torch.no_grad():
        return float(F.cross_entropy(model((data.test.images.float() / 255 - mean) / std), data.test.labels))


def assert_best(run: fl.Run, best: int, last: int, score: float) -> None:
    """The model that was kept and tested is that of step `best`, and not that of step `last`."""
    right, wrong = tensors_of(run, best, MODEL), tensors_of(run, last, MODEL)
    assert equal(run.state, right)
    assert run.summary["val_accuracy"] == score
    assert run.summary["test_loss"] == pytest.approx(loss_on_the_test_set(run, right), rel=1e-4)
    if last != best:
        assert not equal(run.state, wrong)
        assert run.summary["test_loss"] != pytest.approx(loss_on_the_test_set(run, wrong), rel=1e-3)


@pytest.mark.parametrize(("accuracies", "patience", "evaluations", "best"), SCRIPTS)
def test_a_centralised_run_keeps_its_best_epoch_and_stops_when_patience_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accuracies: list[float], patience: int | None, evaluations: int, best: int
) -> None:
    scripted(monkeypatch, accuracies)
    options = [
        *CENTRAL,
        *PROBE,
        "head=linear",
        "optim.lr=0.05",
        "train.epochs=6",
        "run.keep_last=1000",
        f"train.patience={patience or 'null'}",
    ]
    found = run(tmp_path / "r", *options)
    assert [line["val_accuracy"] for line in found.metrics] == accuracies[:evaluations]
    assert found.summary["epochs"] == evaluations and found.summary["best_epoch"] == best
    assert_best(found, 4 * best, 4 * evaluations, accuracies[best - 1])


@pytest.mark.parametrize(("accuracies", "patience", "evaluations", "best"), SCRIPTS)
def test_a_federated_run_keeps_its_best_round_and_stops_when_patience_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accuracies: list[float], patience: int | None, evaluations: int, best: int
) -> None:
    scripted(monkeypatch, accuracies)
    options = [*FED, *PROBE, "head=linear", "federated.rounds=12", "run.keep_last=1000", f"train.patience={patience or 'null'}"]
    options += ["federated.client_vectors=true", "optim.schedule=constant", "optim.lr=0.05"]
    found = run(tmp_path / "r", *options)  # validation looks every two rounds
    assert [line["val_accuracy"] for line in found.metrics if "val_accuracy" in line] == accuracies[:evaluations]
    assert found.summary["rounds"] == 2 * evaluations and found.summary["best_round"] == 2 * best
    assert_best(found, 2 * best, 2 * evaluations, accuracies[best - 1])
    vectors = list(found.client_vectors().values())
    together = sum((v.vector for v in vectors[1:]), start=vectors[0].vector)
    names = list(vectors[0].space.shapes)
    start = {name: found.start[name] for name in names}
    gone = [moved(start, {name: model[name] for name in names}) for model in (found.state, tensors_of(found, 2 * evaluations, MODEL))]
    assert torch.allclose(together, gone[0], atol=1e-6)
    assert best == evaluations or not torch.allclose(together, gone[1], atol=1e-4)


@pytest.mark.parametrize(
    ("losses", "chosen"), [([math.nan, 2.0, 1.0, 1.0], 1.5), ([3.0, 2.0, 2.0, math.nan], 1.0), ([1.0, 1.0, 1.0, 1.0], 0.5)]
)
def test_the_first_of_the_lowest_losses_chooses_alpha_and_no_number_never_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float], chosen: float
) -> None:
    scripted(monkeypatch, losses_of_alphas=losses)
    found = run(tmp_path / "r", *FED, *PROBE, "federated.rounds=1", "server.alphas=[0.5,1.0,1.5,2.0]")
    assert found.metrics[0]["alpha"] == chosen


# --- the order of what is written ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of SIGKILL: nobody catches it."""


@pytest.mark.parametrize("options", [[*CENTRAL, *PROBE], [*FED, *PROBE, "federated.client_vectors=true"]], ids=["centralised", "federated"])
def test_a_run_that_is_killed_before_its_summary_is_not_finished_and_ends_with_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    path, real, there = tmp_path / "r", os.replace, list[set[str]]()

    def killed(source: Any, target: Any) -> None:
        if Path(target).name == "summary.json":
            there.append({p.name for p in path.iterdir()})
            raise Killed
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            run(path, *options)
    assert "model.safetensors" in there[0]  # a summary says that all is there, so it comes last
    assert ("clients" in there[0]) == ("federated.client_vectors=true" in options)
    left = fl.load_run(path)
    assert not left.finished
    model = load_file(path / "model.safetensors")
    assert equal(resumed(left).state, model)
    one = run(tmp_path / "one", *options)
    assert equal(one.state, model) and without(one.summary, TIMES) == without(left.summary, TIMES)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="an open file's name is read from /proc")
def test_what_is_written_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events = tmp_path / "r", list[tuple[str, Path, Path]]()
    sync, replace, rename = os.fsync, os.replace, os.rename

    def synced(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("sync", file, file))
        sync(descriptor)

    def named(how: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def go(source: Any, target: Any) -> None:
            if path in Path(source).parents:
                if Path(source).is_dir():
                    inside = {file for file in Path(source).iterdir() if not any(e[1] == file for e in events)}
                    assert not inside, f"{inside} has its name before it is on disk"
                events.append(("name", Path(source), Path(target)))
            how(source, target)

        return go

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named(replace))
    monkeypatch.setattr(os, "rename", named(rename))
    found = run(path, *FED, *NOISE, *EVERY)
    flushed = [file for kind, file, _ in events if kind == "sync"]
    names = [target for kind, _, target in events if kind == "name"]
    assert {p.name for p in names} >= {
        "config.yaml",
        "environment.json",
        "partition.json",
        "start.safetensors",
        "secret",
        "summary.json",
        "model.safetensors",
    }
    for i, (kind, source, target) in enumerate(events):
        if kind == "name" and not target.is_dir():
            assert ("sync", source, source) in events[:i], f"{target.name} has its name before it is on disk"
        elif kind == "name":
            assert {file.name for file in flushed if file.parent == source} >= {"tensors.safetensors", "state.json", "digests.json"}
            assert ("sync", target.parent, target.parent) in events[i:], "the folder of checkpoints is not flushed"
    assert sum(file.parent.name.startswith(".part") or file.parent.parent == path / "checkpoints" for file in flushed) >= 2 * len(
        steps_of(found)
    )
    assert flushed.count(path / "checkpoints") >= len(steps_of(found)) == 6
    assert flushed.count(path / "metrics.jsonl") >= len(found.metrics) == 6


def test_a_damaged_checkpoint_that_is_passed_over_is_removed(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "r", "a: 1\n", {}, keep_last=9) as folder:
        for step in (1, 2, 3):
            folder.save_checkpoint(step, {"a": torch.full((100,), float(step))}, {"score": None})
        folder.wait_for_checkpoint()
        checkpoints = tmp_path / "r" / "checkpoints"
        (checkpoints / "step-000000003" / "tensors.safetensors").write_bytes(b"")
        (checkpoints / "step-000000002" / "state.json").write_text("{")
        found = folder.latest_checkpoint()
        assert found is not None and found.step == 1
        assert [p.name for p in checkpoints.iterdir()] == ["step-000000001"]


def test_a_checkpoint_that_a_kill_left_half_written_is_removed_when_the_run_goes_on(whole: Callable[..., fl.Run], tmp_path: Path) -> None:
    left = cut(whole(*FED_RUNS["client vectors"]), tmp_path / "r", 5)
    half = left.path / "checkpoints" / ".part-000000123"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    resumed(left)
    assert left.finished and not half.exists()
    assert all(p.name.startswith("step-") for p in (left.path / "checkpoints").iterdir())


# --- draws --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[bytes], list[bytes], list[bytes]]]:
    """What every training batch of a run draws: which features are dropped, how its images are moved, which images there are."""
    dropped, moves, images = list[bytes](), list[bytes](), list[bytes]()

    def before_the_head(module: nn.Module, given: Any) -> None:
        if isinstance(module, nn.Linear) and module.out_features == 10 and module.training and torch.is_grad_enabled():
            dropped.append((given[0] == 0).numpy().tobytes())

    real = resolve_name(AUGMENT)

    def augmented(pictures: Tensor, draws: Any) -> Tensor:
        moves.append(draws["shift"].numpy().tobytes() + draws["flip"].numpy().tobytes())
        images.append(pictures.numpy().tobytes())
        found: Tensor = real(pictures, draws)
        return found

    monkeypatch.setattr(AUGMENT, augmented)
    handle = nn.modules.module.register_module_forward_pre_hook(before_the_head)
    yield dropped, moves, images
    handle.remove()


DRAWN = ["model.dropout=0.5", "data.crop=2", "data.flip=true", "run.checkpoint_minutes=100"]


@pytest.mark.parametrize(
    ("options", "batches"),
    [([*CENTRAL, *PROBE, *DRAWN, "train.epochs=3"], 12), ([*FED, *PROBE, *DRAWN, "federated.rounds=3"], 24)],
    ids=["centralised", "federated"],
)
def test_no_two_batches_of_a_run_share_their_draws_and_equal_runs_share_all(
    tmp_path: Path, watched: tuple[list[bytes], list[bytes], list[bytes]], options: list[str], batches: int
) -> None:
    seen = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, *options, f"seed={seed}")
        seen.append([list(kind) for kind in watched])
        for kind in watched:
            kind.clear()
    for kind in seen[0]:
        assert len(kind) == batches == len(set(kind))  # 4 steps an epoch; 4 clients, 2 steps each, a round
    assert seen[0] == seen[1]
    assert not any(set(a) & set(c) for a, c in zip(seen[0], seen[2], strict=True))


def test_clients_steps_and_rounds_have_draws_of_their_own() -> None:
    shards = {client: torch.arange(50).numpy() for client in range(3)}

    def plan(seed: int, round_: int, cohort: Sequence[int] = (0, 1, 2)) -> Work:
        return plan_round(seed, round_, cohort, shards, steps=2, batch=8, draw=Augment(2, True, 2).draw, dropout=0.5, features=16)

    def draws(work: Work) -> dict[str, list[bytes]]:
        assert work.keep is not None
        kinds = {
            "images": work.index,
            "features": work.keep,
            "shift": work.draws["shift"],
            "affine": work.draws["affine"],
            "color": work.draws["color"],
        }
        return {name: [step.numpy().tobytes() for client in tensor for step in client] for name, tensor in kinds.items()}

    rounds = [draws(plan(0, round_)) for round_ in range(4)]
    for name in rounds[0]:
        every = [step for found in rounds for step in found[name]]
        assert len(every) == 4 * 3 * 2 == len(set(every)), f"{name}: two steps share their draws"
        assert set(every).isdisjoint(draws(plan(1, 0))[name]), f"{name}: two seeds share their draws"
    assert draws(plan(0, 2)) == rounds[2]
    alone = draws(plan(0, 2, [1]))
    assert all(alone[name] == rounds[2][name][2:4] for name in alone)  # whoever else is in the cohort


# --- noise --------------------------------------------------------------------------------------------------------------

PLAIN_STEP = ["server.lr=1", "head=linear", "data.partition=dirichlet", "data.classes_per_client=null", "data.alpha=0.5", *PROBE]


def server_steps(run: fl.Run) -> list[Tensor]:
    """What each round has added to the head."""
    models = [run.start, *(tensors_of(run, step, MODEL) for step in steps_of(run))]
    heads = [{name: model[name] for name in ("head.weight", "head.bias")} for model in models]
    return [moved(a, b) for a, b in itertools.pairwise(heads)]


def test_the_same_sum_has_another_noise_in_another_round_and_it_is_divided_by_those_who_were_asked(tmp_path: Path) -> None:
    options = ["server.norm_bound=1e-30", "privacy.clip=0.5", "privacy.noise=4.0"]  # all are refused: every round's sum is zero
    found = run(tmp_path / "r", *FED, *EVERY, *PLAIN_STEP, *options)
    steps = server_steps(found)
    assert found.summary["refused"] == 24 and len(steps) == 6
    for i, one in enumerate(steps):
        assert float(one.std()) == pytest.approx(0.5 * 4.0 / 4, rel=0.1)
        assert all(abs(float(F.cosine_similarity(one, other, dim=0))) < 0.15 for other in steps[:i])
    again = run(tmp_path / "s", *FED, *EVERY, *PLAIN_STEP, *options)
    assert all(
        abs(float(F.cosine_similarity(*pair, dim=0))) < 0.15 for pair in zip(steps, server_steps(again), strict=True)
    )  # its own secret


def test_noise_is_not_less_hidden_where_some_updates_are_refused(tmp_path: Path) -> None:
    one = ["federated.rounds=1", "federated.participation=1"]
    plain = run(tmp_path / "plain", *FED, *EVERY, *PLAIN_STEP, *one, "federated.client_metrics=true")
    norms = sorted(client["norm"] for client in plain.metrics[0]["client_metrics"])
    bound = (norms[1] + norms[2]) / 2
    found = run(tmp_path / "r", *FED, *EVERY, *PLAIN_STEP, *one, f"server.norm_bound={bound}", "privacy.clip=1e-6", "privacy.noise=1e6")
    assert found.summary["refused"] == 6 and found.metrics[0]["clients"] == 2
    assert float(server_steps(found)[0].std()) == pytest.approx(1 / 8, rel=0.1)  # of 8 who were asked; 1/2 would tell how many answered


def shares(found: fl.Run) -> tuple[dict[int, Tensor], dict[int, int]]:
    """Of a run of one round of FedAvg with client vectors: each client's update of the head, and its samples."""
    counts = json.loads((found.path / "partition.json").read_text())["label_counts"]
    samples = {client: sum(counts[client]) for client in found.client_vectors()}
    vectors = {client: torch.cat([t.flatten() for t in head_of(tau.space, tau.vector)]) for client, tau in found.client_vectors().items()}
    return {client: vector * sum(samples.values()) / samples[client] for client, vector in vectors.items()}, samples


def head_of(space: ParamSpace, vector: Tensor) -> list[Tensor]:
    return [space.views(vector)[name] for name in ("head.weight", "head.bias")]


def test_under_noise_all_updates_weigh_alike(tmp_path: Path) -> None:
    options = [*FED, *EVERY, *PLAIN_STEP, "federated.rounds=1", "federated.participation=1"]
    updates, samples = shares(run(tmp_path / "plain", *options, "federated.client_vectors=true"))
    alike = torch.stack(list(updates.values())).mean(0)
    by_samples = sum((samples[k] * updates[k] for k in updates), start=torch.zeros_like(alike)) / sum(samples.values())
    (step,) = server_steps(run(tmp_path / "noise", *options, "privacy.clip=100", "privacy.noise=1e-12"))
    assert len(updates) == 8 and float((step - alike).norm()) < 0.01 * float((by_samples - alike).norm())


def test_the_secret_is_drawn_once_and_only_its_owner_reads_it(whole: Callable[..., fl.Run], tmp_path: Path) -> None:
    one = whole(*FED_RUNS["adam and noise"])
    left = cut(one, tmp_path / "r", 2)
    before = (left.path / "secret").read_bytes()
    again = resumed(left)
    assert (again.path / "secret").read_bytes() == before == (one.path / "secret").read_bytes()
    assert stat.S_IMODE((one.path / "secret").stat().st_mode) == 0o600
    assert equal(one.state, again.state)
    assert not (whole(*FED_RUNS["client vectors"]).path / "secret").exists()


@pytest.mark.parametrize("round_", [1, 4])
def test_epsilon_counts_the_rounds_before_a_resume(whole: Callable[..., fl.Run], tmp_path: Path, round_: int) -> None:
    one = whole(*FED_RUNS["adam and noise"])
    again = resumed(cut(one, tmp_path / "r", round_))
    epsilons = [[line["epsilon"] for line in each.metrics] for each in (one, again)]
    assert epsilons[0] == epsilons[1] == sorted(epsilons[0]) and one.summary["epsilon"] == again.summary["epsilon"]
    assert 0 < epsilons[0][0] < epsilons[0][-1]  # some client took part in several rounds


# --- an update's number of steps -----------------------------------------------------------------------------------------

ONE_ROUND = [*FED, *EVERY, *PLAIN_STEP, "federated.rounds=1", "federated.participation=1", "federated.local_steps=5"]
ONE_ROUND += ["federated.straggler_rate=0.6", "optim.momentum=0", "federated.client_metrics=true"]


def steps_by_client(found: fl.Run) -> dict[int, int]:
    steps = {client["client"]: client["steps"] for client in found.metrics[0]["client_metrics"]}
    assert len(set(steps.values())) > 2 and len(steps) == 8
    return steps


def test_controls_of_scaffold_are_divided_by_each_client_s_own_steps(tmp_path: Path) -> None:
    found = run(tmp_path / "r", *ONE_ROUND, "federated.algorithm=scaffold")
    norms = {client["client"]: client["norm"] for client in found.metrics[0]["client_metrics"]}
    controls = {int(name): tensor for name, tensor in tensors_of(found, 1, CONTROL).items()}
    assert controls.keys() == norms.keys()
    for client, steps in steps_by_client(found).items():
        far = effective_steps(steps, 0.0) * found.metrics[0]["lr"]
        assert float(controls[client].norm()) == pytest.approx(norms[client] / far, rel=1e-4)


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_fednova_divides_each_update_by_its_steps_under_any_merge_rule(tmp_path: Path, rule: str) -> None:
    updates, samples = shares(run(tmp_path / "plain", *ONE_ROUND, "federated.client_vectors=true"))
    found = run(tmp_path / "r", *ONE_ROUND, "federated.algorithm=fednova", f"server.merge={rule}")
    steps = steps_by_client(found)
    rows = torch.stack([updates[client] / steps[client] for client in steps])
    weights = torch.tensor([float(samples[client]) for client in steps])
    far = sum(samples[client] * steps[client] for client in steps) / sum(samples.values())
    (step,) = server_steps(found)
    assert torch.allclose(step, RULES[rule](rows, weights) * far, atol=1e-6) and float(step.norm()) > 1e-3


def test_parts_of_clients_under_fednova_add_up_to_what_was_learned(tmp_path: Path) -> None:
    found = run(tmp_path / "r", *ONE_ROUND, "federated.algorithm=fednova", "federated.client_vectors=true", "federated.rounds=2")
    vectors = found.client_vectors().values()
    assert len(vectors) == 8 and float((found.task_vector() - sum(vectors)).norm()) < 1e-6 < 1e-3 < float(found.task_vector().norm())


def test_an_update_that_other_ranks_send_has_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_gather", lambda parts, mine: [part.copy_(mine) for part in parts])
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda parts, mine: parts.__setitem__(slice(None), [mine] * len(parts)))
    mine = [Update(3, 40, 5, torch.tensor([1.0, 2.0]), torch.tensor(0.5)), Update(4, 41, 2, torch.tensor([3.0, 4.0]), torch.tensor(0.25))]
    found = Ranks(0, 2).all_updates(mine, 2, 3)
    assert [(u.client, u.samples, u.steps, u.delta.tolist(), float(u.loss)) for u in found] == 2 * [
        (3, 40, 5, [1.0, 2.0], 0.5),
        (4, 41, 2, [3.0, 4.0], 0.25),
    ]


# --- smaller things that nothing looked at --------------------------------------------------------------------------------


def test_the_clipped_mean_bounds_by_the_median_of_the_norms() -> None:
    directions = torch.eye(3, 5)
    merged = RULES["clipped_mean"](directions * torch.tensor([1.0, 2.0, 90.0])[:, None], torch.ones(3))
    assert torch.allclose(merged, torch.tensor([1.0, 2.0, 2.0, 0.0, 0.0]) / 3)  # the mean of the norms, 31, would leave 31 of 90


def test_a_coordinate_at_a_tensor_s_border_counts_to_its_own_tensor() -> None:
    shapes = {"a": (3,), "b": (2, 2), "c": (1,), "d": (4,)}  # 0-2, 3-6, 7, 8-11
    for active, sizes in (([2, 3], [1, 1, 0, 0]), ([6, 7, 8], [0, 1, 1, 1]), ([0, 11], [1, 0, 0, 1]), ([3, 6], [0, 2, 0, 0])):
        assert ParamSpace(shapes, torch.tensor(active)).active_sizes() == sizes
    assert ParamSpace(shapes).active_sizes() == [3, 4, 1, 4]
    assert ParamSpace(shapes, torch.arange(12)).active_sizes() == [3, 4, 1, 4]


def three_tensors() -> list[tuple[str, Tensor]]:
    return [(name, nn.Parameter(torch.ones(4), requires_grad=name != "frozen")) for name in ("paused", "frozen", "free")]


def paused_and_frozen() -> fl.SparseSGDM:
    """Of three tensors the optimizer has paused the first, the user has frozen the second; the masks leave entries to the third alone."""
    masks = {name: torch.full((4,), name == "free") for name in ("paused", "frozen", "free")}
    return fl.SparseSGDM(three_tensors(), 0.1, masks=masks)


def trains(optimizer: fl.SparseSGDM) -> list[bool]:
    return [p.requires_grad for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["deepcopy", "pickle"])
def test_a_copied_optimizer_knows_which_tensors_it_has_paused(copied: Callable[[Any], Any]) -> None:
    optimizer = paused_and_frozen()
    other = copied(optimizer)
    assert trains(other) == [False, False, True]
    other.set_masks(None)
    assert trains(other) == [True, False, True]  # what the user froze stays frozen
    assert trains(optimizer) == [False, False, True]


def test_a_loaded_state_pauses_and_frees_as_its_masks_say() -> None:
    optimizer = paused_and_frozen()
    saved = copy.deepcopy(optimizer.state_dict())
    other = fl.SparseSGDM(three_tensors(), 0.1)
    whole = copy.deepcopy(other.state_dict())
    other.load_state_dict(saved)
    assert trains(other) == [False, False, True]
    other.load_state_dict(whole)
    assert trains(other) == [True, False, True]
    optimizer.load_state_dict(whole)
    assert trains(optimizer) == [True, False, True]


def test_a_value_that_does_not_train_is_kept_in_the_study_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(config: Any) -> float:
        if config.optim.lr > 0.05:
            raise UserError("training is not finite")
        return peaked(config)

    (tmp_path / "p.yaml").write_text(TUNED)
    ran, plan = pretend(monkeypatch, score), read_plan(str(tmp_path / "p.yaml"), overrides=QUICK)
    study = Study(plan, tmp_path / "s")
    first = study.run()
    assert set(study.failed_trials.values()) == {"training is not finite"} and ran
    assert any(score is None for tuned in first.tuned for _, score in tuned.tried)
    before = len(ran)
    again = Study(plan, tmp_path / "s")
    assert again.failed_trials == study.failed_trials
    second = again.run()
    assert len(ran) == before
    assert [(t.value, t.tried) for t in second.tuned] == [(t.value, t.tried) for t in first.tuned]


def test_rounds_and_bytes_are_counted_to_what_the_best_cell_reaches(tmp_path: Path) -> None:
    def cell(label: str, *accuracies: float) -> CellResult:
        runs = {}
        for seed, accuracy in enumerate(accuracies):
            (tmp_path / f"{label}{seed}").mkdir()
            write_json(tmp_path / f"{label}{seed}" / "summary.json", {"val_accuracy": accuracy})
            runs[seed] = RunResult(tmp_path / f"{label}{seed}", seed)
        return CellResult(label, "", {}, runs, len(accuracies))

    cells = [cell("worst", 0.2, 0.9), cell("best", 0.6, 0.8), cell("middle", 0.6), cell("none")]
    assert TableResult("t", "", cells).aim == pytest.approx(NEAR * 0.7)
    assert TableResult("t", "", cells, target=0.3).aim == 0.3
    assert TableResult("t", "", cells[3:]).aim is None
