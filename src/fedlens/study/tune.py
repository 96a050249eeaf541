"""Every cell of a table at the value of one key that validation prefers for it: learning rates of different methods differ by factors of 100.

    tune: {key: optim.lr, by: 3, length: 0.2, tries: 7, like: {half B: half A}, set: [model.image_size=112]}

A climb for every cell: short runs (`length` of the whole, the plan's first seed, the test set unread) at the cell's own value and a factor `by` above
and below, then further on the side that wins, until the best has a worse one on either side or `tries` are spent. A trial that fails is worse than any
that does not. Cells that must be trained alike, say with a client and without it, share one climb: `like`. What short runs do otherwise, to be cheaper still: `set` (what the command line says holds for them, too). What was tried is read from the trials' folders, so a study that is killed goes on, and a value never depends on when it was.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedlens.study.plan import Cell, Plan, Planned, Tune, changed

FAILED = -1.0  # below every accuracy
Scores = Callable[[Planned], float | None]  # validation accuracy of a trial; FAILED; None: not run yet


@dataclass(frozen=True)
class Climb:
    """How far the choice for one cell is."""

    tune: Tune
    tried: Mapping[int, float]  # factors from the cell's own value -> validation accuracy

    @property
    def best(self) -> int | None:
        """Of equals the nearest to the cell's own, then the lower; None: nothing that was tried trains."""
        ranked = sorted(self.tried, key=lambda k: (-self.tried[k], abs(k), k))
        return ranked[0] if ranked and self.tried[ranked[0]] > FAILED else None

    @property
    def next(self) -> list[int]:
        """What to try now; nothing: the choice is made."""
        if begin := [k for k in (0, 1, -1) if k not in self.tried]:
            return begin
        at = min(self.tried) if self.best is None else self.best
        return [k for k in (at + 1, at - 1) if k not in self.tried][: max(0, self.tune.tries - len(self.tried))]

    @property
    def value(self) -> float | None:
        return None if self.best is None else self.tune.value(self.best)

    def told(self) -> dict[str, Any]:
        """For study.json."""
        order = sorted(self.tried)
        return {
            "table": self.tune.cell.table,
            "label": "; ".join(cell.label for cell in self.tune.cells),
            "key": self.tune.key,
            "value": None if self.next else self.value,
            "tried": [[self.tune.value(k), self.tried[k] if self.tried[k] > FAILED else None] for k in order],
            "runs": [self.tune.trial(k).name for k in order],
        }


def climbs(plan: Plan, score: Scores) -> list[Climb]:
    """All cells to tune, each as far as the finished trials take it."""
    found = []
    for tune in plan.tunes:
        climb = Climb(tune, {})
        while ahead := {k: s for k in climb.next if (s := score(tune.trial(k))) is not None}:
            climb = replace(climb, tried={**climb.tried, **ahead})
        found.append(climb)
    return found


def settled(plan: Plan, found: list[Climb]) -> Plan:
    """The plan with every choice that is made."""
    chosen: dict[Cell, Climb] = {cell: climb for climb in found if not climb.next and climb.value is not None for cell in climb.tune.cells}

    def own(planned: Planned) -> Planned:
        climb = chosen.get(planned.cell)
        return planned if climb is None else replace(planned, config=changed(planned.config, climb.tune.key, climb.value))

    return replace(plan, runs=[own(planned) for planned in plan.runs])
