"""Merge rules: task vectors [clients, P] and weights [clients] -> one direction [P].

The same rules serve the server's aggregation and offline editing: FedAvg is the weighted mean of client task vectors
(McMahan et al. 2017); the coordinate-wise median and trimmed mean are the robust ones of Yin et al. (2018).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedlens.errors import bad_value, unknown

Rule = Callable[..., Tensor]


def mean(deltas: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """The weighted mean, summed in client order."""
    total = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        total.add_(delta, alpha=float(weight))
    return total.div_(float(weights.sum()))


def median(deltas: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """The median of each coordinate, unweighted; of an even number the mean of the middle two."""
    ordered = deltas.sort(dim=0).values
    middle = (len(deltas) - 1) // 2
    return (ordered[middle] + ordered[len(deltas) // 2]) / 2


def trimmed_mean(deltas: Tensor, weights: Tensor, *, trim: float = 0.1, **_: Any) -> Tensor:
    """The mean of each coordinate without its `trim` largest and smallest fractions, unweighted."""
    if not 0 <= trim < 0.5:
        raise bad_value("server.trim", trim, "0 <= trim < 0.5")
    cut = int(trim * len(deltas))
    return deltas.sort(dim=0).values[cut : len(deltas) - cut].mean(0)


def clipped_mean(deltas: Tensor, weights: Tensor, *, clip_norm: float | None = None, **_: Any) -> Tensor:
    """The weighted mean of updates scaled down to norm `clip_norm`; null: the median of the cohort's norms."""
    norms = deltas.norm(dim=1)
    bound = norms.median() if clip_norm is None else torch.tensor(clip_norm, device=deltas.device)
    return mean(deltas * (bound / norms.clamp(min=1e-12)).clamp(max=1)[:, None], weights)


RULES: dict[str, Rule] = {"mean": mean, "median": median, "trimmed_mean": trimmed_mean, "clipped_mean": clipped_mean}


def rule(name: str) -> Rule:
    if name not in RULES:
        raise unknown("server.merge", name, RULES)
    return RULES[name]
