"""Editing by task arithmetic: walk along θ0 + α·τ, choose α, forget by negation, interpolate (Ilharco et al. 2023).

Selection sees the metrics it is told and nothing else. They come from validation data, never from the test set.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import torch
from torch import Tensor

from fedlens.errors import UserError, bad_value

MOST = 10_000  # points of a sweep; more is a slip of the pen


@dataclass(frozen=True)
class SweepPoint:
    """What was measured at θ0 + alpha·τ."""

    alpha: float
    metrics: dict[str, float]


def alphas(given: str | Sequence[float]) -> list[float]:
    """ "start:stop:count", evenly spaced with both ends exact, or "a,b,c", or numbers."""
    if isinstance(given, str) and ":" in given:
        return _evenly(given)
    found = [float(_number(part, given)) for part in (given.split(",") if isinstance(given, str) else given)]
    if not found:
        raise _nonsense(given)
    return found


def _evenly(given: str) -> list[float]:
    parts = given.split(":")
    if len(parts) != 3 or not parts[2].strip().isdecimal() or not 2 <= int(parts[2]) <= MOST:
        raise _nonsense(given)
    start, stop, gaps = _number(parts[0], given), _number(parts[1], given), int(parts[2]) - 1
    # in decimals, so that -0.7:2.1:5 passes through 0 itself and 0:1:11 through 0.3
    return [float((start * (gaps - i) + stop * i) / gaps) for i in range(gaps + 1)]


def sweep(evaluate: Callable[[Tensor], Mapping[str, float]], theta0: Tensor, tau: Tensor, alphas: Sequence[float]) -> list[SweepPoint]:
    """`evaluate(θ0 + α·τ)` for each α, in the order given. It measures on validation data: points are there to choose from."""
    _same_shape(theta0, tau)
    return [SweepPoint(float(alpha), dict(evaluate(theta0 + alpha * tau))) for alpha in alphas]


def best(points: Sequence[SweepPoint], key: str = "val_accuracy") -> SweepPoint:
    """The point with the highest metric `key`, of equal ones that of the lowest validation loss, then of smallest |α|. Never a test metric."""
    measured = _measured(points, key)
    if not measured:
        raise UserError(f"sweep: no point has a {key!r} that is a number")
    return max(measured, key=lambda p: (p.metrics[key], -p.metrics.get("val_loss", 0.0), -abs(p.alpha), p.alpha))


def negate(points: Sequence[SweepPoint], target: str, control: str, keep: float = 0.95) -> SweepPoint | None:
    """Forgetting: the lowest `target` among points whose `control` stays at `keep` times its value at α = 0 or above.

    Of equal ones that of smallest |α|; None where no point qualifies. Both metrics come from validation, never from the test set.
    """
    if not 0 <= keep <= 1:
        raise bad_value("keep", keep, "0 to 1")
    start = next((p for p in points if p.alpha == 0), None)
    if start is None:
        raise UserError("sweep: negation compares with the model before it, so the points must contain alpha 0")
    floor = keep * start.metrics[control] if _measured([start], control) else math.nan
    kept = [p for p in _measured(_measured(points, control), target) if p.metrics[control] >= floor]
    return min(kept, key=lambda p: (p.metrics[target], abs(p.alpha), -p.alpha), default=None)


def interpolate(theta_a: Tensor, theta_b: Tensor, alpha: float) -> Tensor:
    """θ_a + α(θ_b − θ_a), exact at α = 0 and 1; outside it extrapolates."""
    _same_shape(theta_a, theta_b)
    return torch.lerp(theta_a, theta_b, float(alpha))


def _measured(points: Sequence[SweepPoint], key: str) -> list[SweepPoint]:
    """The points whose metric is a number; one that lacks it is an error."""
    for point in points:
        if key not in point.metrics:
            raise UserError(
                f"sweep: no metric {key!r} at alpha {point.alpha:g}; allowed is one of {', '.join(sorted(point.metrics)) or 'none'}"
            )
    return [p for p in points if not math.isnan(p.metrics[key])]


def _number(part: object, given: object) -> Decimal:
    try:
        number = Decimal(str(part).strip())
    except InvalidOperation:
        number = Decimal("nan")
    if not (number.is_finite() and math.isfinite(float(number))):
        raise _nonsense(given)
    return number


def _nonsense(given: object) -> UserError:
    return bad_value("alphas", given, f"start:stop:count with a count of 2 to {MOST}, or numbers with commas between")


def _same_shape(one: Tensor, other: Tensor) -> None:
    if one.shape != other.shape:
        raise UserError(f"task arithmetic: vectors of shape {tuple(one.shape)} and {tuple(other.shape)} given, allowed is the same shape")
