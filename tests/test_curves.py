"""Curves: test scores by epoch and round that no choice reads, θ₀ as their first point, and the start as a possible final model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import cut_back, few_images
from torch import Tensor

from fedlens.errors import UserError
from fedlens.overrides import compose
from fedlens.runs.identity import identity
from fedlens.training.run import load_run

FEW = [f"data.root={few_images()}", "data.val_fraction=0.25"]  # 90 images to train on, 30 for validation
CENTRAL = [
    "experiment=centralized_sparse",
    *FEW,
    "optim.batch_size=24",
    "mask.samples=20",
    "train.epochs=3",
    "train.test_every=2",
    "train.patience=2",
]
FED = ["experiment=fedavg_noniid", *FEW, "data.classes_per_client=2", "federated.clients=10", "federated.participation=0.2"]
FED += ["federated.rounds=5", "federated.eval_every=2", "federated.test_every=2", "server.alphas=[0.5,1]", "optim.batch_size=4"]
WHOLE = ["run.keep_last=9", "train.patience=null"]
TIMES = ("seconds", "round_seconds", "images_per_second", "mask", "device")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def without(metrics: list[dict[str, Any]], *parts: str) -> list[dict[str, Any]]:
    return [{n: v for n, v in line.items() if n not in TIMES and not (parts and n.startswith(parts))} for line in metrics]


@pytest.mark.parametrize("options", [CENTRAL, FED], ids=["centralised", "federated"])
@pytest.mark.parametrize("select", ["best", "best_or_start"])
def test_with_curves_on_shuffled_test_labels_change_test_figures_alone(
    fast_run: Callable[..., Any],
    run_once: Callable[..., Any],
    shuffle_test_labels: Callable[[], None],
    options: list[str],
    select: str,
) -> None:
    honest = run_once(*options, f"train.select={select}")
    shuffle_test_labels()
    blind = fast_run("blind", *options, f"train.select={select}")
    assert [line.get("test_accuracy") for line in honest.metrics] != [line.get("test_accuracy") for line in blind.metrics]
    assert same(honest.state, blind.state)
    assert without(honest.metrics, "test_") == without(blind.metrics, "test_")
    assert without([honest.summary], "test_") == without([blind.summary], "test_")
    pairs = zip(*(sorted((run.path / "checkpoints").rglob("tensors.safetensors")) for run in (honest, blind)), strict=True)
    assert all(a.read_bytes() == b.read_bytes() for a, b in pairs)


@pytest.mark.parametrize(("options", "unit", "tested"), [(CENTRAL, "epoch", [0, 2, 3]), (FED, "round", [0, 2, 4, 5])])
def test_a_curve_starts_at_the_head_alone_and_ends_at_the_last_step(
    run_once: Callable[..., Any], options: list[str], unit: str, tested: list[int]
) -> None:
    run = run_once(*options, *WHOLE, "train.select=best")
    points = [line for line in run.metrics if "test_loss" in line]
    assert [line[unit] for line in points] == tested
    assert all({"test_accuracy", "test_loss", "val_accuracy", "val_loss"} <= line.keys() for line in points)
    assert run.metrics[0]["step"] == 0 and "train_loss" not in run.metrics[0]
    assert run.summary["start"] == {name: run.metrics[0][name] for name in ("val_accuracy", "val_loss")}
    assert abs(run.summary["ridge"]["val_accuracy"] - run.metrics[0]["val_accuracy"]) < 1e-9 if run.summary["ridge"] else True


@pytest.mark.parametrize("options", [CENTRAL, FED], ids=["centralised", "federated"])
def test_curves_change_neither_a_run_nor_its_name(fast_run: Callable[..., Any], run_once: Callable[..., Any], options: list[str]) -> None:
    plain = [option for option in options if "test_every" not in option]
    a, b = run_once(*options, "train.select=best"), fast_run("b", *plain)
    assert same(a.state, b.state) and a.summary["test_accuracy"] == b.summary["test_accuracy"]
    assert without(a.metrics[1:], "test_") == without(b.metrics, "test_") or len(a.metrics) > len(b.metrics) + 1
    assert identity(compose(options)) == identity(compose(plain))
    assert identity(compose(plain)) != identity(compose([*plain, "train.select=best_or_start"]))


@pytest.mark.parametrize("select", ["best", "best_or_start"])
@pytest.mark.parametrize("options", [CENTRAL, FED], ids=["centralised", "federated"])
def test_a_run_that_makes_the_model_worse_says_so_and_may_end_at_its_start(
    fast_run: Callable[..., Any], options: list[str], select: str, caplog: pytest.LogCaptureFixture
) -> None:
    harmful = ["head=ridge", "optim.lr=30", "optim.clip_norm=1", "optim.momentum=0", "train.patience=null", "server.alphas=[]"]
    with caplog.at_level("INFO", logger="fedlens"):
        run = fast_run("r", *options, *harmful, f"train.select={select}")
    start = run.metrics[0]["val_accuracy"]
    assert max(line.get("val_accuracy", 0) for line in run.metrics[1:]) < start  # else the test shows nothing
    best = run.summary["best_epoch" if "epoch" in run.metrics[0] else "best_round"]
    if select == "best":
        assert best > 0 and run.summary["val_accuracy"] < start
        assert "points below its start" in caplog.messages[-1]
    else:
        assert best == 0 and run.summary["val_accuracy"] == start and same(run.state, run.start)
        assert "below" not in caplog.messages[-1]


@pytest.mark.parametrize("options", [CENTRAL, FED], ids=["centralised", "federated"])
@pytest.mark.parametrize("select", ["best", "best_or_start"])
def test_curves_of_a_resumed_run_have_each_point_once(run_once: Callable[..., Any], options: list[str], select: str) -> None:
    whole = run_once(*options, *WHOLE, f"train.select={select}")
    for kept in (1, 0):
        resumed = load_run(cut_back(whole, kept)).resume()
        assert without(resumed.metrics) == without(whole.metrics)
        assert same(resumed.state, whole.state) and resumed.summary["start"] == whole.summary["start"]


def test_the_start_can_be_chosen_only_with_a_validation_set() -> None:
    with pytest.raises(UserError, match="No validation set"):
        compose(["experiment=centralized", "head=linear", "data.val_fraction=0", "train.select=best_or_start"])
