"""What a paper needs beside one table a file: the tables of a study side by side or below each other, the geometry of the clients' updates, and
every number as a macro, so that a sentence changes with the runs that it speaks of."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from fedlens.report.latex_tables import (
    ACROSS,
    GAP,
    NARROW,
    NO_VALUE,
    TableFile,
    entry,
    escape,
    label_column,
    marks,
    marks_text,
    mean,
    row,
    table_float,
)
from fedlens.report.markdown import (
    CLAIM,
    EDGE,
    END,
    GEOMETRY,
    LENGTH,
    beside,
    layout,
    mask_shares,
    shown,
    table_stems,
    tuned_rows,
    unique,
)
from fedlens.report.over_seeds import TITLES, UNITS, Measured, over_seeds, shared_heads
from fedlens.study.results import CellResult, Gathered, StudyResult, TableResult
from fedlens.study.statistics import Summary, compare, summarise

NUMBERS = "numbers"
AGREEMENT = ("cosine", "sign_conflict")  # the drift ratio follows from the cosine where updates are equally long
MACROS = r"""% Every number of the report: \lens{TABLE}{CELL} is the mean test accuracy in percent, \lens[KEY]{TABLE}{CELL} another number of that cell
% (mean, sd, n, low, high, val, lr; p, of its difference to the table's first cell; client_norm, cosine, sign_conflict, drift_ratio, means over
% rounds, and first cosine and so on in the first; share KIND, percent of its mask that is of this kind of weight: those that it has),
% \lens[minus OTHER]{TABLE}{CELL} what CELL has more than OTHER on the seeds that both have, with the 95 % interval of that,
% \lens[times OTHER]{TABLE}{CELL} how many times as long CELL's updates are (mean norm over rounds) as OTHER's,
% \lens[NUMBER]{STUDY-KIND}{CELLS} of analyses: KIND sweep or interpolate (start, end, chosen, alpha), interference (cosine, sign conflict, xi), masks (iou, chance),
% forget (target before, target after, others before, others after, target without, others without, target head, others head, alpha), each with sd as well,
% \lens[runs]{STUDY}{all}, \lens[trials]{STUDY}{all} (short runs to tune) and \lens[minutes]{STUDY}{all} (of both) those of a study. A name that is not here is an error, not a gap in the text.
\providecommand{\lens}[3][mean]{\ifcsname lens/#2/#3/#1\endcsname\csname lens/#2/#3/#1\endcsname
  \else\errmessage{no number #1 of #3 in #2: see tables/numbers.tex}\fi}"""


def across_tables(gathered: Gathered) -> Iterator[TableFile]:
    """Of every study its tables side by side where they have the same cells, below each other where they have not; of every table the geometry of
    its updates and what tuning tried."""
    stems, names = table_stems(gathered), unique([study.name for study in gathered.studies])
    for i, study in enumerate(gathered.studies):
        together = _alike(study)
        if together:
            yield _together(study, together, f"{names[i]}-together", i)
        if len(parts := [table for table in _tested(study) if table not in together]) > 1:
            yield _below(study, parts, f"{names[i]}-below", i)
        for j, table in enumerate(study.tables):
            cells = [cell for cell in table.cells if all(cell.over_rounds(key) for key in GEOMETRY)]
            if len(cells) > 1:
                yield _geometry(table, cells, f"{stems[i][j]}-geometry", i, j)
            if tuned := tuned_rows(study, table):
                yield _tuned(table, tuned, f"{stems[i][j]}-tuned", i, j)
        for kind, found in over_seeds(study).items():
            yield _measured(study, found, f"{names[i]}-{kind}", i)


def numbers(gathered: Gathered) -> str:
    """The file of macros."""
    lines = [MACROS]
    for study, name, stems in zip(gathered.studies, unique([s.name for s in gathered.studies]), table_stems(gathered), strict=True):
        seconds = [float(run.summary["seconds"]) for run in (*study.runs, *study.trials) if run.summary.get("seconds") is not None]
        lines += [_define(name, "all", "runs", str(len(study.runs))), _define(name, "all", "trials", str(len(study.trials)))]
        lines += [_define(name, "all", "minutes", f"{sum(seconds) / 60:.0f}")]
        for kind, measured in over_seeds(study).items():
            for each, key in zip(measured, unique([each.label for each in measured]), strict=True):
                lines += [_define(f"{name}-{kind}", key, what, text) for what, text in _of_measured(each).items()]
        for table, stem in zip(study.tables, stems, strict=True):
            against = {c.name_b: c for c in table.comparisons()}
            keys = dict(zip((cell.label for cell in table.cells), unique([cell.label for cell in table.cells]), strict=True))
            for cell, key in zip(table.cells, keys.values(), strict=True):
                found = _of_cell(cell) | {f"minus {keys[other]}": text for other, text in _minus(table, cell).items()}
                found |= {f"times {keys[other]}": text for other, text in _times(table, cell).items()}
                if cell.label in against and (p := against[cell.label].p_adjusted) is not None:
                    found["p"] = f"{p:.2g}"
                lines += [_define(stem, key, what, text) for what, text in found.items()]
    return "\n".join(lines) + "\n"


def _minus(table: TableResult, cell: CellResult) -> dict[str, str]:
    """Other cell -> what this one has more, in points on the seeds that both have, and the interval of that."""
    tested = {each.label: each.of("test_accuracy") for each in table.cells if each.of("test_accuracy")}
    found = {}
    for other in [label for label in tested if label != cell.label and cell.label in tested]:
        for c in compare({other: tested[other], cell.label: tested[cell.label]}):
            inside = "" if c.low is None or c.high is None else rf"\,[{100 * c.low:z.2f},\,{100 * c.high:z.2f}]"
            found[other] = f"${100 * c.difference:+z.2f}{inside}$"
    return found


def _times(table: TableResult, cell: CellResult) -> dict[str, str]:
    """Other cell -> how many times as long this one's updates are, to two digits."""
    lengths = {each.label: length.mean for each in table.cells if (length := each.over_rounds(LENGTH)) and length.mean > 0}
    if cell.label not in lengths:
        return {}
    return {other: f"{float(f'{lengths[cell.label] / length:.2g}'):g}" for other, length in lengths.items() if other != cell.label}


def _define(table: str, cell: str, key: str, text: str) -> str:
    return rf"\expandafter\gdef\csname lens/{table}/{cell}/{key}\endcsname{{{text}}}"


def _of_cell(cell: CellResult) -> dict[str, str]:
    found: dict[str, str] = {}
    if test := cell.summary("test_accuracy"):
        found |= {"mean": f"{100 * test.mean:.2f}", "n": str(test.n)}
        found |= {} if test.sd is None else {"sd": f"{100 * test.sd:.2f}"}
        found |= {} if test.low is None or test.high is None else {"low": f"{100 * test.low:.2f}", "high": f"{100 * test.high:.2f}"}
    if val := cell.summary("val_accuracy"):
        found["val"] = f"{100 * val.mean:.2f}"
    if rate := rate_of(cell):
        found["lr"] = _scientific(rate)
    if length := cell.over_rounds(LENGTH):
        found[LENGTH] = f"{length.mean:.2g}"
    found |= {f"share {kind}": f"{share:.0f}" for kind, share in mask_shares(cell)[1].items()}
    for key in GEOMETRY:
        if mean := cell.over_rounds(key):
            found |= {key: f"{mean.mean:z.2f}", f"first {key}": f"{_at_first(cell, key).mean:z.2f}"}
    return found


def _at_first(cell: CellResult, key: str) -> Summary:
    """What the first round has, over seeds."""
    return summarise([run.curve("round", key)[0][1] for run in cell.runs.values()])


def _of_measured(each: Measured) -> dict[str, str]:
    found = {"n": str(each.n)}
    for key, summary in each.numbers.items():
        scale, what = each.scale(key), key.replace("_", " ")
        found[what] = f"{scale * summary.mean:z.2f}"
        found |= {} if summary.sd is None else {f"{what} sd": f"{scale * summary.sd:z.2f}"}
    return found


def _measured(study: StudyResult, found: Sequence[Measured], name: str, number: int) -> TableFile:
    """What analyses of one kind came to: a row for the cells that each is of."""
    heads, kind = shared_heads(found), found[0].kind
    rows = [row(escape(shown(each.label)), *(_with_sd(each, key) for key in heads), str(each.n)) for each in found]
    caption = (
        rf"{escape(shown(study.name))}: {escape(TITLES[kind][0].lower() + TITLES[kind][1:])}. Mean $\pm$ standard deviation over $n$ seeds. "
        rf"{escape(UNITS[kind])}"
    )
    wide = len(heads) > NARROW
    columns = f"{label_column(0.85)}{label_column(0.7 if wide else 0.6) * len(heads)}r"
    text = table_float(name, caption, columns, [row("", *map(escape, heads.values()), "$n$")], rows, wide)
    return TableFile(name, text, f"tab:{name}", number, None, "measured", wide, 1.4 + 0.3 * len(rows))


def _with_sd(each: Measured, key: str) -> str:
    summary, scale = each.numbers.get(key), each.scale(key)
    if summary is None:
        return NO_VALUE
    return f"${scale * summary.mean:z.2f}" + ("$" if summary.sd is None else rf" \pm {scale * summary.sd:z.2f}$")


def rate_of(cell: CellResult) -> float | None:
    """The learning rate that all of its runs share; of a head alone none, as it takes no step."""
    settings = [run.config.get("optim") for run in cell.runs.values() if run.summary.get("steps") != 0]
    found = {float(optim["lr"]) for optim in settings if isinstance(optim, Mapping) and optim.get("lr") is not None}
    return found.pop() if len(found) == 1 else None


def _scientific(value: float) -> str:
    """1.2 · 10⁻³ as TeX sets it; plain from 0.01 up."""
    if value >= 0.01:
        return f"{value:g}"
    digits, power = f"{value:.2e}".split("e")
    return rf"${float(digits):g}{{\cdot}}10^{{{int(power)}}}$"


def _tested(study: StudyResult) -> list[TableResult]:
    """The tables without a grid of two dimensions that have test accuracies."""
    return [table for table in study.tables if layout(table) is None and any(cell.of("test_accuracy") for cell in table.cells)]


def _alike(study: StudyResult) -> list[TableResult]:
    """Those that share their cells' names with another one."""
    tested = _tested(study)
    shared = {
        id(table)
        for pair in combinations(tested, 2)
        if len({c.label for c in pair[0].cells} & {c.label for c in pair[1].cells}) > 1
        for table in pair
    }
    found = [table for table in tested if id(table) in shared]
    return found if len(found) <= ACROSS else []


def _together(study: StudyResult, tables: Sequence[TableResult], name: str, number: int) -> TableFile:
    """A row a cell, a column a table."""
    marked = [marks(table) for table in tables]
    rows = [
        row(escape(shown(label)), *(entry(cell, own) for cell, own in zip(cells, marked, strict=True))) for label, cells in beside(tables)
    ]
    said = [f"{escape(shown(table.name))}:{marks_text(table)}" for table in tables if table.comparisons()]
    caption = (
        rf"{escape(shown(study.name))}: test accuracy in percent, mean $\pm$ standard deviation over $n$ seeds; "
        rf"below it the 95\,\% $t$ interval of the mean and $n$. {' '.join(said)}"
    )
    wide = len(tables) > NARROW - 1
    head = [row("", *(escape(shown(table.name)) for table in tables))]
    text = table_float(name, caption, f"{label_column(1.0)}{'c' * len(tables)}", head, rows, wide, GAP)
    return TableFile(name, text, f"tab:{name}", number, None, "together", wide, 1.3 + 0.36 * len(rows))


def _below(study: StudyResult, tables: Sequence[TableResult], name: str, number: int) -> TableFile:
    """A row a cell under its table's name: accuracy, rate and how far clients move."""
    rows: list[str] = []
    for table in tables:
        marked, gap = marks(table), GAP if rows else ""
        rows.append(rf"{gap}\multicolumn{{5}}{{@{{}}l@{{}}}}{{\emph{{{escape(shown(table.name))}}}}} \\")
        for cell in table.cells:
            test, rate, length = cell.summary("test_accuracy"), rate_of(cell), cell.over_rounds(LENGTH)
            rows.append(
                row(
                    escape(shown(cell.label)),
                    str(test.n if test else 0),
                    mean(test, mark=marked.get(cell.label)),
                    _scientific(rate) if rate else NO_VALUE,
                    f"{length.mean:.2g}" if length else NO_VALUE,
                )
            )
    first = "first row of its case" if any(table.by_case for table in tables) else "first row of its part"
    caption = (
        rf"{escape(shown(study.name))}: test accuracy in percent, mean $\pm$ standard deviation over $n$ seeds; rate: of learning; length: of a client's update, mean over rounds. "
        rf"$\dagger$: differs from the {first}, paired over seeds, $p < {CLAIM:g}$ after Holm's correction in the part; bold: and is higher."
    )
    head = [row("", "$n$", r"mean $\pm$ sd", "rate", "length")]
    text = table_float(name, caption, f"{label_column(1.45)}ccrr", head, rows, wide=False)
    return TableFile(name, text, f"tab:{name}", number, None, "below", False, 1.3 + 0.2 * len(rows))


def _geometry(table: TableResult, cells: Sequence[CellResult], name: str, study: int, number: int) -> TableFile:
    """Agreement of a round's updates: at the first round, and the mean over all."""
    singles: dict[str, list[str]] = {}  # columns that stand for themselves: head -> entries
    if len({rate_of(cell) for cell in cells}) > 1:
        singles["rate"] = [_scientific(rate) if (rate := rate_of(cell)) else NO_VALUE for cell in cells]
    if all(lengths := [cell.over_rounds(LENGTH) for cell in cells]):
        singles["length"] = [f"{length.mean:.2g}" for length in lengths if length]
    rows = []
    for i, cell in enumerate(cells):
        pairs = []
        for key in AGREEMENT:
            over_all = cell.over_rounds(key)
            pairs += [f"${_at_first(cell, key).mean:z.2f}$", f"${over_all.mean:z.2f}$" if over_all else NO_VALUE]
        rows.append(row(escape(shown(cell.label)), *(entries[i] for entries in singles.values()), *pairs))
    start = 2 + len(singles)
    spans = "".join(rf"\cmidrule(lr){{{start + 2 * k}-{start + 2 * k + 1}}}" for k in range(len(AGREEMENT)))
    heads = [rf"\multicolumn{{2}}{{c}}{{{GEOMETRY[key]}}}" for key in AGREEMENT]
    head = [row("", *singles, *heads), spans, row("", *("" for _ in singles), *(["first", "all"] * len(AGREEMENT)))]
    members = {int(m["clients"]) for cell in cells for run in cell.runs.values() for m in run.metrics if m.get("clients")}
    alone = ""
    if len(members) == 1 and (n := members.pop()) > 1:
        alone = f" {n} updates that have nothing in common would have a cosine of 0 and a sign conflict of about {(1 - n**-0.5) / 2:.2f}."
    caption = (
        f"{escape(shown(table.name))}: how the updates of a round's clients agree, on the coordinates that move; in the first round and on average "
        f"over all rounds, means over seeds{'; length: of an update, mean over rounds' if 'length' in singles else ''}.{alone}"
    )
    text = table_float(name, caption, f"{label_column(1.1)}{'r' * len(singles)}{'rr' * len(AGREEMENT)}", head, rows, wide=False)
    return TableFile(name, text, f"tab:{name}", study, number, "geometry", False, 1.2 + 0.25 * len(rows))


def _tuned(table: TableResult, found: Sequence[Sequence[str]], name: str, study: int, number: int) -> TableFile:
    """How every cell came to its value."""
    rows = [row(*map(escape, each)) for each in found]
    caption = (
        f"{escape(shown(table.name))}: values chosen on validation in short runs, one each ($n = 1$), and what was tried with its validation accuracy in percent; "
        f"the test set was not read.{' An end: nothing was tried beyond it.' if any(END in each[2] for each in found) else ''}"
        f"{' An edge: a neighbour failed or has less than half of its accuracy.' if any(EDGE in each[2] for each in found) else ''}"
    )
    columns = f"{label_column(1.4)}{label_column(0.8)}{label_column(1.1)}{label_column(3.2)}"
    text = table_float(name, caption, columns, [row("", "key", "value", "tried")], rows, wide=True)
    return TableFile(name, text, f"tab:{name}", study, number, "tuned", True, 1.0 + 0.3 * len(rows))
