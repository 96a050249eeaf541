"""A report's contents, its Markdown and its CSV: exact tables, the story's order, nothing folded away that matters."""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_studies import ANALYSES, FORGET, GRID, HOSTILE, PLAIN, SWEEP, Cell, make_run, make_study, plain

from fedlens.report.blocks import Answer, Chart, Details, Entry, Heading, Report, Table, Text, unique
from fedlens.report.content import report
from fedlens.report.markdown import csv_rows, escaped, markdown
from fedlens.report.over_seeds import grid_text, layout, numbers_of, over_seeds, rate_of, table_keys
from fedlens.report.write import write_report
from fedlens.study.results import Analysis, Gathered, gather

RULES: dict[str, Sequence[Cell]] = {
    "at Nc=1": [("dense", "dense", {}, [0.70, 0.72, 0.73]), ("sparse one", "sparse", {}, [0.80, 0.82, 0.84])],
    "IID": [("dense", "dense", {}, [0.80, 0.82, 0.84]), ("sparse one", "sparse", {}, [0.85, 0.86, None])],
}


def contents(*folders: Path) -> Report:
    return report(gather(folders))


def tables(made: Report) -> dict[str, Table]:
    return {block.key: block for block in made.walk() if isinstance(block, Table)}


def texts(table: Table) -> list[list[str]]:
    return [[entry.text for entry in row] for row in table.entries()]


def column(table: Table, name: str) -> list[Entry]:
    return [row[list(table.header).index(name)] for row in table.entries()]


# --- tables of cells


def test_a_small_table_is_exact(tmp_path: Path) -> None:
    found = tables(report(plain(tmp_path)))
    cells = found["toy-three-models"]
    assert texts(cells) == [
        ["central", "3", "82.00 ± 2.00", "81.00 ± 2.00", "–", "–", "–", "–"],
        ["dense", "3", "71.67 ± 1.53", "70.67 ± 1.53", "3 MB", "≤ 1.3", "≤ 1.33 MB", "3 of 3"],
        ["sparse one", "3", "88.33 ± 2.52", "87.33 ± 2.52", "3 MB", "≤ 1", "≤ 1 MB", "3 of 3"],
    ]
    assert column(cells, "test accuracy, %") == [
        Entry("82.00 ± 2.00", "[77.03, 86.97], n = 3", pytest.approx(0.82)),
        Entry("71.67 ± 1.53", "[67.87, 75.46], n = 3", pytest.approx(0.7166667), "differs"),
        Entry("88.33 ± 2.52", "[82.08, 94.58], n = 3", pytest.approx(0.8833333), "best"),
    ]
    assert (
        "Bold: significantly higher; †: significantly lower than “central” (paired over seeds, p < 0.05 after Holm's correction)."
        in cells.caption
    )
    assert "Target: 50.00 % validation accuracy; evaluated every round. ≤: a seed had reached it at the first evaluation." in cells.caption
    assert texts(found["toy-three-models-paired"]) == [
        ["dense", "-10.33", "[-11.77, -8.90]", "3", "0.001", "0.0021", "[-14.44, -6.23]", "0.0017"],
        ["sparse one", "+6.33", "[4.90, 7.77]", "3", "0.0028", "0.0028", "[2.23, 10.44]", "0.0092"],
    ]


def test_what_the_first_evaluation_has_already_reached_is_a_bound_and_no_mean(tmp_path: Path) -> None:
    cells: list[Cell] = [("once", "once", {}, [0.70, 0.72, 0.73]), ("below", "below", {}, [0.3, 0.4])]
    folder = make_study(tmp_path / "s", {"t": cells}, rounds=1)
    for file in folder.rglob("metrics.jsonl"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"round": 25, "bytes_up": 25 * 10**6}) + "\n")
    table = tables(contents(folder))["toy-t"]
    assert [row[-3:] for row in texts(table)] == [["≤ 25", "≤ 25 MB", "3 of 3"], ["–", "–", "0 of 2"]]
    assert "evaluated once, after 25 rounds. ≤: a seed had reached it at the first evaluation." in table.caption


def test_what_is_reached_later_is_a_mean_beside_how_often_validation_looked(tmp_path: Path) -> None:
    cells: list[Cell] = [("dense", "dense", {}, [0.63, 0.65]), ("rarely", "rarely", {}, [0.63, 0.73])]
    folder = make_study(tmp_path / "s", {"t": cells}, rounds=5)
    for file in (folder / "runs").glob("run-0-1-*/metrics.jsonl"):
        lines = [line for line in file.read_text().splitlines() if json.loads(line)["round"] in (3, 5)]
        file.write_text("\n".join(lines) + "\n")
    (result,) = gather([folder]).studies[0].tables
    assert [result.cost(cell)["rounds"] for cell in result.cells] == [{0: 4.0, 1: 4.0}, {0: 5.0, 1: 3.0}]
    assert [result.at_first(cell) for cell in result.cells] == [False, True], (
        "one seed at its first evaluation is enough to make a mean a bound"
    )
    table = tables(contents(folder))["toy-t"]
    assert [row[-3:-1] for row in texts(table)] == [["4", "4 MB"], ["≤ 4", "≤ 4 MB"]]
    assert "evaluated every 1 to 3 rounds. ≤:" in table.caption


def test_the_start_of_a_curve_counts_as_round_0_with_nothing_sent(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", {"t": [("a", "a", {}, [0.7]), ("b", "b", {}, [0.8])]})
    for place, start in ((0, 0.6), (1, 0.1)):
        file = folder / "runs" / f"run-0-{place}-0" / "metrics.jsonl"
        file.write_text(json.dumps({"step": 0, "round": 0, "val_accuracy": start}) + "\n" + file.read_text())
    assert [row[-3:] for row in texts(tables(contents(folder))["toy-t"])] == [["≤ 0", "≤ 0 B", "1 of 1"], ["1", "1 MB", "1 of 1"]]


def test_a_table_without_clients_has_no_columns_of_traffic(tmp_path: Path) -> None:
    cells: list[Cell] = [("central", "central", {}, [0.80, 0.82]), ("again", "central", {}, [0.70, 0.72])]
    table = tables(contents(make_study(tmp_path / "s", {"in one place": cells})))["toy-in-one-place"]
    assert (
        list(table.header) == ["", "n", "test accuracy, %", "validation accuracy, %"] and "Target" not in table.caption and not table.wide
    )


def test_cells_may_be_compared_with_the_first_of_their_own_case(tmp_path: Path) -> None:
    two = [[0.70, 0.71, 0.72], [0.74, 0.76, 0.75]]
    cells: list[Cell] = [
        (f"{case}, {rule}", case, {"server.merge": rule}, two[i]) for case in "ab" for i, rule in enumerate(("mean", "ties"))
    ]
    cells.append(("b, dare", "b", {"server.merge": "dare"}, [None, None, None, 0.5]))
    folder = make_study(tmp_path / "s", {"rules": cells})
    written = json.loads((folder / "study.json").read_text())
    (table,) = gather([folder]).studies[0].tables
    assert [(c.name_a, c.name_b) for c in table.comparisons()] == [("a, mean", c) for c in ("a, ties", "b, mean", "b, ties")]
    assert table.compared_with == "a, mean" and table.unshared() == ["b, dare"]
    written["tables"][0]["by_case"] = True
    (folder / "study.json").write_text(json.dumps(written))
    found = tables(contents(folder))
    paired = found["toy-rules-paired"]
    assert [row[:2] for row in texts(paired)] == [["a, ties", "+4.00"], ["b, ties", "+4.00"]]
    assert "minus that of the first cell of its case, in points" in paired.caption and "No seed shared: b, dare." in paired.caption
    assert "than the first cell of its case (paired" in found["toy-rules-grid"].caption


def test_cells_that_share_no_seed_are_named_and_not_compared(tmp_path: Path) -> None:
    cells: list[Cell] = [("a", "a", {}, [0.5, None]), ("b", "b", {}, [None, 0.7]), ("c", "c", {}, [0.6, None])]
    paired = tables(contents(make_study(tmp_path / "s", {"t": cells})))["toy-t-paired"]
    assert [row[0] for row in texts(paired)] == ["c"] and "No seed shared: b." in paired.caption


def test_no_difference_without_its_n(tmp_path: Path) -> None:
    found = [table for table in tables(contents(make_study(tmp_path / "s", PLAIN | GRID))).values() if table.kind == "paired"]
    assert [entry.text for table in found for entry in column(table, "n")] == ["3"] * 5


def test_seeds_that_are_missing_are_counted(tmp_path: Path) -> None:
    cells: list[Cell] = [("a", "a", {}, [0.5, 0.6]), ("b", "b", {}, [None, 0.7]), ("c", "c", {}, [None, None])]
    found = tables(contents(make_study(tmp_path / "s", {"t": cells})))
    assert [entry.text for entry in column(found["toy-t"], "n")] == ["2", "1 of 2", "0 of 2"]
    assert "Seeds not finished: b: 1 of 2; c: 0 of 2." in found["toy-t"].caption
    assert texts(found["toy-t-paired"]) == [["b", "+10.00", "–", "1", "no test", "no test", "–", "no test"]]


def test_an_interval_ends_at_the_possible_range(tmp_path: Path) -> None:
    table = tables(contents(make_study(tmp_path / "s", {"t": [("a", "a", {}, [0.99, 1.0, 0.95]), ("b", "b", {}, [0.01, 0.3])]})))["toy-t"]
    assert [entry.below for entry in column(table, "test accuracy, %")] == ["[91.43, 100.00], n = 3", "[0.00, 100.00], n = 2"]


def test_a_grid_of_one_key_and_several_cases_has_two_dimensions(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "s", GRID)])
    grid = layout(found.studies[0].tables[0])
    assert grid is not None and (grid.key, grid.cases, grid.values) == ("federated.local_steps", ["Nc=1", "Nc=5"], [4, 8])
    table = tables(report(found))["toy-nc-and-j-grid"]
    assert list(table.header) == ["", "local_steps 4", "local_steps 8"] and texts(table)[0] == ["Nc=1", "63.40 ± 2.00", "63.80 ± 2.00"]
    assert column(table, "local_steps 4")[0].below == "[58.43, 68.37], n = 3"
    assert layout(plain(tmp_path / "flat").studies[0].tables[0]) is None


def test_a_list_of_a_grid_is_shown_without_brackets_and_as_none_if_it_is_empty(tmp_path: Path) -> None:
    assert [grid_text(value) for value in ("[]", "[0.5,1]", [], 4, "ties")] == ["none", "0.5, 1", "none", "4", "ties"]
    cells = [(f"{case}, merge {v}", case, {"server.merge": v}, [0.6, 0.62]) for case in "ab" for v in ("[]", "[0.5,1]")]
    found = tables(contents(make_study(tmp_path / "s", {"t": cells})))
    assert list(found["toy-t-grid"].header) == ["", "merge none", "merge 0.5, 1"] and texts(found["toy-t"])[0][0] == "a, merge none"


# --- tables of a study


def test_tables_with_the_same_cells_stand_side_by_side(tmp_path: Path) -> None:
    folders = [make_study(tmp_path / name, each, name=name) for name, each in {"rules": RULES, "other": PLAIN, "grid": GRID}.items()]
    together = [table for table in tables(contents(*folders)).values() if table.kind == "together"]
    assert [table.key for table in together] == ["rules-together"], (
        "one table has no other beside it, and a grid has two dimensions already"
    )
    assert list(together[0].header) == ["", "at Nc=1", "IID"]
    assert texts(together[0])[1] == ["sparse one", "82.00 ± 2.00", "85.50 ± 0.71"]
    assert [entry.mark for entry in together[0].entries()[1]] == ["", "best", ""] and together[0].entries()[1][2].below.endswith("n = 2")


def test_tables_with_other_cells_stand_below_each_other(tmp_path: Path) -> None:
    places: list[Cell] = [
        ("value", "sparse", {}, [0.9, 0.91, 0.93]),
        ("key", "sparse", {}, [0.8, 0.82, 0.83]),
        ("query", "sparse", {}, [None]),
    ]
    folders = [make_study(tmp_path / "s", {**PLAIN, "places": places})]
    folders += [make_study(tmp_path / name, each, name=name) for name, each in {"rules": RULES, "g": GRID}.items()]
    below = [table for table in tables(contents(*folders)).values() if table.kind == "below"]
    assert [table.key for table in below] == ["toy-below"], "what stands side by side, or is a grid, is not repeated"
    rows = texts(below[0])
    assert [row[0] for row in rows] == ["three models", "central", "dense", "sparse one", "places", "value", "key", "query"]
    assert rows[0][1:] == [""] * 4 and rows[7] == ["query", "0 of 1", "–", "–", "–"]
    assert rows[6] == ["key", "3", "81.67 ± 1.53", "0.03", "1"] and below[0].entries()[6][2].mark == "differs"


def test_the_geometry_of_updates_is_that_of_the_first_round_and_of_all(tmp_path: Path) -> None:
    geometry = tables(report(plain(tmp_path)))["toy-three-models-geometry"]
    assert list(geometry.header) == [
        *("", "rate", "length"),
        *(f"{name}, {when}" for name in ("cosine", "sign conflict") for when in ("first round", "all rounds")),
    ]
    assert texts(geometry)[0] == ["dense", "0.03", "1", "0.10", "0.10", "0.20", "0.20"], "the central cell has no rounds"


def test_rates_stand_beside_the_geometry_where_they_differ(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", RULES)
    for run in (folder / "runs").glob("run-*-1-*"):
        config = json.loads((run / "config.yaml").read_text())
        config["optim"]["lr"] = 0.0012
        (run / "config.yaml").write_text(json.dumps(config))
    geometry = tables(contents(folder))["toy-at-nc-1-geometry"]
    assert [entry.text for entry in column(geometry, "rate")] == ["0.03", "0.0012"]


def test_a_head_alone_has_no_learning_rate(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", {"in one place": [("head", "central", {}, [0.80]), ("trained", "central", {}, [0.82])]})
    for run, steps in (("run-0-0-0", 0), ("run-0-1-0", 7)):
        summary = folder / "runs" / run / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"steps": steps}))
    assert [rate_of(cell) for cell in gather([folder]).studies[0].tables[0].cells] == [None, 0.03]


def test_what_tuning_tried_is_listed_and_a_choice_at_an_end_or_an_edge_is_marked(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", PLAIN)
    content = json.loads((folder / "study.json").read_text())
    shared = {"table": "three models", "key": "optim.lr", "runs": []}
    content["tuned"] = [
        shared | {"label": "dense", "value": 0.03, "tried": [[0.01, 0.7], [0.03, 0.72], [0.09, None]]},  # failing is worse
        shared | {"label": "sparse one", "value": 0.3, "tried": [[0.03, 0.7], [0.1, 0.71], [0.3, 0.72]]},
        shared | {"label": "central", "value": None, "tried": [[0.01, None]]},
    ]
    (folder / "study.json").write_text(json.dumps(content))
    (study,) = gather([folder]).studies
    assert [(tuned.at_an_end, tuned.at_an_edge) for tuned in study.tuned] == [(False, True), (True, False), (False, False)]
    near = replace(study.tuned[0], tried=[(0.09, 0.35), (0.27, 0.01), (0.03, 0.72), (0.01, 0.4)])
    assert near.at_an_edge and not replace(near, tried=[(0.09, 0.37), (0.27, 0.01), (0.03, 0.72)]).at_an_edge
    made = contents(folder)
    table = tables(made)["toy-three-models-tuned"]
    assert texts(table) == [
        ["dense", "optim.lr", "0.03 (an edge)", "0.01: 70.00, 0.03: 72.00, 0.09: failed"],
        ["sparse one", "optim.lr", "0.3 (an end)", "0.03: 70.00, 0.1: 71.00, 0.3: 72.00"],
        ["central", "optim.lr", "–", "0.01: failed"],
    ]
    assert "An end: nothing was tried beyond it. An edge: a neighbour failed" in table.caption
    assert any(
        "beside one that fails: “dense”" in caution for block in made.lead if isinstance(block, Answer) for caution in block.cautions
    )


# --- the story


def test_studies_stand_in_the_order_of_the_story(tmp_path: Path) -> None:
    names = ["own", "rates", "layerscale", "strategies", "baselines", "six_models", "heterogeneity"]
    made = contents(*(make_study(tmp_path / name, PLAIN, name=name) for name in names))
    headings = [block.key for block in made.blocks if isinstance(block, Heading) and block.level == 2]
    assert headings == [
        f"study-{name}" for name in ("six-models", "baselines", "heterogeneity", "strategies", "layerscale", "rates", "own")
    ]
    assert [block.key for block in made.lead if isinstance(block, Chart)] == ["main-strategies-three-models-cells"]
    assert [block.question for block in made.lead if isinstance(block, Answer)] == ["Which one wins?"] * 7


def test_question_answer_figure_and_table_follow_each_other(tmp_path: Path) -> None:
    made = contents(make_study(tmp_path / "s", RULES, ANALYSES))
    kinds = [type(block).__name__ for block in made.blocks]
    assert kinds[:5] == ["Heading", "Answer", "Heading", "Answer", "Chart"] and kinds.index("Table") < kinds.index("Details")
    assert [type(block) for block in made.lead] == [Text, Answer, Chart]
    assert made.lead[0].text.startswith("11 finished runs of tiny on toy_set, n = 2 to 3 per cell.")  # type: ignore[union-attr]
    assert made.title == "toy" and report(gather([tmp_path / "s"]), "Mine").title == "Mine"


def test_of_one_cell_its_curves_come_before_its_table(tmp_path: Path) -> None:
    made = contents(make_study(tmp_path / "s", {"t": [("a", "dense", {}, [0.5, 0.6])]}))
    shown = [block.kind for block in made.blocks if isinstance(block, Chart | Table)]
    assert shown[:3] == ["val_accuracy", "cells", "scores"]


def test_a_study_answers_with_its_first_significant_difference(tmp_path: Path) -> None:
    flat: dict[str, Sequence[Cell]] = {"flat": [("a", "a", {}, [0.5, 0.6]), ("b", "b", {}, [0.5, 0.6])]}

    def told(**tables: Any) -> str:
        (first,) = [
            block for block in contents(make_study(tmp_path / str(len(list(tmp_path.iterdir()))), tables)).lead if isinstance(block, Answer)
        ]
        return first.text

    assert told(**flat, **PLAIN).startswith("“three models”: “sparse one” is best on validation")
    assert told(**flat, other=[("a", "a", {}, [0.5])]) == "“flat”: “a” and “b” tie on validation at 54.00 % (n = 2)."
    assert told(**flat) == "“a” and “b” tie on validation at 54.00 % (n = 2)."


def test_keys_are_different_and_fit_file_names(tmp_path: Path) -> None:
    odd: dict[str, Sequence[Cell]] = dict.fromkeys((HOSTILE, "Nc=1", "Nc 1", "ξ"), PLAIN["three models"])
    made = contents(make_study(tmp_path / "one", odd, ANALYSES), make_study(tmp_path / "two", odd, ANALYSES))
    for kind in (Heading, Table, Chart):
        keys = [block.key for block in made.walk() if isinstance(block, kind)]
        assert len(keys) == len(set(keys)) and all(re.fullmatch("[a-z0-9-]+", key) for key in keys)
    assert unique(["a b", "A-b", "a_b", "ξ"]) == ["a-b", "a-b-2", "a-b-3", "x"]


def test_files_of_tables_with_like_names_differ(tmp_path: Path) -> None:
    cells: Sequence[Cell] = [("a", "a", {}, [0.5])]
    assert table_keys(gather([make_study(tmp_path / "s", {"Nc=1": cells, "Nc 1": cells})])) == [["toy-nc-1", "toy-nc-1-2"]]


def test_a_study_that_is_given_twice_is_reported_once(tmp_path: Path) -> None:
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
    assert "No trial is complete." in markdown(report(found)) and "fedlens study runs" not in markdown(report(found))


def test_a_failure_is_listed_by_cell_and_seed_or_by_its_analysis(tmp_path: Path) -> None:
    failures = {"run-0-1-1": "no memory", "analyses/0.json": "the disk of /home/me/x/model.st is full", "gone": "of an older plan"}
    cells: list[Cell] = [("a", "a", {}, [0.5, 0.6]), ("", "", {}, [0.7, None])]
    made = contents(make_study(tmp_path / "s", {"t": cells}, [("sweep", SWEEP)], failures=failures))
    assert texts(tables(made)["toy-failures"]) == [
        ["all, seed 1", "run-0-1-1", "no memory"],
        ["sweep of all, seed 0", "analyses/0.json", "the disk of …/model.st is full"],
        ["gone", "–", "of an older plan"],
    ]


def test_runs_environment_and_command_are_folded_away(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", PLAIN)
    (folder / "runs" / "run-0-0-0" / "environment.json").write_text(json.dumps({"torch": "2.0", "device": "a GPU", "host": "secret"}))
    (last,) = [
        block for block in contents(folder).blocks if isinstance(block, Details) and block.summary == "Runs, environment and command"
    ]
    text = markdown(Report("", [last]))
    assert "    fedlens study toy --on here\n\n- device: a GPU\n- torch: 2.0\n" in text and "secret" not in text
    assert "| run-0-0-1 | central | 1 | 82.00 | 81.00 |" in text and text.count("| run-") == 9


# --- analyses and searches


def test_clients_that_are_forgotten_are_in_the_title(tmp_path: Path) -> None:
    (study,) = plain(tmp_path, analyses=[("forget", FORGET)]).studies
    one, other = study.analyses[0], json.loads(json.dumps(FORGET))
    other["clients"] = [other["clients"][0] | {"client": client} for client in (4, 1)]
    found = tables(report(Gathered([replace(study, analyses=[one, replace(one, found=other, options={"clients": [4, 1]})])])))
    assert [row[0] for row in texts(found["toy-forget"])] == ["all: client 0", "all: clients 4, 1"]
    assert [row[0] for row in texts(found["toy-forget-seeds"])] == ["all: client 0 (Bag)", "all: client 4 (Bag)", "all: client 1 (Bag)"]


def test_analyses_and_searches_are_in_the_report(tmp_path: Path) -> None:
    study = make_study(tmp_path / "s", PLAIN, ANALYSES)
    trials = [
        {"number": 0, "params": {"optim.lr": 0.1}, "value": 0.7, "state": "complete"},
        {"number": 1, "params": {"optim.lr": 0.25}, "value": None, "state": "pruned"},
    ]
    default = {"params": {"optim.lr": 0.01}, "value": 0.65}
    search = {"name": "lr", "question": "What rate?", "experiment": ["data.root=/home/me/x"], "keys": ["optim.lr"], "trials": trials}
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "search.json").write_text(json.dumps(search | {"default": default, "best": 0}))
    made = contents(study, tmp_path / "f")
    found, text = tables(made), markdown(made)
    assert texts(found["toy-sweep-seeds"]) == [["all", "0", "79.00", "79.00", "0.5", "79.00", "80.00"]]
    assert texts(found["toy-interference-seeds"]) == [["half A and half B", "0", "0.1", "0.2", "20.00", "0.7"]]
    assert "starts 2.97 from where run-a does" in text and "…/run-b" in text
    assert texts(found["toy-forget-seeds"]) == [["all: client 0 (Bag)", "0", "90.00", "40.00", "80.00", "80.00", "1"]]
    assert texts(found["toy-masks-seeds"]) == [["all, between seeds", "0", "0.625", "0.05"]]
    assert texts(found["searches"]) == [
        ["lr", "2 trials (1 complete, 1 pruned)", "best (trial 0)", "70.00", "optim.lr = 0.1"],
        ["", "", "default", "65.00", "optim.lr = 0.01"],
    ]
    assert texts(found["search-lr-list"]) == [["trial 0", "complete", "0.1", "70.00"], ["trial 1", "pruned", "0.25", "–"]]
    assert "All trials share: data.root=…/x." in text and "/home" not in text


def test_analyses_of_several_seeds_are_means(tmp_path: Path) -> None:
    """By hand: the numbers of one analysis, and their means over seeds."""
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
    table = tables(report(both))["toy-forget"]
    assert texts(table) == [["all: client 0", "90.00", "35.00 ± 7.07", "80.00", "80.00", "1.00", "2"]]
    assert len(texts(tables(report(both))["toy-forget-seeds"])) == 2
    finer = [replace(a, options={"grid": "0:1:5"}) for a in both.studies[0].analyses[1:]]  # the other options are another analysis
    assert [row.n for row in over_seeds(replace(study, analyses=[*study.analyses, *finer]))["sweep"]] == [1, 1]


def _shifted(analysis: Analysis) -> dict[str, Any]:
    """Return the result of an analysis, with another outcome."""
    found = json.loads(json.dumps(analysis.found))
    if analysis.kind == "forget":
        found["clients"][0]["after"]["test_target"] -= 0.1
    elif analysis.kind == "sweep":
        found["chosen"]["alpha"] += 0.5
    return dict(found)


# --- Markdown and CSV


def test_markdown_has_answers_and_tables(tmp_path: Path) -> None:
    text = markdown(report(plain(tmp_path)))
    assert "## toy (here)\n\nWhich one wins?\n**“sparse one” is best on validation" in text
    assert "|  | n | test accuracy, % | validation accuracy, % |" in text
    assert r"| dense | 3 | 71.67 ± 1.53 † (\[67.87, 75.46\], n = 3) |" in text and r"| **88.33 ± 2.52** (\[" in text
    assert "\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n" in text


def test_the_terminal_gets_no_details(tmp_path: Path) -> None:
    made = report(plain(tmp_path))
    assert "Differences to" in markdown(made) and "Differences to" not in markdown(made, details=False)


def test_labels_cannot_break_markdown() -> None:
    assert escaped("a|b <i> *x* _y_ least_sensitive $1 & `c`\nd") == r"a\|b \<i\> \*x\* \_y\_ least_sensitive \$1 &amp; \`c\` d"
    assert escaped("mask.path=/home/me/m.st at C:\\Users\\me\\x, hf:org/name 2/3") == "mask.path=…/m.st at …/x, hf:org/name 2/3"


def test_hostile_names_are_one_cell_each_in_markdown(tmp_path: Path) -> None:
    text = markdown(contents(make_study(tmp_path / "s", {HOSTILE: [(HOSTILE, "a", {}, [0.5]), ("b", "b", {}, [0.6])]}, name=HOSTILE)))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))  # not the command, which is code
    assert "/etc" not in text and "<" not in prose.replace("\\<", "")
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_csv_is_one_line_a_run_and_the_same_whatever_the_time_it_took(tmp_path: Path) -> None:
    studies: dict[str, Sequence[Cell]] = {"t": [("a", "a,b", {"server.merge": "ties"}, [0.5, None]), ("c", "central", {}, [0.6, 0.7])]}
    first = csv_rows(gather([make_study(tmp_path / "one", studies)]))
    again = make_study(tmp_path / "two", studies)
    for file in again.rglob("summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": 99.0}))
    assert first == csv_rows(gather([again]))
    assert first.splitlines() == [
        "study,table,case,server.merge,seed,run,test_accuracy,val_accuracy,rounds,bytes_up,bytes_down",
        'toy,t,"a,b",ties,0,run-0-0-0,0.5,0.49,3,3000000,3000000',
        "toy,t,central,,0,run-0-1-0,0.6,0.59,,,",
        "toy,t,central,,1,run-0-1-1,0.7,0.69,,,",
    ]


def test_a_spreadsheet_runs_no_name_as_a_formula(tmp_path: Path) -> None:
    cells: list[Cell] = [
        (name, name, {"=key": value}, [0.5]) for name, value in (("=1+1", "+x"), ("-a", -0.5), ("@b", "-c"), ("d\x07\te", "  =f"))
    ]
    header, *rows = csv.reader(csv_rows(gather([make_study(tmp_path / "s", {"\r=t": cells}, name="+s")])).splitlines())
    assert header[3] == "'=key"
    assert [row[:4] for row in rows] == [
        ["'+s", "'=t", "'=1+1", "'+x"],
        ["'+s", "'=t", "'-a", "-0.5"],
        ["'+s", "'=t", "'@b", "'-c"],
        ["'+s", "'=t", "d� e", "'=f"],
    ]


# --- all files


def test_a_report_is_the_same_bytes_twice(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", PLAIN, ANALYSES)
    for out in ("one", "two"):
        assert write_report(gather([folder]), tmp_path / out) == tmp_path / out / "index.html"
    files = {file.relative_to(tmp_path / "one"): file.read_bytes() for file in (tmp_path / "one").rglob("*") if file.is_file()}
    assert files == {file.relative_to(tmp_path / "two"): file.read_bytes() for file in (tmp_path / "two").rglob("*") if file.is_file()}
    assert {"index.html", "results.md", "results.csv", "tables/numbers.tex", "tables/toy-three-models.tex"} <= {str(name) for name in files}
    assert not (tmp_path / "one" / "figures").exists()


def test_figures_are_written_if_they_are_wanted(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "s", {"t": [("a", "central", {}, [0.5, 0.6])]})])
    write_report(found, tmp_path / "out", figures=True)
    keys = {block.key for block in report(found).walk() if isinstance(block, Chart)}
    assert keys and {file.name for file in (tmp_path / "out" / "figures").iterdir()} == {
        f"{key}.{kind}" for key in keys for kind in ("pdf", "png")
    }
