"""The files of a report that go into papers: exact tables, escaped labels, the same bytes for the same runs, a paper that compiles."""

import json
import logging
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from fedlens.errors import UserError
from fedlens.report import figures, latex
from fedlens.report.drawing import COLUMN, LONGEST, PAGE, STYLE, Line, Panel, clean, line_figure
from fedlens.report.figures import FigureFile, along_figure, forgotten_figure, length_figure, write_figures
from fedlens.report.html import html_report
from fedlens.report.latex import compile_pdf, write_files, write_latex
from fedlens.report.latex_across import across_tables, numbers, rate_of
from fedlens.report.latex_tables import escape, latex_tables
from fedlens.report.markdown import csv_rows, escaped, grid_text, layout, markdown_report, placeless, slug, table_stems, unique
from fedlens.report.over_seeds import numbers_of, over_seeds
from fedlens.study.figures import partition_figure
from fedlens.study.results import Analysis, CellResult, Gathered, gather
from fedlens.study.statistics import summarise

HOSTILE = r"50% & $x_1$ #{a}~b^c \input{/etc/passwd} <α|τ> --,, [z]* ξθ 中 ∞"
Cell = tuple[str, str, Mapping[str, Any], Sequence[float | None]]  # label, case, values, test accuracy by seed; None: not finished


def make_run(folder: Path, seed: int, accuracy: float, *, federated: bool = True, mask: bool = False, rounds: int = 3) -> None:
    """A finished run's files, without a model."""
    folder.mkdir(parents=True)
    config = {
        "experiment": "fedavg_noniid" if federated else "centralized",
        "seed": seed,
        "head": "ridge",
        "data": {"name": "toy_set", "root": "/home/me/data", "partition": "classes", "classes_per_client": 1},
        "model": {"name": "tiny", "weights": "/home/me/tiny.safetensors", "image_size": 28},
        "optim": {"lr": 0.03, "batch_size": 32},
        "federated": {"clients": 3, "local_steps": 4, "rounds": rounds, "participation": 1.0},
        "mask": {"strategy": "qk_only", "density": 0.1},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    summary: dict[str, Any] = {"test_accuracy": accuracy, "val_accuracy": accuracy - 0.01, "seconds": 1.0, "parameters": 1234, "mask": None}
    lines: list[dict[str, Any]] = [{"step": 1, "epoch": 1, "val_accuracy": accuracy - 0.01}]
    if federated:
        summary |= {"rounds": rounds, "bytes_up": rounds * 10**6, "bytes_down": rounds * 10**6}
        lines = [
            {
                "step": t,
                "round": t,
                "val_accuracy": accuracy - 0.01 - 0.1 * (rounds - t),
                "bytes_up": t * 10**6,
                "drift_ratio": 0.5 + 0.01 * t,
                "cosine": 0.1 * seed,
                "sign_conflict": 0.2,
                "client_norm": 0.5 * t,
            }
            for t in range(1, rounds + 1)
        ]
        counts = [[5, 0], [0, 5], [3, 2]]
        (folder / "partition.json").write_text(json.dumps({"clients": 3, "label_counts": counts}))
    if mask:
        summary["mask"] = {
            "composition": {"query": {"eligible": 10, "active": 1, "share": 0.25}, "key": {"eligible": 10, "active": 3, "share": 0.75}},
            "by_layer": [["embed", 0, 10], ["block 0", 4, 20], ["other", 0, 0]],
        }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_study(
    folder: Path,
    tables: Mapping[str, Sequence[Cell]],
    analyses: Sequence[tuple[str, Any]] = (),
    failures: Mapping[str, str] | None = None,
    name: str = "toy",
    **options: Any,
) -> Path:
    """Cells whose case begins with "central" are not federated, those with "sparse" in it have masks."""
    listed = []
    for t, (table, cells) in enumerate(tables.items()):
        written = []
        for c, (label, case, values, accuracies) in enumerate(cells):
            runs = {str(seed): f"run-{t}-{c}-{seed}" for seed in range(len(accuracies))}
            for seed, accuracy in enumerate(accuracies):
                if accuracy is not None:
                    kind = {"federated": not case.startswith("central"), "mask": "sparse" in case}
                    make_run(folder / "runs" / runs[str(seed)], seed, accuracy, **kind, **options)
            written.append({"label": label, "case": case, "values": values, "runs": runs})
        listed.append({"name": table, "question": "", "target": 0.5, "cells": written})
    made = []
    for i, (kind, found) in enumerate(analyses):
        labels = ["half A", "half B"] if kind in ("interference", "interpolate") else ["all"]
        made.append({"kind": kind, "title": f"{kind} of all", "labels": labels, "seed": 0, "file": f"analyses/{i}.json"})
        (folder / "analyses").mkdir(parents=True, exist_ok=True)
        (folder / "analyses" / f"{i}.json").write_text(json.dumps(found))
    content = {"name": name, "place": "here", "question": "Which one wins?", "tables": listed, "analyses": made, "failures": failures or {}}
    (folder / "study.json").write_text(json.dumps(content))
    return folder


def point(alpha: float, value: float = 0.8) -> dict[str, float]:
    return {"alpha": alpha, "val_accuracy": value, "test_accuracy": value - 0.01}


SWEEP = {
    "points": [point(a, 0.8 - abs(a - 0.5) / 10) for a in (0.0, 0.5, 1.0)],
    "chosen": point(0.5),
    "start": point(0.0),
    "end": point(1.0),
}
XI = {
    "names": ["run-a", "run-b"],
    "samples": [20, 20],
    "alphas": [0.0, 1.0],
    "xi": [[0.0, 0.1], [0.1, 0.2]],
    "pairs": [{"a": "run-a", "b": "run-b", "cosine": 0.1, "sign_conflict": 0.2, "drift_ratio": 0.7}],
    "notes": ["/home/me/runs/run-b starts 2.97 from where run-a does"],
}
EDGES = [{"alpha": a, "val_target": 0.9 - a / 2, "val_control": 0.8, "test_target": 0.9 - a / 2, "test_control": 0.8} for a in (0.0, 1.0)]
FORGET = {"clients": [{"client": 0, "classes": ["Bag"], "points": EDGES, "before": EDGES[0], "after": EDGES[1], "notes": []}]}
OVERLAP = {"names": ["run-a", "run-b"], "iou": 0.625, "chance": 0.05}
ANALYSES = [("sweep", SWEEP), ("interpolate", SWEEP), ("interference", XI), ("masks", OVERLAP), ("forget", FORGET)]

PLAIN: dict[str, Sequence[Cell]] = {
    "three models": [
        ("central", "central", {}, [0.80, 0.82, 0.84]),
        ("dense", "dense", {}, [0.70, 0.72, 0.73]),
        ("sparse one", "sparse", {}, [0.86, 0.88, 0.91]),
    ]
}
GRID: dict[str, Sequence[Cell]] = {
    "Nc and J": [
        (f"Nc={nc}, local_steps {j}", f"Nc={nc}", {"federated.local_steps": j}, [0.6 + nc / 100 + j / 1000 + s / 50 for s in range(3)])
        for nc in (1, 5)
        for j in (4, 8)
    ]
}


def plain(tmp_path: Path, **options: Any) -> Gathered:
    return gather([make_study(tmp_path / "study", PLAIN, **options)])


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of their sizes with nothing on them: embedding fonts takes most of the time."""

    def write(folder: Path, stem: str, drawn: tuple[str, str, Figure], study: int, table: int | None) -> FigureFile:
        kind, caption, figure = drawn
        width, height = (float(side) for side in figure.get_size_inches())
        name = f"{stem}-{slug(kind)}"
        for suffix in ("pdf", "png"):
            Figure(figsize=(width, height)).savefig(folder / f"{name}.{suffix}", dpi=20)
        return FigureFile(folder / name, caption, f"fig:{name}", study, table, kind, (width, height))

    monkeypatch.setattr(figures, "_write", write)


# --- Markdown and CSV


def test_a_small_table_in_markdown_is_exact(tmp_path: Path) -> None:
    text = markdown_report(plain(tmp_path))
    assert "## toy (here)\n\nWhich one wins?\n\n### three models\n\n| cell |" in text
    assert "| central | 82.00 ± 2.00 [77.03, 86.97] (n = 3) | 81.00 ± 2.00 [76.03, 85.97] (n = 3) | — | — | — | — |" in text
    assert (
        "| dense | 71.67 ± 1.53 [67.87, 75.46] (n = 3) | 70.67 ± 1.53 [66.87, 74.46] (n = 3) | 3.0 ± 0.0 (n = 3) "
        "| ≤ 1.3 (n = 3) | ≤ 1.3 (n = 3) | 3 of 3 reached it |" in text
    )
    assert (
        "The target is 50.00 % validation accuracy; rounds and MB are those of the first evaluation that reaches it. "
        "Validation looked every round (≤: a seed had reached the target at the first look).\n" in text
    )
    assert "Test accuracy minus that of central, in points, paired over the n seeds that both have:" in text
    assert "| dense | -10.33 | [-11.77, -8.90] | 3 | 0.001 | 0.0021 |" in text
    assert "| sparse one | +6.33 | [4.90, 7.77] | 3 | 0.0028 | 0.0028 |" in text


def test_what_the_first_evaluation_has_already_reached_is_a_bound_and_no_mean(tmp_path: Path) -> None:
    cells: list[Cell] = [("once", "once", {}, [0.70, 0.72, 0.73]), ("below", "below", {}, [0.3, 0.4])]
    folder = make_study(tmp_path / "s", {"t": cells}, rounds=1)
    for file in folder.rglob("metrics.jsonl"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"round": 25, "bytes_up": 25 * 10**6}) + "\n")
    found = gather([folder])
    said = "Validation looked once, after 25 rounds (≤: a seed had reached the target at the first look)."
    text, page = markdown_report(found), html_report(found)
    assert "| ≤ 25 (n = 3) | ≤ 25 (n = 3) | 3 of 3 reached it |" in text and "| — | — | 0 of 2 reached it |" in text
    assert said in text and said in page and page.count("≤ 25<small>n = 3</small>") == 2 and "25.0 ±" not in text + page
    tables = {table.kind: table.text for table in latex_tables(found)}
    assert r"& $\le 25$ & $\le 25$ & 3 of 3 \\" in tables["full"] and r"$\le 25$\\{\scriptsize 3 of 3}" in tables["cells"]
    assert all(escape(said) in tables[kind] for kind in ("cells", "full"))


def test_what_is_reached_later_is_a_mean_beside_how_often_validation_looked(tmp_path: Path) -> None:
    cells: list[Cell] = [("dense", "dense", {}, [0.63, 0.65]), ("rarely", "rarely", {}, [0.63, 0.73])]
    folder = make_study(tmp_path / "s", {"t": cells}, rounds=5)
    for file in (folder / "runs").glob("run-0-1-*/metrics.jsonl"):
        lines = [line for line in file.read_text().splitlines() if json.loads(line)["round"] in (3, 5)]
        file.write_text("\n".join(lines) + "\n")
    (table,) = gather([folder]).studies[0].tables
    assert [table.cost(cell)["rounds"] for cell in table.cells] == [{0: 4.0, 1: 4.0}, {0: 5.0, 1: 3.0}]
    assert [table.at_first(cell) for cell in table.cells] == [False, True], "one seed at its first look is enough to make a mean a bound"
    text = markdown_report(gather([folder]))
    assert "| 4.0 ± 0.0 (n = 2) | 4.0 ± 0.0 (n = 2) |" in text and "| ≤ 4 (n = 2) | ≤ 4 (n = 2) |" in text
    assert "Validation looked every 1 to 3 rounds (≤:" in text


def test_a_table_without_clients_has_no_columns_of_traffic(tmp_path: Path) -> None:
    cells: list[Cell] = [("central", "central", {}, [0.80, 0.82]), ("again", "central", {}, [0.70, 0.72])]
    found = gather([make_study(tmp_path / "s", {"in one place": cells})])
    text = markdown_report(found)
    assert "| cell | test accuracy | validation accuracy |\n" in text and "MB up" not in text and "The target" not in text
    for table in latex_tables(found):
        assert "MB" not in table.text and "target" not in table.text
    full = next(table.text for table in latex_tables(found) if table.kind == "full")
    assert (
        r"central & 2 & $81.00 \pm 1.41$ & $[68.29, 93.71]$ & " in full and "{@{}>{\\raggedright\\arraybackslash}p{1.35in}crcrc@{}}" in full
    )
    page = html_report(found)
    assert "Validation accuracy, %" in page and "MB sent" not in page and "Reached by" not in page


def test_cells_may_be_compared_with_the_first_of_their_own_case(tmp_path: Path) -> None:
    two = [[0.70, 0.71, 0.72], [0.74, 0.76, 0.75]]
    cells: list[Cell] = [
        (f"{case}, {rule}", case, {"server.merge": rule}, two[i]) for case in "ab" for i, rule in enumerate(("mean", "ties"))
    ]
    cells.append(("b, dare", "b", {"server.merge": "dare"}, [None, None, None, 0.5]))
    folder = make_study(tmp_path / "s", {"rules": cells})
    told = json.loads((folder / "study.json").read_text())
    (table,) = gather([folder]).studies[0].tables
    assert [(c.name_a, c.name_b) for c in table.comparisons()] == [("a, mean", c) for c in ("a, ties", "b, mean", "b, ties")]
    assert table.compared_with == "a, mean" and table.unshared() == ["b, dare"]
    told["tables"][0]["by_case"] = True
    (folder / "study.json").write_text(json.dumps(told))
    found = gather([folder])
    (table,) = found.studies[0].tables
    assert [(c.name_a, c.name_b) for c in table.comparisons()] == [("a, mean", "a, ties"), ("b, mean", "b, ties")]
    text = markdown_report(found)
    assert "minus that of the first cell of its case, in points" in text and "| b, ties | +4.00 |" in text and "| b, mean | +" not in text
    assert "No seed shared with it:\n\n- b, dare" in text
    for kind, said in {"paired": "minus that of the first cell of its case", "grid": "differs from the first cell of its case"}.items():
        assert said in next(each.text for each in latex_tables(found) if each.kind == kind)
    assert "differences of test accuracy to the first cell of its case, in points" in html_report(found)


def test_a_head_alone_has_no_learning_rate(tmp_path: Path) -> None:
    cells: list[Cell] = [("head", "central", {}, [0.80]), ("trained", "central", {}, [0.82])]
    folder = make_study(tmp_path / "s", {"in one place": cells})
    for run, steps in (("run-0-0-0", 0), ("run-0-1-0", 7)):
        summary = folder / "runs" / run / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"steps": steps}))
    assert [rate_of(cell) for cell in gather([folder]).studies[0].tables[0].cells] == [None, 0.03]


def test_sweeps_are_drawn_as_far_as_all_of_them_go(tmp_path: Path) -> None:
    far = SWEEP | {"points": [point(a, 0.8 - abs(a - 0.5) / 20) for a in (0.0, 0.5, 1.0, 2.0, 8.0)]}
    folder = make_study(tmp_path / "s", {"t": [("a", "a", {}, [0.5])]}, [("sweep", SWEEP), ("sweep", far)])
    told = json.loads((folder / "study.json").read_text())
    told["analyses"][1]["labels"] = ["far"]
    (folder / "study.json").write_text(json.dumps(told))
    figure = along_figure(gather([folder]).studies[0])
    assert figure is not None and along_figure(gather([folder]).studies[0], "interpolate") is None
    drawn = [list(np.asarray(line.get_xdata())) for line in figure.axes[0].get_lines()]
    assert drawn.count([0.0, 0.5, 1.0]) == 2 and max(max(x) for x in drawn) == 1.0


def test_seeds_that_are_missing_and_runs_that_failed_are_said_without_paths(tmp_path: Path, blank: None) -> None:
    tables: dict[str, Sequence[Cell]] = {"t": [("a", "a", {}, [0.5, 0.6]), ("b", "b", {}, [None, 0.7]), ("c", "c", {}, [None, None])]}
    failures = {"run-0-1-0": "the disk of /home/me/runs/x/model.safetensors is full"}
    found = gather([make_study(tmp_path / "s", tables, failures=failures)])
    text = markdown_report(found)
    assert "Seeds that are not finished:\n\n- b: 1 of 2 seeds\n- c: 0 of 2 seeds" in text
    assert "- b, seed 0 (run-0-1-0): the disk of …/model.safetensors is full" in text
    assert "| b | +10.00 | — | 1 | no test | no test |" in text
    assert "| c | — | — | — | — | — | — |" in text
    named = {table.name: table.text for table in latex_tables(found)}
    assert "Seeds not finished: b: 1 of 2 seeds; c: 0 of 2 seeds." in named["toy-t"]
    write_latex(found, tmp_path / "out")
    paper = (tmp_path / "out" / "paper.tex").read_text()
    assert "Not all seeds are finished: b: 1 of 2 seeds; c: 0 of 2 seeds. 1 runs failed." in paper
    assert "/home" not in text + paper and "n = 1 to 2 seeds a cell" in paper and "tiny.safetensors" in paper


def test_a_study_that_is_given_twice_is_told_once(tmp_path: Path) -> None:
    mine = make_study(tmp_path / "studies" / "mine", PLAIN)
    make_study(tmp_path / "studies" / "yours", PLAIN, name="yours")
    make_run(tmp_path / "studies" / "alone", 0, 0.5)
    (tmp_path / "studies" / "f").mkdir()
    content = {"name": "lr", "question": "", "experiment": [], "keys": [], "trials": [], "default": {}, "best": None}
    (tmp_path / "studies" / "f" / "search.json").write_text(json.dumps(content))
    (tmp_path / "link").symlink_to(tmp_path / "studies")
    found = gather([mine, tmp_path / "studies", tmp_path / "studies" / "mine" / "..", tmp_path / "link"])
    assert [study.name for study in found.studies] == ["toy", "yours", "runs"] and len(found.searches) == 1
    assert [len(cell.runs) for cell in found.studies[-1].tables[0].cells] == [1]


def test_a_failure_is_told_by_cell_and_seed_or_by_its_analysis(tmp_path: Path) -> None:
    failures = {"run-0-1-1": "no memory", "analyses/0.json": "no weights", "gone": "of an older plan"}
    tables: dict[str, Sequence[Cell]] = {"t": [("a", "a", {}, [0.5, 0.6]), ("", "", {}, [0.7, None])]}
    found = gather([make_study(tmp_path / "s", tables, [("sweep", SWEEP)], failures=failures)])
    assert (
        "Failed:\n\n- all, seed 1 (run-0-1-1): no memory\n- sweep of all, seed 0 (analyses/0.json): no weights\n- gone: of an older plan"
        in markdown_report(found)
    )
    page = html_report(found)
    assert '<th scope="row">all, seed 1</th><td>run-0-1-1</td><td>no memory</td>' in page and '<th scope="row">all</th>' in page
    assert '<th scope="row">gone</th><td>–</td><td>of an older plan</td>' in page and '<th scope="row"></th>' not in page


def test_clients_that_are_forgotten_are_in_the_title(tmp_path: Path) -> None:
    (study,) = plain(tmp_path, analyses=[("forget", FORGET)]).studies
    one, other = study.analyses[0], json.loads(json.dumps(FORGET))
    other["clients"] = [other["clients"][0] | {"client": client} for client in (4, 1)]
    both = Gathered([replace(study, analyses=[one, replace(one, found=other, options={"clients": [4, 1]})])])
    text, page = markdown_report(both), html_report(both)
    for title in ("forget of all: client 0", "forget of all: clients 4, 1"):
        assert f"### {title}\n" in text and f"<h4>{title}, seed 0: along α</h4>" in page
        assert any(caption.startswith(f"{title}, seed 0") for _, caption, _ in figures._of_study(both.studies[0]))


def test_cells_that_share_no_seed_are_named_and_not_compared(tmp_path: Path) -> None:
    tables: dict[str, Sequence[Cell]] = {"t": [("a", "a", {}, [0.5, None]), ("b", "b", {}, [None, 0.7]), ("c", "c", {}, [0.6, None])]}
    found = gather([make_study(tmp_path / "s", tables)])
    assert "No seed shared with it:\n\n- b" in markdown_report(found)
    paired = next(table.text for table in latex_tables(found) if table.kind == "paired")
    assert "No seed shared: b." in paired and paired.count(r" \\") == 2


def test_no_difference_without_its_n(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "s", PLAIN | GRID)])
    rows = [line for line in markdown_report(found).splitlines() if re.match(r"\| [^|]+ \| [+-]\d", line)]
    assert len(rows) == 5 and all(re.fullmatch(r"\d+", row.split("|")[4].strip()) for row in rows)
    tex = [
        line for table in latex_tables(found) if table.kind == "paired" for line in table.text.splitlines() if re.search(r"\$[+-]\d", line)
    ]
    assert len(tex) == 5 and all(line.split(" & ")[3] == "3" for line in tex)


def test_csv_is_one_line_a_run_and_the_same_whatever_the_time_it_took(tmp_path: Path) -> None:
    tables: dict[str, Sequence[Cell]] = {"t": [("a", "a,b", {"server.merge": "ties"}, [0.5, None]), ("c", "central", {}, [0.6, 0.7])]}
    first = csv_rows(gather([make_study(tmp_path / "one", tables)]))
    again = make_study(tmp_path / "two", tables)
    for file in again.rglob("summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": 99.0}))
    assert first == csv_rows(gather([again]))
    assert first.splitlines() == [
        "study,table,case,server.merge,seed,run,test_accuracy,val_accuracy,rounds,bytes_up,bytes_down",
        'toy,t,"a,b",ties,0,run-0-0-0,0.5,0.49,3,3000000,3000000',
        "toy,t,central,,0,run-0-1-0,0.6,0.59,,,",
        "toy,t,central,,1,run-0-1-1,0.7,0.69,,,",
    ]


def test_analyses_and_searches_are_in_the_markdown(tmp_path: Path) -> None:
    study = make_study(tmp_path / "s", PLAIN, ANALYSES)
    trials = [
        {"number": 0, "params": {"optim.lr": 0.1}, "value": 0.7, "state": "complete"},
        {"number": 1, "params": {"optim.lr": 0.25}, "value": None, "state": "pruned"},
    ]
    default = {"params": {"optim.lr": 0.01}, "value": 0.65}
    search = {"name": "lr", "question": "What rate?", "experiment": ["data.root=/home/me/x"], "keys": ["optim.lr"], "trials": trials}
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "search.json").write_text(json.dumps(search | {"default": default, "best": 0}))
    found = gather([study, tmp_path / "f"])
    text = markdown_report(found)
    assert "- α = 0.5 chosen on validation (80.00 %): test 79.00 %; α = 0: 79.00 %; α = 1: 79.00 %" in text
    assert "- half A and half B: cosine 0.100, sign conflict 0.200, drift ratio 0.700\n- note: …/run-b starts 2.97" in text
    assert "- client 0 (Bag), α = 1: test accuracy on its classes 90.0 to 40.0 %, on all others 80.0 to 80.0 %" in text
    assert "- intersection over union 0.625; of random masks of these sizes 0.050" in text
    assert "2 trials (1 complete, 1 pruned), n = 1 run each. All of `data.root=…/x`." in text
    assert "| best (trial 0) | 70.00 | optim.lr = 0.1 |\n| default | 65.00 | optim.lr = 0.01 |" in text
    assert r"& best & 70.00 & optim.lr = 0.1 \\" in next(table.text for table in latex_tables(found) if table.kind == "searches")
    assert "/home" not in text


def test_analyses_of_several_seeds_are_means_and_macros(tmp_path: Path) -> None:
    """By hand: numbers of one analysis, means over seeds, a table in every file, and a macro of each."""
    (study,) = plain(tmp_path, analyses=ANALYSES).studies
    again = [replace(a, seed=1, found=_shifted(a)) for a in study.analyses]
    both = Gathered([replace(study, analyses=[*study.analyses, *again])])
    found = over_seeds(both.studies[0])
    assert {kind: [(row.label, row.n) for row in rows] for kind, rows in found.items()} == {
        "sweep": [("all", 2)],
        "interpolate": [("half A and half B", 2)],
        "interference": [("half A and half B", 2)],
        "masks": [("all, between seeds", 2)],
        "forget": [("all: client 0", 2)],
    }
    (forgotten,) = found["forget"]
    assert {key: s.mean for key, s in forgotten.numbers.items()} == pytest.approx(
        {"target_before": 0.9, "target_after": 0.35, "others_before": 0.8, "others_after": 0.8, "alpha": 1.0}
    )
    assert numbers_of(study.analyses[0])["chosen"] == 0.79 and found["sweep"][0].numbers["alpha"].mean == pytest.approx(0.75)
    text = markdown_report(both)
    assert "| all: client 0 | 90.00 ± 0.00 | 35.00 ± 7.07 | 80.00 ± 0.00 | 80.00 ± 0.00 | 1.00 ± 0.00 | 2 |" in text
    assert "by negation, over seeds" in text and "- seed 1: client 0 (Bag)" in text and text.count("### forget of all") == 1
    said = {file.kind: file.caption for file in write_figures(both, tmp_path / "figures")}
    assert "over seeds (n = 2); rings: the α at which that mean is highest" in said["alpha"] and "mean over seeds, n = 2" in said["xi"]
    assert "over seeds (n = 2), as far as all" in said["forget"] and "xi 2" not in said
    finer = [
        replace(a, options={"grid": "0:1:5"}) for a in both.studies[0].analyses[1:]
    ]  # with a seed missing: no mean over different ones
    assert [row.n for row in over_seeds(replace(study, analyses=[*study.analyses, *finer]))["sweep"]] == [1, 1]
    assert "by negation, over seeds" not in markdown_report(Gathered([study]))  # one seed is told as it is
    assert "Forgetting clients by negation: means over seeds" in html_report(both)
    tables = {table.name: table.text for table in across_tables(both)}
    assert r"$35.00 \pm 7.07$" in tables["toy-forget"] and set(tables) >= {f"toy-{kind}" for kind in found}
    assert r"\csname lens/toy-forget/all-client-0/target after\endcsname{35.00}" in numbers(both)
    assert r"\csname lens/toy-sweep/all/alpha\endcsname{0.75}" in numbers(both)
    assert r"\csname lens/toy-masks/all-between-seeds/iou\endcsname{0.62}" in numbers(both)


def _shifted(analysis: Analysis) -> dict[str, Any]:
    """The same with another outcome."""
    found = json.loads(json.dumps(analysis.found))
    if analysis.kind == "forget":
        found["clients"][0]["after"]["test_target"] -= 0.1
    elif analysis.kind == "sweep":
        found["chosen"]["alpha"] += 0.5
    return dict(found)


def test_labels_cannot_break_markdown() -> None:
    assert escaped("a|b <i> *x* _y_ least_sensitive $1 & `c`\nd") == r"a\|b \<i\> \*x\* \_y\_ least_sensitive \$1 &amp; \`c\` d"
    assert placeless("mask.path=/home/me/m.st at C:\\Users\\me\\x, hf:org/name 2/3") == "mask.path=…/m.st at …/x, hf:org/name 2/3"


def test_files_of_tables_with_like_names_differ(tmp_path: Path) -> None:
    assert unique(["a b", "A-b", "a_b", "ξ"]) == ["a-b", "a-b-2", "a-b-3", "x"]
    cells: Sequence[Cell] = [("a", "a", {}, [0.5])]
    found = gather([make_study(tmp_path / "s", {"Nc=1": cells, "Nc 1": cells})])
    assert table_stems(found) == [["toy-nc-1", "toy-nc-1-2"]]


# --- LaTeX


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Nc=1", "Nc=1"),
        ("mask_rule", r"mask\_\allowbreak{}rule"),
        ("50% & #1", r"50\% \& \#1"),
        ("α τ ξ θ₀", r"\ensuremath{\alpha} \ensuremath{\tau} \ensuremath{\xi} \ensuremath{\theta}\ensuremath{_0}"),
        (r"\input{x}$y$", r"\textbackslash{}input\{x\}\$y\$"),
        ("a--b,,c~^", r"a-{}-b,{},c\textasciitilde{}\textasciicircum{}"),
        ("[2] *", "{[}2{]} {*}"),
        ("−0.5 ± 1 é", r"\ensuremath{-}0.5 \ensuremath{\pm} 1 é"),
        ("中\u200b\x07x", "[U+4E2D]x"),
    ],
)
def test_labels_are_escaped_for_latex(given: str, expected: str) -> None:
    assert escape(given) == expected


def test_tables_in_latex_are_exact(tmp_path: Path) -> None:
    named = {table.name: table.text for table in latex_tables(plain(tmp_path))}
    assert list(named) == ["toy-three-models", "toy-three-models-full", "toy-three-models-paired"]
    full = named["toy-three-models-full"]
    assert r"central & 3 & $82.00 \pm 2.00$ & $[77.03, 86.97]$ & $81.00 \pm 2.00$ & $[76.03, 85.97]$ & -- & -- & -- & -- \\" in full
    assert (
        r"dense & 3 & $71.67 \pm 1.53^{\dagger}$ & $[67.87, 75.46]$ & $70.67 \pm 1.53$ & $[66.87, 74.46]$ & $3.0 \pm 0.0$ & $\le 1.3$ & $\le 1.3$ & 3 of 3 \\"
        in full
    )
    assert r"dense & $-10.33$ & $[-11.77, -8.90]$ & 3 & $0.001$ & $0.0021$ \\" in named["toy-three-models-paired"]
    short = named["toy-three-models"]
    assert r"\begin{tabular}[t]{@{}c@{}}$82.00 \pm 2.00$\\{\scriptsize $[77.03, 86.97]$}\end{tabular}" in short
    assert all(text.count(r"\toprule") == text.count(r"\bottomrule") == text.count(r"\caption") == 1 for text in named.values())


def test_only_what_is_higher_with_a_corrected_p_below_5_percent_is_bold(tmp_path: Path) -> None:
    full = next(table.text for table in latex_tables(plain(tmp_path)) if table.kind == "full")
    assert re.findall(r"\\mathbf\{(.*?)\}\^", full) == [r"88.33 \pm 2.52"]
    assert full.count(r"^{\dagger}") == 2
    assert r"$\dagger$: differs from central (paired over seeds, $p < 0.05$ after Holm's correction); bold: and is higher." in full
    unclear = gather([make_study(tmp_path / "u", {"t": [("a", "a", {}, [0.5, 0.6]), ("b", "b", {}, [0.7, 0.61])]})])
    text = next(table.text for table in latex_tables(unclear) if table.kind == "full")
    assert "mathbf" not in text and "dagger" not in text and "No paired difference to a has $p < 0.05$" in text


def test_a_grid_of_one_key_and_several_cases_has_two_dimensions(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "s", GRID)])
    grid = layout(found.studies[0].tables[0])
    assert grid is not None and (grid.key, grid.cases, grid.values) == ("federated.local_steps", ["Nc=1", "Nc=5"], [4, 8])
    text = next(table.text for table in latex_tables(found) if table.kind == "grid")
    assert r" & \multicolumn{2}{c}{local\_\allowbreak{}steps} \\" in text and "\n & 4 & 8 \\\\" in text
    entry = r"\begin{tabular}[t]{@{}c@{}}$63.40 \pm 2.00$\\{\scriptsize $[58.43, 68.37]$ $n{=}3$}\end{tabular}"
    assert f"\nNc=1 & {entry} & " in text
    assert layout(plain(tmp_path).studies[0].tables[0]) is None


def test_a_long_table_goes_on_in_another(tmp_path: Path) -> None:
    cells: list[Cell] = [(f"c{i}", f"c{i}", {}, [0.5]) for i in range(45)]
    full = next(table for table in latex_tables(gather([make_study(tmp_path / "s", {"t": cells}, rounds=1)])) if table.kind == "full")
    assert full.text.count(r"\begin{table*}") == full.text.count(r"\end{table*}") == 2 and full.text.count(r"\label") == 1
    assert sum(f"c{i} & 1 &" in full.text for i in range(45)) == 45


# --- across tables, and numbers for sentences

RULES: dict[str, Sequence[Cell]] = {
    "at Nc=1": [("dense", "dense", {}, [0.70, 0.72, 0.73]), ("sparse one", "sparse", {}, [0.80, 0.82, 0.84])],
    "IID": [("dense", "dense", {}, [0.80, 0.82, 0.84]), ("sparse one", "sparse", {}, [0.85, 0.86, None])],
}


def test_tables_with_the_same_cells_stand_side_by_side(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "rules", RULES), make_study(tmp_path / "other", PLAIN), make_study(tmp_path / "grid", GRID)])
    together = [table for table in across_tables(found) if table.kind == "together"]
    assert [table.name for table in together] == ["toy-together"], "one table has no other beside it, a grid is one already"
    lines = together[0].text.splitlines()
    assert r" & at Nc=1 & IID \\" in lines
    row = next(line for line in lines if line.startswith("sparse one"))
    assert r"$\mathbf{82.00 \pm 2.00}^{\dagger}$" in row and r"$85.50 \pm 0.71$" in row and row.index("82.00") < row.index("85.50")
    assert "$n{=}3$" in row and "$n{=}2$" in row


def test_tables_with_other_cells_stand_below_each_other(tmp_path: Path) -> None:
    tables = {
        **PLAIN,
        "places": [("value", "sparse", {}, [0.9, 0.91, 0.93]), ("key", "sparse", {}, [0.8, 0.82, 0.83]), ("query", "sparse", {}, [None])],
    }
    found = gather(
        [
            make_study(tmp_path / "s", tables),
            make_study(tmp_path / "rules", RULES, name="rules"),
            make_study(tmp_path / "g", GRID, name="g"),
        ]
    )
    below = [table for table in across_tables(found) if table.kind == "below"]
    assert [table.name for table in below] == ["toy-below"], "what stands side by side, or is a grid, does not stand here too"
    lines = below[0].text.splitlines()
    parts = [line for line in lines if "multicolumn" in line]
    assert [r"\emph{three models}" in parts[0], r"\emph{places}" in parts[1], len(parts)] == [True, True, 2]
    assert lines.index(parts[0]) < lines.index(next(line for line in lines if line.startswith("dense"))) < lines.index(parts[1])
    assert next(line for line in lines if line.startswith("key")).startswith(r"key & 3 & $81.67 \pm 1.53^{\dagger}$ & ")
    assert r"query & 0 & -- & -- & -- \\" in lines


def test_forgetting_is_drawn_as_what_it_costs_the_others(tmp_path: Path) -> None:
    (study,) = plain(tmp_path, analyses=[("forget", FORGET)]).studies
    assert forgotten_figure(study) is None, "of one cell there is nothing to compare"
    (of_all,) = study.analyses
    found = json.loads(json.dumps(of_all.found))
    (client,) = found["clients"]
    client["points"] = [
        {"alpha": 2.0, "val_target": 0.1, "val_control": 0.7},
        {"alpha": 0.0, "val_target": 0.9, "val_control": 0.8},
        {"alpha": 1.0, "val_target": 0.3, "val_control": 0.79},
    ]
    figure = forgotten_figure(replace(study, analyses=[of_all, replace(of_all, labels=["sparse"], found=found)]))
    assert figure is not None
    first, second = figure.axes[0].lines
    assert list(first.get_ydata()) == pytest.approx([90, 40]) and list(first.get_xdata()) == pytest.approx([0, 0])
    assert list(second.get_xdata()) == pytest.approx([0, 1, 10]) and list(second.get_ydata()) == pytest.approx([90, 30, 10])
    assert second.get_markevery() == [1], "the α that was chosen"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["all", "sparse"]


def test_the_geometry_of_updates_is_that_of_the_first_round_and_of_all(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "s", PLAIN)])
    geometry = next(table.text for table in across_tables(found) if table.kind == "geometry")
    assert r"dense & 1 & $0.10$ & $0.10$ & $0.20$ & $0.20$ \\" in geometry  # length 0.5, 1, 1.5; cosine 0.1 · seed
    assert "central" not in geometry.split("midrule")[1], "it has no rounds"
    assert " & length & " in geometry and " & rate & " not in geometry, "all rates are one"


def test_rates_stand_beside_the_geometry_where_they_differ(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", RULES)
    for run in (folder / "runs").glob("run-*-1-*"):
        config = json.loads((run / "config.yaml").read_text())
        config["optim"]["lr"] = 0.0012
        (run / "config.yaml").write_text(json.dumps(config))
    text = next(table.text for table in across_tables(gather([folder])) if table.kind == "geometry")
    assert "dense & 0.03 & 1 & $" in text and r"sparse one & $1.2{\cdot}10^{-3}$ & 1 & $" in text


def test_every_number_is_a_macro(tmp_path: Path) -> None:
    text = numbers(gather([make_study(tmp_path / "s", RULES, name="masks of all")]))
    defined = dict(re.findall(r"\\gdef\\csname (lens/[^\\]+)\\endcsname\{(.*)\}", text))
    assert defined["lens/masks-of-all/all/runs"] == "11"
    assert defined["lens/masks-of-all-at-nc-1/dense/mean"] == "71.67" and defined["lens/masks-of-all-at-nc-1/dense/n"] == "3"
    assert float(defined["lens/masks-of-all-at-nc-1/sparse-one/p"]) < 0.05 and "lens/masks-of-all-at-nc-1/dense/p" not in defined
    assert defined["lens/masks-of-all-at-nc-1/sparse-one/share key"] == "75" and "lens/masks-of-all-at-nc-1/dense/share key" not in defined
    assert defined["lens/masks-of-all-iid/sparse-one/n"] == "2" and defined["lens/masks-of-all-iid/sparse-one/drift_ratio"] == "0.52"
    assert defined["lens/masks-of-all-iid/sparse-one/first drift_ratio"] == "0.51"
    assert defined["lens/masks-of-all-at-nc-1/dense/minus sparse-one"] == r"$-10.33\,[-11.77,\,-8.90]$"
    assert defined["lens/masks-of-all-at-nc-1/dense/times sparse-one"] == "1"


def test_what_tuning_tried_is_told_and_a_choice_at_an_end_or_an_edge_is_marked(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", PLAIN)
    content = json.loads((folder / "study.json").read_text())
    shared = {"table": "three models", "key": "optim.lr", "runs": []}
    content["tuned"] = [
        shared | {"label": "dense", "value": 0.03, "tried": [[0.01, 0.7], [0.03, 0.72], [0.09, None]]},  # what fails is worse
        shared | {"label": "sparse one", "value": 0.3, "tried": [[0.03, 0.7], [0.1, 0.71], [0.3, 0.72]]},
        shared | {"label": "central", "value": None, "tried": [[0.01, None]]},
    ]
    (folder / "study.json").write_text(json.dumps(content))
    found = gather([folder])
    assert [(tuned.at_an_end, tuned.at_an_edge) for tuned in found.studies[0].tuned] == [(False, True), (True, False), (False, False)]
    near = replace(found.studies[0].tuned[0], tried=[(0.09, 0.35), (0.27, 0.01), (0.03, 0.72), (0.01, 0.4)])
    assert near.at_an_edge and not replace(near, tried=[(0.09, 0.37), (0.27, 0.01), (0.03, 0.72)]).at_an_edge
    text = markdown_report(found)
    assert "| dense | optim.lr | 0.03 (an edge) | 0.01: 70.00, 0.03: 72.00, 0.09: failed |" in text
    assert "| sparse one | optim.lr | 0.3 (an end) |" in text
    (table,) = [table for table in across_tables(found) if table.kind == "tuned"]
    assert table.name == "toy-three-models-tuned"
    assert r"sparse one & optim.lr & 0.3 (an end) & 0.03: 70.00, 0.1: 71.00, 0.3: 72.00 \\" in table.text
    assert (
        r"central & optim.lr & — & 0.01: failed" in table.text
        and "An end: nothing was tried beyond it. An edge: a neighbour failed" in table.text
    )
    assert "0.3 (an end)" in html_report(found)


# --- figures


def drawn(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_figures_of_all_kinds_are_the_same_bytes_twice(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "s", PLAIN, ANALYSES)])
    files = write_figures(found, tmp_path / "one")
    write_figures(gather([tmp_path / "s"]), tmp_path / "two")
    assert drawn(tmp_path / "one") == drawn(tmp_path / "two")
    assert [file.kind for file in files] == ["cells", "rounds", "bytes", "drift", "partition", "masks", "alpha", "between", "xi", "forget"]
    assert set(drawn(tmp_path / "one")) == {file.path.name + suffix for file in files for suffix in (".pdf", ".png")}
    assert len({file.label for file in files}) == len(files)
    said = {file.kind: file.caption for file in files}
    assert all("n = " in said[kind] for kind in said if kind != "partition")
    assert all("95 % t interval" in said[kind] for kind in ("cells", "rounds", "bytes", "drift"))
    pdf = (tmp_path / "one" / "toy-three-models-rounds.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf and b"CreationDate" not in pdf


def test_a_table_in_two_dimensions_has_a_map_and_a_panel_a_case(tmp_path: Path) -> None:
    files: dict[str, FigureFile] = {file.kind: file for file in write_figures(gather([make_study(tmp_path / "s", GRID)]), tmp_path / "f")}
    assert list(files) == ["cells", "map", "rounds", "bytes", "drift", "partition"]
    assert files["rounds"].wide and not files["map"].wide


def of_table(found: Gathered) -> dict[str, Figure]:
    """The figures of the only table, as they are before they are written."""
    with rc_context(STYLE):
        return {kind: figure for kind, _, figure in figures._of_table(found.studies[0].tables[0])}


def look(line: Any) -> tuple[Any, ...]:
    return line.get_color(), line.get_marker(), str(line._dash_pattern)


def told(figure: Figure) -> dict[str, tuple[Any, ...]]:
    """What the legend says: name -> look."""
    (legend,) = figure.legends
    return dict(zip((text.get_text() for text in legend.get_texts()), map(look, legend.get_lines()), strict=True))


def boxes(figure: Figure, texts: Sequence[Any]) -> list[Any]:
    figure.draw_without_rendering()
    return [text.get_window_extent() for text in texts if text.get_text() and text.get_visible()]


def stand_apart(figure: Figure, texts: Sequence[Any]) -> bool:
    """No two overlap, and none is cut."""
    found = boxes(figure, texts)
    cut = [box for box in found if box.x0 < figure.bbox.x0 - 1 or box.x1 > figure.bbox.x1 + 1]
    return not cut and not any(one.overlaps(other) for one, other in combinations(found, 2))


def grid_of(cases: Sequence[str], values: Sequence[Any], lacking: Sequence[tuple[str, Any]] = ()) -> dict[str, Sequence[Cell]]:
    key, accuracies = "server.merge", [0.6, 0.62, 0.65]
    return {"t": [(f"{c}, merge {v}", c, {key: v}, [None] * 3 if (c, v) in lacking else accuracies) for c in cases for v in values]}


@pytest.mark.parametrize("kind", ["rounds", "bytes"])
def test_a_line_looks_as_the_legend_says_whatever_another_panel_lacks(tmp_path: Path, kind: str) -> None:
    tables = grid_of(("a", "b"), ("mean", "ties", "dare"), lacking=[("a", "mean"), ("b", "ties")])
    figure = of_table(gather([make_study(tmp_path / "s", tables)]))[kind]
    named = told(figure)
    assert list(named) == ["merge mean", "merge ties", "merge dare"] and len(set(named.values())) == 3
    first, second = ([look(line) for line in ax.lines] for ax in figure.axes)
    assert first == [named["merge ties"], named["merge dare"]] and second == [named["merge mean"], named["merge dare"]]


def test_no_two_cells_of_a_grid_look_the_same(tmp_path: Path) -> None:
    rules = ("mean", "ties", "dare", "fisher", "median", "trimmed_mean")
    named = told(of_table(gather([make_study(tmp_path / "s", grid_of(("a", "b"), rules))]))["drift"])
    assert len(named) == len(set(named.values())) == 12


def test_runs_that_were_evaluated_once_have_no_curves(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "s", PLAIN, rounds=1)])
    assert list(of_table(found)) == ["cells"]
    assert re.findall(r"<h4>(.*?): three models</h4>", html_report(found))[:2] == [
        "Test accuracy",
        "Validation accuracy by epoch, centralised",
    ]


def test_the_lowest_panel_of_every_column_has_its_numbers_and_its_name(tmp_path: Path) -> None:
    figure = of_table(gather([make_study(tmp_path / "s", grid_of("abcde", ("mean", "ties")))]))["rounds"]
    shown = [ax for ax in figure.axes if ax.axison]
    places = {(ax.get_subplotspec().colspan.start, ax.get_subplotspec().rowspan.start): ax for ax in shown}  # type: ignore[union-attr]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)], "five are three and two"
    for (column, row), ax in places.items():
        lowest = (column, row + 1) not in places
        assert bool(ax.get_xlabel()) == lowest and any(tick.label1.get_visible() for tick in ax.xaxis.get_major_ticks()) == lowest


def test_numbers_on_a_logarithmic_axis_have_room_in_narrow_panels() -> None:
    means = [summarise([0.5]), summarise([0.6])]
    panels = [Panel([Line("a", [4_500.0, 190_000.0], means)], "y", f"{i}") for i in range(3)]
    with rc_context(STYLE):
        figure = line_figure(panels, "MB up", share=True, log=True)
        for ax in figure.axes:
            figure.draw_without_rendering()
            ends = ax.get_xlim()
            inside = [tick.label1 for tick in ax.xaxis.get_major_ticks() if ends[0] <= tick.get_loc() <= ends[1]]
            assert len(inside) > 1 and stand_apart(figure, inside)


def test_accuracies_are_drawn_within_0_and_100_percent() -> None:
    line = Line("a", [0.0, 1.0], [summarise([0.7, 1.0, 1.0]), summarise([0.0, 0.0, 0.4])])
    assert line.y[0].high is not None and line.y[0].high > 1 and line.y[1].low is not None and line.y[1].low < 0
    (ax,) = line_figure([Panel([line], "y")], "x").axes
    low, high = ax.get_ylim()
    assert -5 < low <= 0 and 100 <= high < 105
    band = ax.collections[0].get_paths()[0].vertices[:, 1]  # type: ignore[index, call-overload]
    assert band.min() == 0 and band.max() == 100
    (ax,) = line_figure([Panel([replace(line, scale=1)], "cosine")], "x").axes
    assert ax.get_ylim()[0] < 0, "what is no percentage may be negative"


def test_classes_below_narrow_partitions_stand_apart() -> None:
    with rc_context(STYLE):
        figure = partition_figure({f"Nc = {i}": np.eye(100, dtype=np.int64) for i in range(4)}, (PAGE, 2.1))
        for ax in figure.axes[:4]:
            assert stand_apart(figure, [tick.label1 for tick in ax.xaxis.get_major_ticks()[1:-1]])


@pytest.mark.parametrize(
    ("longest", "layers", "most", "wide"), [(8, 6, 50.0, False), (26, 14, 98.0, False), (35, 14, 99.0, True), (8, 26, 100.0, True)]
)
def test_a_map_of_masks_takes_the_page_where_a_column_is_too_narrow(longest: int, layers: int, most: float, wide: bool) -> None:
    by_layer = {f"block {i}": most for i in range(layers)}
    kinds = dict.fromkeys(("query", "key", "value", "attention output", "mlp in", "mlp out", "norm", "patch embedding"), most)
    rows = [(CellResult("least sensitive, no queries or keys"[:length], "", {}, {}, 1), by_layer, kinds) for length in (longest, 5)]
    with rc_context(STYLE):
        figure = figures._mask_figure(rows)
        assert (figure.get_figwidth() > COLUMN) == wide
        for ax in figure.axes:
            assert stand_apart(figure, ax.texts) and stand_apart(figure, [ax.title, *ax.get_yticklabels()])


def test_the_legend_of_what_forgetting_costs_fits_its_column(tmp_path: Path) -> None:
    (study,) = plain(tmp_path, analyses=[("forget", FORGET)]).studies
    labels = ["dense", "sparse", "its place at random", "all but the patch embedding"]
    with rc_context(STYLE):
        figure = forgotten_figure(replace(study, analyses=[replace(study.analyses[0], labels=[label]) for label in labels]))
        assert figure is not None and list(told(figure)) == labels
        assert stand_apart(figure, figure.legends[0].get_texts())
        plot, legend = figure.axes[0].get_window_extent(), figure.legends[0].get_window_extent()
        assert legend.y1 < plot.y0 and plot.height > 0.5 * figure.bbox.height


def test_a_list_of_a_grid_is_said_without_brackets_and_none_where_it_is_empty(tmp_path: Path) -> None:
    assert [grid_text(value) for value in ("[]", "[0.5,1]", [], 4, "ties")] == ["none", "0.5, 1", "none", "4", "ties"]
    found = gather([make_study(tmp_path / "s", grid_of(("a", "b"), ("[]", "[0.5,1]")))])
    assert [tick.get_text() for tick in of_table(found)["map"].axes[0].get_xticklabels()] == ["none", "0.5, 1"]
    assert "\n & none & 0.5, 1 \\\\" in next(table.text for table in latex_tables(found) if table.kind == "grid")
    assert "| a, merge none |" in markdown_report(found) and ">a, merge none<" in html_report(found)


def test_accuracy_is_drawn_against_the_length_of_updates_where_they_differ(tmp_path: Path, blank: None) -> None:
    cells: list[Cell] = [(name, "sparse", {}, [0.5 + 0.01 * i, 0.52]) for i, name in enumerate(("a", "b", "c", HOSTILE))]
    folder = make_study(tmp_path / "s", {"rules": cells, "others": cells[:2]})
    assert "length" not in [file.kind for file in write_figures(gather([folder]), tmp_path / "alike")]
    for i in range(4):
        for file in (folder / "runs").glob(f"run-0-{i}-*/metrics.jsonl"):
            lines = [json.loads(line) | {"client_norm": 0.01 * 5**i} for line in file.read_text().splitlines()]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kinds = [file.kind for file in write_figures(gather([folder]), tmp_path / "out")]
    assert kinds.count("length") == 1 and kinds.count("masks") == 1
    figure = length_figure(gather([folder]).studies[0].tables[0])
    assert figure is not None
    points = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() != "None"]  # type: ignore[index]
    assert points == pytest.approx([0.01, 0.05, 0.25, 1.25]) and len(figure.legends[0].get_texts()) == 4


def test_masks_of_one_name_are_one_row_unless_they_lie_elsewhere(tmp_path: Path) -> None:
    cells: list[Cell] = [("a", "sparse", {}, [0.5]), ("b", "sparse", {}, [0.6])]
    folder = make_study(tmp_path / "s", {"one": cells, "two": cells[:1]})

    def rows() -> list[str]:
        return [cell.label for cell, *_ in figures._masks(gather([folder]).studies[0])]

    assert rows() == ["a"], "the same mask under two names is one"
    for number, share in (("0-1", 0.35), ("1-0", 0.26)):
        file = folder / "runs" / f"run-{number}-0" / "summary.json"
        found = json.loads(file.read_text())
        found["mask"]["composition"] = {"query": {"eligible": 10, "share": share}, "key": {"eligible": 10, "share": 1 - share}}
        file.write_text(json.dumps(found))
    assert rows() == ["a", "b"], "one point is near, ten are not"


def test_hostile_labels_are_drawn(tmp_path: Path) -> None:
    labels = [HOSTILE, "_hidden", "$\\frac", "x" * 90]
    cells: list[Cell] = [(label, label, {}, [0.5 + i / 100, 0.6]) for i, label in enumerate(labels)]
    assert len(write_figures(gather([make_study(tmp_path / "s", {HOSTILE: cells})]), tmp_path / "f")) == 5
    assert clean("_hidden") == " _hidden" and clean("中") == "□" and len(clean("x" * 90)) <= LONGEST


# --- the paper


def test_what_the_paper_uses_is_there_and_an_edited_paper_stays(tmp_path: Path, blank: None, caplog: pytest.LogCaptureFixture) -> None:
    found, out = gather([make_study(tmp_path / "s", PLAIN | GRID, ANALYSES)]), tmp_path / "out"
    paper = write_latex(found, out)
    text = paper.read_text()
    used = re.findall(r"^\\input\{(.+?)\}", text, re.MULTILINE), re.findall(r"^\\includegraphics.*\{(.+?)\}", text, re.MULTILINE)
    assert len(used[0]) >= 4 and all((out / f"{name}.tex").is_file() for name in used[0])
    assert len(used[1]) >= 8 and all((out / name).is_file() for name in used[1])
    assert "@@" not in text and str(tmp_path) not in text and "21 runs of tiny on toy\\_\\allowbreak{}set" in text
    assert write_latex(found, out).read_text() == text and not (out / "paper-new.tex").exists()
    paper.write_text(text.replace("[To write:", "[My words:"))
    with caplog.at_level(logging.INFO, logger="fedlens"):
        write_latex(found, out)
    assert "[My words:" in paper.read_text() and (out / "paper-new.tex").read_text() == text and "was edited" in caplog.text


def test_without_a_tex_engine_there_is_no_pdf_and_a_line_that_says_so(
    tmp_path: Path, blank: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(latex.shutil, "which", lambda name: None)
    with caplog.at_level(logging.INFO, logger="fedlens"):
        done = write_files(plain(tmp_path), tmp_path / "out")
    assert "no paper.pdf" in caplog.text and "paper.pdf" not in done
    assert {"results.md", "results.csv", "paper.tex", "tables/toy-three-models.tex", "figures/toy-three-models-rounds.pdf"} <= set(done)
    assert all(path.is_file() for path in done.values())


needs_tex = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")


def pages(folder: Path) -> int:
    command = ["pdflatex", "-draftmode", "-interaction=nonstopmode", "-halt-on-error", f"-output-directory={folder}", "paper.tex"]
    for _ in range(2):
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    log = (folder / "paper.log").read_text(errors="replace").replace("\n", "")
    assert done.returncode == 0 and "Overfull \\hbox" not in log and "undefined references" not in log
    return len(re.findall(r"\[\d+(?=[\s\]{<])", log))


@needs_tex
def test_hostile_labels_compile(tmp_path: Path, blank: None) -> None:
    cells: list[Cell] = [(label, label, {}, [0.5, 0.6]) for label in (HOSTILE, "[1] first", "* second", "least_sensitive_" * 4)]
    out = tmp_path / "out"
    done = write_files(gather([make_study(tmp_path / "s", {HOSTILE: cells}, name=HOSTILE, failures={"x": HOSTILE})]), out)
    assert done["paper.pdf"].read_bytes().startswith(b"%PDF")
    assert not list(out.glob("*.aux")) and not list(out.glob("*.log"))


@needs_tex
def test_a_paper_of_many_tables_has_at_most_eight_pages(tmp_path: Path, blank: None) -> None:
    cells: list[Cell] = [
        (f"Nc={nc}, merge {rule}", f"Nc={nc}", {"server.merge": rule}, [0.6 + nc / 100, 0.7, 0.65])
        for nc in (1, 5, 10)
        for rule in ("mean", "ties", "dare", "fisher")
    ]
    tables = {f"table {i}": cells if i % 2 else PLAIN["three models"] for i in range(4)}
    studies = [make_study(tmp_path / name, tables, ANALYSES, name=name) for name in ("one", "two")]
    write_latex(gather(studies), tmp_path / "out")
    assert 4 <= pages(tmp_path / "out") <= 8
    text = (tmp_path / "out" / "paper.tex").read_text()
    assert "% Made too, and left out" in text and all(rf"\subsection{{table {i}}}" in text for i in range(4))


@needs_tex
def test_an_error_of_latex_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "paper.tex").write_text("\\documentclass{article}\n\\begin{document}\n\\undefinedthing\n\\end{document}\n")
    with pytest.raises(UserError, match=r"paper\.tex: \w+ says \S*paper\.tex:3: Undefined control sequence") as caught:
        compile_pdf(tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "paper.pdf").exists()


@needs_tex
@pytest.mark.parametrize("engine", ["latexmk", "pdflatex"])
def test_a_paper_that_is_written_has_its_numbers_and_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    if shutil.which(engine) is None or shutil.which("bibtex") is None:
        pytest.skip(f"no {engine} with bibtex here")
    found = shutil.which
    monkeypatch.setattr(latex.shutil, "which", lambda name: found(name) if name in (engine, "pdflatex", "bibtex") else None)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "numbers.tex").write_text(numbers(gather([make_study(tmp_path / "s", RULES)])))
    (tmp_path / "references.bib").write_text("@misc{one, author={A. Name}, title={Of something}, year={2025}}\n")
    written = r"""\documentclass{article}\input{tables/numbers}\begin{document}
Dense reaches \lens{toy-iid}{dense}\,\% (n = \lens[n]{toy-iid}{dense}) \cite{one}.
\bibliographystyle{plain}\bibliography{references}\end{document}"""
    (tmp_path / "paper.tex").write_text(written)
    made = compile_pdf(tmp_path)
    assert made is not None and made.stat().st_size > 10_000
    if shutil.which("pdftotext"):
        said = subprocess.run(["pdftotext", str(made), "-"], capture_output=True, text=True, check=True).stdout
        assert "Dense reaches 82.00 % (n = 3) [1]." in said and "Of something" in said and "[?]" not in said
    (tmp_path / "paper.tex").write_text(written.replace("{toy-iid}{dense}", "{toy-iid}{sparse}"))
    with pytest.raises(UserError, match="no number mean of sparse in toy-iid"):
        compile_pdf(tmp_path)
