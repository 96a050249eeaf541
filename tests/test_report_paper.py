"""LaTeX of a report: exact tables, escaped labels, every number as a macro, and a paper of at most eight pages that answers the course's questions."""

import json
import logging
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_studies import ANALYSES, HOSTILE, PLAIN, Cell, make_study, plain

from fedlens.cli import main, parser
from fedlens.errors import UserError
from fedlens.report import latex, paper
from fedlens.report.blocks import NONE, Chart, Entry, Table
from fedlens.report.content import report
from fedlens.report.latex import compile_pdf, escape, figure_float, numbers, table_float
from fedlens.report.over_seeds import rate_of
from fedlens.report.paper import CONTENT, class_line, write_paper
from fedlens.report.write import write_report
from fedlens.study.results import Gathered, gather

needs_tex = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")


# --- text and floats


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Nc=1", "Nc=1"),
        ("mask_rule", r"mask\_\allowbreak{}rule"),
        ("50% & #1", r"50\% \& \#1"),
        ("α τ ξ θ₀", r"\ensuremath{\alpha} \ensuremath{\tau} \ensuremath{\xi} \ensuremath{\theta}\ensuremath{_0}"),
        (r"\input{x}$y$", r"\textbackslash{}input\{x\}\$y\$"),
        ("a--b,,c~^", r"a-{}-b,{},c\textasciitilde{}\textasciicircum{}"),
        ("[2] *", "{[}2{]} {*}"),
        ("−0.5 ± 1 é", r"\ensuremath{-}0.5 \ensuremath{\pm} 1 é"),
        ("10⁻³ °", r"10\ensuremath{^-}\ensuremath{^3} \ensuremath{^\circ}"),
        ("中\u200b\x07x", "[U+4E2D]x"),
    ],
)
def test_labels_are_escaped_for_latex(text: str, expected: str) -> None:
    assert escape(text) == expected


def test_a_table_in_latex_is_exact() -> None:
    rows = [
        ["dense", Entry("71.67 ± 1.53", "[67.87, 75.46], n = 3", 0.7, "differs"), "-10.33"],
        ["sparse_one", Entry("88.33 ± 2.52", "[82.08, 94.58], n = 2", 0.9, "best"), NONE],
    ]
    text = table_float(Table("toy-t", "models: 50 %", ["cell", "test accuracy, %", "p"], rows))
    assert text.startswith("\\begin{table}[!htb]\n\\caption{Models: 50 \\%}\\label{tab:toy-t}\n\\centering\\footnotesize")
    assert "test accuracy, \\%" in text and text.count(r"\toprule") == text.count(r"\bottomrule") == 1
    entry = r"\begin{tabular}[t]{@{}c@{}}71.67 \ensuremath{\pm} 1.53\rlap{$^\dagger$}\\{\scriptsize {[}67.87, 75.46{]}, n = 3}\end{tabular}"
    assert f"\ndense & {entry} & \\ensuremath{{-}}10.33 \\\\\n" in text
    assert r"sparse\_\allowbreak{}one & \begin{tabular}[t]{@{}c@{}}\textbf{88.33 \ensuremath{\pm} 2.52}\\" in text
    assert text.count(" & -- \\\\") == 1


def test_a_number_of_seeds_that_all_entries_share_is_in_the_caption_alone() -> None:
    rows = [["a", Entry("1 ± 1", "[0, 2], n = 3")], ["b", Entry("2 ± 1", "[1, 3], n = 3")], ["c", NONE]]
    text = table_float(Table("t", "Toy.", ["", "x"], rows))
    assert r"\caption{Toy. Everywhere n = 3.}" in text and text.count("n = 3") == 1 and r"{\scriptsize {[}1, 3{]}}" in text
    mixed = table_float(Table("t", "Toy.", ["", "x"], [*rows, ["d", Entry("3", "n = 1")]]))
    assert "Everywhere" not in mixed and mixed.count("n = 3") == 2
    alone = table_float(Table("t", "Toy.", ["", "x"], [["a", Entry("1", "n = 1")]]))
    assert "Everywhere n = 1" in alone and "tabular}[t]" not in alone


def test_a_row_with_its_first_entry_alone_is_the_title_of_a_group() -> None:
    text = table_float(Table("t", "Toy.", ["", "x", "y"], [["one place", "", ""], ["a", "1", "2"]]))
    assert r"\multicolumn{3}{@{}l@{}}{\emph{one place}} \\" in text and "a & 1 & 2 \\\\" in text


def test_a_long_table_continues_in_another_float() -> None:
    text = table_float(Table("t", "Toy.", ["", "x"], [[f"c{i}", str(i)] for i in range(45)]))
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 2 and text.count(r"\label") == 1
    assert r"\caption{Continued.}" in text and sum(f"\nc{i} & {i} \\\\" in text for i in range(45)) == 45
    tall = table_float(Table("t", "Toy.", ["", "x"], [[f"c{i}", Entry("1", f"n = {i}")] for i in range(41)]))
    assert tall.count(r"\begin{table}") == 3, "rows of two lines fill a page sooner"


def test_a_table_takes_two_columns_only_if_one_is_too_narrow() -> None:
    def of(columns: int) -> Table:
        return Table("t", "Toy.", ["", *("value" for _ in range(columns))], [["least sensitive", *(["88.33 ± 2.52"] * columns)]])

    assert [r"\begin{table*}[t]" in table_float(of(n)) for n in (1, 2, 6)] == [False, False, True]
    assert r"\begin{table*}[t]" in table_float(replace(of(1), wide=True))
    text = table_float(Table("t", "Toy.", ["", "tried"], [["a", "0.1: 70.00, " * 30]]))
    assert len(re.findall(r"p\{\d+pt\}", text)) == 1, "long text breaks lines"


def test_a_figure_refers_to_the_pdf_of_its_chart() -> None:
    text = figure_float(Chart("toy-a", "Test accuracy", "toy: 50 % of θ₀", {}))
    assert text.splitlines()[:2] == [
        r"\begin{figure}[!htb]",
        r"\centering\includegraphics[width=\linewidth,height=0.4\textheight,keepaspectratio]{figures/toy-a.pdf}",
    ]
    assert r"\caption{Toy: 50 \% of \ensuremath{\theta}\ensuremath{_0}}\label{fig:toy-a}" in text
    assert r"\begin{figure*}[t]" in figure_float(Chart("toy-a", "", "", {}, wide=True))


# --- macros

RULES: dict[str, Sequence[Cell]] = {
    "at Nc=1": [("dense", "dense", {}, [0.70, 0.72, 0.73]), ("sparse one", "sparse", {}, [0.80, 0.82, 0.84])],
    "IID": [("dense", "dense", {}, [0.80, 0.82, 0.84]), ("sparse one", "sparse", {}, [0.85, 0.86, None])],
}


def macros(gathered: Gathered) -> dict[str, str]:
    return dict(re.findall(r"\\gdef\\csname lens/([^\\]+)\\endcsname\{(.*)\}", numbers(gathered)))


def test_paths_of_a_machine_are_not_in_the_names_of_macros(tmp_path: Path) -> None:
    cells = [(f"weights=/home/someone/{name}.pth", "", {}, [0.7, 0.8]) for name in ("a", "b")]
    text = numbers(gather([make_study(tmp_path / "s", {"at /home/someone/data": cells}, name="x")]))
    assert "someone" not in text and "b-pth" in text


def test_every_number_is_a_macro(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "s", RULES, name="masks of all")])
    defined = macros(found)
    assert numbers(found).startswith("% Every number of the report") and r"\providecommand{\lens}" in numbers(found)
    assert defined["masks-of-all/all/runs"] == "11"
    assert defined["masks-of-all-at-nc-1/dense/mean"] == "71.67" and defined["masks-of-all-at-nc-1/dense/n"] == "3"
    assert float(defined["masks-of-all-at-nc-1/sparse-one/p"]) < 0.05 and "masks-of-all-at-nc-1/dense/p" not in defined
    assert defined["masks-of-all-at-nc-1/sparse-one/share key"] == "75" and "masks-of-all-at-nc-1/dense/share key" not in defined
    assert defined["masks-of-all-iid/sparse-one/n"] == "2" and defined["masks-of-all-iid/sparse-one/drift_ratio"] == "0.52"
    assert defined["masks-of-all-iid/sparse-one/first drift_ratio"] == "0.51"
    assert defined["masks-of-all-at-nc-1/dense/minus sparse-one"] == r"$-10.33\,[-11.77,\,-8.90]$"
    assert defined["masks-of-all-at-nc-1/dense/times sparse-one"] == "1" and defined["masks-of-all-at-nc-1/dense/lr"] == "0.03"


def test_analyses_over_seeds_are_macros(tmp_path: Path) -> None:
    (study,) = plain(tmp_path, analyses=ANALYSES).studies
    later = []
    for analysis in study.analyses:
        content = json.loads(json.dumps(analysis.found))
        if analysis.kind == "forget":
            content["clients"][0]["after"]["test_target"] -= 0.1
        elif analysis.kind == "sweep":
            content["chosen"]["alpha"] += 0.5
        later.append(replace(analysis, seed=1, found=content))
    defined = macros(Gathered([replace(study, analyses=[*study.analyses, *later])]))
    assert defined["toy-forget/all-client-0/target after"] == "35.00" and defined["toy-forget/all-client-0/target after sd"] == "7.07"
    assert defined["toy-sweep/all/alpha"] == "0.75" and defined["toy-masks/all-between-seeds/iou"] == "0.62"
    assert defined["toy-interference/half-a-and-half-b/n"] == "2"


def test_a_small_rate_is_a_power_of_ten_and_a_head_alone_has_none(tmp_path: Path) -> None:
    cells: list[Cell] = [("head", "central", {}, [0.80]), ("trained", "central", {}, [0.82])]
    folder = make_study(tmp_path / "s", {"t": cells})
    for run, steps in (("run-0-0-0", 0), ("run-0-1-0", 7)):
        edit(folder / "runs" / run / "summary.json", steps=steps)
    edit(folder / "runs" / "run-0-1-0" / "config.yaml", optim={"lr": 0.0012})
    found = gather([folder])
    assert [rate_of(cell) for cell in found.studies[0].tables[0].cells] == [None, 0.0012]
    assert macros(found)["toy-t/trained/lr"] == r"$1.2{\cdot}10^{-3}$" and "toy-t/head/lr" not in macros(found)


# --- the paper

SEEDS = [0.80, 0.81, 0.83]
HANDIN: dict[str, tuple[str, Sequence[Any]]] = {  # table -> (case, the values of its key)
    "centralised lengths": ("central", [1, 3, 9]),
    "schedules": ("central", ["cosine", "step"]),
    "IID": ("dense", ["fedavg_iid"]),
    "Nc and J": ("dense", [4, 8, 16]),
    "sparsity": ("sparse", [0.5, 0.1]),
    "calibration rounds": ("sparse", [1, 4]),
    "mask rules": ("sparse", ["least_sensitive", "random"]),
    "six models": ("dense", ["fedavg_iid", "fedavg_noniid", "fedavg_iid_sparse", "fedavg_noniid_sparse"]),
    "extension: merge rules": ("dense", ["mean", "ties"]),
}
FULL = {
    "data": {"name": "cifar100", "val_fraction": 0.1, "partition": "classes", "classes_per_client": 5},
    "model": {"name": "dino_vits16", "weights": "/home/me/dino.pth", "image_size": 112},
    "optim": {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.0, "batch_size": 64, "schedule": "cosine", "clip_norm": 10.0},
    "train": {"epochs": 5},
    "federated": {"clients": 100, "participation": 0.1, "local_steps": 4, "rounds": 40},
    "mask": {"strategy": "least_sensitive", "density": 0.1, "rounds": 4, "scope": "central"},
    "server": {"merge": "mean"},
}


def edit(file: Path, **facts: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def handin(folder: Path, seeds: Sequence[float | None] = SEEDS, omit: str = "", rename: Mapping[str, str] | None = None) -> Path:
    """Write a study of every question of the course, with curves of test loss and accuracy."""
    keys = {topic.table: topic.key or "experiment" for topic in CONTENT.topics}
    tables: dict[str, list[Cell]] = {}
    for table, (case, values) in HANDIN.items():
        nc = [f"Nc={n}" for n in (1, 5)] if table == "Nc and J" else [case]
        cells: list[Cell] = [(f"{c}, {v}" if len(nc) > 1 else f"{keys[table]} {v}", c, {keys[table]: v}, seeds) for c in nc for v in values]
        tables |= {} if table == omit else {table: cells}
    make_study(folder, {(rename or {}).get(name, name): cells for name, cells in tables.items()}, name="handin")
    for t, (table, cells) in enumerate(tables.items()):
        for c, (*_, values, _) in enumerate(cells):
            for run in (folder / "runs").glob(f"run-{t}-{c}-*"):
                config = json.loads(json.dumps(FULL))
                for key, value in values.items():
                    section, _, name = key.rpartition(".")
                    (config[section] if section else config)[name] = value
                if table == "Nc and J":
                    config["federated"]["rounds"] = 160 // config["federated"]["local_steps"]
                config.setdefault("experiment", "centralized" if cells[0][1] == "central" else "fedavg_noniid")
                edit(run / "config.yaml", **config)
                lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                start = {name: 0 for name in ("epoch", "round") if name in lines[0]} | {"val_accuracy": 0.5, "step": 0}
                lines = [line | {"test_loss": 1 / (i + 1), "test_accuracy": line["val_accuracy"]} for i, line in enumerate([start, *lines])]
                (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with its paper, of a study that answers every question."""
    folder = tmp_path_factory.mktemp("handin")
    write_report(gather([handin(folder / "study")]), folder / "out", paper="")
    return folder / "out"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures out, which take most of the time."""
    monkeypatch.setattr(paper, "save", lambda *_: [])


def text_of(tmp_path: Path, study: Path, documentclass: str = "") -> str:
    """Return the paper of a study, without its PDF."""
    found = gather([study])
    return write_paper(found, report(found), tmp_path / "paper", documentclass).read_text()


def test_the_paper_answers_every_question_with_a_figure_and_a_table(written: Path) -> None:
    text = (written / "paper.tex").read_text()
    sections = dict(re.findall(r"\\subsection\{(.+?)\}\n(.*?)(?=\\subsection|\\section)", text, re.DOTALL))
    for topic in CONTENT.topics:
        section = sections[topic.title]
        assert r"\includegraphics" in section and r"\input{tables/handin-" in section, topic.title
        assert re.search(r"See (Figure|Table)~\\ref", section) and "%" in section
        assert rf"\item {topic.question}" in text
    assert "density 0.5 & 3 & " in re.sub(r"mask\.", "", (written / "tables" / "handin-sparsity-short.tex").read_text())
    figures, tables = re.findall(r"\\includegraphics.*?\{(.+?)\}", text), re.findall(r"\\input\{(.+?)\}", text)
    assert all((written / name).is_file() for name in figures) and all((written / f"{name}.tex").is_file() for name in tables)
    for name in (
        "handin-centralised-lengths-test-loss-epoch",
        "handin-centralised-lengths-test-accuracy-epoch",
        "handin-iid-test-loss-round",
    ):
        assert f"figures/{name}.pdf" in figures
    assert "To write" not in text and "TODO" not in text and "@@" not in text and "/home" not in text


def test_the_setup_is_that_of_the_configurations(written: Path) -> None:
    text = (written / "paper.tex").read_text()
    assert r"We use CIFAR-100~\cite{krizhevsky2009cifar}. Of the training images a share of 0.1" in text
    assert r"It starts from dino.pth." in text and "at 112 pixels" in text
    assert (
        "divided among $K$ = 100 clients" in text
        and "$C$ = 0.1 of the clients. Each takes $J$ = 4, 8 and 16 local steps with batches of 64" in text
    )
    assert "$J$ times the number of rounds is always 160." in text and "$N_c$ = 5, and" in text
    assert r"density: 0.1 and 0.5; rounds of calibration: 1 and 4; scored by: the server on validation images" in text
    assert "short runs" not in text, "nothing was tuned"
    settings = (written / "tables" / "paper-settings.tex").read_text()
    assert re.search(r"Epochs in one place & 3 & 3 & 0.03 & -- & 1, 3 and 9 \\\\", settings), settings
    assert re.search(r"Heterogeneity and local steps & 6 & 3 & 0.03 & 10, 20 and 40 & -- \\\\", settings)


def test_tuned_rates_and_searches_are_in_the_setup(tmp_path: Path, undrawn: None) -> None:
    folder = handin(tmp_path / "s")
    tuned = {
        "table": "sparsity",
        "label": "mask.density 0.5",
        "key": "optim.lr",
        "value": 0.3,
        "tried": [[0.1, 0.7], [0.3, 0.72]],
        "runs": [],
    }
    edit(folder / "study.json", tuned=[tuned])
    assert "1 cells have a learning rate of their own, chosen on validation among 2 short runs" in text_of(tmp_path, folder)


def test_a_question_without_runs_names_the_command_that_adds_them(tmp_path: Path, undrawn: None) -> None:
    for table in HANDIN:
        text = text_of(tmp_path, handin(tmp_path / table.replace(":", ""), omit=table, seeds=[0.8]))
        (command,) = re.findall(r"no runs for this question. To add them, run:\n\\texttt\{(.+?)\}\.\n", text)
        args = parser().parse_args(shlex.split(command.replace("-{}-", "--").replace(r"\textquotesingle{}", "'"))[1:])
        assert (args.command, args.name, args.tables) == ("study", "handin", [table])
        (topic,) = (topic for topic in CONTENT.topics if topic.table == table)
        assert f"These questions are open: {topic.title}." in text


def test_tables_are_recognised_by_what_they_vary(tmp_path: Path, undrawn: None) -> None:
    names = {name: f"table {i}" for i, name in enumerate(HANDIN)}
    text = text_of(tmp_path, handin(tmp_path / "s", rename=names))
    assert "no runs for this question" not in text
    for topic in CONTENT.topics:
        assert (
            rf"\input{{tables/handin-{names[topic.table].replace(' ', '-')}"
            in text.split(rf"\subsection{{{topic.title}}}")[1].split(r"\subsection")[0]
        )


def test_one_seed_has_no_spread_in_the_paper(tmp_path: Path, written: Path, undrawn: None) -> None:
    text = text_of(tmp_path, handin(tmp_path / "s", seeds=[0.8]))
    assert "The standard deviation of test accuracy over seeds" not in text and "One seed has no spread." in text
    assert "over seeds is 1.53 points in the median cell" in (written / "paper.tex").read_text()


def test_an_edited_paper_is_left_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture, undrawn: None) -> None:
    found, out = plain(tmp_path), tmp_path / "out"
    made = write_paper(found, report(found), out)
    text = made.read_text()
    assert write_paper(found, report(found), out) == made and made.read_text() == text and not (out / "paper-new.tex").exists()
    made.write_text(text.replace("First Student", "Ada Lovelace"))
    (out / "references.bib").write_text("mine")
    with caplog.at_level(logging.INFO, logger="fedlens"):
        assert write_paper(found, report(found), out) == out / "paper-new.tex"
    assert "Ada Lovelace" in made.read_text() and (out / "paper-new.tex").read_text() == text and "was edited" in caplog.text
    assert (out / "references.bib").read_text() == "mine"


def test_the_command_draws_the_figures_of_an_edited_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = make_study(tmp_path / "s", PLAIN), tmp_path / "out"
    out.mkdir()
    (out / "paper.tex").write_text(r"\includegraphics{figures/toy-three-models-cells.pdf} but no document")
    assert main(["report", str(folder), "--out", str(out), "--paper"]) == 0
    assert (out / "figures" / "toy-three-models-cells.pdf").read_bytes().startswith(b"%PDF") and (out / "paper-new.tex").is_file()
    assert main(["report", str(folder), "--out", str(out), "--paper", "not a class"]) == 2
    assert "--paper must be a document class" in capsys.readouterr().err


def test_every_reference_that_the_paper_cites_is_in_its_bibliography(tmp_path: Path, undrawn: None) -> None:
    found = plain(tmp_path)
    text = write_paper(found, report(found), tmp_path / "out").read_text()
    entries = re.findall(r"^@\w+\{(\w+),", (tmp_path / "out" / "references.bib").read_text(), re.MULTILINE)
    cited = {key for keys in re.findall(r"\\cite\{(.+?)\}", text + " ".join(CONTENT.names.values())) for key in keys.split(",")}
    assert len(entries) == len(set(entries)) and cited <= set(entries)
    assert not set(entries) - cited - {"davari2024breadcrumbs", "loshchilov2017sgdr"}


def test_the_document_class_may_be_another(tmp_path: Path, undrawn: None) -> None:
    assert class_line("") == "[10pt,twocolumn,letterpaper]{article}" and class_line("article") == "{article}"
    assert class_line("[conference]{IEEEtran}") == "[conference]{IEEEtran}"
    text = text_of(tmp_path, handin(tmp_path / "s", seeds=[0.8]), "[11pt]{report}")
    assert "\\documentclass[11pt]{report}\n" in text and "fedlens-paper" not in text
    for wrong in ("a b", "{article}\\input{x}", "article%"):
        with pytest.raises(UserError, match="must be a document class"):
            class_line(wrong)


# --- TeX


def pages(folder: Path, cites: bool = True) -> tuple[int, str]:
    """Compile the paper; return its number of pages and its log. Without citations and references, one pass is enough."""
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", f"-output-directory={folder}", "paper.tex"]
    for step in (command, ["bibtex", "paper"], command, command) if cites else (command,):
        done = subprocess.run(step, cwd=folder, capture_output=True, check=False, text=True, errors="replace")
        assert done.returncode == 0 or step[0] == "bibtex", done.stdout[-2000:]
    log = (folder / "paper.log").read_text(errors="replace").replace("\n", "")
    return len(re.findall(r"\[\d+(?=[\s\]{<])", log)), log


@needs_tex
def test_the_paper_has_at_most_eight_pages_and_no_line_in_the_margin(written: Path) -> None:
    assert (written / "paper.pdf").read_bytes().startswith(b"%PDF") and not list(written.glob("*.aux"))
    count, log = pages(written)
    assert 5 <= count <= 8
    assert not [float(wide) for wide in re.findall(r"Overfull \\hbox \(([\d.]+)pt", log) if float(wide) > 2]
    assert "undefined" not in log


@needs_tex
@pytest.mark.parametrize("documentclass", ["", "[11pt]{article}"])
def test_hostile_labels_compile_within_eight_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documentclass: str) -> None:
    labels = [HOSTILE, "[1] first", "* second", "least_sensitive_" * 4, *(f"{HOSTILE} {i}" for i in range(20))]
    cells: list[Cell] = [(label, label, {}, [0.5, 0.6]) for label in labels]
    folder = make_study(tmp_path / "s", dict.fromkeys(HANDIN, cells), name=HOSTILE, failures={"x": HOSTILE})
    out = tmp_path / "out"
    monkeypatch.setattr(latex.shutil, "which", lambda name: None)  # the paper is compiled below
    write_report(gather([folder]), out, paper=documentclass)
    count, log = pages(out)
    assert documentclass or count <= 8
    assert not [float(wide) for wide in re.findall(r"Overfull \\hbox \(([\d.]+)pt", log) if float(wide) > 20]


@needs_tex
def test_all_tables_of_a_report_fit_their_columns(written: Path, tmp_path: Path) -> None:
    inputs = "\n".join(
        rf"\input{{tables/{file.stem}}}\clearpage" for file in sorted((written / "tables").glob("*.tex")) if file.stem != "numbers"
    )
    (tmp_path / "paper.tex").write_text(
        r"\documentclass[10pt,twocolumn]{article}\usepackage[utf8]{inputenc}\usepackage[T1]{fontenc}\usepackage{textcomp,amsmath,array,booktabs,graphicx}"
        r"\usepackage[letterpaper,margin=0.8in]{geometry}\emergencystretch=2em\begin{document}" + inputs + r"\end{document}"
    )
    shutil.copytree(written / "tables", tmp_path / "tables")
    _, log = pages(tmp_path, cites=False)
    assert "Overfull \\hbox" not in log


@needs_tex
def test_an_error_of_latex_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "paper.tex").write_text("\\documentclass{article}\n\\begin{document}\n\\undefinedthing\n\\end{document}\n")
    with pytest.raises(UserError, match=r"paper\.tex: \w+ failed: \S*paper\.tex:3: Undefined control sequence") as caught:
        compile_pdf(tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "paper.pdf").exists()


def test_without_tex_there_is_no_pdf_and_a_line_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(latex.shutil, "which", lambda name: None)
    with caplog.at_level(logging.INFO, logger="fedlens"):
        write_report(plain(tmp_path), tmp_path / "out", paper="")
    assert "no paper.pdf" in caplog.text and not (tmp_path / "out" / "paper.pdf").exists()
    assert all(
        (tmp_path / "out" / name).is_file() for name in ("paper.tex", "references.bib", "fedlens-paper.sty", "tables/toy-three-models.tex")
    )


@needs_tex
@pytest.mark.parametrize("engine", ["latexmk", "pdflatex"])
def test_an_own_paper_has_its_numbers_and_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    if shutil.which(engine) is None or shutil.which("bibtex") is None:
        pytest.skip(f"no {engine} with bibtex here")
    installed = shutil.which
    monkeypatch.setattr(latex.shutil, "which", lambda name: installed(name) if name in (engine, "pdflatex", "bibtex") else None)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "numbers.tex").write_text(numbers(gather([make_study(tmp_path / "s", RULES)])))
    (tmp_path / "references.bib").write_text("@misc{one, author={A. Name}, title={Of something}, year={2025}}\n")
    own = r"""\documentclass{article}\input{tables/numbers}\begin{document}
Dense reaches \lens{toy-iid}{dense}\,\% (n = \lens[n]{toy-iid}{dense}) \cite{one}.
\bibliographystyle{plain}\bibliography{references}\end{document}"""
    (tmp_path / "paper.tex").write_text(own)
    made = compile_pdf(tmp_path)
    assert made is not None and made.stat().st_size > 10_000
    if shutil.which("pdftotext"):
        said = subprocess.run(["pdftotext", str(made), "-"], capture_output=True, text=True, check=True).stdout
        assert "Dense reaches 82.00 % (n = 3) [1]." in said and "Of something" in said and "[?]" not in said
    (tmp_path / "paper.tex").write_text(own.replace("{toy-iid}{dense}", "{toy-iid}{sparse}"))
    with pytest.raises(UserError, match="no number mean of sparse in toy-iid"):
        compile_pdf(tmp_path)


def test_every_measured_number_of_our_paper_is_a_macro_and_no_sentence_has_more_than_three() -> None:
    source = (Path(__file__).parents[1] / "paper" / "paper.tex").read_text()
    text = re.sub(r"(?<!\\)%.*", "", source[source.index(r"\begin{abstract}") :])
    text = re.sub(r"\\(includegraphics|input|label|ref|cite\w*)(\[[^]]*\])?\{[^}]*\}", "", text)
    measured = r"\\(lens|het|iid|one|kind|score|clip|kept|rules|single|six|leave|density)(\[[^]]*\])?(\{[^}]*\})+"
    # momentum, softness, density, the test set's own error, LayerScale of the weights
    settings = {"0.9", "0.01", "0.1", "0.3", "0.14", "6.7"}
    assert set(re.findall(r"\d+\.\d+", re.sub(measured, "", text))) <= settings
    sentences = re.split(r"(?<=[.;:])\s", re.sub(measured, "NUMBER", text))
    assert max(sentence.count("NUMBER") for sentence in sentences) == 3
