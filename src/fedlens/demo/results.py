"""Results of the runs of `fedlens demo`, and words for their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, TypeAlias

from fedlens.data.dataset import Dataset
from fedlens.training.run import Run

Points: TypeAlias = Sequence[tuple[float, float]]  # x, y


@dataclass(frozen=True)
class DemoResults:
    """All runs and measurements of the demo."""

    seed: int
    clients: int
    rounds: int
    data: Dataset
    central: Run
    dense: Mapping[str, Run]  # split -> FedAvg
    studied: str  # the split of the sections on masks and task arithmetic
    sparse: Mapping[str, Run]  # mask rule -> FedAvg under its mask
    rates: Mapping[str, float]
    dense_rate: float
    followed: str  # the mask rule that is compared with dense training from section 5 on
    sweeps: Mapping[str, Mapping[str, Any]]  # "dense" or the rule -> result of sweep_run
    groups: tuple[list[str], list[str]]  # classes of the two federations of section 6
    maps: Mapping[str, Mapping[str, Any]]  # "dense" or the rule -> result of interference_of_runs
    sums: Mapping[str, Mapping[str, float]]  # "dense" or the rule -> validation accuracy at θ₀ and after additions

    @property
    def ridge(self) -> Mapping[str, float]:
        """The head alone, before any round: the start of every sweep."""
        start: Mapping[str, float] = self.sweeps["dense"]["start"]
        return start

    @property
    def pair(self) -> dict[str, Run]:
        """Dense training and the followed rule, on the same split."""
        return {"dense": self.dense[self.studied], self.followed: self.sparse[self.followed]}


# --- words for numbers


def title(name: str) -> str:
    """Return a rule's name as words."""
    return name.replace("_", " ")


def compared(value: float, reference: float) -> str:
    """Describe how one accuracy in percent compares with another."""
    gap = value - reference
    return "level with" if abs(gap) < 0.05 else f"{abs(gap):.1f} points {'above' if gap > 0 else 'below'}"


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def standard_error(percent: float, images: int) -> float:
    """Return the standard error of an accuracy in percent."""
    return sqrt(percent * (100 - percent) / max(1, images))


def mean(run: Run, key: str) -> float:
    """Return the mean of a metric over the rounds."""
    values = [float(m[key]) for m in run.metrics if key in m]
    return sum(values) / len(values)


def by_round(runs: Mapping[str, Run], key: str, scale: float = 1.0) -> dict[str, Points]:
    return {title(name): [(m["round"], scale * m[key]) for m in run.metrics if key in m] for name, run in runs.items()}


def last(run: Run, key: str) -> float:
    return float([m[key] for m in run.metrics if key in m][-1])
