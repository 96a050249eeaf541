"""Editing by task arithmetic: walk along θ0 + α·τ, choose α, forget by negation, interpolate (Ilharco et al. 2023).

Choices read only the metrics passed in. They must come from validation data, never from the test set.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

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
    if not isinstance(spec, str) or ":" not in spec:
        values = [float(_number(part, spec)) for part in (spec.split(",") if isinstance(spec, str) else spec)]
        if not values:
            raise _bad_alphas(spec)
        return values
    parts = spec.split(":")
    if len(parts) != 3 or not parts[2].strip().isdecimal() or not 2 <= int(parts[2]) <= MOST:
        raise _bad_alphas(spec)
    start, stop, gaps = _number(parts[0], spec), _number(parts[1], spec), int(parts[2]) - 1
    # Decimals, so that -0.7:2.1:5 includes exactly 0 and 0:1:11 exactly 0.3.
    return [float((start * (gaps - i) + stop * i) / gaps) for i in range(gaps + 1)]


def _number(part: object, spec: object) -> Decimal:
    try:
        number = Decimal(str(part).strip())
    except InvalidOperation:
        number = Decimal("nan")
    if not (number.is_finite() and math.isfinite(float(number))):
        raise _bad_alphas(spec)
    return number


def _bad_alphas(spec: object) -> UserError:
    return bad_value("alphas", spec, f"start:stop:count with a count of 2 to {MOST}, or numbers separated by commas")


def sweep(evaluate: Callable[[Tensor], Mapping[str, float]], theta0: Tensor, tau: Tensor, alphas: Sequence[float]) -> list[SweepPoint]:
    """Evaluate θ0 + α·τ for each α, in order. `evaluate` must use validation data, since points are chosen by its metrics."""
    _check_same_shape(theta0, tau)
    return [SweepPoint(float(alpha), dict(evaluate(theta0 + alpha * tau))) for alpha in alphas]


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
    _check_same_shape(theta_a, theta_b)
    return torch.lerp(theta_a, theta_b, float(alpha))


def _measured(points: Sequence[SweepPoint], key: str) -> list[SweepPoint]:
    """Return the points whose metric is not NaN; a point without the metric is an error."""
    for point in points:
        if key not in point.metrics:
            known = ", ".join(sorted(point.metrics)) or "none"
            raise UserError(f"sweep: no metric {key!r} at alpha {point.alpha:g}; measured are {known}.")
    return [p for p in points if not math.isnan(p.metrics[key])]


def _check_same_shape(one: Tensor, other: Tensor) -> None:
    if one.shape != other.shape:
        raise UserError(f"task arithmetic needs vectors of the same shape, got {tuple(one.shape)} and {tuple(other.shape)}.")
