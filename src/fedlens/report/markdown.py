"""Results as Markdown and CSV, and how things are said in all files of a report: labels, costs, what is missing.

The same runs give the same text: no times, no seconds, no paths of the machine that ran them.
"""

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedlens.report.over_seeds import BESIDE, TITLES, UNITS, Measured, of_seeds, over_seeds, shared_heads, titled
from fedlens.study.results import Analysis, CellResult, Gathered, SearchResult, StudyResult, TableResult, further_metrics
from fedlens.study.statistics import Summary, summarise

NOTHING = "—"
MB = 1e-6
LENGTH = "client_norm"  # the metric that is the mean length of a round's updates
GEOMETRY = {"drift_ratio": "drift ratio", "cosine": "cosine", "sign_conflict": "sign conflict"}
CLAIM = 0.05  # adjusted p below which a difference is marked
# an absolute path, wherever it begins; what stays is its last part
PATH = re.compile(r"(?<![\w./])(?:/|~/|[A-Za-z]:\\)(?:[^\s/\\:'\",;]+[/\\])+(?=([^\s/\\:'\",;]*))")


# --- how things are said


def shown(label: str) -> str:
    """A name or label in one line and without paths; that of a table without cases begins with a comma in older studies. An empty list is none."""
    return placeless(label.lstrip(", ").replace("[]", "none")) or "all"


def grid_text(value: Any) -> str:
    """A value of a grid; that of a list without its brackets."""
    text = str(value)
    if not (text.startswith("[") and text.endswith("]")):
        return text
    return ", ".join(part.strip() for part in text[1:-1].split(",")) if text[1:-1].strip() else "none"


def placeless(text: str) -> str:
    """In one line and without paths of a machine, except for their last part."""
    return " ".join(PATH.sub("…/", text).split())


def p_text(p: float | None) -> str:
    return "no test" if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}"


def interval(low: float | None, high: float | None, scale: float = 100, digits: int = 2) -> str:
    return NOTHING if low is None or high is None else f"[{scale * low:z.{digits}f}, {scale * high:z.{digits}f}]"


def with_sd(summary: Summary | None, scale: float = 100, digits: int = 2) -> str:
    """86.10 ± 0.21, a single run without its ±."""
    if summary is None:
        return NOTHING
    return f"{scale * summary.mean:z.{digits}f}" + ("" if summary.sd is None else f" ± {scale * summary.sd:z.{digits}f}")


def aim_text(table: TableResult) -> str:
    """What rounds and bytes are counted to."""
    if table.aim is None:
        return ""
    return f"{100 * table.aim:.2f} % validation accuracy" + ("" if table.target is not None else ", 95 % of the best cell's mean")


@dataclass(frozen=True)
class Took:
    """Rounds or bytes to the aim, over the seeds that reached it."""

    found: Summary
    most: bool  # one had reached it when validation first looked: a bound, whose spread over seeds says nothing

    def number(self, scale: float) -> str:
        """Without its spread: 25, 1.3."""
        return f"{scale * self.found.mean:.1f}".removesuffix(".0" if self.most else "")

    def text(self, scale: float) -> str:
        """1.3 ± 0.6, or ≤ 25."""
        return f"≤ {self.number(scale)}" if self.most else with_sd(self.found, scale, 1)


def reached(table: TableResult, cell: CellResult) -> tuple[dict[str, Took], str]:
    """Rounds and bytes to the aim where a seed reached it, and "k of n reached it"; "" for a cell without rounds."""
    evaluated = [run for run in cell.runs.values() if run.curve("bytes_up", "val_accuracy")]
    cost = table.cost(cell) if evaluated else {}
    found = {key: Took(summarise(values), table.at_first(cell)) for key, values in cost.items() if values}
    return found, f"{len(cost['rounds'])} of {len(evaluated)} reached it" if evaluated else ""


def looked(table: TableResult) -> str:
    """How often validation looked, and what ≤ says where a cell has one: what rounds and bytes to the aim are worth."""
    if not table.looks:
        return ""
    if max(map(len, table.looks)) == 1:
        at = _span(at for (at,) in table.looks)
        said = f"once, after {at} round{'s' * (at != '1')}"
    else:
        every = _span(max(b - a for a, b in pairwise([0.0, *looks])) for looks in table.looks)
        said = "every round" if every == "1" else f"every {every} rounds"
    bound = any(table.at_first(cell) for cell in table.cells)
    return f"Validation looked {said}" + (" (≤: a seed had reached the target at the first look)." if bound else ".")


def _span(values: Iterable[float]) -> str:
    found = sorted(set(values))
    return f"{found[0]:g}" if len(found) == 1 else f"{found[0]:g} to {found[-1]:g}"


def missing(table: TableResult) -> list[str]:
    return [f"{shown(cell.label)}: {len(cell.runs)} of {cell.planned} seeds" for cell in table.cells if len(cell.runs) < cell.planned]


def counts(cells: Iterable[CellResult]) -> str:
    """n = 3, or n = 2 to 3."""
    found = sorted({len(cell.runs) for cell in cells if cell.runs})
    return f"n = {found[0]}" + (f" to {found[-1]}" if len(found) > 1 else "") if found else "n = 0"


@dataclass(frozen=True)
class Layout:
    """A table in two dimensions: cases down, values of the one key of its grid across."""

    key: str
    cases: list[str]
    values: list[Any]
    cells: Mapping[tuple[str, str], CellResult]  # (case, text of the value) -> cell

    def at(self, case: str, value: Any) -> CellResult | None:
        return self.cells.get((case, str(value)))


def layout(table: TableResult) -> Layout | None:
    """None where the grid has not exactly one key, or there are not several cases and several values."""
    keys = {tuple(cell.values) for cell in table.cells}
    if len(keys) != 1 or len(only := keys.pop()) != 1:
        return None
    key = only[0]
    cases = list(dict.fromkeys(cell.case for cell in table.cells))
    values = list({str(cell.values[key]): cell.values[key] for cell in table.cells}.values())
    if len(cases) < 2 or len(values) < 2:
        return None
    return Layout(key, cases, values, {(cell.case, str(cell.values[key])): cell for cell in table.cells})


def beside(tables: Sequence[TableResult]) -> list[tuple[str, list[CellResult | None]]]:
    """The cells of several tables side by side: a label, and the cell that each table has under it."""
    labels = dict.fromkeys(cell.label for table in tables for cell in table.cells)
    named = [{cell.label: cell for cell in table.cells} for table in tables]
    return [(label, [cells.get(label) for cells in named]) for label in labels]


Shares = dict[str, float]


def mask_shares(cell: CellResult) -> tuple[Shares, Shares]:
    """Where its masks lie, in percent, means over seeds: how much of each layer moves, and how much of what moves is of each kind of weight."""
    masks = [mask for run in cell.runs.values() if (mask := run.mask)]
    return (
        _means([{layer: active / eligible for layer, active, eligible in mask["by_layer"] if eligible} for mask in masks]),
        _means([{kind: row["share"] for kind, row in mask["composition"].items() if row["eligible"]} for mask in masks]),
    )


def _means(rows: Sequence[Shares]) -> Shares:
    """In percent, of the names that all rows have."""
    names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    return {name: 100 * summarise([row[name] for row in rows]).mean for name in names}


def slug(text: str) -> str:
    """For names of files and LaTeX labels: a-z, 0-9 and hyphens."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:48].strip("-") or "x"


def unique(names: Sequence[str]) -> list[str]:
    """Slugs that differ: the second of a kind ends in -2."""
    found: list[str] = []
    for name in map(slug, names):
        number, own = 2, name
        while own in found:
            number, own = number + 1, f"{name}-{number}"
        found.append(own)
    return found


def table_stems(gathered: Gathered) -> list[list[str]]:
    """Of every study, a name for each of its tables' files."""
    flat = iter(unique([f"{study.name} {table.name}" for study in gathered.studies for table in study.tables]))
    return [[next(flat) for _ in study.tables] for study in gathered.studies]


# --- Markdown


def escaped(text: str) -> str:
    """Text that Markdown shows as it is; an underscore inside a word needs nothing."""
    text = re.sub(r"([\\`*|$~\[\]<>])", r"\\\1", " ".join(text.split())).replace("&", "&amp;")
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def rows_text(header: Sequence[str], rows: Iterable[Sequence[str]], right: int = 1) -> str:
    """A table whose columns from `right` on stand at the right."""
    rule = ["---" if i < right else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def markdown_report(gathered: Gathered) -> str:
    """All tables, differences, analyses, failures and searches. Accuracies are in percent, differences in points, MB are 10^6 bytes."""
    parts = [
        "# Results",
        "Mean ± standard deviation over seeds [95 % t interval of the mean] (n = seeds). Accuracies in percent; MB are 10^6 bytes.",
    ]
    for study in gathered.studies:
        parts += _study(study)
    for search in gathered.searches:
        parts += _search(search)
    return "\n\n".join(filter(None, parts)) + "\n"


def _study(study: StudyResult) -> list[str]:
    parts = [f"## {escaped(shown(study.name))} ({escaped(shown(study.place))})", escaped(study.question)]
    for table in study.tables:
        parts += [f"### {escaped(shown(table.name))}", escaped(table.question) if table.question != study.question else ""]
        parts += [_cells(table), *_paired(table), *_tuned(study, table), _list("Seeds that are not finished", missing(table))]
    kinds = dict.fromkeys(analysis.kind for analysis in study.analyses)
    parts += [part for kind in kinds for group in of_seeds(study, kind) for part in _analyses(group)]
    parts += [part for rows in over_seeds(study).values() if max(row.n for row in rows) > 1 for part in _measured(rows)]
    return [*parts, _list("Failed", [f"{of} ({run}): {why}" if of else f"{run}: {why}" for of, run, why in failed(study)])]


def failed(study: StudyResult) -> list[tuple[str, str, str]]:
    """Of every failure what it is of (cell or analysis, and seed; "" where the plan no longer has it), its run or file, and why."""
    found = []
    for name, why in study.failures.items():
        label, seed = study.planned.get(name, ("", 0))
        found.append((f"{shown(label)}, seed {seed}" if name in study.planned else "", name, placeless(why)))
    return found


def tuned_rows(study: StudyResult, table: TableResult) -> list[list[str]]:
    """cell, key, chosen value (and whether it is the last on its side, or beside one that fails), and what was tried with its validation accuracy."""
    return [
        [
            shown(each.label),
            each.key,
            NOTHING if each.value is None else f"{each.value:g}{END if each.at_an_end else ''}{EDGE if each.at_an_edge else ''}",
            ", ".join(f"{value:g}: {'failed' if score is None else value_text(score)}" for value, score in each.tried),
        ]
        for each in study.tuned
        if each.table == table.name and each.tried
    ]


END, EDGE = " (an end)", " (an edge)"
TUNED = (
    "Chosen on validation in short runs, n = 1 each; the test set was not read "
    "(an end: nothing was tried beyond it; an edge: a neighbour failed or has less than half of its accuracy):"
)


def _tuned(study: StudyResult, table: TableResult) -> list[str]:
    rows = [[escaped(text) for text in row] for row in tuned_rows(study, table)]
    return [TUNED, rows_text(["cell", "key", "value", "tried"], rows, right=4)] if rows else []


def _list(title: str, lines: Sequence[str]) -> str:
    return f"{title}:\n\n" + "\n".join(f"- {escaped(line)}" for line in lines) if lines else ""


def _cells(table: TableResult) -> str:
    aim = f"{100 * table.aim:.2f} %" if table.aim is not None else "the target"
    header = ["cell", "test accuracy", "validation accuracy", "MB up", f"rounds to {aim}", f"MB up to {aim}", "reached"]
    rows = []
    for cell in table.cells:
        cost, said = reached(table, cell)
        full = [cell.summary("test_accuracy"), cell.summary("val_accuracy")]
        sent, rounds, sent_to = cell.summary("bytes_up"), cost.get("rounds"), cost.get("bytes_up")
        rows.append(
            [
                escaped(shown(cell.label)),
                *(s.text() if s else NOTHING for s in full),
                _mean(sent, MB),
                _took(rounds, 1),
                _took(sent_to, MB),
                said or NOTHING,
            ]
        )
    under = (
        f"\n\nThe target is {aim_text(table)}; rounds and MB are those of the first evaluation that reaches it. {looked(table)}".rstrip()
        if table.aim is not None
        else ""
    )
    if not table.sends:
        header, rows = header[:3], [row[:3] for row in rows]
    for name in table.further_metrics:
        header.append(escaped(name.removeprefix("test_")))
        for row, cell in zip(rows, table.cells, strict=True):
            row.append(s.text() if (s := cell.summary(name)) else NOTHING)
    return rows_text(header, rows) + (under if table.sends else "")


def _mean(summary: Summary | None, scale: float) -> str:
    """Of a cost, whose t interval may well hold numbers below 0."""
    return NOTHING if summary is None else f"{with_sd(summary, scale, 1)} (n = {summary.n})"


def _took(took: Took | None, scale: float) -> str:
    return NOTHING if took is None else f"{took.text(scale)} (n = {took.found.n})"


def _paired(table: TableResult) -> list[str]:
    found = table.comparisons()
    if not found:
        return [_list(f"No seed shared with {escaped(shown(table.compared_with))}", [shown(label) for label in table.unshared()])]
    header = ["cell", "difference", "95 % interval", "n", "p", "p (Holm)"]
    rows = [
        [
            escaped(shown(c.name_b)),
            f"{100 * c.difference:+z.2f}",
            interval(c.low, c.high),
            str(c.n),
            p_text(c.p),
            p_text(c.p_adjusted),
        ]
        for c in found
    ]
    title = f"Test accuracy minus that of {escaped(shown(table.compared_with))}, in points, paired over the n seeds that both have:"
    return [title, rows_text(header, rows), _list("No seed shared with it", [shown(label) for label in table.unshared()])]


def sweep_text(found: Mapping[str, Any]) -> str:
    """What an α sweep or a line between models came to, of one seed."""
    chosen, start, end = found["chosen"], found["start"], found["end"]
    return (
        f"α = {chosen['alpha']:g} chosen on validation ({100 * chosen['val_accuracy']:.2f} %): test {100 * chosen['test_accuracy']:.2f} %; "
        f"α = {start['alpha']:g}: {100 * start['test_accuracy']:.2f} %; α = {end['alpha']:g}: {100 * end['test_accuracy']:.2f} %"
    )


def forget_text(client: Mapping[str, Any]) -> str:
    before, after = client["before"], client["after"]
    classes = ", ".join(map(str, client["classes"][:4])) + (", …" if len(client["classes"]) > 4 else "")
    return (
        f"client {client['client']} ({classes}), α = {after['alpha']:g}: test accuracy on its classes "
        f"{100 * before['test_target']:.1f} to {100 * after['test_target']:.1f} %, on all others "
        f"{100 * before['test_control']:.1f} to {100 * after['test_control']:.1f} %"
        + "".join(
            f"; {said} {100 * client[key]['test_target']:.1f} and {100 * client[key]['test_control']:.1f} %"
            for key, said in BESIDE.items()
            if client.get(key)
        )
    )


def vector_names(analysis: Analysis) -> list[str]:
    """What interfered, by labels of cells where it is cells, by client where it is clients."""
    names = [str(name) for name in analysis.found["names"]]
    return [shown(label) for label in analysis.labels] if len(analysis.labels) == len(names) else names


def interference_texts(analysis: Analysis) -> list[str]:
    called = dict(zip(map(str, analysis.found["names"]), vector_names(analysis), strict=True))
    return [
        f"{called[pair['a']]} and {called[pair['b']]}: cosine {pair['cosine']:.3f}, sign conflict {pair['sign_conflict']:.3f}, "
        f"drift ratio {pair['drift_ratio']:.3f}"
        for pair in analysis.found["pairs"]
    ]


def _measured(found: Sequence[Measured]) -> list[str]:
    kind = found[0].kind
    return [f"### {TITLES[kind]}, over seeds", f"Mean ± standard deviation over n seeds. {UNITS[kind]}", measured_table(found)]


def measured_table(found: Sequence[Measured]) -> str:
    """What analyses of one kind came to, a row for the cells that each is of."""
    heads = shared_heads(found)
    rows = [[escaped(shown(row.label)), *(with_sd(row.numbers.get(key), row.scale(key)) for key in heads), str(row.n)] for row in found]
    return rows_text(["", *heads.values(), "n"], rows)


def _analyses(group: Sequence[Analysis]) -> list[str]:
    """Analyses of the same, one a seed."""
    if len(group) == 1:
        said, lines = f"One seed ({group[0].seed}), so n = 1 and no interval.", _lines(group[0])
    else:
        said, lines = "Seed by seed:", [f"seed {analysis.seed}: {line}" for analysis in group for line in _lines(analysis)]
    return [f"### {escaped(shown(titled(group[0])))}", said, "\n".join(f"- {escaped(line)}" for line in lines)]


def _lines(analysis: Analysis) -> list[str]:
    found = analysis.found
    notes = list(found.get("notes", []))
    if analysis.kind == "forget":
        lines = [forget_text(client) for client in found["clients"]]
        notes += [f"client {client['client']}: {note}" for client in found["clients"] for note in client.get("notes", [])]
    elif analysis.kind == "interference":
        lines = interference_texts(analysis)
    elif analysis.kind == "masks":
        lines = [f"intersection over union {found['iou']:.3f}; of random masks of these sizes {found['chance']:.3f}"]
    else:
        lines = [sweep_text(found)]
    return lines + [f"note: {placeless(note)}" for note in notes]


# --- searches


def params_text(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}" for key, value in params.items())


def best_trial(search: SearchResult) -> Mapping[str, Any] | None:
    return next((trial for trial in search.trials if trial["number"] == search.best), None)


def states_text(search: SearchResult) -> str:
    states = [str(trial["state"]) for trial in search.trials]
    return f"{len(states)} trials ({', '.join(f'{states.count(s)} {s}' for s in dict.fromkeys(states))})" if states else "no trials"


def value_text(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.2f}"


def _search(search: SearchResult) -> list[str]:
    best, default = best_trial(search), search.default
    rows = [["default", value_text(default.get("value")), escaped(placeless(params_text(default.get("params", {}))))]]
    if best is not None:
        rows.insert(0, [f"best (trial {best['number']})", value_text(best["value"]), escaped(placeless(params_text(best["params"])))])
    shared = f" All of `{placeless(' '.join(search.experiment)).replace('`', '')}`." if search.experiment else ""
    return [
        f"## Search: {escaped(search.name)}",
        escaped(search.question),
        f"{states_text(search)}, n = 1 run each.{shared} Chosen on validation; the test set was not read.",
        rows_text(["", "validation accuracy", "parameters"], rows),
    ]


# --- CSV

NUMBERS = ("test_accuracy", "val_accuracy", "rounds", "bytes_up", "bytes_down")


def csv_rows(gathered: Gathered) -> str:
    """One line a run of a table; a column for every key of a grid; empty where a run has no such thing. Fractions, not percent."""
    keys = list(dict.fromkeys(key for study in gathered.studies for table in study.tables for cell in table.cells for key in cell.values))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    runs = [run for study in gathered.studies for table in study.tables for cell in table.cells for run in cell.runs.values()]
    columns = [*NUMBERS, *further_metrics(runs)]
    writer.writerow(["study", "table", "case", *keys, "seed", "run", *columns])
    for study in gathered.studies:
        for table in study.tables:
            for cell in table.cells:
                for seed, run in sorted(cell.runs.items()):
                    values = [_plain(cell.values.get(key)) for key in keys]
                    numbers = [_plain(run.summary.get(key)) for key in columns]
                    writer.writerow([*map(_plain, (study.name, table.name, cell.case)), *values, seed, run.name, *numbers])
    return buffer.getvalue()


def _plain(value: Any) -> str:
    return "" if value is None else placeless(str(value))
