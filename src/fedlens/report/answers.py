"""Sentences that the data supports: one short sentence per question, with cautions.

Cells are ranked by validation accuracy, never by test accuracy. Nothing is called significant, or not, if there is one seed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedlens.report.blocks import Answer, counts, label, listed
from fedlens.report.over_seeds import Measured
from fedlens.runs.session import start_accuracy
from fedlens.study.results import CellResult, RunResult, SearchResult, TableResult, Tuned
from fedlens.study.statistics import Comparison

CLAIM = 0.05  # adjusted p below which a difference is called significant
TEST, VALIDATION = "test_accuracy", "val_accuracy"
MOST = 4  # names in a sentence


def diverged(run: RunResult) -> bool:
    """Return True if training destroyed the model: its accuracy is below half of θ₀'s, or of its own best if θ₀ was not scored."""
    score = next((run.summary[key] for key in (TEST, VALIDATION) if run.summary.get(key) is not None), None)
    scores = [line[VALIDATION] for line in run.metrics if line.get(VALIDATION) is not None]
    return score is not None and not score >= (start_accuracy(run.summary) or max(scores, default=0.0)) / 2


def ends_below_start(run: RunResult) -> bool:
    """Return True if training made the model worse on validation than θ₀. A ridge head takes no step."""
    before, after = start_accuracy(run.summary), run.summary.get(VALIDATION)
    return before is not None and after is not None and after < before and run.summary.get("steps") != 0


def significant(comparison: Comparison) -> bool:
    return comparison.p_adjusted is not None and comparison.p_adjusted < CLAIM


def answer(table: TableResult, question: str, tuned: Sequence[Tuned] = (), command: str = "") -> Answer:
    """Answer the question of a table. `command` runs what is not finished."""
    key = TEST if any(cell.of(TEST) for cell in table.cells) else VALIDATION
    cells = [cell for cell in table.cells if cell.of(key)]
    to_run = f" To finish it, run: {command}" if command else ""
    if not cells:
        return Answer(question, f"No run is finished yet.{to_run}")
    cases = list(dict.fromkeys(cell.case for cell in cells))
    groups = [[cell for cell in cells if cell.case == case] for case in cases] if table.by_case else [cells]
    best = [_best(group) for group in groups]
    two_ways = len(cases) > 1 and not table.by_case and key == TEST and all(cell.values for cell in cells)
    text = _span(cells, key) if two_ways else " ".join(_sentence(table, *each, key) for each in zip(groups, best, strict=True))
    cautions = [*_edges([cell for group in best for cell in group], cells), *_tuned(tuned), *_runs(cells)]
    if len(cells) > 1 and all(len(cell.of(key)) == 1 for cell in cells):
        cautions.append("One seed per cell: no difference can be tested.")
    if lacking := [f"{_name(cell.label)} ({len(cell.runs)} of {cell.planned})" for cell in table.cells if len(cell.runs) < cell.planned]:
        cautions.append(f"Not all seeds are finished: {_listed(lacking)}.{to_run}")
    return Answer(question, text, cautions)


def _name(text: str) -> str:
    return f"“{label(text)}”"


def _listed(names: Sequence[str]) -> str:
    return listed([*names[:MOST], *([f"{len(names) - MOST} more"] if len(names) > MOST else [])])


def _mean(cell: CellResult, key: str) -> float:
    """Return the mean in percent to two decimals, as readers see it."""
    summary = cell.summary(key)
    assert summary is not None
    return round(100 * summary.mean, 2)


def _n(cells: Iterable[CellResult], key: str) -> str:
    return counts(len(cell.of(key)) for cell in cells)


def _best(cells: Sequence[CellResult]) -> list[CellResult]:
    """Return the cells with the highest mean validation accuracy; none if a cell has no validation accuracy."""
    if not all(cell.of(VALIDATION) for cell in cells):
        return []
    highest = max(_mean(cell, VALIDATION) for cell in cells)
    return [cell for cell in cells if _mean(cell, VALIDATION) == highest]


def _sentence(table: TableResult, cells: Sequence[CellResult], best: Sequence[CellResult], key: str) -> str:
    """Return the sentence on the cells that validation prefers."""
    n = _n(best or cells, key)
    if not best:
        return _span(cells, key)
    names, mean = _listed([_name(cell.label) for cell in best]), f"{_mean(best[0], key):.2f}"
    if key == VALIDATION and len(best) == 1:
        opening = f"{names} reaches {mean} % on validation" if len(cells) == 1 else f"{names} has the highest validation accuracy, {mean} %"
        return f"{opening} ({n}); the test set was not read."
    if len(cells) == 1:
        sd = getattr(cells[0].summary(key), "sd", None)
        return f"{names} reaches {mean}{'' if sd is None else f' ± {100 * sd:.2f}'} % on the test set ({n})."
    if len(best) > 1:
        return f"{names} tie on validation at {_mean(best[0], VALIDATION):.2f} % ({n})."
    opening = f"{names} is best on validation and reaches {mean} % on the test set"
    lost = {cell.label for cell in table.cells if any(diverged(run) for run in cell.runs.values())}
    sound = [c for c in table.comparisons() if not {c.name_a, c.name_b} & lost]
    for c in (c for c in sound if c.name_b == best[0].label):
        relation = f"{abs(100 * c.difference):.2f} points {'above' if c.difference >= 0 else 'below'} {_name(c.name_a)}"
        tested = "" if c.p_adjusted is None else ", significant" if significant(c) else ", not significant"
        return f"{opening}, {relation} (n = {c.n}{tested})."
    others = [c for c in sound if c.name_a == best[0].label and c.p_adjusted is not None]
    higher = [_name(c.name_b) for c in others if significant(c) and c.difference > 0]
    ending = f"; {_listed(higher) or 'no other cell'} is significantly higher there" if others else ""
    return f"{opening} ({n}){ending}."


def _span(cells: Sequence[CellResult], key: str) -> str:
    """Return the sentence on the highest and the lowest cell."""
    low, *_, high = sorted([*cells, *cells], key=lambda cell: _mean(cell, key))
    what, top, n = "Test" if key == TEST else "Validation", f"{_mean(high, key):.2f} %", _n(cells, key)
    if _mean(low, key) == _mean(high, key):
        return f"{what} accuracy is {top} in {_name(high.label) if len(cells) == 1 else 'all cells'} ({n})."
    return f"{what} accuracy falls from {top} ({_name(high.label)}) to {_mean(low, key):.2f} % ({_name(low.label)}), {n}."


# --- cautions


def _edges(best: Sequence[CellResult], cells: Sequence[CellResult]) -> list[str]:
    """Name values of the best cells that are the lowest or highest with finished runs in the same case."""
    cautions = []
    for cell, key, value in [(each, key, value) for each in best for key, value in each.values.items()]:
        tried = [each.values[key] for each in cells if each.case == cell.case and key in each.values]
        if len(set(map(str, tried))) > 1 and all(isinstance(v, int | float) for v in tried) and value in (min(tried), max(tried)):
            side = "highest" if value == max(tried) else "lowest"
            cautions.append(f"{key.rsplit('.', 1)[-1]} = {value} is the {side} value with finished runs: a better one may lie beyond.")
    return list(dict.fromkeys(cautions))


def _tuned(tuned: Sequence[Tuned]) -> list[str]:
    """Name cells whose tuned value is at an end of what was tried, or beside a value that fails."""
    ends, edges = ([_name(each.label) for each in tuned if getattr(each, flag)] for flag in ("at_an_end", "at_an_edge"))
    return [
        *([f"The tuned value is the lowest or highest that was tried: {_listed(ends)}."] if ends else []),
        *([f"The tuned value lies beside one that fails: {_listed(edges)}."] if edges else []),
    ]


def _runs(cells: Sequence[CellResult]) -> list[str]:
    """Name diverged seeds, and cells that end below θ₀."""
    cautions, low = [], dict[str, str]()
    for cell in cells:
        lost = [f"seed {seed}" for seed, run in sorted(cell.runs.items()) if diverged(run)]
        cautions += [f"{_name(cell.label)}: {_listed(lost)} diverged; the mean and its interval include it."] if lost else []
        if below := sum(ends_below_start(run) and not diverged(run) for run in cell.runs.values()):
            low[_name(cell.label)] = f"{below} of {len(cell.runs)}"
    if len(low) == 1:
        return [*cautions, *(f"{name} ends below θ₀ on validation in {seeds} seeds." for name, seeds in low.items())]
    return cautions + [f"Below θ₀ on validation: {_listed([f'{name} ({seeds} seeds)' for name, seeds in low.items()])}."] * bool(low)


# --- analyses and searches


def measured(rows: Sequence[Measured], question: str) -> Answer:
    """Answer what the analyses of one kind show."""
    kind, first = rows[0].kind, {"sweep": "end", "interpolate": "start", "forget": "target_before"}

    def lost(row: Measured, before: str, after: str) -> float:
        return 100 * (row.numbers[before].mean - row.numbers[after].mean)

    if kind == "forget":
        text = " ".join(
            f"Subtraction takes {lost(row, 'target_before', 'target_after'):z.1f} points from the classes of {_name(row.label)}, "
            f"and {lost(row, 'others_before', 'others_after'):z.1f} from all others (n = {row.n})."
            for row in rows[:2]
        )
    elif kind in first:
        row = max(rows, key=lambda row: lost(row, "chosen", first[kind]))
        gain, than = f"{lost(row, 'chosen', first[kind]):z.2f}", "trained model" if kind == "sweep" else "first model"
        most, where = ("nothing", "") if gain.startswith(("0.00", "-")) else (f"at most {gain} points", f"{_name(row.label)}, ")
        text = f"On the test set, the α that validation chooses gains {most} over the {than} ({where}n = {row.n})."
    else:
        key = "iou" if kind == "masks" else "cosine"
        what = "Masks overlap with an intersection over union" if kind == "masks" else "Task vectors have a cosine"
        means = sorted(row.numbers[key].mean for row in rows)
        span = f"between {means[0]:z.2f} and {means[-1]:z.2f}" if len(rows) > 1 else f"of {means[0]:z.2f}"
        text = f"{what} {span} (n = {min(row.n for row in rows)})."
    return Answer(question, text)


def best_trial(result: SearchResult) -> Mapping[str, Any] | None:
    return next((trial for trial in result.trials if trial["number"] == result.best), None)


def search(result: SearchResult) -> Answer:
    """Answer what a search found."""
    best = best_trial(result)
    if best is None or best["value"] is None:
        return Answer(result.question, "No trial is complete.")
    text, default = f"The best trial reaches {100 * best['value']:.2f} % on validation", result.default["value"]
    if best["params"] == result.default["params"]:
        return Answer(result.question, f"{text}: the default configuration (n = 1).")
    gain = "" if default is None else f", {100 * (best['value'] - default):+z.2f} points from the default"
    doubt = f"The best of {sum(t['state'] == 'complete' for t in result.trials)} trials is partly lucky: repeat it with other seeds."
    return Answer(result.question, f"{text}{gain} (n = 1).", [doubt])
