"""A report's contents, built once from results: per study question, answer, figures and tables; what few readers need is folded away."""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from fedlens.report import answers, blocks, charts
from fedlens.report import over_seeds as views
from fedlens.report.answers import CLAIM, TEST, VALIDATION
from fedlens.report.blocks import NONE, Answer, Block, Chart, Details, Entry, Heading, Row, Table, clean, label, number, percent, stat
from fedlens.runs.store import read_environment
from fedlens.study.results import CellResult, Gathered, SearchResult, StudyResult, TableResult, Tuned
from fedlens.study.statistics import Summary, summarise

STORY = (  # the order of studies; others follow as they come
    *("handin", "six_models", "baselines", "curves", "schedules", "heterogeneity", "sparsity", "calibration", "strategies", "places"),
    *("layerscale", "clipping", "merging", "momentum", "algorithms", "arithmetic", "forgetting", "rates"),
)
MAIN = ("places", "strategies", "heterogeneity")  # the first of them gives a report its main figure
TITLE = "Federated fine-tuning under the lens of task arithmetic"
ACROSS = 6  # columns of values up to which a table fits a paper
MEANS = "mean ± standard deviation over n seeds, below it the 95 % t interval of the mean"
TRIED = (
    "values chosen on validation in short runs, one each (n = 1), and the validation accuracy of every value that was tried, in percent; the test set was "
    "not read. An end: nothing was tried beyond it. An edge: a neighbour failed, or has less than half of its accuracy"
)
ALONG = {"sweep": "alpha", "interpolate": "between"}  # analysis -> end of its chart's key
Columns = dict[str, Callable[[CellResult], Entry]]
Cells = Sequence[CellResult | None]
Marks = Mapping[str, str]  # label -> best or differs


def report(gathered: Gathered, title: str | None = None) -> blocks.Report:
    """Return the contents of a report."""
    named = zip(gathered.studies, blocks.unique([study.name for study in gathered.studies]), views.table_keys(gathered), strict=True)
    ordered = sorted(named, key=lambda each: STORY.index(each[0].name) if each[0].name in STORY else len(STORY))
    seen: set[str] = set()
    parts = {name: _study(study, name, keys, seen) for study, name, keys in ordered}
    main = next((parts[name] for name in MAIN if name in parts), next(iter(parts.values()), []))
    figure = [replace(block, key=f"main-{block.key}") for block in main if isinstance(block, Chart)][:1]
    first = [replace(next(b for b in part if isinstance(b, Answer)), part=f"study-{name}") for name, part in parts.items()]
    names = [label(name) for name in (*(study.name for study in gathered.studies), *(search.name for search in gathered.searches))]
    rest = [block for part in (*parts.values(), _searches(gathered.searches)) for block in part]
    return blocks.Report(
        title or (names[0] if len(names) == 1 else TITLE), [blocks.Text(_subject(gathered), soft=True), *first, *figure], rest
    )


def _subject(gathered: Gathered) -> str:
    """Return what was studied."""
    runs = [run for study in gathered.studies for run in study.runs]
    if not runs:
        return "Searches over hyper-parameters: one run per trial (n = 1), judged on validation; the test set was not read."
    named = [[clean(str(name)) for run in runs if (name := dict(run.config.get(part) or {}).get("name"))] for part in ("model", "data")]
    models, data = (" and ".join(dict.fromkeys(names)) or "unnamed" for names in named)
    cells = [len(cell.runs) for study in gathered.studies for table in study.tables for cell in table.cells]
    return (
        f"{len(runs)} finished run{'s' * (len(runs) > 1)} of {models} on {data}, {blocks.counts(cells)} per cell. Accuracies are in percent, as {MEANS}. "
        "Everything was chosen on validation images, never on the test set."
    )


# --- a study


def _study(study: StudyResult, name: str, keys: Sequence[str], seen: set[str]) -> list[Block]:
    """Return the part of a study: its answer, tables and analyses, then what is folded away. `seen`: partitions that other studies have shown."""
    command = "" if study.name == "runs" else f"fedlens study {shlex.quote(study.name)} --on {shlex.quote(study.place)}"
    parts = [_table(study, table, key, command) for table, key in zip(study.tables, keys, strict=True)]
    analyses = [block for kind in views.TITLES if views.of_seeds(study, kind) for block in _analyses(study, kind, name)]
    title = f"{label(study.name).replace('_', ' ')} ({label(study.place)})"
    story: list[Block] = [Heading(title, f"study-{name}"), _answer(study, parts, analyses, command)]
    for table, key, (answer, part) in zip(study.tables, keys, parts, strict=True):
        story += [Heading(label(table.name), key, 3), answer, *part] if len(parts) > 1 else part
    story += analyses
    alike = _alike(study)
    partitions = {json.dumps(run.partition.get("label_counts")): run for run in study.runs if run.partition}
    fresh = [run for counted, run in partitions.items() if counted not in seen]
    seen |= partitions.keys()
    sections: dict[str, Sequence[Block]] = {
        "Tables side by side": [_together(study, alike, f"{name}-together")] if alike else [],
        "Where the weights that train lie": _drawn(charts.masks(study, f"{name}-study-masks")),
        "Labels per client": _drawn(charts.partitions(fresh, f"{name}-study-partition")),
        "Failures": _failures(study, f"{name}-failures"),
    }
    for heading, shown in sections.items():
        story += [Heading(heading, blocks.slug(f"{name} {heading}"), 3), *shown] if shown else []
    others = [table for table in _flat(study) if table not in alike]
    folded: dict[str, Sequence[Block]] = {
        "All tables of this study in one": [_below(study, others, f"{name}-below")] if len(others) > 1 else [],
        "Runs, environment and command": [*([blocks.Code(command)] if command else []), *_runs(study, name)],
    }
    return [*story, *(Details(summary, inside) for summary, inside in folded.items() if inside)]


def _answer(study: StudyResult, parts: Sequence[tuple[Answer, Sequence[Block]]], analyses: Sequence[Block], command: str) -> Answer:
    """Return a study's own answer: of its analysis, else of its first table with a significant difference, else of its first table."""
    kinds = (views.TITLES["forget"], views.TITLES["sweep"])
    candidates = [block for block in analyses if isinstance(block, Answer) and block.question in kinds]
    own = [(answer, table) for (answer, shown), table in zip(parts, study.tables, strict=True) if shown]
    for answer, table in sorted(own, key=lambda each: ", significant" not in each[0].text):
        candidates.append(replace(answer, text=f"“{label(table.name)}”: {answer.text}") if len(parts) > 1 else answer)
    none = Answer("", f"No run is finished yet.{f' Run: {command}' if command else ''}")
    return replace((candidates or [none])[0], question=study.question or label(study.name))


def _drawn(*drawn: Chart | Sequence[Chart] | None) -> list[Chart]:
    lists = ([each] if isinstance(each, Chart) else each or [] for each in drawn)
    return [chart for each in lists for chart in each]


def _table(study: StudyResult, table: TableResult, key: str, command: str) -> tuple[Answer, list[Block]]:
    """Return answer, figures, table and details of a table."""
    tuned = [each for each in study.tuned if each.table == table.name and each.tried]
    question = table.question if table.question and table.question != study.question else f"{label(table.name)}: which is best?"
    own = f"{command} --table {shlex.quote(table.name)}" if command and len(study.tables) > 1 else command
    answer = answers.answer(table, question, tuned, own)
    if not any(cell.runs for cell in table.cells):
        return answer, []
    grid, cells = views.layout(table), _cells(table, key)
    shown = _grid(table, grid, f"{key}-grid") if grid and len(grid.values) <= ACROSS else cells
    repeated = any(len(cell.runs) > 1 for cell in table.cells)
    agreeing = [cell for cell in table.cells if all(cell.over_rounds(measure) for measure in views.AGREEMENT)]
    folded: dict[str, Sequence[Block]] = {
        "All numbers of this table": [cells] if shown is not cells else [],
        f"Differences to {_baseline(table)}": _paired(table, f"{key}-paired"),
        "Values tried in short runs": [*_drawn(charts.tried(tuned, f"{key}-tried")), _tuned(table, tuned, f"{key}-tuned")] if tuned else [],
        "Agreement of the clients' updates": [
            *_drawn(charts.lengths(table, f"{key}-length"), charts.drift(table, f"{key}-drift") if repeated else None),
            *([_geometry(table, agreeing, f"{key}-geometry")] if len(agreeing) > 1 else []),
        ],
        "Accuracy by what clients send": _drawn(charts.traffic(table, f"{key}-bytes")),
    }
    curves, scores = charts.curves(table, key), charts.scores(table, f"{key}-cells")
    compared = _drawn(charts.grid_map(table, f"{key}-map") if grid else None, scores)
    first, last = (compared, curves) if len(table.cells) > 1 else (curves, compared)  # of one cell, what it does along the way comes first
    return answer, [*first, shown, *last, *(Details(summary, inside) for summary, inside in folded.items() if inside)]


# --- tables of cells


def _rows(cells: Iterable[CellResult], columns: Columns) -> list[Row]:
    return [[label(cell.label), *(column(cell) for column in columns.values())] for cell in cells]


def _tested(cell: CellResult | None, marks: Marks) -> Entry:
    return _accuracy(cell.summary(TEST), marks.get(cell.label, "")) if cell else NONE


def _accuracy(summary: Summary | None, mark: str = "") -> Entry:
    """Return an accuracy in percent; its interval ends at the possible range."""
    if summary is not None and summary.low is not None and summary.high is not None:
        summary = replace(summary, low=max(0.0, summary.low), high=min(1.0, summary.high))
    return stat(summary, mark=mark)


def _baseline(table: TableResult) -> str:
    return table.compared_with if table.by_case else f"“{label(table.compared_with)}”"


def _marks(table: TableResult) -> Marks:
    """Mark the cells whose difference is significant: best if higher, else differs."""
    return {c.name_b: "best" if c.difference > 0 else "differs" for c in table.comparisons() if answers.significant(c)}


def _marks_text(table: TableResult) -> str:
    if all(c.p_adjusted is None for c in table.comparisons()):
        return ""
    marks = _marks(table).values()
    meanings = ["bold: significantly higher"] * ("best" in marks) + ["†: significantly lower"] * ("differs" in marks)
    text = f"{'; '.join(meanings)} than" if meanings else "no significant difference to"
    return f" {text[0].upper()}{text[1:]} {_baseline(table)} (paired over seeds, p < {CLAIM:g} after Holm's correction)."


def _caption(table: TableResult) -> str:
    lacking = [f"{label(cell.label)}: {len(cell.runs)} of {cell.planned}" for cell in table.cells if len(cell.runs) < cell.planned]
    missing = f" Seeds not finished: {'; '.join(lacking)}." if lacking else ""
    return f"{label(table.name)}: test accuracy in percent, {MEANS}.{_marks_text(table)}{missing}"


def _target(table: TableResult) -> str:
    """Return what rounds and bytes are counted to, and how often validation looked."""
    if table.aim is None or not table.looks:
        return ""
    gaps = sorted({max(b - a for a, b in pairwise([0.0, *looks])) for looks in table.looks})
    span = " to ".join(f"{gap:g}" for gap in dict.fromkeys((gaps[0], gaps[-1])))
    often = f"once, after {span}" if max(map(len, table.looks)) == 1 else f"every {span}" if span != "1" else "every"
    source = "" if table.target is not None else ", 95 % of the best cell's mean"
    bound = " ≤: a seed had reached it at the first evaluation." if any(table.at_first(cell) for cell in table.cells) else ""
    return f" Target: {percent(table.aim)} % validation accuracy{source}; evaluated {often} round{'s' * (span != '1')}.{bound}"


def _cells(table: TableResult, key: str) -> Table:
    """Return all numbers of every cell."""
    marks, columns = _marks(table), Columns(n=_seeds)
    if any(cell.of(TEST) for cell in table.cells):
        columns["test accuracy, %"] = lambda cell: _tested(cell, marks)
    columns["validation accuracy, %"] = lambda cell: _accuracy(cell.summary(VALIDATION))
    if table.sends:
        columns["sent by clients"] = lambda cell: _amount(cell.summary("bytes_up"), blocks.size)
        columns["rounds to target"] = lambda cell: _took(table, cell, "rounds", "{:.1f}".format)
        columns["sent to target"] = lambda cell: _took(table, cell, "bytes_up", blocks.size)
        columns["reached by"] = lambda cell: _reached(table, cell) if cell.of("bytes_up") else NONE
    for name in table.further_metrics:
        columns[f"{name.removeprefix('test_')}, %"] = lambda cell, name=name: stat(cell.summary(name))  # type: ignore[misc]
    caption = _caption(table) + _target(table) * table.sends
    return Table(key, caption, ["", *columns], _rows(table.cells, columns), "cells", table.sends)


def _seeds(cell: CellResult) -> Entry:
    return Entry(f"{len(cell.runs)}{f' of {cell.planned}' * (len(cell.runs) < cell.planned)}", "", len(cell.runs))


def _rate(cell: CellResult) -> Entry:
    return number("{:.3g}", views.rate_of(cell))


def _took(table: TableResult, cell: CellResult, what: str, text: Callable[[float], str]) -> Entry:
    """Return rounds or bytes to the target over the seeds that reached it; an upper bound if a seed had at the first evaluation."""
    values = table.cost(cell)[what]
    return _amount(summarise(values) if values else None, text, "≤ " * table.at_first(cell))


def _reached(table: TableResult, cell: CellResult) -> Entry:
    reached = len(table.cost(cell)["rounds"])
    return Entry(f"{reached} of {len(cell.runs)}", "", reached)


def _amount(summary: Summary | None, text: Callable[[float], str], bound: str = "") -> Entry:
    if summary is None:
        return NONE
    spread = f" ± {text(summary.sd)}" if summary.sd and not bound else ""
    return Entry(f"{bound}{text(summary.mean)}{spread}".replace(".0 ", " ").removesuffix(".0"), f"n = {summary.n}", summary.mean)


def _matrix(key: str, caption: str, header: Sequence[str], rows: Iterable[tuple[str, Cells]], marks: Iterable[Marks], kind: str) -> Table:
    """Return test accuracies in two dimensions; `marks`: one mapping per column."""
    own = list(marks)
    entries = [[Entry(label(name)), *map(_tested, cells, own)] for name, cells in rows]
    return Table(key, caption, ["", *header], entries, kind, len(header) > ACROSS // 2)


def _grid(table: TableResult, grid: views.Layout, key: str) -> Table:
    """Return cases down and values across."""
    header = [f"{grid.key.rsplit('.', 1)[-1]} {views.grid_text(value)}" for value in grid.values]
    rows = [(case, [grid.at(case, value) for value in grid.values]) for case in grid.cases]
    return _matrix(key, _caption(table), header, rows, [_marks(table)] * len(header), "grid")


def _flat(study: StudyResult) -> list[TableResult]:
    """Return the tables without a grid of two dimensions that have test accuracies."""
    return [table for table in study.tables if views.layout(table) is None and any(cell.of(TEST) for cell in table.cells)]


def _alike(study: StudyResult) -> list[TableResult]:
    """Return the tables that share several cells' names with another one; none if they are too many for a paper."""
    flat = [({cell.label for cell in table.cells}, table) for table in _flat(study)]
    alike = [table for names, table in flat if any(len(names & others) > 1 for others, other in flat if other is not table)]
    return alike if len(alike) <= ACROSS else []


def _together(study: StudyResult, tables: Sequence[TableResult], key: str) -> Table:
    """Return the cells of all tables down and the tables across."""
    differing = " ".join(f"{label(table.name)}:{text}" for table in tables if (text := _marks_text(table)))
    caption = f"{label(study.name)}: test accuracy in percent, {MEANS}. {differing}".strip()
    return _matrix(key, caption, [label(table.name) for table in tables], views.beside(tables), map(_marks, tables), "together")


def _below(study: StudyResult, tables: Sequence[TableResult], key: str) -> Table:
    """Return the tables below each other, each under a row with its name: accuracy, learning rate, length of an update."""
    rows: list[Row] = []
    for table in tables:
        marks = _marks(table)
        columns: Columns = {
            "n": _seeds,
            "test accuracy, %": lambda cell, marks=marks: replace(_tested(cell, marks), below=""),  # type: ignore[misc]
            **{"rate": _rate, "length": _metric(views.LENGTH, "{:.2g}")},
        }
        rows += [[label(table.name), *[""] * len(columns)], *_rows(table.cells, columns)]
    first = "first row of its case" if any(table.by_case for table in tables) else "first row of its part"
    caption = (
        f"{label(study.name)}: test accuracy in percent, mean ± standard deviation over n seeds; the learning rate; the length of a client's update, mean over "
        f"rounds. Bold: significantly higher than the {first} (paired over seeds, p < {CLAIM:g} after Holm's correction); †: significantly lower."
    )
    return Table(key, caption, ["", *columns], rows, "below")


def _paired(table: TableResult, key: str) -> list[Table]:
    """Return the differences to the baseline cells."""
    alone, rows = ", ".join(label(name) for name in table.unshared()), []
    for c, pooled in zip(table.comparisons(), table.comparisons(pooled=True), strict=True):
        interval, wide = (
            NONE if d.low is None or d.high is None else Entry(f"[{percent(d.low)}, {percent(d.high)}]", "", d.low) for d in (c, pooled)
        )
        ps = (c.p, c.p_adjusted, pooled.p_adjusted)
        p, adjusted, of_pooled = (Entry("no test" if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}", "", p) for p in ps)
        difference = number("{:+z.2f}", 100 * c.difference)
        rows.append([Entry(label(c.name_b)), difference, interval, number("{}", c.n), p, adjusted, wide, of_pooled])
    caption = (
        f"{label(table.name)}: test accuracy minus that of {_baseline(table)}, in points, over the n seeds that both have; 95 % t interval; p of the paired "
        f"t test, and after Holm's correction. Pooled: unpaired, with the variance within cells pooled over the table.{f' No seed shared: {alone}.' if alone else ''}"
    )
    header = ["", "difference", "95 % interval", "n", "p", "p (Holm)", "pooled interval", "p, pooled (Holm)"]
    return [Table(key, caption, header, rows, "paired")] if rows or alone else []


def _geometry(table: TableResult, cells: Sequence[CellResult], key: str) -> Table:
    """Return how a round's updates agree: in the first round, and on average over all."""
    columns: Columns = {"rate": _rate, "length": _metric(views.LENGTH, "{:.2g}")}
    for measure in views.AGREEMENT:
        for when in ("first round", "all rounds"):
            columns[f"{measure.replace('_', ' ')}, {when}"] = _metric(measure, "{:z.2f}", when == "first round")
    members = {int(m["clients"]) for cell in cells for run in cell.runs.values() for m in run.metrics if m.get("clients")}
    n = members.pop() if len(members) == 1 else 0
    alone = f" {n} unrelated updates have a cosine of 0 and a sign conflict of about {(1 - n**-0.5) / 2:.2f}." if n > 1 else ""
    caption = f"{label(table.name)}: agreement of the updates of a round's clients on the weights that train, means over seeds.{alone}"
    return Table(key, caption, ["", *columns], _rows(cells, columns), "geometry")


def _metric(name: str, form: str, first: bool = False) -> Callable[[CellResult], Entry]:
    """Return the column of a metric of rounds: its mean over seeds, over all rounds or in the first one."""

    def column(cell: CellResult) -> Entry:
        if first:
            return number(form, fmean(run.curve("round", name)[0][1] for run in cell.runs.values()))
        return number(form, getattr(cell.over_rounds(name), "mean", None))

    return column


def _tuned(table: TableResult, tuned: Sequence[Tuned], key: str) -> Table:
    rows: list[Row] = []
    for each in tuned:
        chosen = blocks.NO_VALUE if each.value is None else f"{each.value:g}{' (an end)' * each.at_an_end}{' (an edge)' * each.at_an_edge}"
        tried = ", ".join(f"{value:g}: {'failed' if score is None else percent(score)}" for value, score in each.tried)
        rows.append([label(each.label), each.key, Entry(chosen, "", each.value), tried])
    return Table(key, f"{label(table.name)}: {TRIED}.", ["", "key", "value", "tried"], rows, "tuned", True)


# --- analyses, runs, searches


def _analyses(study: StudyResult, kind: str, name: str) -> list[Block]:
    """Return the analyses of one kind: figures, means over seeds, and every seed folded away."""
    groups, rows = views.of_seeds(study, kind), views.over_seeds(study)[kind]
    heads = _heads(views.HEADS[kind], [row.numbers for row in rows])
    entries: list[Row] = [
        [label(row.label), *(stat(row.numbers.get(key), row.scale(key)) for key in heads), number("{}", row.n)] for row in rows
    ]
    title = views.TITLES[kind]
    caption = f"{label(study.name)}, {title[0].lower()}{title[1:]}: {MEANS}. {views.UNITS}"
    means = Table(f"{name}-{kind}", caption, ["", *heads.values(), "n"], entries, "measured", len(heads) > ACROSS // 2)
    keyed = list(zip(groups, blocks.unique(f"{name} study {kind} {group[0].title}" for group in groups), strict=True))
    drawn: list[Chart | None] = []
    if kind in ALONG:
        drawn = [charts.along(groups, kind, f"{name}-study-{ALONG[kind]}")]
    elif kind == "interference":
        drawn = [charts.disentanglement(*each) for each in keyed]
    elif kind == "forget":
        drawn = [charts.forgotten_cost(groups, f"{name}-study-forgotten"), *(charts.forgetting(*each) for each in keyed)]
    folded = Details("Seed by seed", _seeds_of(study, kind, f"{name}-{kind}-seeds"))
    return [Heading(title, f"{name}-{kind}", 3), answers.measured(rows, title), *_drawn(*drawn), means, folded]


def _heads(heads: Mapping[str, str], measured: Sequence[Container[str]]) -> dict[str, str]:
    """Return number -> column of those numbers that were measured."""
    return {key: head for key, head in heads.items() if any(key in numbers for numbers in measured)}


def _seeds_of(study: StudyResult, kind: str, name: str) -> list[Block]:
    """Return every analysis of a kind, one row per pair of task vectors or client, and the notes."""
    measured = [(a, *each) for group in views.of_seeds(study, kind) for a in group for each in views.measurements(a)]
    heads = _heads(views.HEADS[kind] | views.FURTHER, [numbers for *_, numbers in measured])
    rows: list[Row] = [[label(of), number("{}", a.seed), *(_plain(numbers.get(key), key) for key in heads)] for a, of, numbers in measured]
    runs = {run.name: f"{label(cell.label)} (seed {seed})" for t in study.tables for cell in t.cells for seed, run in cell.runs.items()}
    notes = []
    for a in (a for a in study.analyses if a.kind == kind):
        parts = [("", a.found), *((f", client {client['client']}", client) for client in a.found.get("clients") or [])]
        for part, note in ((part, str(note)) for part, content in parts for note in content.get("notes") or []):
            named = next((note.replace(run, runs[run]) for run in runs if run in note), note)
            notes.append(f"{label(a.title)}, seed {a.seed}{part}: {clean(named)}")
    table = Table(name, f"{views.TITLES[kind]}: one analysis per row. {views.UNITS}", ["", "seed", *heads.values()], rows, "seeds")
    return [table, blocks.Items(notes)] if notes else [table]


def _plain(value: float | None, key: str) -> Entry:
    return number("{:.3g}", value) if key in views.PLAIN or value is None else Entry(percent(value), "", value)


def _failures(study: StudyResult, key: str) -> list[Table]:
    """Return what failed: the cell or analysis with its seed if the plan has it, the run or file, the reason."""
    planned = {run: f"{label(cell)}, seed {seed}" for run, (cell, seed) in study.planned.items()}
    rows = [[planned.get(run, run), run if run in planned else blocks.NO_VALUE, clean(why)] for run, why in study.failures.items()]
    return [Table(key, "What failed, and why.", ["", "run or file", "reason"], rows, "failures")] if rows else []


def _runs(study: StudyResult, name: str) -> list[Block]:
    """Return the finished runs, and where they ran."""
    environments = [read_environment(run.path) for run in study.runs]
    facts = {key: sorted({str(each[key]) for each in environments if each.get(key)}) for key in ("device", "torch", "python", "fedlens")}
    found = {run.path: (run, cell) for table in study.tables for cell in table.cells for run in cell.runs.values()}
    rows: list[Row] = []
    for run, cell in found.values():
        scores = [_plain(run.summary.get(key), key) for key in (TEST, VALIDATION)]
        rows.append([run.name, label(cell.label), number("{}", run.seed), *scores])
    header = ["run", "cell", "seed", "test accuracy, %", "validation accuracy, %"]
    where = blocks.Items([clean(f"{key}: {', '.join(values)}") for key, values in facts.items() if values])
    return [where, Table(f"{name}-runs", f"{label(study.name)}: its finished runs.", header, rows, "runs")] if rows else []


def _searches(searches: Sequence[SearchResult]) -> list[Block]:
    """Return the searches: best and default of all in one table, then each with its trials."""
    rows: list[Row] = []
    story: list[Block] = []
    for search, key in zip(searches, blocks.unique([f"search {search.name}" for search in searches]), strict=True):
        states = Counter(str(trial["state"]) for trial in search.trials)
        count = f"{len(search.trials)} trials ({', '.join(f'{n} {state}' for state, n in states.items())})" if states else "no trials"
        rows.append([label(search.name), count, f"best (trial {search.best})", *_trial(answers.best_trial(search) or {})])
        rows.append(["", "", "default", *_trial(search.default)])
        story += [Heading(f"Search {label(search.name)}", key, 3), answers.search(search), *_drawn(charts.trials(search, f"{key}-trials"))]
        shared = [blocks.Text(clean(f"All trials share: {', '.join(search.experiment)}."), soft=True)] if search.experiment else []
        story.append(Details("Trials", [*shared, _trials(search, f"{key}-list")]))
    caption = "Searches over hyper-parameters: validation accuracy in percent, one run per trial (n = 1); the test set was not read."
    header = ["search", "trials", "", "validation accuracy, %", "parameters"]
    return [Heading("Searches", "searches"), Table("searches", caption, header, rows, "searches", True), *story] if rows else []


def _trials(search: SearchResult, key: str) -> Table:
    rows: list[Row] = []
    for trial in search.trials:
        values = [_value(trial["params"].get(name)) for name in search.keys]
        rows.append([f"trial {trial['number']}", trial["state"], *values, _plain(trial["value"], "value")])
    header = ["", "state", *search.keys, "validation accuracy, %"]
    return Table(key, f"{label(search.name)}: one run per trial (n = 1).", header, rows, "trials")


def _trial(trial: Mapping[str, Any]) -> tuple[Entry, str]:
    """Return validation accuracy and parameters."""
    params = [f"{name} = {_value(value).text}" for name, value in trial.get("params", {}).items()]
    return _plain(trial.get("value"), "value"), clean(", ".join(params))


def _value(value: Any) -> Entry:
    """Return the value of a parameter."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return number("{:.4g}", value) if value is None or numeric else Entry(clean(str(value)))
