"""Tables for papers: booktabs, each a file with its caption and label, to be \\input. Needs array, booktabs and amsmath."""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedlens.report.markdown import (
    CLAIM,
    MB,
    Layout,
    Took,
    aim_text,
    best_trial,
    grid_text,
    layout,
    looked,
    missing,
    p_text,
    params_text,
    placeless,
    reached,
    shown,
    states_text,
    table_stems,
    value_text,
)
from fedlens.study.results import CellResult, Gathered, SearchResult, TableResult
from fedlens.study.statistics import Comparison, Summary

GREEK = "alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon varphi chi psi omega"
CAPITALS = "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
SIGNS = "- pm times div cdot le ge ne approx to leftarrow infty Vert in surd partial circ"
IN_MATH = {
    **dict(zip("αβγδεζηθικλμνξπρστυφχψω", GREEK.split(), strict=True)),
    **dict(zip("ΓΔΘΛΞΠΣΦΨΩ", CAPITALS.split(), strict=True)),
    **dict(zip("−±×÷·≤≥≠≈→←∞‖∈√∂°", SIGNS.split(), strict=True)),
}
SUBSCRIPTS, SUPERSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)), dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True))
IN_TEXT = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_\allowbreak{}",  # long names may break there
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # at the beginning of a row it would be an option of the end of the row before
    "]": "{]}",
    "*": "{*}",  # the same
    "\u00a0": "~",
}
KNOWN = set("–—‘’“”…€†‡•™") | set(map(chr, range(0xA1, 0x180))) - set("ĦħĸĿŀŉŦŧſ\u00ad")  # to inputenc and T1
ROWS = 40  # a longer table goes on in another
NARROW = 3  # values across up to which a table fits one column
ACROSS = 6  # and two
NO_VALUE = "--"
GAP = "\\addlinespace[2pt]\n"  # between rows of two lines


def escape(text: str) -> str:
    """Text that LaTeX sets as it is, in one line. Letters that its fonts lack are spelt as U+…."""
    letters = "".join(_letter(letter) for letter in unicodedata.normalize("NFC", " ".join(text.split())))
    return re.sub(r"([-,'])(?=\1)", r"\1{}", letters)  # two hyphens are no dash, two commas no quotation mark


def _letter(letter: str) -> str:
    if letter in IN_TEXT:
        return IN_TEXT[letter]
    if letter in IN_MATH:
        name = IN_MATH[letter]
        return r"\ensuremath{-}" if name == "-" else rf"\ensuremath{{{'^' if name == 'circ' else ''}\{name}}}"
    if letter in SUBSCRIPTS:
        return rf"\ensuremath{{_{SUBSCRIPTS[letter]}}}"
    if letter in SUPERSCRIPTS:
        return rf"\ensuremath{{^{SUPERSCRIPTS[letter]}}}"
    if " " <= letter <= "~" or letter in KNOWN:
        return letter
    return "" if unicodedata.category(letter) in ("Cc", "Cf") else f"[U+{ord(letter):04X}]"


@dataclass(frozen=True)
class TableFile:
    """tables/NAME.tex."""

    name: str
    text: str
    label: str
    study: int | None  # its place among the studies; None: searches
    table: int | None
    kind: str  # cells, full, grid, paired, searches; together, geometry, measured, tuned (latex_across.py)
    wide: bool
    height: float  # inches, about


def latex_tables(gathered: Gathered) -> Iterator[TableFile]:
    """Of every table its cells with all that is known of them, in two dimensions where it has two, and differences to the first cell."""
    stems = table_stems(gathered)
    for i, study in enumerate(gathered.studies):
        for j, table in enumerate(study.tables):
            yield _cells(table, stems[i][j], i, j)
            yield _full(table, f"{stems[i][j]}-full", i, j)
            grid = layout(table)
            if grid and len(grid.values) <= ACROSS:
                yield _grid(table, grid, f"{stems[i][j]}-grid", i, j)
            if found := table.comparisons():
                yield _paired(table, found, f"{stems[i][j]}-paired", i, j)
    if gathered.searches:
        yield _searches(gathered.searches)


# --- numbers


def _number(text: str) -> str:
    return f"${text}$"


def mean(summary: Summary | None, scale: float = 100, digits: int = 2, mark: Comparison | None = None) -> str:
    if summary is None:
        return NO_VALUE
    text = f"{scale * summary.mean:z.{digits}f}" + ("" if summary.sd is None else rf" \pm {scale * summary.sd:z.{digits}f}")
    if mark is None:
        return _number(text)
    return _number(rf"\mathbf{{{text}}}^{{\dagger}}" if mark.difference > 0 else rf"{text}^{{\dagger}}")


def _took(took: Took | None, scale: float) -> str:
    if took is None:
        return NO_VALUE
    return _number(rf"\le {took.number(scale)}") if took.most else mean(took.found, scale, 1)


def _interval(low: float | None, high: float | None) -> str:
    return NO_VALUE if low is None or high is None else _number(f"[{100 * low:z.2f}, {100 * high:z.2f}]")


def _p(p: float | None) -> str:
    return "no test" if p is None else _number(p_text(p))


# --- floats


def table_float(name: str, caption: str, columns: str, head: Sequence[str], rows: Sequence[str], wide: bool, gap: str = "") -> str:
    """The environment, or several where the rows are many. `caption` is LaTeX, and so is `gap`, which stands between rows."""
    starred, parts = "table*" if wide else "table", []
    for start in range(0, max(1, len(rows)), ROWS):
        said = caption if not start else "Continued."
        label = rf"\label{{tab:{name}}}" if not start else ""
        lines = [
            rf"\begin{{{starred}}}[{'t' if wide else '!htb'}]",
            rf"\caption{{{said}}}{label}",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
            r"\toprule",
            *head,
            r"\midrule",
            ("\n" + gap).join(rows[start : start + ROWS]),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\end{{{starred}}}",
        ]
        parts.append("\n".join(lines))
    return "\n".join(parts) + "\n"


def row(*entries: str) -> str:
    return " & ".join(entries) + r" \\"


def _stacked(above: str, below: str) -> str:
    """An entry of two lines, beside a label that may have more."""
    return rf"\begin{{tabular}}[t]{{@{{}}c@{{}}}}{above}\\{{\scriptsize {below}}}\end{{tabular}}" if below else above


def label_column(inches: float) -> str:
    return rf">{{\raggedright\arraybackslash}}p{{{inches}in}}"


def marks(table: TableResult) -> dict[str, Comparison]:
    """label -> its difference to the cell it is compared with, where that is below 5 % after correction."""
    return {c.name_b: c for c in table.comparisons() if c.p_adjusted is not None and c.p_adjusted < CLAIM}


def marks_text(table: TableResult) -> str:
    found, marked = table.comparisons(), marks(table)
    if not found:
        return ""
    first, limit = escape(shown(table.compared_with)), f"$p < {CLAIM:g}$"
    if not marked:
        return f" No paired difference to {first} has {limit} after Holm's correction."
    said = rf" $\dagger$: differs from {first} (paired over seeds, {limit} after Holm's correction)"
    return said + ("; bold: and is higher." if any(c.difference > 0 for c in marked.values()) else ".")


def missing_text(table: TableResult) -> str:
    found = missing(table)
    return f" Seeds not finished: {escape('; '.join(found))}." if found else ""


def _cells(table: TableResult, name: str, study: int, number: int) -> TableFile:
    """Two lines a cell: means; below them the interval, and how many seeds reached the target."""
    marked, rows = marks(table), []
    for cell in table.cells:
        cost, said = reached(table, cell)
        test, sent, target = cell.summary("test_accuracy"), cell.summary("bytes_up"), cost.get("bytes_up")
        inside = _interval(test.low, test.high) if test and test.low is not None else ""
        traffic = [
            _number(f"{MB * sent.mean:.1f}") if sent else NO_VALUE,
            _stacked(_took(cost.get("rounds"), 1), said.removesuffix(" reached it")),
            _number((r"\le " if target.most else "") + target.number(MB)) if target else NO_VALUE,
        ]
        accuracy = _stacked(mean(test, mark=marked.get(cell.label)), inside)
        rows.append(row(escape(shown(cell.label)), str(test.n if test else 0), accuracy, *(traffic if table.sends else [])))
    head = [row("", "$n$", "test accuracy")]
    if table.sends:
        head = [
            r" & & test accuracy & & \multicolumn{2}{c}{to the target} \\",
            r"\cmidrule(l){5-6}",
            row("", "$n$", r"mean $\pm$ sd", "MB up", "rounds", "MB up"),
        ]
    caption = (
        rf"{escape(shown(table.name))}: test accuracy in percent, mean $\pm$ standard deviation over $n$ seeds, below it the 95\,\% $t$ interval of the mean"
        f"{_aim(table)}{marks_text(table)}{missing_text(table)}"
    )
    text = table_float(name, caption, f"{label_column(0.8)}{'cccrr' if table.sends else 'cc'}", head, rows, wide=False, gap=GAP)
    return TableFile(name, text, f"tab:{name}", study, number, "cells", False, 1.6 + 0.3 * len(rows))


def _aim(table: TableResult) -> str:
    """What the columns of traffic are; the end of the sentence before where there are none."""
    if not table.sends:
        return "."
    said = (
        f" The target is {escape(aim_text(table))}; rounds and MB are those of the first evaluation that reaches it, means over the seeds that did, k of n. "
        f"{escape(looked(table))}"
    )
    return "; MB sent by all clients." + (said if table.aim is not None and any(reached(table, cell)[1] for cell in table.cells) else "")


def _full(table: TableResult, name: str, study: int, number: int) -> TableFile:
    """All that is known of each cell, in one line."""
    marked, rows = marks(table), []
    for cell in table.cells:
        cost, said = reached(table, cell)
        test, val = cell.summary("test_accuracy"), cell.summary("val_accuracy")
        other = rf", $n={val.n}$" if val and test and val.n != test.n else ""
        traffic = [
            mean(cell.summary("bytes_up"), MB, 1),
            _took(cost.get("rounds"), 1),
            _took(cost.get("bytes_up"), MB),
            said.removesuffix(" reached it") or NO_VALUE,
        ]
        rows.append(
            row(
                escape(shown(cell.label)),
                str(test.n if test else 0),
                mean(test, mark=marked.get(cell.label)),
                _interval(test.low, test.high) if test else NO_VALUE,
                mean(val) + other,
                _interval(val.low, val.high) if val else NO_VALUE,
                *(traffic if table.sends else []),
            )
        )
    spans = [r"\multicolumn{2}{c}{test accuracy}", r"\multicolumn{2}{c}{validation accuracy}"]
    under = [r"mean $\pm$ sd", r"95\,\% interval"] * 2
    if table.sends:
        spans, under = [*spans, "", r"\multicolumn{3}{c}{to the target}"], [*under, "MB up", "rounds", "MB up", "reached"]
    head = [
        row("", "", *spans),
        r"\cmidrule(lr){3-4}\cmidrule(lr){5-6}" + (r"\cmidrule(l){8-10}" if table.sends else ""),
        row("", "$n$", *under),
    ]
    caption = (
        rf"{escape(shown(table.name))}: accuracies in percent, mean $\pm$ standard deviation over $n$ seeds, and the 95\,\% $t$ interval of the mean"
        f"{_aim(table)}{marks_text(table)}{missing_text(table)}"
    )
    text = table_float(name, caption, f"{label_column(1.35)}crcrc{'rrrr' if table.sends else ''}", head, rows, wide=True)
    return TableFile(name, text, f"tab:{name}", study, number, "full", True, 1.1 + 0.17 * len(rows))


def _grid(table: TableResult, grid: Layout, name: str, study: int, number: int) -> TableFile:
    """Two lines a case: mean ± sd; the interval and n."""
    marked, rows = marks(table), []
    for case in grid.cases:
        rows.append(row(escape(shown(case)), *(entry(grid.at(case, value), marked) for value in grid.values)))
    key = escape(grid.key.rsplit(".", 1)[-1])
    across = len(grid.values)
    head = [
        rf" & \multicolumn{{{across}}}{{c}}{{{key}}} \\",
        rf"\cmidrule(l){{2-{across + 1}}}",
        row("", *(escape(grid_text(value)) for value in grid.values)),
    ]
    caption = (
        rf"{escape(shown(table.name))}: test accuracy in percent, mean $\pm$ standard deviation over $n$ seeds; "
        rf"below it the 95\,\% $t$ interval of the mean and $n$.{marks_text(table)}{missing_text(table)}"
    )
    wide = across > NARROW
    text = table_float(name, caption, f"{label_column(1.0 if wide else 0.5)}{'c' * across}", head, rows, wide, GAP)
    return TableFile(name, text, f"tab:{name}", study, number, "grid", wide, 1.2 + 0.36 * len(rows))


def entry(cell: CellResult | None, marked: Mapping[str, Comparison]) -> str:
    found = cell.summary("test_accuracy") if cell else None
    if cell is None or found is None:
        return _stacked(NO_VALUE, "$n{=}0$")
    inside = "" if found.low is None else _interval(found.low, found.high) + " "
    return _stacked(mean(found, mark=marked.get(cell.label)), f"{inside}$n{{=}}{found.n}$")


def _paired(table: TableResult, found: Sequence[Comparison], name: str, study: int, number: int) -> TableFile:
    rows = [
        row(
            escape(shown(c.name_b)),
            _number(f"{100 * c.difference:+z.2f}"),
            _interval(c.low, c.high),
            str(c.n),
            _p(c.p),
            _p(c.p_adjusted),
        )
        for c in found
    ]
    alone = [shown(label) for label in table.unshared()]
    caption = (
        f"{escape(shown(table.name))}: test accuracy minus that of {escape(shown(table.compared_with))}, in points, over the $n$ seeds that both have; "
        r"95\,\% $t$ interval; $p$ of the paired $t$ test, and after Holm's correction."
        + (f" No seed shared: {escape(', '.join(alone))}." if alone else "")
    )
    head = [row("", "difference", r"95\,\% interval", "$n$", "$p$", r"$p_{\text{Holm}}$")]
    text = table_float(name, caption, f"{label_column(0.85)}rcrrr", head, rows, wide=False)
    return TableFile(name, text, f"tab:{name}", study, number, "paired", False, 1.0 + 0.2 * len(rows))


def _searches(searches: Sequence[SearchResult]) -> TableFile:
    rows = []
    for search in searches:
        best, default = best_trial(search), search.default
        rows += [
            row(
                escape(search.name),
                escape(states_text(search)),
                "best",
                value_text(best["value"]).replace("—", NO_VALUE) if best else NO_VALUE,
                escape(placeless(params_text(best["params"]))) if best else NO_VALUE,
            ),
            row(
                "",
                "",
                "default",
                value_text(default.get("value")).replace("—", NO_VALUE),
                escape(placeless(params_text(default.get("params", {})))),
            ),
        ]
    caption = r"Searches over hyper-parameters: validation accuracy in percent, one run each ($n = 1$, so no interval); the test set was not read."
    head = [row("search", "", "", "validation", "parameters")]
    text = table_float("searches", caption, f"{label_column(1.1)}{label_column(1.3)}lr{label_column(2.9)}", head, rows, wide=True)
    return TableFile("searches", text, "tab:searches", None, None, "searches", True, 1.0 + 0.3 * len(rows))
