"""The skeleton of a paper around a report's tables and figures, its PDF where a TeX engine is found, and all files of a report at once."""

import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedlens.errors import UserError
from fedlens.files import write_atomic
from fedlens.report.figures import FigureFile, write_figures
from fedlens.report.latex_across import NUMBERS, across_tables, numbers
from fedlens.report.latex_tables import TableFile, escape, latex_tables
from fedlens.report.markdown import (
    CLAIM,
    counts,
    csv_rows,
    interval,
    markdown_report,
    missing,
    p_text,
    placeless,
    shown,
)
from fedlens.study.results import Gathered, RunResult, StudyResult, TableResult

log = logging.getLogger("fedlens")

PAPER = "paper.tex"
SEAL = "% Made by fedlens report; as long as nothing below is changed, a new report may replace it: "
TITLE = "Federated fine-tuning under the lens of task arithmetic"
LATER = 9  # rank of what the paper has in another form
TABLE_RANK = {
    "grid": 0,
    "together": 0,
    "cells": 0,
    "searches": 0,
    "measured": 1,
    "paired": 2,
    "geometry": 4,
    "below": LATER,
    "tuned": LATER,
    "full": LATER,
}
FIGURE_RANK = {
    "alpha": 1,
    "xi": 1,
    "forget": 1,
    "forgotten": 1,
    "length": 2,
    "rounds": 3,
    "masks": 3,
    "drift": 4,
    "partition": 4,
    "bytes": 5,
    "between": 6,
    "map": 6,
    "cells": 7,
}
COLUMNS = 16 * 9.4 * 0.85  # inches of column in eight pages, less what floats leave empty
TEXT, TEXT_OF_STUDY, TEXT_OF_TABLE = 24.0, 4.0, 1.9  # inches of column that text takes, about
SECONDS = 300  # for one pass of TeX
FACTS = {
    "data set": "data.name",
    "model": "model.name",
    "weights": "model.weights",
    "image size": "model.image_size",
    "head": "head",
    "learning rate": "optim.lr",
    "momentum": "optim.momentum",
    "weight decay": "optim.weight_decay",
    "schedule": "optim.schedule",
    "batch size": "optim.batch_size",
}
CENTRAL = {"epochs": "train.epochs"}
FEDERATED = {
    "clients": "federated.clients",
    "participation": "federated.participation",
    "partition": "data.partition",
    "classes per client": "data.classes_per_client",
    "Dirichlet α": "data.alpha",
    "algorithm": "federated.algorithm",
    "local steps J": "federated.local_steps",
    "rounds": "federated.rounds",
    "merge rule": "server.merge",
    "server optimizer": "server.optimizer",
    "server learning rate": "server.lr",
}
MASKED = {
    "rule": "mask.strategy",
    "density": "mask.density",
    "rounds of calibration": "mask.rounds",
    "scope": "mask.scope",
    "without": "mask.without",
}


def write_files(gathered: Gathered, out: Path) -> dict[str, Path]:
    """results.md, results.csv, tables/*.tex, figures/*.{pdf,png}, paper.tex and, where a TeX engine is found, paper.pdf: name -> path."""
    out.mkdir(parents=True, exist_ok=True)
    done = {"results.md": out / "results.md", "results.csv": out / "results.csv"}
    write_atomic(done["results.md"], markdown_report(gathered))
    write_atomic(done["results.csv"], csv_rows(gathered))
    made = _write(gathered, out)
    done |= {str(path.relative_to(out)): path for path in made}
    try:
        pdf = compile_pdf(out)
    except UserError as error:  # a paper that somebody is writing, a TeX that lacks a package: the rest of the report is there
        log.warning("no paper.pdf: %s", error)
        pdf = None
    return done if pdf is None else done | {pdf.name: pdf}


def write_latex(gathered: Gathered, folder: Path) -> Path:
    """tables/*.tex, figures/*.{pdf,png} and paper.tex. A paper.tex that was edited stays, and the new one is paper-new.tex."""
    return _write(gathered, folder)[0]


def _write(gathered: Gathered, folder: Path) -> list[Path]:
    """The paper and all that it needs."""
    tables, figures = [*latex_tables(gathered), *across_tables(gathered)], write_figures(gathered, folder / "figures")
    texts = {NUMBERS: numbers(gathered), **{table.name: table.text for table in tables}}
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomic(folder / "tables" / f"{name}.tex", text)
    paper, skeleton = folder / PAPER, paper_text(gathered, tables, figures)
    target = paper if not paper.exists() or _untouched(paper) else folder / "paper-new.tex"
    if target != paper:
        log.info("%s was edited and stays; the new skeleton is %s", paper, target)
    write_atomic(target, f"{SEAL}{_digest(skeleton)}\n{skeleton}")
    drawn = [figure.path.with_name(figure.path.name + suffix) for figure in figures for suffix in (".pdf", ".png")]
    return [paper, *(folder / "tables" / f"{name}.tex" for name in texts), *drawn]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _untouched(paper: Path) -> bool:
    first, _, rest = paper.read_text(encoding="utf-8", errors="replace").partition("\n")
    return first == SEAL + _digest(rest)


# --- the paper


def paper_text(gathered: Gathered, tables: Sequence[TableFile], figures: Sequence[FigureFile]) -> str:
    used, left = _fitting(tables, figures)
    parts = {
        "title": rf"{TITLE}\\[2pt] \large {escape(', '.join(_names(gathered)))}",
        "abstract": _abstract(gathered),
        "questions": _questions(gathered),
        "setup": "\n\n".join(_setup(i, study, used) for i, study in enumerate(gathered.studies) if study.runs),
        "missing": _missing(gathered),
        "results": "".join([*(_results(i, study, used) for i, study in enumerate(gathered.studies)), _searches(used)]),
        "left": "\n".join(["% Made too, and left out so that this stays within eight pages:", *(f"% {_include(f)[1]}" for f in left)])
        if left
        else "",
    }
    template = (files("fedlens.report") / "assets" / PAPER).read_text(encoding="utf-8")
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], template)


Floating = TableFile | FigureFile


def _fitting(tables: Sequence[TableFile], figures: Sequence[FigureFile]) -> tuple[list[Floating], list[Floating]]:
    """What has room in eight pages, the most telling first, and what has not. Both in the order in which they were made."""
    gridded = {(t.study, t.table) for t in tables if t.kind == "grid"}
    joined = {t.study for t in tables if t.kind == "together"}
    ranked: list[tuple[int, float, Floating]] = []
    for t in tables:
        elsewhere = t.kind == "cells" and ((t.study, t.table) in gridded or t.study in joined)
        rank = LATER if elsewhere else TABLE_RANK[t.kind]
        ranked.append((rank, t.height * (1 + t.wide), t))
    for f in figures:
        caption = 0.35 + 0.16 * len(f.caption) / (110 if f.wide else 55)
        ranked.append((FIGURE_RANK[f.kind.split()[0]], (f.size[1] + caption) * (1 + f.wide), f))
    studies, tabled = {each.study for *_, each in ranked}, {(each.study, each.table) for *_, each in ranked}
    room, used = COLUMNS - TEXT - TEXT_OF_STUDY * len(studies) - TEXT_OF_TABLE * len(tabled), set()
    for rank, height, each in sorted(ranked, key=lambda entry: entry[0]):
        if height <= room and rank < LATER:
            room -= height
            used.add(each.label)
    made = [each for _, _, each in ranked]
    return [each for each in made if each.label in used], [each for each in made if each.label not in used]


def _include(each: Floating) -> tuple[str, str]:
    """The lines that set it, and those lines as one."""
    if isinstance(each, TableFile):
        return (rf"\input{{tables/{each.name}}}",) * 2
    starred = "figure*" if each.wide else "figure"
    lines = [
        rf"\begin{{{starred}}}[{'t' if each.wide else '!htb'}]",
        r"\centering",
        rf"\includegraphics[width=\linewidth]{{figures/{each.path.name}.pdf}}",
        rf"\caption{{{escape(each.caption)}}}\label{{{each.label}}}",
        rf"\end{{{starred}}}",
    ]
    return "\n".join(lines), rf"\includegraphics[width=\linewidth]{{figures/{each.path.name}.pdf}}"


def _names(gathered: Gathered) -> list[str]:
    studies = [f"{shown(study.name)} ({shown(study.place)})" for study in gathered.studies]
    return [*studies, *(f"search {shown(search.name)}" for search in gathered.searches)]


def _abstract(gathered: Gathered) -> str:
    runs = [run for study in gathered.studies for run in study.runs]
    cells = [cell for study in gathered.studies for table in study.tables for cell in table.cells]
    said = []
    if runs:
        models, data = _values(runs, "model.name"), _values(runs, "data.name")
        said.append(
            f"We report {len(runs)} runs of {models} on {data}, in {len(gathered.studies)} "
            f"{'study' if len(gathered.studies) == 1 else 'studies'}, with {counts(cells)} seeds a cell."
        )
    said += [_best(study.tables[0], f"In {study.name}, ") for study in gathered.studies[:3] if study.tables]
    if gathered.searches:
        said.append(f"{len(gathered.searches)} searches over hyper-parameters are reported beside them.")
    return escape(" ".join(filter(None, said)))


def _questions(gathered: Gathered) -> str:
    asked = [study.question for study in gathered.studies]
    asked += [table.question for study in gathered.studies for table in study.tables] + [search.question for search in gathered.searches]
    items = [rf"  \item {escape(question)}" for question in dict.fromkeys(filter(None, asked))]
    return "\n".join(["The runs were made to answer:", r"\begin{itemize}", *items, r"\end{itemize}"]) if items else ""


def _best(table: TableResult, where: str = "") -> str:
    """What the cell that validation prefers has on the test set, with its interval and n."""
    found = [(val, test, cell) for cell in table.cells if (test := cell.summary("test_accuracy")) and (val := cell.summary("val_accuracy"))]
    if not found:
        return ""
    _, best, cell = max(found, key=lambda each: each[0].mean)
    inside = f", 95 % interval {interval(best.low, best.high)}" if best.low is not None else ""
    opening = f"{where}{shown(table.name)}: " if where else ""
    return f"{opening}best on validation is {shown(cell.label)}, with a test accuracy of {100 * best.mean:.2f} % (n = {best.n}{inside})."


def _claims(table: TableResult) -> str:
    found = table.comparisons()
    clear = [c for c in found if c.p_adjusted is not None and c.p_adjusted < CLAIM]
    if not found:
        return ""
    of = f"Of {len(found)} paired difference{'s' if len(found) > 1 else ''} to {shown(table.compared_with)}"
    first = f"{of}, {len(clear) or 'none'} {'have' if len(clear) > 1 else 'has'} p < {CLAIM:g} after Holm's correction"
    told = [
        f"{shown(c.name_b)} {100 * c.difference:+z.2f} points {interval(c.low, c.high)} (n = {c.n}, p {_equals(c.p_adjusted)})"
        for c in clear[:4]
    ]
    return first + (f": {'; '.join(told)}{'; …' if len(clear) > 4 else ''}." if told else ".")


def _equals(p: float | None) -> str:
    text = p_text(p)
    return text if text.startswith("<") else f"= {text}"


def _setup(number: int, study: StudyResult, used: Sequence[Floating]) -> str:
    """Facts of the runs' configurations, all values where runs differ; and how the data are divided."""
    runs = study.runs
    federated = [run for run in runs if run.summary.get("bytes_up") is not None]
    central, masked = [run for run in runs if run not in federated], [run for run in runs if run.mask]
    sizes = sorted({int(run.summary["parameters"]) for run in runs if run.summary.get("parameters")})
    size = f"; {' or '.join(f'{n:,}' for n in sizes)} parameters" if sizes else ""
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    said = [
        f"{len(runs)} runs, seeds {seeds}; {_facts(runs, FACTS)}{size}.",
        f"Centralised ({len(central)} runs): {_facts(central, CENTRAL)}." if central else "",
        f"Federated ({len(federated)} runs): {_facts(federated, FEDERATED)}." if federated else "",
        f"Masks ({len(masked)} runs): {_facts(masked, MASKED)}." if masked else "",
        "Where several values stand, cells of the tables differ in them." if len(runs) > 1 else "",
    ]
    own = [each for each in used if each.study == number and _of_setup(each)]
    told = (
        rf"\textbf{{Study {escape(shown(study.name))}}} ({escape(shown(study.place))}). {escape(' '.join(filter(None, said)))} {_refs(own)}"
    )
    return "\n".join([told.strip(), *(_include(each)[0] for each in own)])


def _of_setup(each: Floating) -> bool:
    return each.kind == "partition"


def _facts(runs: Sequence[RunResult], keys: Mapping[str, str]) -> str:
    found = [(name, _values(runs, key)) for name, key in keys.items()]
    return "; ".join(f"{name} {values}" for name, values in found if values)


def _values(runs: Iterable[RunResult], key: str) -> str:
    """All values of a key of the configurations: numbers by size, else as they come."""
    found: list[Any] = []
    for run in runs:
        value: Any = run.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, list):
            value = " and ".join(map(str, value)) or None
        if value is not None and value not in found:
            found.append(value)
    if all(isinstance(value, int | float) for value in found):
        found.sort()
    texts = [f"{value:g}" if isinstance(value, float) else placeless(str(value)) for value in found]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], f"… ({len(texts)} values)"])


def _missing(gathered: Gathered) -> str:
    lines = [line for study in gathered.studies for table in study.tables for line in missing(table)]
    failed = sum(len(study.failures) for study in gathered.studies)
    said = [f"Not all seeds are finished: {'; '.join(lines[:12])}{'; …' if len(lines) > 12 else ''}." if lines else ""]
    said.append(f"{failed} runs failed." if failed else "")
    return escape(" ".join(filter(None, said)))


def _results(number: int, study: StudyResult, used: Sequence[Floating]) -> str:
    parts = [rf"\section{{{escape(study.question or f'Results: {shown(study.name)}')}}}"]
    for j, table in enumerate(study.tables):
        own = [each for each in used if each.study == number and each.table == j]
        asked = table.question if table.question != study.question else ""
        said = " ".join(filter(None, [asked, _sentence(_best(table)), _claims(table)]))
        parts += [
            rf"\subsection{{{escape(shown(table.name))}}}",
            f"{escape(said)} {_refs(own)}".strip(),
            r"\towrite{the answer, and what may explain it}",
            *(_include(each)[0] for each in own),
        ]
    own = [each for each in used if each.study == number and each.table is None and not _of_setup(each)]
    if own:
        parts += [
            r"\subsection{Across the study}",
            f"{_refs(own)}",
            r"\towrite{what they show}",
            *(_include(each)[0] for each in own),
        ]
    return "\n".join(parts) + "\n\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _refs(own: Sequence[Floating]) -> str:
    """See Tables 1 and 2 and Figure 1."""
    said = []
    for name, kind in (("Table", TableFile), ("Figure", FigureFile)):
        labels = [rf"\ref{{{each.label}}}" for each in own if isinstance(each, kind)]
        if labels:
            listed = labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
            said.append(f"{name}{'s' if len(labels) > 1 else ''}~{listed}")
    return f"See {'; '.join(said)}." if said else ""


def _searches(used: Sequence[Floating]) -> str:
    own = [each for each in used if each.study is None]
    if not own:
        return ""
    included = "\n".join(_include(each)[0] for each in own)
    return "\\section{Searches}\n" + f"{_refs(own)} \\towrite{{what was gained over the default}}\n{included}\n\n"


# --- TeX


def compile_pdf(folder: Path) -> Path | None:
    """FOLDER/paper.pdf from paper.tex, without shell escape; None where no TeX engine is found."""
    with tempfile.TemporaryDirectory() as inside:
        cites = r"\bibliography{" in (folder / PAPER).read_text(encoding="utf-8", errors="replace")
        commands = _commands(inside, cites)
        if not commands:
            log.info(
                "no paper.pdf: none of latexmk with pdflatex, tectonic and pdflatex is found; paper.tex is ready to be compiled elsewhere"
            )
            return None
        for command in commands:
            _tex(command, folder, inside)
        made = Path(inside) / "paper.pdf"
        if not made.is_file():
            raise UserError(f"paper.tex: {commands[0][0]} left no PDF")
        write_atomic(folder / "paper.pdf", made.read_bytes())
    return folder / "paper.pdf"


def _commands(inside: str, cites: bool) -> list[list[str]]:
    """The passes of the first engine that is found; latexmk and tectonic see to references themselves."""
    quiet = ["-interaction=nonstopmode", "-halt-on-error", "-file-line-error"]
    if shutil.which("latexmk") and shutil.which("pdflatex"):  # -norc: no Perl from a folder that somebody else wrote
        return [["latexmk", "-norc", "-pdf", *quiet, "-latexoption=-no-shell-escape", f"-outdir={inside}", PAPER]]
    if shutil.which("tectonic"):
        return [["tectonic", "--untrusted", "--outdir", inside, PAPER]]
    if shutil.which("pdflatex"):
        once = ["pdflatex", *quiet, "-no-shell-escape", f"-output-directory={inside}", PAPER]
        return [once, ["bibtex", f"{inside}/paper"], once, once] if cites and shutil.which("bibtex") else [once, once]
    return []


def _tex(command: Sequence[str], folder: Path, inside: str) -> None:
    environment = {**os.environ, "max_print_line": "1000", "TEXMFOUTPUT": inside}  # an error stays in one line; bibtex may write there
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"paper.tex: {command[0]} did not finish ({type(error).__name__}, {SECONDS} s allowed)") from None
    if done.returncode:
        said = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")
        found = re.search(r"^(?:[^\s:]+\.tex:\d+: .*|! .*|error: .*)$", said, re.MULTILINE)
        raise UserError(f"paper.tex: {command[0]} says {found[0] if found else f'exit status {done.returncode}'}")
