"""Editing by task arithmetic: walk along θ0 + α·τ, choose α, forget by negation, interpolate (Ilharco et al. 2023).

Choices read only the metrics passed in. They must come from validation data, never from the test set.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import torch
from torch import Tensor

from fedlens.errors import UserError, bad_value

MOST = 10_000  # points per sweep; more is probably a typing error


@dataclass(frozen=True)
class SweepPoint:
    """The metrics measured at θ0 + alpha·τ."""

    alpha: float
    metrics: dict[str, float]


def alphas(spec: str | Sequence[float]) -> list[float]:
    """Return the numbers of "start:stop:count" (evenly spaced, both ends exact), of "a,b,c" or of a sequence."""
    try:
        if isinstance(spec, str) and ":" in spec:  # decimals, so that -0.7:2.1:5 includes exactly 0 and 0:1:11 exactly 0.3
            first, last, count = spec.split(":")
            start, stop, gaps = Decimal(first), Decimal(last), int(count) - 1
            values = [float((start * (gaps - i) + stop * i) / gaps) for i in range(gaps + 1)] if 0 < gaps < MOST else []
        else:
            values = [float(Decimal(str(part))) for part in (spec.split(",") if isinstance(spec, str) else spec)]
    except (ValueError, ArithmeticError):
        values = []
    if not values or not all(map(math.isfinite, values)):
        raise bad_value("alphas", spec, f"start:stop:count with a count of 2 to {MOST}, or numbers separated by commas")
    return values


def best(points: Sequence[SweepPoint], key: str = "val_accuracy") -> SweepPoint:
    """Return the point with the highest metric `key`; ties go to the lowest val_loss, then to the smallest |α|."""
    measured = _measured(points, key)
    if not measured:
        raise UserError(f"sweep: no point has a {key!r} that is a number.")
    return max(measured, key=lambda p: (p.metrics[key], -p.metrics.get("val_loss", 0.0), -abs(p.alpha), p.alpha))


def negate(points: Sequence[SweepPoint], target: str, control: str, keep: float = 0.95) -> SweepPoint | None:
    """Return the point of lowest `target` whose `control` is at least `keep` times its value at α = 0, or None; ties: smallest |α|."""
    if not 0 <= keep <= 1:
        raise bad_value("keep", keep, "0 to 1")
    start = next((p for p in points if p.alpha == 0), None)
    if start is None:
        raise UserError("sweep: negation compares with the unedited model, so the points must contain alpha 0.")
    floor = keep * start.metrics[control] if _measured([start], control) else math.nan
    qualifying = [p for p in _measured(_measured(points, control), target) if p.metrics[control] >= floor]
    return min(qualifying, key=lambda p: (p.metrics[target], abs(p.alpha), -p.alpha), default=None)


def interpolate(theta_a: Tensor, theta_b: Tensor, alpha: float) -> Tensor:
    """Return θ_a + α(θ_b − θ_a), exact at α = 0 and 1; α outside [0, 1] extrapolates."""
    if theta_a.shape != theta_b.shape:
        raise UserError(f"interpolation needs vectors of the same shape, got {tuple(theta_a.shape)} and {tuple(theta_b.shape)}.")
    return torch.lerp(theta_a, theta_b, float(alpha))


def _measured(points: Sequence[SweepPoint], key: str) -> list[SweepPoint]:
    """Return the points whose metric is not NaN; a point without the metric is an error."""
    for point in points:
        if key not in point.metrics:
            known = ", ".join(sorted(point.metrics)) or "none"
            raise UserError(f"sweep: no metric {key!r} at alpha {point.alpha:g}; measured are {known}.")
    return [p for p in points if not math.isnan(p.metrics[key])]
