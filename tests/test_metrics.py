"""Metrics against plain loops over classes, and their way into a run's evaluation."""

import pytest
import torch
from conftest import FAST

from fedlens.errors import UserError
from fedlens.overrides import compose
from fedlens.registry import registry
from fedlens.tasks.metrics import METRICS
from fedlens.training.bench import set_up


def brute_force(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    predicted, recalls, f1 = logits.argmax(1).tolist(), [], []
    truth = labels.tolist()
    for c in range(logits.shape[1]):
        hits = sum(p == t == c for p, t in zip(predicted, truth, strict=True))
        guesses, samples = predicted.count(c), truth.count(c)
        recalls += [hits / samples] if samples else []
        f1 += [2 * hits / (guesses + samples)] if guesses + samples else []
    top5 = [t in row.sort(descending=True).indices[:5].tolist() for row, t in zip(logits, truth, strict=True)]
    return {"macro_f1": sum(f1) / len(f1), "balanced_accuracy": sum(recalls) / len(recalls), "top5_accuracy": sum(top5) / len(top5)}


@pytest.mark.parametrize(("classes", "present"), [(7, 7), (9, 4), (3, 3)])
def test_metrics_equal_plain_loops(classes: int, present: int) -> None:
    g = torch.Generator().manual_seed(classes)
    logits, labels = torch.randn(50, classes, generator=g), torch.randint(present, (50,), generator=g)
    logits[:, -1] -= 9  # a class that is never predicted
    assert {name: metric(logits, labels) for name, metric in METRICS.items()} == pytest.approx(brute_force(logits, labels))
    assert registry("metric") is METRICS


def test_further_metrics_join_the_evaluation_and_leave_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = set_up(compose(FAST))
    plain, tested = bench.evaluate(bench.val), bench.test()
    monkeypatch.setattr(bench.config.train, "metrics", ["macro_f1", "top5_accuracy"])
    measured = bench.measure(bench.val)
    assert list(measured) == ["accuracy", "loss", "macro_f1", "top5_accuracy"]
    assert (measured["loss"], measured["accuracy"]) == plain == bench.evaluate(bench.val)
    assert list(bench.test()) == ["test_accuracy", "test_loss", "test_macro_f1", "test_top5_accuracy"]
    assert bench.test().items() >= tested.items()
    bench.config.train.test = False
    assert set(bench.test().values()) == {None} and len(bench.test()) == 4


def test_an_unknown_metric_is_one_line_before_a_run_exists() -> None:
    with pytest.raises(UserError, match=r"train\.metrics must be one of .*Did you mean 'macro_f1'"):
        compose([*FAST, "train.metrics=[macro_f2]"])


def test_a_metric_of_one_s_own_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "largest", lambda logits, labels: float(logits.shape[0] * 1000 + logits.shape[1]))
    bench = set_up(compose(FAST))
    monkeypatch.setattr(bench.config.train, "metrics", ["largest"])
    assert bench.measure(bench.val)["largest"] == 1000 * len(bench.val) + 10
