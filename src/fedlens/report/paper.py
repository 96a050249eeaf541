"""The hand-in: a LaTeX paper of at most eight pages with the report's answers, figures and tables, for a student to complete.

assets/paper.tex is its text: @@NAME@@ stands for a part that is made here, @@RUNS KEY@@ for the values of a configuration key, and a line with an
empty part is left out. assets/paper.yaml lists the questions.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedlens.errors import UserError
from fedlens.files import write_atomic
from fedlens.report.answers import answer
from fedlens.report.blocks import NO_VALUE, Answer, Chart, Report, Table, clean, counts, listed
from fedlens.report.latex import PAPER, escape, figure_float, height_of, table_float
from fedlens.report.over_seeds import table_keys
from fedlens.report.vega import save
from fedlens.study.processes import make_folder
from fedlens.study.results import Gathered, RunResult, TableResult, Tuned

log = logging.getLogger("fedlens")

SEAL = "% Made by fedlens report; while the lines below are unchanged, a new report replaces them: "
CLASS = "[10pt,twocolumn,letterpaper]{article}"
QUOTE, UPRIGHT = "'", r"\textquotesingle{}"  # of commands, which readers copy
STYLE, BIBLIOGRAPHY = "fedlens-paper.sty", "references.bib"
COLUMNS, TEXT = 16 * 8.9 * 0.9, 50.0  # inches of column: of eight pages, of text and references
VARIED = ("server.merge", "mask.strategy", "mask.rounds", "mask.density", "federated.local_steps", "optim.schedule", "train.epochs")
CONTENT: Any = OmegaConf.create((files("fedlens.report") / "assets" / "paper.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Part:
    """A question of the course, its answer, and the floats that show it. Without a table, the caution is the command that adds one."""

    topic: Any
    answer: Answer
    table: TableResult | None = None
    tuned: Sequence[Tuned] = ()
    floats: Sequence[Table | Chart] = ()

    @property
    def runs(self) -> list[RunResult]:
        return list({run.path: run for cell in (self.table.cells if self.table else ()) for run in cell.runs.values()}.values())

    @property
    def sentence(self) -> str:
        """The first sentence of the answer, after the topic's lead."""
        first = re.split(r"(?<=[.!?])\s+(?=[A-Z“])", self.answer.text, maxsplit=1)[0]
        return f"{self.topic.lead} {first[:1].lower()}{first[1:]}"


def write_paper(gathered: Gathered, report: Report, folder: Path, documentclass: str = "") -> Path:
    """Write paper.tex with its figures, tables, style and bibliography, and the figures of an edited paper, which is left unchanged. Return the new one."""
    line, assets, paper = class_line(documentclass), files("fedlens.report") / "assets", folder / PAPER
    parts = [_part(topic, gathered, report) for topic in CONTENT.topics]
    included = re.findall(r"figures/([\w-]+)\.pdf", paper.read_text(encoding="utf-8", errors="replace")) if paper.exists() else []
    needed = {*included, *(each.key for part in parts for each in part.floats)}
    for name in ("tables", "figures"):
        make_folder(folder / name)
    for chart in (each for each in report.walk() if isinstance(each, Chart) and each.key in needed):
        save(chart, folder / "figures" / chart.key, ("pdf",))
    for table in (_settings(parts), *(each for part in parts for each in part.floats if isinstance(each, Table))):
        write_atomic(folder / "tables" / f"{table.key}.tex", table_float(table))
    for name in (STYLE, BIBLIOGRAPHY):
        if not (folder / name).exists():
            write_atomic(folder / name, (assets / name).read_text(encoding="utf-8"))
    text = paper_text(gathered, parts, folder, line)
    target = paper if not paper.exists() or _unchanged(paper) else folder / "paper-new.tex"
    if target != paper:
        log.info("%s was edited and is left unchanged; the new paper is %s", paper, target)
    write_atomic(target, f"{SEAL}{_digest(text)}\n{text}")
    return target


def class_line(documentclass: str) -> str:
    """Return what follows \\documentclass: [OPTIONS]{NAME}."""
    match = re.fullmatch(r"(\[[\w\s=,.-]*\])?\{?([\w./-]+)\}?", documentclass or CLASS)
    if match is None:
        raise UserError(f"--paper must be a document class such as article or '[conference]{{IEEEtran}}', got {documentclass!r}.")
    return f"{match[1] or ''}{{{match[2]}}}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unchanged(paper: Path) -> bool:
    first, _, rest = paper.read_text(encoding="utf-8", errors="replace").partition("\n")
    return first == SEAL + _digest(rest)


# --- questions and their floats


def _part(topic: Any, gathered: Gathered, report: Report) -> Part:
    """Return a topic with the table of its name, or else the one with most tested cells that varies its key."""
    listed = zip(gathered.studies, table_keys(gathered), strict=True)
    keyed = [(study, *pair) for study, keys in listed for pair in zip(study.tables, keys, strict=True)]
    fitting = [(rank, each) for each in keyed if (rank := _rank(topic, each[1]))]
    if not fitting:
        command = f"fedlens study handin --table '{topic.table}'"
        return Part(topic, Answer(topic.question, "These results have no runs for this question. To add them, run:", [command]))
    study, table, key = max(fitting, key=lambda pair: pair[0])[1]
    longer = tuple(other for *_, other in keyed if other.startswith(f"{key}-"))
    blocks = [each for each in report.walk() if isinstance(each, Table | Chart) and f"{each.key}-".startswith(f"{key}-")]
    own = [each for each in blocks if not each.key.startswith(longer)]
    tables = [each for kind in ("grid", "cells") for each in own if isinstance(each, Table) and each.kind == kind]
    drawn = [each for kind in topic.charts for each in own if isinstance(each, Chart) and each.kind == kind]
    tuned = [each for each in study.tuned if each.table == table.name and each.tried]
    answered = answer(table, topic.question, tuned, f"fedlens study {study.name} --on {study.place}")
    return Part(topic, answered, table, tuned, [*drawn[:2], *map(_short, tables[:1])])


def _rank(topic: Any, table: TableResult) -> tuple[bool, int, int] | None:
    """Return how well a table answers a topic: by its name, its tested cells and its cells. None if it has no runs or varies something else."""
    runs = [next(iter(cell.runs.values())) for cell in table.cells if cell.runs]
    varied, experiments = [key for key in VARIED if len(_all(runs, key)) > 1], _all(runs, "experiment")
    if topic.key == "experiment":
        fits = len(experiments) > 3 and "server.merge" not in varied
    else:
        fits = varied[:1] == [topic.key] if topic.key else not varied and experiments == ["fedavg_iid"]
    named = table.name.lower() == topic.table.lower()
    return (named, sum(bool(cell.of("test_accuracy")) for cell in table.cells), len(table.cells)) if runs and (named or fits) else None


def _short(table: Table) -> Table:
    """Return a table of cells without its columns of traffic."""
    columns = [i for i, name in enumerate(table.header) if not i or name == "n" or name.endswith("accuracy, %")]
    if table.kind != "cells" or len(columns) == len(table.header):
        return table
    rows, header = [[row[i] for i in columns] for row in table.rows], [table.header[i] for i in columns]
    return replace(table, key=f"{table.key}-short", caption=table.caption.split(" Target: ")[0], header=header, rows=rows, wide=False)


def _fitting(parts: Sequence[Part], folder: Path) -> list[Table | Chart]:
    """Return the floats that have room in eight pages: first figures come first, then tables, then second figures."""
    texts = [[part.answer.text, *part.answer.cautions, *([part.sentence] * 2 if part.table else [])] for part in parts]
    letters = sum(len(" ".join(each)) for each in texts)
    room, used = COLUMNS - TEXT - 0.45 * len(parts) - 0.165 * letters / 52, []
    for each in {each.key: each for at in (0, -1, 1) for part in parts for each in part.floats[at:][:1]}.values():
        if (height := _height(each, folder)) <= room:
            room -= height
            used.append(each)
    return used


def _height(each: Table | Chart, folder: Path) -> float:
    """Return the inches of column that a float takes, about."""
    if isinstance(each, Table):
        return 0.4 + 0.15 * len(each.caption) / 58 + height_of(each)
    file = folder / "figures" / f"{each.key}.pdf"
    box = re.search(rb"/MediaBox *\[ *0 +0 +([\d.]+) +([\d.]+)", file.read_bytes()) if file.is_file() else None
    height = (6.9 if each.wide else 3.25) * (float(box[2]) / float(box[1]) if box else 0.7)
    return (1 + each.wide) * (0.4 + height) + 0.15 * len(each.caption) / 58


# --- text


def paper_text(gathered: Gathered, parts: Sequence[Part], folder: Path, documentclass: str) -> str:
    """Return the paper."""
    groups, texts = _groups(parts), _parts(gathered, parts, _fitting(parts, folder))
    texts |= {"documentclass": documentclass, "style": rf"\usepackage{{{Path(STYLE).stem}}}" if documentclass == CLASS else ""}
    lines = []
    for line in (files("fedlens.report") / "assets" / PAPER).read_text(encoding="utf-8").splitlines():
        fields = {field[0]: field.groups() for field in re.finditer(r"@@(\w+)(?: ([\w.]+))?@@", line)}
        values = {field: _texts(groups[name], key) if key else texts[name] for field, (name, key) in fields.items()}
        lines += [re.sub(r"@@[^@]+@@", lambda field: values[field[0]], line)] if all(values.values()) else []  # noqa: B023
    return "\n".join(lines) + "\n"


def _parts(gathered: Gathered, parts: Sequence[Part], used: Sequence[Table | Chart]) -> dict[str, str]:
    """Return the parts of the template; an empty one leaves its line out."""
    answered = [part for part in parts if part.table]
    cells = [cell for part in answered if part.table for cell in part.table.cells]
    spreads = sorted(100 * s.sd for cell in cells if (s := cell.summary("test_accuracy")) and s.sd is not None)
    grid = [run.config["federated"] for part in answered if part.topic.key == "federated.local_steps" for run in part.runs]
    products = {int(each["local_steps"]) * int(each["rounds"]) for each in grid}
    tuned = [each for part in answered for each in part.tuned]
    return {
        "abstract": escape(" ".join(part.sentence for part in answered if part.topic.get("abstract"))),
        "questions": "\n".join(rf"  \item {escape(part.topic.question)}" for part in parts),
        "product": f"{products.pop():,}" if len(products) == 1 else "",
        "tuned": str(len(tuned) or ""),
        "tried": str(sum(len(each.tried) for each in tuned) or ""),
        "searches": escape("; ".join(f"{clean(search.name)} ({len(search.trials)} trials)" for search in gathered.searches)),
        "experiments": "\n".join(_section(part, used) for part in parts),
        "seeds": escape(counts(len(cell.runs) for cell in cells)),
        "median": f"{spreads[len(spreads) // 2]:.2f}" if spreads else "",
        "most": f"{spreads[-1]:.2f}" if spreads else "",
        "alone": "" if spreads else r"\texttt{fedlens study handin -{}-seeds 3}",
        "findings": "\n".join(rf"  \item {escape(part.sentence)}" for part in answered),
        "doubtful": escape("; ".join(part.topic.title for part in answered if part.answer.cautions)),
        "open": escape("; ".join(part.topic.title for part in parts if not part.table)),
        "left": ", ".join(each.key for part in parts for each in part.floats if each not in used),
    }


def _section(part: Part, used: Sequence[Table | Chart]) -> str:
    """Return a topic's answer, with references to its figures and tables, and those."""
    own = [each for each in part.floats if each in used]
    links = [rf"Table~\ref{{tab:{each.key}}}" if isinstance(each, Table) else rf"Figure~\ref{{fig:{each.key}}}" for each in own]
    see, cautions = f"See {listed(links)}." if links else "", escape(" ".join(part.answer.cautions))
    if not part.table:
        cautions = rf"\texttt{{{cautions.replace(QUOTE, UPRIGHT)}}}."
    floats = [rf"\input{{tables/{each.key}}}" if isinstance(each, Table) else figure_float(each).rstrip() for each in own]
    return "\n".join(filter(None, [rf"\subsection{{{escape(part.topic.title)}}}", escape(part.answer.text), see, cautions, *floats])) + "\n"


# --- the configurations that were used


def _groups(parts: Sequence[Part]) -> dict[str, list[RunResult]]:
    """Return all runs of the paper, and those of one sort."""
    runs = list({run.path: run for part in parts for run in part.runs}.values())
    federated = [run for run in runs if run.summary.get("bytes_up") is not None]
    split = {name: [run for run in federated if run.config["data"].get("partition") == name] for name in ("iid", "classes")}
    others = {"central": [run for run in runs if run not in federated], "masked": [run for run in runs if run.mask]}
    return {"all": runs, "federated": federated, **others, **split}


def _all(runs: Iterable[RunResult], key: str) -> list[Any]:
    """Return the different values of a configuration key, numbers by size."""
    values: dict[str, Any] = {}
    for run in runs:
        value: Any = run.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        values.setdefault(str(value), value)
    listed = list(values.values())
    return sorted(listed) if all(isinstance(value, int | float) for value in listed) else listed


def _texts(runs: Iterable[RunResult], key: str, most: int = 7) -> str:
    """Return those values in LaTeX; many numbers as a range."""
    values = [Path(value).name if key == "model.weights" else value for value in _all(runs, key) if value is not None]
    texts = [f"{value:.3g}" if isinstance(value, float) else CONTENT.names.get(str(value)) or escape(clean(str(value))) for value in values]
    texts = list(dict.fromkeys(texts))
    if len(texts) > most and all(isinstance(value, int | float) for value in values):
        return f"{texts[0]} to {texts[-1]}"
    return listed(texts)


def _settings(parts: Sequence[Part]) -> Table:
    """Return the table of learning rates and lengths of every experiment."""
    rows = []
    for part in parts:
        groups, cells = _groups([part]), part.table.cells if part.table else []
        lengths = [
            _texts(groups[name], key, 3) or NO_VALUE for name, key in {"federated": "federated.rounds", "central": "train.epochs"}.items()
        ]
        seeds = counts(len(cell.runs) for cell in cells).removeprefix("n = ")
        rows += [[part.topic.title, str(len(cells)), seeds, _texts(part.runs, "optim.lr", 2), *lengths]] if cells else []
    header = ["", "cells", "seeds", "learning rate", "rounds", "epochs"]
    return Table("paper-settings", "Cells, seeds per cell, learning rates and lengths of the experiments.", header, rows)
