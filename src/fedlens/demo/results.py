"""Results of the runs of `fedlens demo`: the comparison of the first screen, its thesis, and what the chapters show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from fedlens.data.dataset import Dataset
from fedlens.study.results import RunResult, TableResult
from fedlens.study.statistics import Comparison, compare

MIXED, DENSE, MERGED = "mixed data", "one class per client", "one class, mean of the rounds"
MASKED, MASKED_MERGED = "one class, a tenth moves", "a tenth moves, mean of the rounds"
CLASSES: TypeAlias = Mapping[float, Mapping[str, float]]  # α -> class -> validation accuracy in percent


@dataclass(frozen=True)
class DemoResults:
    """All runs and measurements of the demo."""

    data: Dataset  # as split with the first seed
    heads: Mapping[int, RunResult]  # seed -> the head that the federations start from
    table: TableResult  # the federations over seeds
    curves: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]]  # federation or its means -> seed -> (round, test accuracy in percent)
    along: CLASSES  # θ₀ + ατ, τ of the mean of the rounds at one class per client, first seed
    tested: Mapping[float, float]  # α = 1 and the α that validation chooses there -> test accuracy in percent
    client: int  # the client that is subtracted from the masked federation
    forgotten: str  # its class
    without: CLASSES  # θ − ατₖ, τₖ: what that client added

    @property
    def seeds(self) -> list[int]:
        return list(self.heads)

    @property
    def accuracies(self) -> dict[str, dict[int, float]]:
        """Test accuracies in percent, averaged over the second half of the rounds: federation or its means -> seed -> value."""
        return {name: {seed: second_half(points) for seed, points in by_seed.items()} for name, by_seed in self.curves.items()}

    def first(self, federation: str) -> RunResult:
        """Return a federation's run with the first seed."""
        return next(cell.runs[self.seeds[0]] for cell in self.table.cells if cell.label == federation)


@dataclass(frozen=True)
class Thesis:
    """The cost of one class per client and what the mean of the rounds gives back, in points of test accuracy: per seed, and their means."""

    cost: Mapping[int, float]
    back: Mapping[int, float]
    mean_cost: Comparison
    mean_back: Comparison

    @classmethod
    def of(cls, accuracies: Mapping[str, Mapping[int, float]]) -> "Thesis":
        """Compare the federations' test accuracies in percent."""
        dense = accuracies[DENSE]
        cost, back = ({seed: accuracies[name][seed] - value for seed, value in dense.items()} for name in (MIXED, MERGED))
        return cls(cost, back, difference(accuracies, MIXED, DENSE), difference(accuracies, MERGED, DENSE))

    @property
    def seeds(self) -> list[int]:
        """The seeds in which one class per client costs accuracy and the mean of the rounds gives some of it back."""
        return [seed for seed in self.cost if self.cost[seed] > 0 and self.back[seed] > 0]

    @property
    def holds(self) -> bool:
        """True if it holds for every seed, and the intervals of both means exclude 0."""
        return len(self.seeds) == len(self.cost) and all(c.low is not None and c.low > 0 for c in (self.mean_cost, self.mean_back))

    @property
    def sentence(self) -> str:
        """The thesis if the numbers carry it, else what they show."""
        cost, back = self.mean_cost.difference, self.mean_back.difference
        if self.holds:
            return (
                "With one class per client, each round overwrites what the rounds before it learned, and federated averaging loses "
                f"{cost:.0f} points of accuracy. The mean of the rounds' models gives {back:.0f} of them back, without one more step of training."
            )
        return (
            f"These {len(self.cost)} seeds do not settle it: on average, one class per client changes the accuracy of federated averaging by "
            f"{-cost:+.1f} points, and the mean of the rounds' models changes it by {back:+.1f}."
        )


def second_half(points: Sequence[tuple[int, float]]) -> float:
    """Return the mean of a curve over the second half of its rounds: one round's model depends on the clients that it happened to sample."""
    return fmean(y for x, y in points if x > points[-1][0] / 2)


def difference(accuracies: Mapping[str, Mapping[int, float]], of: str, to: str) -> Comparison:
    """Return the difference between two rows over their seeds."""
    return compare({name: accuracies[name] for name in (to, of)}, to)[0]
