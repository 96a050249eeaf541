"""What a table of repeated runs says: means with t intervals, paired differences over shared seeds, cost to reach a target.

Corrections for many tests at once are Holm's (1979, family-wise error) and Benjamini and Hochberg's (1995, false discoveries).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from fedlens.errors import UserError, bad_value, unknown

Runs = Mapping[str, Mapping[int, float]]  # name -> seed -> value
Baseline = str | Mapping[str, str] | None  # of all, or name -> its own; None: every pair
LARGEST = 1e100  # what is squared and summed beyond it may overflow


@dataclass(frozen=True)
class Summary:
    """A mean over n runs, their spread (ddof = 1) and the mean's confidence interval; a single run has neither."""

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None

    def text(self, scale: float = 100, digits: int = 2) -> str:
        """86.10 ± 0.21 [85.58, 86.62] (n = 3)"""
        shown = _shown(self.mean, scale, digits)
        if self.sd is not None and self.low is not None and self.high is not None:
            shown += f" ± {_shown(self.sd, scale, digits)} [{_shown(self.low, scale, digits)}, {_shown(self.high, scale, digits)}]"
        return f"{shown} (n = {self.n})"


@dataclass(frozen=True)
class Comparison:
    """The mean of b − a over the n seeds that both have, its confidence interval, and paired two-sided tests of "no difference".

    One seed gives no interval and no test. Neither do differences that are all the same, which say nothing of their spread;
    only where all are 0 is p = 1. `p_adjusted` counts the tests that were made beside this one.
    """

    name_a: str
    name_b: str
    n: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_adjusted: float | None
    wilcoxon_p: float | None  # of ranks, not of a normal distribution; never below 2^(1 − n)

    def text(self, scale: float = 100, digits: int = 2) -> str:
        """sparse − dense: +0.52 [0.10, 0.94] (n = 3, p = 0.034, adjusted 0.068)"""
        shown = f"{self.name_b} − {self.name_a}: {_shown(self.difference, scale, digits, '+')}"
        if self.low is not None and self.high is not None:
            shown += f" [{_shown(self.low, scale, digits)}, {_shown(self.high, scale, digits)}]"
        tested = "no test" if self.p is None or self.p_adjusted is None else f"p = {self.p:.2g}, adjusted {self.p_adjusted:.2g}"
        return f"{shown} (n = {self.n}, {tested})"


def summarise(values: Iterable[float] | Mapping[int, float], confidence: float = 0.95) -> Summary:
    """Mean, standard deviation and the t interval of the mean, of numbers or of seed -> number."""
    _check_confidence(confidence)
    return _summary(_numbers("values", values.values() if isinstance(values, Mapping) else values), confidence)


# --- differences


def compare(runs: Runs, baseline: Baseline = None, method: str = "holm", confidence: float = 0.95) -> list[Comparison]:
    """All pairs, or everything minus the baseline (or minus its own: name -> name), on shared seeds only. Pairs that share none are left out: see `unpaired`."""
    if method not in CORRECTIONS:
        raise unknown("method", method, CORRECTIONS)
    _check_confidence(confidence)
    for name, values in runs.items():
        _numbers(name, values.values())
    found = [_compare(runs, a, b, confidence) for a, b in _pairs(runs, baseline) if runs[a].keys() & runs[b].keys()]
    adjusted = iter(CORRECTIONS[method]([c.p for c in found if c.p is not None]))
    return [c if c.p is None else replace(c, p_adjusted=next(adjusted)) for c in found]


def unpaired(runs: Runs, baseline: Baseline = None) -> list[tuple[str, str]]:
    """The pairs (a, b) that share no seed, and so cannot be compared."""
    return [(a, b) for a, b in _pairs(runs, baseline) if not runs[a].keys() & runs[b].keys()]


def _pairs(runs: Runs, baseline: Baseline) -> list[tuple[str, str]]:
    if not runs:
        raise UserError("compare: no runs given, allowed is one or more")
    if baseline is None:
        return list(combinations(runs, 2))
    own = dict.fromkeys(runs, baseline) if isinstance(baseline, str) else baseline
    for name in own.values():
        if name not in runs:
            raise unknown("baseline", name, runs)
    return [(own[name], name) for name in runs if own.get(name, name) != name]


def _compare(runs: Runs, a: str, b: str, confidence: float) -> Comparison:
    pairs = [(float(runs[a][seed]), float(runs[b][seed])) for seed in sorted(runs[a].keys() & runs[b].keys())]
    # 0.86 − 0.85 and 0.87 − 0.86 differ by rounding alone, which a t test would take for a tiny spread: drop the last bits of float64
    grain = math.ldexp(1.0, max(-1000, math.frexp(max(abs(v) for pair in pairs for v in pair))[1] - 44))
    differences = [round((y - x) / grain) * grain for x, y in pairs]
    found = _summary(differences, confidence)
    if found.n == 1 or not any(differences):
        nothing = None if found.n == 1 else 1.0
        return Comparison(a, b, found.n, found.mean, None, None, nothing, None, nothing)
    from scipy import stats  # type: ignore[import-untyped]

    ranked = float(stats.wilcoxon(differences).pvalue)
    if not found.sd:
        return Comparison(a, b, found.n, found.mean, None, None, None, None, ranked)
    p = float(2 * stats.t.sf(abs(found.mean) / (found.sd / math.sqrt(found.n)), found.n - 1))
    return Comparison(a, b, found.n, found.mean, found.low, found.high, p, None, ranked)


# --- many tests


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down p-values, in the order given. Claim what is below α, and the chance of even one false claim is at most α."""
    m, highest, adjusted = len(p_values), 0.0, [0.0] * len(p_values)
    for rank, i in enumerate(_ascending(p_values)):
        adjusted[i] = highest = max(highest, min(1.0, (m - rank) * float(p_values[i])))
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's step-up p-values, in the order given. Claim what is below α: at most a share α is expected to be false."""
    m, lowest, adjusted = len(p_values), 1.0, [0.0] * len(p_values)
    for rank, i in reversed(list(enumerate(_ascending(p_values)))):
        adjusted[i] = lowest = min(lowest, float(p_values[i]) * m / (rank + 1))
    return adjusted


CORRECTIONS: dict[str, Callable[[Sequence[float]], list[float]]] = {"holm": holm, "benjamini_hochberg": benjamini_hochberg}


def _ascending(p_values: Sequence[float]) -> list[int]:
    if wrong := [p for p in p_values if not 0 <= p <= 1]:  # NaN neither
        raise bad_value("p_values", wrong[0], "0 to 1")
    return sorted(range(len(p_values)), key=lambda i: float(p_values[i]))


# --- cost


def to_target(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """The first x (rounds, bytes) whose y is at the target or above, among the points that were measured; None where none is."""
    _numbers("target", [target])
    _numbers("curve", [number for point in curve for number in point])
    return min((x for x, y in curve if y >= target), default=None)


def rounds_and_bytes_to(metrics: Sequence[Mapping[str, Any]], target: float, key: str = "val_accuracy") -> dict[str, int | None]:
    """{"rounds", "bytes_up"} (both from the start) at the first evaluation that reaches the target, from lines of metrics.jsonl."""
    lines = [line for line in metrics if line.get(key) is not None]
    if not lines:
        raise UserError(f"metrics: no line has a {key!r}")
    if lacking := [needed for needed in ("round", "bytes_up") if any(line.get(needed) is None for line in lines)]:
        raise UserError(f"metrics: a line with {key!r} has no {lacking[0]!r}; allowed is the metrics of a federated run")
    first = to_target([(line["round"], line[key]) for line in lines], target)
    there: Mapping[str, Any] = next((line for line in lines if line["round"] == first), {})
    return {"rounds": there.get("round"), "bytes_up": there.get("bytes_up")}


# --- numbers


def _summary(values: Sequence[float], confidence: float) -> Summary:
    """With the standard library's mean and deviation, which are exact: no order of summation, no spread among equals."""
    mean, n = statistics.mean(values), len(values)
    if n == 1:
        return Summary(1, mean, None, None, None)
    sd = statistics.stdev(values)
    half = _quantile(confidence, n - 1) * sd / math.sqrt(n)
    return Summary(n, mean, sd, mean - half, mean + half)


@cache
def _quantile(confidence: float, freedom: int) -> float:
    """Of Student's t: half the interval, in standard errors."""
    from scipy import stats

    return -float(stats.t.ppf((1 - confidence) / 2, freedom))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise bad_value("confidence", confidence, "between 0 and 1")


def _numbers(field: str, values: Iterable[Any]) -> list[float]:
    try:
        found = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise UserError(f"{field}: {error}; allowed is finite numbers") from None
    if not found:
        raise UserError(f"{field}: nothing given, allowed is one number or more")
    if wrong := [number for number in found if not abs(number) <= LARGEST]:  # NaN neither
        raise bad_value(field, wrong[0], f"finite numbers up to {LARGEST:g}")
    return found


def _shown(value: float, scale: float, digits: int, sign: str = "-") -> str:
    return f"{scale * value:{sign}z.{digits}f}"  # z: no -0.00
