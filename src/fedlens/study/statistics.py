"""Statistics of repeated runs: means with t intervals, paired differences over common seeds, cost to reach a target.

Corrections for multiple tests: Holm (1979, family-wise error) and Benjamini and Hochberg (1995, false discovery rate).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from typing import Any

from fedlens.errors import UserError, bad_value, unknown

Runs = Mapping[str, Mapping[int, float]]  # name -> seed -> value
Baseline = str | Mapping[str, str] | None  # one baseline, or name -> baseline; None: every pair
LARGEST = 1e100  # squares of larger numbers may overflow


@dataclass(frozen=True)
class Summary:
    """The mean of n runs, their standard deviation (ddof = 1) and the mean's confidence interval; both None if n = 1."""

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None

    def text(self, scale: float = 100, digits: int = 2) -> str:
        """Return text such as "86.10 ± 0.21 [85.58, 86.62] (n = 3)"."""
        shown = _shown(self.mean, scale, digits)
        if self.sd is not None and self.low is not None and self.high is not None:
            shown += f" ± {_shown(self.sd, scale, digits)} [{_shown(self.low, scale, digits)}, {_shown(self.high, scale, digits)}]"
        return f"{shown} (n = {self.n})"


@dataclass(frozen=True)
class Comparison:
    """The mean of b − a over n common seeds, its confidence interval, and paired two-sided tests of "no difference".

    One seed gives neither interval nor test. Nor do equal differences, which have no spread; if all are 0, p = 1.
    `p_adjusted` is corrected for the other tests of the same comparison.
    """

    name_a: str
    name_b: str
    n: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_adjusted: float | None
    wilcoxon_p: float | None  # signed-rank test; never below 2^(1 − n)

    def text(self, scale: float = 100, digits: int = 2) -> str:
        """Return text such as "sparse − dense: +0.52 [0.10, 0.94] (n = 3, p = 0.034, adjusted 0.068)"."""
        shown = f"{self.name_b} − {self.name_a}: {_shown(self.difference, scale, digits, '+')}"
        if self.low is not None and self.high is not None:
            shown += f" [{_shown(self.low, scale, digits)}, {_shown(self.high, scale, digits)}]"
        tested = "no test" if self.p is None or self.p_adjusted is None else f"p = {self.p:.2g}, adjusted {self.p_adjusted:.2g}"
        return f"{shown} (n = {self.n}, {tested})"


def summarise(values: Iterable[float] | Mapping[int, float], confidence: float = 0.95) -> Summary:
    """Return mean, standard deviation and the t interval of the mean of numbers, or of seed -> number."""
    _check_confidence(confidence)
    return _summary(_numbers("values", values.values() if isinstance(values, Mapping) else values), confidence)


# --- differences


def compare(
    runs: Runs, baseline: Baseline = None, method: str = "holm", confidence: float = 0.95, *, pooled: bool = False
) -> list[Comparison]:
    """Compare all pairs, or every name with its baseline, on common seeds. Pairs without a common seed are omitted, see `unpaired`.

    `pooled`: an unpaired t test with the variance within names, pooled over all of `runs`. With three seeds a paired test has only
    2 degrees of freedom, the pooled one 2 per name; it assumes that all names vary alike.
    """
    if method not in CORRECTIONS:
        raise unknown("method", method, CORRECTIONS)
    _check_confidence(confidence)
    for name, values in runs.items():
        _numbers(name, values.values())
    test = _pooled if pooled else _compare
    comparisons = [test(runs, a, b, confidence) for a, b in _pairs(runs, baseline) if runs[a].keys() & runs[b].keys()]
    adjusted = iter(CORRECTIONS[method]([c.p for c in comparisons if c.p is not None]))
    return [c if c.p is None else replace(c, p_adjusted=next(adjusted)) for c in comparisons]


def unpaired(runs: Runs, baseline: Baseline = None) -> list[tuple[str, str]]:
    """Return the pairs (a, b) without a common seed, which cannot be compared."""
    return [(a, b) for a, b in _pairs(runs, baseline) if not runs[a].keys() & runs[b].keys()]


def _pairs(runs: Runs, baseline: Baseline) -> list[tuple[str, str]]:
    if not runs:
        raise UserError("compare: there are no runs; pass one or more.")
    if baseline is None:
        return list(combinations(runs, 2))
    own = dict.fromkeys(runs, baseline) if isinstance(baseline, str) else baseline
    for name in own.values():
        if name not in runs:
            raise unknown("baseline", name, runs)
    return [(own[name], name) for name in runs if own.get(name, name) != name]


def _compare(runs: Runs, a: str, b: str, confidence: float) -> Comparison:
    pairs = [(float(runs[a][seed]), float(runs[b][seed])) for seed in sorted(runs[a].keys() & runs[b].keys())]
    # 0.86 − 0.85 and 0.87 − 0.86 differ by rounding only, but a t test would see a tiny spread: drop the last bits of float64.
    grain = math.ldexp(1.0, max(-1000, math.frexp(max(abs(v) for pair in pairs for v in pair))[1] - 44))
    differences = [round((y - x) / grain) * grain for x, y in pairs]
    s = _summary(differences, confidence)
    if s.n == 1 or not any(differences):
        p = None if s.n == 1 else 1.0
        return Comparison(a, b, s.n, s.mean, None, None, p, None, p)
    from scipy import special, stats  # type: ignore[import-untyped]

    wilcoxon_p = float(stats.wilcoxon(differences).pvalue)
    if not s.sd:
        return Comparison(a, b, s.n, s.mean, None, None, None, None, wilcoxon_p)
    p = float(2 * special.stdtr(s.n - 1, -abs(s.mean) / (s.sd / math.sqrt(s.n))))
    return Comparison(a, b, s.n, s.mean, s.low, s.high, p, None, wilcoxon_p)


def _pooled(runs: Runs, a: str, b: str, confidence: float) -> Comparison:
    groups = [list(values.values()) for values in runs.values()]
    difference, n = statistics.mean(runs[b].values()) - statistics.mean(runs[a].values()), min(len(runs[a]), len(runs[b]))
    freedom = sum(len(group) - 1 for group in groups)
    variance = sum((len(group) - 1) * statistics.variance(group) for group in groups if len(group) > 1) / max(1, freedom)
    error = math.sqrt(variance * (1 / len(runs[a]) + 1 / len(runs[b])))
    if n == 1 or not error:
        return Comparison(a, b, n, difference, None, None, None, None, None)
    from scipy import special

    half = -float(special.stdtrit(freedom, (1 - confidence) / 2)) * error
    p = float(2 * special.stdtr(freedom, -abs(difference) / error))
    return Comparison(a, b, n, difference, difference - half, difference + half, p, None, None)


# --- multiple tests


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjusted p-values. Rejecting those below α keeps the family-wise error rate at or below α."""
    ascending = sorted(range(len(p_values)), key=_fractions(p_values).__getitem__)
    stepped = (min(1.0, (len(p_values) - rank) * p_values[i]) for rank, i in enumerate(ascending))
    adjusted = dict(zip(ascending, accumulate(stepped, max), strict=True))
    return [adjusted[i] for i in range(len(p_values))]


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return Benjamini and Hochberg's step-up adjusted p-values. Rejecting those below α keeps the false discovery rate at or below α."""
    from scipy import stats

    adjusted: list[float] = stats.false_discovery_control(_fractions(p_values)).tolist() if len(p_values) else []
    return adjusted


CORRECTIONS: dict[str, Callable[[Sequence[float]], list[float]]] = {"holm": holm, "benjamini_hochberg": benjamini_hochberg}


def _fractions(p_values: Sequence[float]) -> Sequence[float]:
    if wrong := [p for p in p_values if not 0 <= p <= 1]:  # also true for NaN
        raise bad_value("p_values", wrong[0], "in [0, 1]")
    return p_values


# --- cost


def to_target(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the smallest measured x (rounds, bytes) whose y reaches the target, or None."""
    _numbers("target", [target])
    _numbers("curve", [number for point in curve for number in point])
    return min((x for x, y in curve if y >= target), default=None)


def rounds_and_bytes_to(metrics: Sequence[Mapping[str, Any]], target: float, key: str = "val_accuracy") -> dict[str, int | None]:
    """Return {"rounds", "bytes_up"} since the start at the first evaluation that reaches the target, from lines of metrics.jsonl."""
    lines = [{"bytes_up": 0, **line} if line.get("round") == 0 else line for line in metrics if line.get(key) is not None]
    if not lines:
        raise UserError(f"metrics: no line has {key!r}.")
    if lacking := [needed for needed in ("round", "bytes_up") if any(line.get(needed) is None for line in lines)]:
        raise UserError(f"metrics: a line with {key!r} has no {lacking[0]!r}; use the metrics of a federated run.")
    first = to_target([(line["round"], line[key]) for line in lines], target)
    at_target: Mapping[str, Any] = next((line for line in lines if line["round"] == first), {})
    return {"rounds": at_target.get("round"), "bytes_up": at_target.get("bytes_up")}


# --- numbers


def _summary(values: Sequence[float], confidence: float) -> Summary:
    """Summarise with the standard library, whose mean and deviation are exact: independent of order, 0 for equal values."""
    mean, n = statistics.mean(values), len(values)
    if n == 1:
        return Summary(1, mean, None, None, None)
    from scipy import special

    sd = statistics.stdev(values)
    half = -float(special.stdtrit(n - 1, (1 - confidence) / 2)) * sd / math.sqrt(n)  # Student's t
    return Summary(n, mean, sd, mean - half, mean + half)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise bad_value("confidence", confidence, "in (0, 1)")


def _numbers(field: str, values: Iterable[Any]) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise UserError(f"{field} must be finite numbers ({error}).") from None
    if not numbers:
        raise UserError(f"{field} must have one number or more, got none.")
    if wrong := [number for number in numbers if not abs(number) <= LARGEST]:  # also true for NaN
        raise bad_value(field, wrong[0], f"finite numbers up to {LARGEST:g}")
    return numbers


def _shown(value: float, scale: float, digits: int, sign: str = "-") -> str:
    return f"{scale * value:{sign}z.{digits}f}"  # z: no -0.00
