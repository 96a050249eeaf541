"""fp16 with loss scaling, the default on a T4, on the CPU's autocast: overflows, skipped steps, the scaler's state, both loops, masks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import cut_back, few_images

from fedlens.precision import FP16_SCALE, Precision
from fedlens.training.run import load_run

FP16 = Precision(torch.device("cpu"), torch.float16)
FEW = [f"data.root={few_images()}", "model.freeze_blocks=5", "data.val_fraction=0.2"]  # half precision is slow on a CPU
CENTRAL = ["experiment=centralized", *FEW, "train.epochs=2", "optim.batch_size=20"]
FED = ["experiment=fedavg_noniid", *FEW, "data.classes_per_client=2", "federated.clients=10", "federated.participation=0.2"]
FED += ["federated.rounds=2", "federated.local_steps=2", "federated.eval_every=1", "optim.batch_size=4"]
SPARSE = ["mask.strategy=least_sensitive", "mask.samples=4", "mask.rounds=2"]
LOOPS = {
    "centralised": CENTRAL,
    "centralised sparse": ["experiment=centralized_sparse", *CENTRAL[1:], *SPARSE],
    "sequential": [*FED, "federated.engine=sequential"],
    "cohort": [*FED, "federated.engine=cohort"],
    "cohort sparse": ["experiment=fedavg_noniid_sparse", *FED[1:], *SPARSE, "federated.engine=cohort"],
}


@pytest.fixture
def high_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first loss scale at which every gradient overflows."""
    monkeypatch.setattr(Precision, "scaler", lambda self: torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-6))


def scaler_of(checkpoint: Path) -> dict[str, Any]:
    """The loss scaler's state in a checkpoint."""
    found: list[dict[str, Any]] = []

    def search(content: Any) -> None:
        for key, value in content.items() if isinstance(content, dict) else ():
            if key == "scaler":
                found.append(value)
            search(value)

    search(json.loads((checkpoint / "state.json").read_text()))
    return found[0]


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_fp16_ends_close_to_fp32(fast_run: Callable[..., Any], options: list[str]) -> None:
    rate = "optim.lr=0.1" if "mask.samples=4" in options else "optim.lr=0.01"
    half, full = (fast_run(name, *options, rate, f"train.precision={name}") for name in ("fp16", "fp32"))
    assert half.summary["precision"] == "float16"
    assert half.summary["test_loss"] == pytest.approx(full.summary["test_loss"], rel=0.03)
    moved = {name: half.state[name] - half.start[name] for name in half.state}
    assert sum(float(delta.norm()) for delta in moved.values()) > 0
    assert all(tensor.dtype == torch.float32 and bool(tensor.isfinite().all()) for tensor in half.state.values())
    if half.mask is not None:
        mask = half.mask.as_dict()
        assert all(torch.equal(half.state[n][~mask[n]], half.start[n][~mask[n]]) for n in mask)
        shared = sum(int((mask[n] & other).sum()) for n, other in full.mask.as_dict().items())
        assert shared > 0.9 * sum(int(each.sum()) for each in mask.values())


def test_a_step_that_overflows_is_skipped_and_lowers_the_scale(fast_run: Callable[..., Any], high_scale: None) -> None:
    run = fast_run("r", *CENTRAL, "train.precision=fp16", "run.keep_last=9")
    scales = [scaler_of(folder)["scale"] for folder in sorted((run.path / "checkpoints").iterdir())]
    assert scales[0] < 2.0**40  # overflows
    assert any(not torch.equal(run.state[n], run.start[n]) for n in run.state)  # and steps that count, after them


def test_all_steps_overflow_and_nothing_moves(fast_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Precision, "scaler", lambda self: torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=0.99))
    run = fast_run("r", *CENTRAL, "train.precision=fp16", "train.epochs=1")
    assert all(torch.equal(run.state[n], run.start[n]) for n in run.state)


def test_the_scale_after_skipped_steps_survives_a_resume(fast_run: Callable[..., Any], high_scale: None) -> None:
    options = [*CENTRAL, "train.precision=fp16", "run.keep_last=9", "train.patience=null"]
    whole = fast_run("whole", *options)
    resumed = load_run(cut_back(whole, 1)).resume()
    assert all(torch.equal(resumed.state[n], whole.state[n]) for n in whole.state)
    times = ("seconds", "images_per_second")
    lines = [[{k: v for k, v in line.items() if k not in times} for line in run.metrics] for run in (resumed, whole)]
    assert lines[0] == lines[1]


def gradient(factor: float) -> torch.Tensor:
    """The gradient of factor · w, computed in half precision."""
    weight = torch.ones(4, requires_grad=True)
    loss = (weight.half() * torch.tensor(factor).half()).sum().float()
    (grad,) = FP16.gradients(loss, [weight])
    return grad


def test_a_local_step_whose_gradient_overflows_takes_a_smaller_scale() -> None:
    assert torch.finfo(torch.float16).max < 100 * FP16_SCALE
    assert torch.equal(gradient(100.0), torch.full((4,), 100.0))


def test_a_gradient_too_small_for_half_precision_is_scaled_into_it() -> None:
    tiny = 2.0**-24  # the smallest number that half precision holds; a tenth of it vanishes
    weight = torch.ones(1, requires_grad=True)
    loss = (weight.half() * 1.0).sum().float() * (tiny / 10)
    assert FP16.gradients(loss, [weight])[0].item() == pytest.approx(tiny / 10, rel=0.01)
    (plain,) = torch.autograd.grad((weight.half() * 1.0).sum().float() * (tiny / 10), [weight])
    assert plain.item() == 0


def test_a_gradient_that_no_scale_can_hold_is_returned_as_it_is() -> None:
    assert not bool(gradient(float("inf")).isfinite().any())


def test_federated_fp16_is_the_same_after_a_resume(fast_run: Callable[..., Any]) -> None:
    whole = fast_run("whole", *FED, "train.precision=fp16", "run.keep_last=9", "train.patience=null")
    resumed = load_run(cut_back(whole, 1)).resume()
    assert all(torch.equal(resumed.state[n], whole.state[n]) for n in whole.state)
