"""The centralised loop against plain torch, its early stopping, and its options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import EMBEDDED, FAST, SIDE, few_images

from fedlens.cli import main
from fedlens.engine.sampling import batch_indices
from fedlens.errors import UserError
from fedlens.models import create_model
from fedlens.optim.schedules import learning_rate
from fedlens.overrides import compose
from fedlens.seeding import torch_rng
from fedlens.training.bench import set_up


def test_an_epoch_equals_a_plain_torch_loop(fast_run: Callable[..., Any]) -> None:
    options = [
        "train.epochs=1",
        f"data.root={few_images()}",
        "data.crop=0",
        "data.flip=false",
        "head=linear",
        "optim.weight_decay=0.01",
        "data.val_fraction=0.0",
        "model.freeze_head=false",
        "optim.clip_norm=null",
        "optim.lr=0.001",
        "optim.batch_size=24",
        "seed=4",
    ]
    run = fast_run("r", *options)
    bench = set_up(compose([*FAST, *options]))
    model = create_model("tiny", 10, weights="pretrained", image_size=SIDE, seed=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)
    order = batch_indices(120, 5, 24, torch_rng(4, "batches", 0, 0))
    assert sorted(order.flatten().tolist()) == list(range(120))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (bench.dataset.mean, bench.dataset.std))
    for step, index in enumerate(order):
        images = (bench.dataset.train.images[index].float() / 255 - mean) / std
        loss = F.cross_entropy(model(images), bench.dataset.train.labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = learning_rate(bench.config.optim, step / 5)
        optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(run.state[name], tensor, atol=1e-6), name


@pytest.mark.parametrize("options", [[], ["model.dropout=0.2", "train.label_smoothing=0.1"]], ids=["plain", "dropout"])
def test_a_batch_in_parts_makes_the_same_step(fast_run: Callable[..., Any], options: list[str]) -> None:
    whole = fast_run("whole", "train.epochs=1", *options)
    same = fast_run("same", "train.epochs=1", "train.chunk=60", *options)
    parts = fast_run("parts", "train.epochs=1", "train.chunk=7", *options)
    for name, tensor in whole.state.items():
        assert torch.equal(same.state[name], tensor) and torch.allclose(parts.state[name], tensor, atol=1e-5), name
    assert parts.metrics[0]["train_loss"] == pytest.approx(whole.metrics[0]["train_loss"], abs=1e-5)


def test_where_memory_runs_out_a_batch_is_halved_until_it_fits(
    fast_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    real, fits = F.cross_entropy, [20]

    def small(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        if logits.requires_grad and len(labels) > fits[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(logits, labels, **options)

    whole = fast_run("whole", "train.epochs=1")
    monkeypatch.setattr(F, "cross_entropy", small)
    halved = fast_run("halved", "train.epochs=1")
    assert [record.args for record in caplog.records if "out of memory" in record.message] == [(60, 30), (30, 15)]
    assert all(torch.allclose(halved.state[name], tensor, atol=1e-5) for name, tensor in whole.state.items())
    fits[0] = 0
    assert main(["run", *FAST, "train.epochs=1", f"run.dir={whole.path.parent / 'none'}"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: device: out of memory; try a smaller optim.batch_size")


def test_without_epochs_a_run_is_its_head_alone(fast_run: Callable[..., Any], run_once: Callable[..., Any]) -> None:
    run = fast_run("r", "train.epochs=0")
    assert run.summary["val_accuracy"] == run.summary["ridge"]["val_accuracy"] and run.summary["steps"] == 0 and run.metrics == []
    assert all(torch.equal(run.state[name], tensor) for name, tensor in run.start.items())
    assert 0.5 < run.summary["test_accuracy"] < run_once(*EMBEDDED, "train.epochs=1").summary["test_accuracy"]


def test_fine_tuning_beats_the_ridge_head_that_it_starts_from(run_once: Callable[..., Any]) -> None:
    run = run_once(*EMBEDDED, "train.epochs=1")
    assert run.summary["val_accuracy"] > run.summary["ridge"]["val_accuracy"]
    assert run.summary["test_accuracy"] > 0.8


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, while it traces
def test_compiled_runs_do_what_plain_ones_do_and_share_their_code(fast_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils as dynamo

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: real(f, backend="aot_eager", fullgraph=True, **kw))
    options = ["train.epochs=1", "model.dropout=0.1"]
    plain, compiled = fast_run("plain", *options), fast_run("compiled", *options, "train.compile=true")
    for name, tensor in plain.state.items():
        assert torch.allclose(compiled.state[name], tensor, atol=1e-5), name
    made = dynamo.counters["stats"]["unique_graphs"]
    assert made > 0
    again = fast_run("again", *options, "train.compile=true", "seed=1")
    assert dynamo.counters["stats"]["unique_graphs"] == made
    assert not torch.equal(again.state["blocks.0.mlp.fc1.weight"], compiled.state["blocks.0.mlp.fc1.weight"])


def test_patience_stops_and_the_best_epoch_meets_the_test_set(fast_run: Callable[..., Any]) -> None:
    run = fast_run("r", "train.epochs=8", "train.patience=1", "optim.lr=5", "optim.schedule=constant")  # too high: it gets worse
    assert run.summary["epochs"] < 8
    best = max(run.metrics, key=lambda m: m["val_accuracy"])
    assert run.summary["best_epoch"] == best["epoch"]
    assert run.summary["val_accuracy"] == best["val_accuracy"]


def test_a_frozen_backbone_and_a_frozen_head_stay_as_they_were(fast_run: Callable[..., Any]) -> None:
    start = create_model("tiny", 10, weights="pretrained", image_size=SIDE).state_dict()
    probe = fast_run("probe", "model.freeze_backbone=true", "model.freeze_head=false", "head=linear", "train.epochs=1").state
    assert all(torch.equal(probe[n], start[n]) for n in start if not n.startswith("head."))
    assert not torch.equal(probe["head.weight"], start["head.weight"])
    trained = fast_run("trained", "head=linear", "train.epochs=1").state  # nothing has fitted it: it is not frozen where nobody says so
    assert not torch.equal(trained["head.weight"], start["head.weight"])
    tuned = fast_run("tuned", "model.freeze_head=true", "head=linear", "train.epochs=1").state
    assert torch.equal(tuned["head.weight"], start["head.weight"])
    assert not torch.equal(tuned["norm.weight"], start["norm.weight"])


@pytest.mark.parametrize(
    "option",
    [
        "optim.clip_norm=0.001",
        "optim.nesterov=true",
        "optim.schedule=step",
        "optim.warmup=0.5",
        "train.label_smoothing=0.3",
        "data.randaugment=2",
        "model.dropout=0.5",
        "seed=1",
        "train.precision=bf16",
    ],
)
def test_every_option_reaches_the_training(fast_run: Callable[..., Any], option: str) -> None:
    plain, changed = (fast_run(name, "train.epochs=1", "data.val_fraction=0.5", *extra) for name, extra in (("a", []), ("b", [option])))
    assert not torch.equal(plain.state["norm.weight"], changed.state["norm.weight"])


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_no_such_state(fast_run: Callable[..., Any], tmp_path: Any) -> None:
    with pytest.raises(UserError, match="not finite"):
        fast_run("r", "optim.lr=1e9", "optim.clip_norm=null", "train.epochs=5", "optim.batch_size=20", "run.checkpoint_minutes=0")
    for file in (tmp_path / "r" / "checkpoints").rglob("*.safetensors"):
        from safetensors.torch import load_file

        assert all(torch.isfinite(t).all() for t in load_file(file).values())
    assert not (tmp_path / "r" / "summary.json").exists()
    assert "ERROR" in (tmp_path / "r" / "log.txt").read_text()


@pytest.mark.parametrize("rates", [["optim.lr=1e38", "optim.weight_decay=100"], ["optim.lr=1e30"]], ids=["inf", "nan"])
def test_a_model_that_the_last_step_made_not_finite_is_neither_saved_nor_reported(
    fast_run: Callable[..., Any], tmp_path: Any, rates: list[str]
) -> None:
    with pytest.raises(UserError, match="not finite"):
        fast_run("r", *rates, "optim.batch_size=540", "optim.clip_norm=null", "train.epochs=1")
    assert not (tmp_path / "r").exists()


def test_two_seeds_differ_and_equal_seeds_agree(fast_run: Callable[..., Any]) -> None:
    a, b, c = (fast_run(n, "train.epochs=1", f"seed={s}").state["norm.weight"] for n, s in (("a", 1), ("b", 1), ("c", 2)))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
