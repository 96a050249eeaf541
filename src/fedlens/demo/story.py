"""What `fedlens demo` ran and measured, and words for its numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from fedlens.data.dataset import Dataset
from fedlens.training.run import Run


@dataclass(frozen=True)
class Story:
    """What was run and measured."""

    seed: int
    clients: int
    rounds: int
    data: Dataset
    central: Run
    dense: Mapping[str, Run]  # split -> FedAvg
    studied: str  # the split of all that follows
    sparse: Mapping[str, Run]  # mask rule -> FedAvg under its mask
    rates: Mapping[str, float]
    dense_rate: float
    followed: str  # the mask rule that is compared with dense from chapter 5 on
    sweeps: Mapping[str, Mapping[str, Any]]  # "dense" or the rule -> sweep_run
    groups: tuple[list[str], list[str]]  # the classes of the two federations of chapter 6
    maps: Mapping[str, Mapping[str, Any]]  # "dense" or the rule -> interference_of_runs
    sums: Mapping[str, Mapping[str, float]]  # "dense" or the rule -> validation accuracy at θ₀ and after adding

    @property
    def ridge(self) -> Mapping[str, float]:
        """The head alone, before any round: every sweep starts there."""
        found: Mapping[str, float] = self.sweeps["dense"]["start"]
        return found

    @property
    def pair(self) -> dict[str, Run]:
        """Dense training and the followed rule, on the same split."""
        return {"dense": self.dense[self.studied], self.followed: self.sparse[self.followed]}


# --- words for numbers


def spoken(name: str) -> str:
    return name.replace("_", " ")


def standing(value: float, reference: float) -> str:
    """Two accuracies in percent: how the first lies to the second."""
    gap = value - reference
    return "level with" if abs(gap) < 0.05 else f"{abs(gap):.1f} points {'above' if gap > 0 else 'below'}"


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def standard_error(percent: float, images: int) -> float:
    """Of an accuracy in percent."""
    return sqrt(percent * (100 - percent) / max(1, images))


def mean(found: Run, key: str) -> float:
    """Of a metric over the rounds."""
    values = [float(m[key]) for m in found.metrics if key in m]
    return sum(values) / len(values)


def by_round(runs: Mapping[str, Run], key: str, scale: float = 1.0) -> dict[str, list[tuple[float, float]]]:
    return {spoken(name): [(m["round"], scale * m[key]) for m in found.metrics if key in m] for name, found in runs.items()}


def last(found: Run, key: str) -> float:
    return float([m[key] for m in found.metrics if key in m][-1])


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e7 else f"{count / 1e6:,.1f} MB"
