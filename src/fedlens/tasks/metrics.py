"""Metrics of a whole split: functions (logits [n, classes], labels [n]) -> float. Accuracy and loss are always computed, in training/bench.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedlens.registry import Registry

Metric = Callable[[Tensor, Tensor], float]


def _counts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return per class the numbers of correct predictions, of predictions and of samples, in float64."""
    classes, predicted = logits.shape[1], logits.argmax(1)
    hits, guesses, samples = (torch.bincount(x, minlength=classes).double() for x in (labels[predicted == labels], predicted, labels))
    return hits, guesses, samples


def macro_f1(logits: Tensor, labels: Tensor) -> float:
    """Unweighted mean F1 of the classes that occur among labels or predictions."""
    hits, guesses, samples = _counts(logits, labels)
    total = guesses + samples
    return float((2 * hits[total > 0] / total[total > 0]).mean())


def balanced_accuracy(logits: Tensor, labels: Tensor) -> float:
    """Unweighted mean recall of the classes that occur among labels."""
    hits, _, samples = _counts(logits, labels)
    return float((hits[samples > 0] / samples[samples > 0]).mean())


def top5_accuracy(logits: Tensor, labels: Tensor) -> float:
    """Fraction of samples whose label is among the five largest logits."""
    top = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return float((top == labels[:, None]).any(1).double().mean())


METRICS: Registry[Metric] = Registry("metric", macro_f1, balanced_accuracy, top5_accuracy)
