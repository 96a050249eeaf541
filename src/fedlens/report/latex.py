"""Tables and figures as LaTeX floats, every number of a report as a macro, and the PDF where TeX is installed."""

import logging
import math
import os
import re
import shutil
import subprocess
import tempfile
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedlens.errors import UserError
from fedlens.files import write_atomic
from fedlens.report.blocks import NO_VALUE, Chart, Entry, Table, unique
from fedlens.report.over_seeds import GEOMETRY, LENGTH, Measured, mask_shares, over_seeds, rate_of, table_keys
from fedlens.study.results import CellResult, Gathered, TableResult
from fedlens.study.statistics import Comparison, compare, summarise

log = logging.getLogger("fedlens")

PAPER = "paper.tex"
BREAK = "\\\\"
SECONDS = 300  # limit for one pass of TeX
LINES = 40  # a longer table continues in another float
COLUMN, PAGE = 234.0, 496.0  # widths in points: one column of a paper, and two
LETTER, SMALL, GAP = 4.1, 3.6, 6.0  # mean width of a letter in \footnotesize and \scriptsize, space between columns
NARROWEST, LONG = 60.0, 110.0  # a column of text is at least this wide; it breaks lines from this width on

GREEK = "alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon varphi chi psi omega"
SIGNS = "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega pm times div cdot le ge ne approx to leftarrow infty Vert in surd partial"
MATH = zip("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ±×÷·≤≥≠≈→←∞‖∈√∂", f"{GREEK} {SIGNS}".split(), strict=True)
# Long names may break at an underscore. A bracket or star at the beginning of a row would be an option of the row before.
TEXT = (
    r"\textbackslash{} \{ \} \$ \& \% \# \_\allowbreak{} \textasciitilde{} \textasciicircum{} \textless{} \textgreater{} \textbar{} "
    r"\textquotedbl{} \textasciigrave{} {[} {]} {*} ~ \ensuremath{-} \ensuremath{^-} \ensuremath{^\circ}"
)
LETTERS = {
    **{letter: rf"\ensuremath{{\{name}}}" for letter, name in MATH},
    **{letter: rf"\ensuremath{{_{i}}}" for i, letter in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **{letter: rf"\ensuremath{{^{i}}}" for i, letter in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **dict(zip('\\{}$&%#_~^<>|"`[]*\u00a0−⁻°', TEXT.split(), strict=True)),
}
KNOWN = set("–—‘’“”…€†‡•™") | set(map(chr, range(0xA1, 0x180))) - set("ĦħĸĿŀŉŦŧſ\u00ad")  # to inputenc and T1


# --- text


def escape(text: str) -> str:
    """Return text that LaTeX prints literally, in one line. Letters that its fonts lack become [U+…]."""
    letters = "".join(_letter(letter) for letter in unicodedata.normalize("NFC", " ".join(text.split())))
    return re.sub(r"([-,'])(?=\1)", r"\1{}", letters)  # two hyphens are no dash, two commas no quotation mark


def _letter(letter: str) -> str:
    if letter in LETTERS or " " <= letter <= "~" or letter in KNOWN:
        return LETTERS.get(letter, letter)
    return "" if unicodedata.category(letter) in ("Cc", "Cf") else f"[U+{ord(letter):04X}]"


def _caption(text: str, label: str) -> str:
    return rf"\caption{{{escape(text[:1].upper() + text[1:])}}}\label{{{label}}}"


# --- floats


def table_float(table: Table) -> str:
    """Return the environment of a table, or several if it has many rows. It needs array, booktabs and graphicx, and is never wider than the text."""
    table, parts = _alike(table), []
    columns, wide = _columns(table)
    starred, rows = "table*" if wide else "table", table.entries()
    gap = "\\addlinespace[2pt]\n" if any(entry.below for row in rows for entry in row) else ""
    step = LINES // min(LINES, max(_lines(table, columns), default=1))
    for start in range(0, max(1, len(rows)), step):
        lines = [
            rf"\begin{{{starred}}}[{'t' if wide else '!htb'}]",
            r"\caption{Continued.}" if start else _caption(table.caption, f"tab:{table.key}"),
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\sbox0{{\begin{{tabular}}{{@{{}}{''.join(columns)}@{{}}}}",
            r"\toprule",
            " & ".join(_title(i, table) for i in range(len(columns))) + r" \\",
            r"\midrule",
            ("\n" + gap).join(_row(row) for row in rows[start : start + step]),
            r"\bottomrule",
            r"\end{tabular}}\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
            rf"\end{{{starred}}}",
        ]
        parts.append("\n".join(lines))
    return "\n".join(parts) + "\n"


def height_of(table: Table) -> float:
    """Return the inches of column that a table takes without its caption, about."""
    columns, wide = _columns(_alike(table))
    return (1 + wide) * (0.5 + sum(0.14 * lines + 0.02 for lines in _lines(_alike(table), columns)))


def _lines(table: Table, columns: Sequence[str]) -> list[int]:
    """Return how many lines each row has, about."""
    widths = {i: float(match[1]) for i, kind in enumerate(columns) if (match := re.search(r"p\{(\d+)pt\}", kind))}
    broken = [[math.ceil(LETTER * len(row[i].text) / width) for i, width in widths.items()] for row in table.entries()]
    return [max([1 + any(entry.below for entry in row), *own]) for row, own in zip(table.entries(), broken, strict=True)]


def _alike(table: Table) -> Table:
    """Return a table whose entries all have the same n with that n in its caption only."""
    belows = [entry.below for row in table.entries() for entry in row if entry.below]
    ns = {match[0] if (match := re.search(r"n = \d+$", below)) else "" for below in belows}
    if len(ns) != 1 or "" in ns:
        return table
    n = ns.pop()
    rows = [[replace(entry, below=entry.below.removesuffix(n).rstrip(", ")) for entry in row] for row in table.entries()]
    return replace(table, rows=rows, caption=f"{table.caption} Everywhere {n}.")


def _widths(table: Table) -> list[float]:
    """Return how wide the entries of each column are, about, in points."""
    widths = [LETTER * max(map(len, [*name.split(), ""])) for name in table.header]
    for row in table.entries():
        if any(entry.text for entry in row[1:]):  # not the title of a group of rows
            widths = [max(width, LETTER * len(entry.text), SMALL * len(entry.below)) for width, entry in zip(widths, row, strict=True)]
    return widths


def _columns(table: Table) -> tuple[list[str], bool]:
    """Return the types of the columns, and whether the table takes both columns of a paper. Long text shares what other columns leave."""
    widths = _widths(table)
    flexible = {i: 1.05 * width for i, width in enumerate(widths) if width > (LONG if i else NARROWEST)}
    fixed = sum(width for i, width in enumerate(widths) if i not in flexible) + GAP * (len(widths) - 1)
    wanted, least = sum(flexible.values()), NARROWEST * len(flexible)
    wide = table.wide or COLUMN - fixed < min(wanted, least)
    share = min(1.0, max((PAGE if wide else COLUMN) - fixed, least) / max(wanted, 1))
    broken = {i: rf">{{\raggedright\arraybackslash}}p{{{share * width:.0f}pt}}" for i, width in flexible.items()}
    return [broken.get(i, "c" if i else "l") for i in range(len(widths))], wide


def _title(column: int, table: Table) -> str:
    """Return a column's title, in lines about as long as its entries."""
    lines = textwrap.wrap(table.header[column], max(4, int(_widths(table)[column] / LETTER)), break_long_words=False)
    if len(lines) < 2:
        return escape("".join(lines))
    return rf"\begin{{tabular}}[b]{{@{{}}c@{{}}}}{BREAK.join(map(escape, lines))}\end{{tabular}}"


def _row(row: Sequence[Entry]) -> str:
    if len(row) > 1 and row[0].text and not any(entry.text for entry in row[1:]):  # the title of a group of rows
        return rf"\multicolumn{{{len(row)}}}{{@{{}}l@{{}}}}{{\emph{{{escape(row[0].text)}}}}} \\"
    return " & ".join(map(_entry, row)) + r" \\"


def _entry(entry: Entry) -> str:
    """Return an entry in one line or two. `best` is bold; `differs` has a dagger."""
    text = _number(entry.text)
    text = rf"\textbf{{{text}}}" if entry.mark == "best" else text + r"\rlap{$^\dagger$}" * (entry.mark == "differs")
    return rf"\begin{{tabular}}[t]{{@{{}}c@{{}}}}{text}\\{{\scriptsize {_number(entry.below)}}}\end{{tabular}}" if entry.below else text


def _number(text: str) -> str:
    """Return an entry's text; a hyphen before a number is a minus."""
    return "--" if text == NO_VALUE else escape(re.sub(r"(?<![\w.)])-(?=\d)", "−", text))


def figure_float(chart: Chart) -> str:
    """Return the environment of a chart, whose PDF is in figures/."""
    starred, place = ("figure*", "t") if chart.wide else ("figure", "!htb")
    drawn = rf"\centering\includegraphics[width=\linewidth,height=0.4\textheight,keepaspectratio]{{figures/{chart.key}.pdf}}"
    return "\n".join([rf"\begin{{{starred}}}[{place}]", drawn, _caption(chart.caption, f"fig:{chart.key}"), rf"\end{{{starred}}}"]) + "\n"


# --- numbers


def numbers(gathered: Gathered) -> str:
    """Return the file of macros."""
    found: list[tuple[str, str, Mapping[str, str]]] = []  # table, cell, its numbers
    for study, name, keys in zip(gathered.studies, unique(s.name for s in gathered.studies), table_keys(gathered), strict=True):
        seconds = [float(run.summary["seconds"]) for run in (*study.runs, *study.trials) if run.summary.get("seconds") is not None]
        counted = {"runs": str(len(study.runs)), "trials": str(len(study.trials)), "minutes": f"{sum(seconds) / 60:.0f}"}
        found.append((name, "all", counted))
        for kind, measured in over_seeds(study).items():
            cells = unique(each.label for each in measured)
            found += [(f"{name}-{kind}", cell, _of_measured(each)) for each, cell in zip(measured, cells, strict=True)]
        for table, key in zip(study.tables, keys, strict=True):
            found += [(key, cell, own) for cell, own in _of_table(table).items()]
    opening = (files("fedlens.report") / "assets" / "numbers.tex").read_text(encoding="utf-8").rstrip()
    macros = [
        rf"\expandafter\gdef\csname lens/{table}/{cell}/{what}\endcsname{{{text}}}"
        for table, cell, own in found
        for what, text in own.items()
    ]
    return "\n".join([opening, *macros]) + "\n"


def _of_table(table: TableResult) -> dict[str, dict[str, str]]:
    """Return a cell's key -> its numbers: its own, differences and ratios to the other cells, and p of the difference to the baseline."""
    labels = [cell.label for cell in table.cells]
    keys = dict(zip(labels, unique(labels), strict=True))
    tests = {c.name_b: c.p_adjusted for c in table.comparisons()}
    tested = {cell.label: values for cell in table.cells if (values := cell.of("test_accuracy"))}
    lengths = {cell.label: length.mean for cell in table.cells if (length := cell.over_rounds(LENGTH)) and length.mean > 0}
    found = {}
    for cell in table.cells:
        own = found[keys[cell.label]] = _of_cell(cell)
        others = {label: key for label, key in keys.items() if label != cell.label}
        for other in (label for label in others if {label, cell.label} <= tested.keys()):
            for c in compare({other: tested[other], cell.label: tested[cell.label]}):
                own[f"minus {keys[other]}"] = _difference(c)
            for c in compare(tested, {cell.label: other}, pooled=True):
                own[f"pooled minus {keys[other]}"] = _difference(c)
        for other in (label for label in others if {label, cell.label} <= lengths.keys()):
            own[f"times {keys[other]}"] = f"{float(f'{lengths[cell.label] / lengths[other]:.2g}'):g}"
        if (p := tests.get(cell.label)) is not None:
            own["p"] = f"{p:.2g}"
    return found


def _difference(c: Comparison) -> str:
    inside = "" if c.low is None or c.high is None else rf"\,[{100 * c.low:z.2f},\,{100 * c.high:z.2f}]"
    return f"${100 * c.difference:+z.2f}{inside}$"


def _of_cell(cell: CellResult) -> dict[str, str]:
    found: dict[str, str] = {}
    if test := cell.summary("test_accuracy"):
        found |= {"mean": f"{100 * test.mean:.2f}", "n": str(test.n)}
        found |= {} if test.sd is None else {"sd": f"{100 * test.sd:.2f}"}
        found |= {} if test.low is None or test.high is None else {"low": f"{100 * test.low:.2f}", "high": f"{100 * test.high:.2f}"}
    if val := cell.summary("val_accuracy"):
        found["val"] = f"{100 * val.mean:.2f}"
    if rate := rate_of(cell):
        digits, power = f"{rate:.2e}".split("e")
        found["lr"] = f"{rate:g}" if rate >= 0.01 else rf"${float(digits):g}{{\cdot}}10^{{{int(power)}}}$"
    if length := cell.over_rounds(LENGTH):
        found[LENGTH] = f"{length.mean:.2g}"
    found |= {f"share {kind}": f"{share:.0f}" for kind, share in mask_shares(cell)[1].items()}
    for key in GEOMETRY:
        if mean := cell.over_rounds(key):
            first = summarise([run.curve("round", key)[0][1] for run in cell.runs.values()])
            found |= {key: f"{mean.mean:z.2f}", f"first {key}": f"{first.mean:z.2f}"}
    return found


def _of_measured(each: Measured) -> dict[str, str]:
    found = {"n": str(each.n)}
    for key, summary in each.numbers.items():
        scale, what = each.scale(key), key.replace("_", " ")
        found[what] = f"{scale * summary.mean:z.2f}"
        found |= {} if summary.sd is None else {f"{what} sd": f"{scale * summary.sd:z.2f}"}
    return found


# --- TeX


def compile_pdf(folder: Path, name: str = PAPER) -> Path | None:
    """Write the PDF of FOLDER/NAME beside it, without shell escape; return its path, or None if no TeX is installed."""
    with tempfile.TemporaryDirectory() as inside:
        cites = r"\bibliography{" in (folder / name).read_text(encoding="utf-8", errors="replace")
        commands = _commands(inside, name, cites)
        if not commands:
            pdf = Path(name).with_suffix(".pdf")
            log.info("no %s: install latexmk with pdflatex, tectonic or pdflatex, or compile %s elsewhere", pdf, name)
            return None
        for command in commands:
            _tex(command, folder, inside, name)
        made = (Path(inside) / name).with_suffix(".pdf")
        if not made.is_file():
            raise UserError(f"{name}: {commands[0][0]} wrote no PDF")
        pdf = (folder / name).with_suffix(".pdf")
        write_atomic(pdf, made.read_bytes())
    return pdf


def _commands(inside: str, name: str, cites: bool) -> list[list[str]]:
    """Return the passes of the first engine that is installed; latexmk and tectonic repeat passes themselves."""
    quiet = ["-interaction=nonstopmode", "-halt-on-error", "-file-line-error"]
    if shutil.which("latexmk") and shutil.which("pdflatex"):  # -norc: no Perl from a folder that somebody else wrote
        return [["latexmk", "-norc", "-pdf", *quiet, "-latexoption=-no-shell-escape", f"-outdir={inside}", name]]
    if shutil.which("tectonic"):
        return [["tectonic", "--untrusted", "--outdir", inside, name]]
    if shutil.which("pdflatex"):
        once = ["pdflatex", *quiet, "-no-shell-escape", f"-output-directory={inside}", name]
        return [once, ["bibtex", f"{inside}/{Path(name).stem}"], once, once] if cites and shutil.which("bibtex") else [once, once]
    return []


def _tex(command: Sequence[str], folder: Path, inside: str, name: str) -> None:
    environment = {**os.environ, "max_print_line": "1000", "TEXMFOUTPUT": inside}  # an error stays in one line; bibtex may write there
    quiet: dict[str, Any] = {"capture_output": True, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, timeout=SECONDS, check=False, **quiet)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{name}: {command[0]} did not finish ({type(error).__name__}, limit {SECONDS} s)") from None
    if done.returncode:
        output = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")
        line = re.search(r"^(?:[^\s:]+\.tex:\d+: .*|! .*|error: .*)$", output, re.MULTILINE)
        raise UserError(f"{name}: {command[0]} failed: {line[0] if line else f'exit status {done.returncode}'}")
