"""Choose one key's value per cell on validation: learning rates of different methods differ by factors of 100.

    tune: {key: optim.lr, by: 3, length: 0.2, tries: 7, like: {half B: half A}, set: [model.image_size=112]}

Each cell has a line search over short runs: `length` of the whole run, the plan's first seed, no test set. It starts with the cell's own value and
those a factor `by` above and below, then goes on from the best one, until both neighbours of the best are worse or `tries` are spent. A failed trial
ranks below all others. `like`: cells that must be trained alike, such as with and without a client, share one search. `set`: overrides of the short
runs only, to make them cheaper; the command line wins over them. The trials' folders hold all state, so a killed study resumes with the same choices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedlens.study.plan import Plan, PlannedRun, TuningSpec, changed

FAILED = -1.0  # below every accuracy
Score = Callable[[PlannedRun], float | None]  # validation accuracy of a trial; FAILED; None: not run yet


@dataclass(frozen=True)
class LineSearch:
    """The state of the search for one cell's value."""

    spec: TuningSpec
    tried: Mapping[int, float]  # exponent of the factor -> validation accuracy

    @property
    def best(self) -> int | None:
        """The exponent with the highest accuracy; among equals the nearest to 0, then the lower. None: no trial succeeded."""
        ranked = sorted(self.tried, key=lambda k: (-self.tried[k], abs(k), k))
        return ranked[0] if ranked and self.tried[ranked[0]] > FAILED else None

    @property
    def next(self) -> list[int]:
        """The exponents to try now; empty when the search is done."""
        if first := [k for k in (0, 1, -1) if k not in self.tried]:
            return first
        at = min(self.tried) if self.best is None else self.best
        return [k for k in (at + 1, at - 1) if k not in self.tried][: max(0, self.spec.tries - len(self.tried))]

    @property
    def value(self) -> float | None:
        return None if self.best is None else self.spec.value(self.best)

    def metadata(self) -> dict[str, Any]:
        """Return the search's entry in study.json."""
        order = sorted(self.tried)
        return {
            "table": self.spec.cell.table,
            "label": "; ".join(cell.label for cell in self.spec.cells),
            "key": self.spec.key,
            "value": None if self.next else self.value,
            "tried": [[self.spec.value(k), self.tried[k] if self.tried[k] > FAILED else None] for k in order],
            "runs": [self.spec.trial(k).name for k in order],
        }


def line_searches(plan: Plan, score: Score) -> list[LineSearch]:
    """Return the search of every tuned cell, advanced as far as the finished trials allow."""
    searches = []
    for spec in plan.tuning:
        search = LineSearch(spec, {})
        while scored := {k: s for k in search.next if (s := score(spec.trial(k))) is not None}:
            search = replace(search, tried={**search.tried, **scored})
        searches.append(search)
    return searches


def with_chosen_values(plan: Plan, searches: list[LineSearch]) -> Plan:
    """Return the plan with the value of every finished search in the configurations of its cells."""
    chosen = {cell: s for s in searches if not s.next and s.value is not None for cell in s.spec.cells}

    def tuned(planned: PlannedRun) -> PlannedRun:
        search = chosen.get(planned.cell)
        return planned if search is None else replace(planned, config=changed(planned.config, search.spec.key, search.value))

    return replace(plan, runs=[tuned(planned) for planned in plan.runs])
