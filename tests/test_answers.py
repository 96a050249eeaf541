"""The sentences of a report: each is there only if the data carries it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_studies import ANALYSES, FORGET, GRID, PLAIN, SWEEP, Cell, make_study, point

from fedlens.report.answers import answer, diverged, ends_below_start, measured, search
from fedlens.report.blocks import Answer
from fedlens.report.content import report
from fedlens.report.over_seeds import over_seeds
from fedlens.study.results import Gathered, SearchResult, TableResult, Tuned, gather, read_study

TEST_WORDS = ("significant", " p ", "test of", "differ")


def table_of(folder: Path, cells: Sequence[Cell], **options: Any) -> TableResult:
    return read_study(make_study(folder, {"t": cells}, **options)).tables[0]


def edit(folder: Path, pattern: str, **facts: Any) -> None:
    """Change the summaries of the runs whose names match."""
    for file in folder.glob(f"runs/{pattern}/summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def grid(key: str, values: Mapping[Any, Sequence[float | None]]) -> list[Cell]:
    return [(f"{key.split('.')[-1]} {value}", "", {key: value}, seeds) for value, seeds in values.items()]


def numbers_in(sentence: str) -> list[str]:
    """Return the numbers of a sentence outside the names of its cells."""
    return re.findall(r"\d+(?:\.\d+)?", re.sub(r"“[^”]*”", "", sentence))


# --- a winner, and whether it is one


def test_the_cell_that_validation_prefers_is_compared_with_the_baseline(tmp_path: Path) -> None:
    table = gather([make_study(tmp_path / "s", PLAIN)]).studies[0].tables[0]
    assert answer(table, "Which one wins?") == Answer(
        "Which one wins?",
        "“sparse one” is best on validation and reaches 88.33 % on the test set, 6.33 points above “central” (n = 3, significant).",
        [],
    )


def test_validation_chooses_although_another_cell_is_better_on_the_test_set(tmp_path: Path) -> None:
    table_of(tmp_path / "s", [("a", "a", {}, [0.7, 0.72]), ("b", "b", {}, [0.6, 0.69])])
    edit(tmp_path / "s", "run-0-1-*", val_accuracy=0.9)
    table = gather([tmp_path / "s"]).studies[0].tables[0]
    assert answer(table, "").text == (
        "“b” is best on validation and reaches 64.50 % on the test set, 6.50 points below “a” (n = 2, not significant)."
    )


def test_a_difference_that_is_not_significant_is_called_so(tmp_path: Path) -> None:
    table = table_of(tmp_path / "s", [("a", "a", {}, [0.5, 0.6]), ("b", "b", {}, [0.7, 0.61])])
    assert answer(table, "").text.endswith("10.50 points above “a” (n = 2, not significant).")


def test_a_baseline_that_wins_is_compared_with_all_others(tmp_path: Path) -> None:
    table = table_of(tmp_path / "s", [("a", "a", {}, [0.8, 0.81, 0.83]), ("b", "b", {}, [0.7, 0.71, 0.74])])
    assert answer(table, "").text == (
        "“a” is best on validation and reaches 81.33 % on the test set (n = 3); no other cell is significantly higher there."
    )
    edit(tmp_path / "s", "run-0-0-*", val_accuracy=0.9)
    for seed, accuracy in enumerate((0.90, 0.911, 0.93)):
        edit(tmp_path / "s", f"run-0-1-{seed}", test_accuracy=accuracy)
    table = gather([tmp_path / "s"]).studies[0].tables[0]
    assert answer(table, "").text.endswith("(n = 3); “b” is significantly higher there.")


def test_one_seed_per_cell_gives_no_word_of_a_test(tmp_path: Path) -> None:
    for cells in ([("a", "a", {}, [0.5]), ("b", "b", {}, [0.7])], [("b", "b", {}, [0.7]), ("a", "a", {}, [0.5])]):
        found = gather([make_study(tmp_path / cells[0][0], {"t": cells})])
        told = answer(found.studies[0].tables[0], "")
        assert told.text.startswith("“b” is best on validation and reaches 70.00 % on the test set") and "(n = 1)" in told.text
        assert not any(word in told.text for word in TEST_WORDS)
        assert told.cautions == ["One seed per cell: no difference can be tested."]
        captions = [block.caption for block in report(found).walk() if hasattr(block, "rows")]
        assert captions and not any("significant" in caption for caption in captions)


def test_a_tie_is_named_as_a_tie(tmp_path: Path) -> None:
    cells: list[Cell] = [(name, name, {}, [0.7, 0.72]) for name in "abcdef"]
    assert (
        answer(table_of(tmp_path / "two", [*cells[:2], ("z", "z", {}, [0.1, 0.2])]), "").text
        == "“a” and “b” tie on validation at 70.00 % (n = 2)."
    )
    assert answer(table_of(tmp_path / "six", cells), "").text == "“a”, “b”, “c”, “d” and 2 more tie on validation at 70.00 % (n = 2)."


def test_means_that_read_the_same_tie(tmp_path: Path) -> None:
    table = table_of(tmp_path / "s", [("a", "a", {}, [0.70001, 0.70001]), ("b", "b", {}, [0.70003, 0.7])])
    assert "tie on validation" in answer(table, "").text


def test_one_cell_reaches_what_it_reaches(tmp_path: Path) -> None:
    assert answer(table_of(tmp_path / "three", [("a", "a", {}, [0.5, 0.6, 0.7])]), "") == Answer(
        "", "“a” reaches 60.00 ± 10.00 % on the test set (n = 3).", []
    )
    assert answer(table_of(tmp_path / "one", [("a", "a", {}, [0.5])]), "") == Answer("", "“a” reaches 50.00 % on the test set (n = 1).", [])


def test_a_table_without_runs_says_what_to_run(tmp_path: Path) -> None:
    table = table_of(tmp_path / "s", [("a", "a", {}, [None, None])])
    told = answer(table, "Which?", command="fedlens study toy --on here --table t")
    assert told == Answer("Which?", "No run is finished yet. To finish it, run: fedlens study toy --on here --table t")
    assert answer(table, "Which?").text == "No run is finished yet."
    assert answer(replace(table, cells=[]), "Which?").text == "No run is finished yet."


def test_seeds_that_are_missing_are_named_with_the_command_that_runs_them(tmp_path: Path) -> None:
    cells: list[Cell] = [("a", "a", {}, [0.5, 0.6]), ("b", "b", {}, [0.7, None]), ("c", "c", {}, [None, None])]
    told = answer(table_of(tmp_path / "s", cells), "", command="fedlens study toy")
    assert told.cautions == ["Not all seeds are finished: “b” (1 of 2) and “c” (0 of 2). To finish it, run: fedlens study toy"]
    assert told.text == "“b” is best on validation and reaches 70.00 % on the test set, 20.00 points above “a” (n = 1)."


def test_runs_without_a_test_accuracy_are_judged_on_validation(tmp_path: Path) -> None:
    cells: list[Cell] = [("a", "a", {}, [0.5]), ("b", "b", {}, [0.7])]
    make_study(tmp_path / "s", {"t": cells})
    edit(tmp_path / "s", "*", test_accuracy=None)
    table = gather([tmp_path / "s"]).studies[0].tables[0]
    assert answer(table, "").text == "“b” has the highest validation accuracy, 69.00 % (n = 1); the test set was not read."


def test_without_validation_no_cell_is_called_best(tmp_path: Path) -> None:
    make_study(tmp_path / "s", {"t": [("a", "a", {}, [0.5]), ("b", "b", {}, [0.7])]})
    edit(tmp_path / "s", "*", val_accuracy=None)
    text = answer(gather([tmp_path / "s"]).studies[0].tables[0], "").text
    assert text == "Test accuracy falls from 70.00 % (“b”) to 50.00 % (“a”), n = 1."


# --- grids and their edges


def test_a_winner_at_the_edge_of_its_grid_is_flagged(tmp_path: Path) -> None:
    table = table_of(tmp_path / "high", grid("train.epochs", {1: [0.5, 0.6], 3: [0.6, 0.65], 9: [0.7, 0.72]}))
    assert answer(table, "").cautions == ["epochs = 9 is the highest value with finished runs: a better one may lie beyond."]
    table = table_of(tmp_path / "low", grid("mask.density", {0.01: [0.7, 0.72], 0.1: [0.6, 0.65], 0.5: [0.5, 0.6]}))
    assert answer(table, "").cautions == ["density = 0.01 is the lowest value with finished runs: a better one may lie beyond."]
    table = table_of(tmp_path / "inside", grid("mask.density", {0.01: [0.5, 0.52], 0.1: [0.6, 0.65], 0.5: [0.5, 0.6]}))
    assert not answer(table, "").cautions
    table = table_of(tmp_path / "names", grid("optim.schedule", {"cosine": [0.5, 0.52], "step": [0.6, 0.65]}))
    assert not answer(table, "").cautions, "names have no order"


def test_an_edge_is_that_of_the_runs_that_are_finished(tmp_path: Path) -> None:
    table = table_of(tmp_path / "s", grid("train.epochs", {1: [0.5], 3: [0.6], 9: [None]}))
    assert "epochs = 3 is the highest value with finished runs: a better one may lie beyond." in answer(table, "").cautions


def test_an_edge_is_flagged_on_the_first_screen_too(tmp_path: Path) -> None:
    found = gather([make_study(tmp_path / "s", {"t": grid("train.epochs", {1: [0.5, 0.6], 3: [0.6, 0.65]}), "u": [("a", "a", {}, [0.5])]})])
    (first,) = [block for block in report(found).lead if isinstance(block, Answer)]
    assert any("epochs = 3 is the highest" in caution for caution in first.cautions)


def test_a_grid_of_two_dimensions_is_described_by_its_ends(tmp_path: Path) -> None:
    table = gather([make_study(tmp_path / "s", GRID)]).studies[0].tables[0]
    assert answer(table, "").text == "Test accuracy falls from 67.80 % (“Nc=5, local_steps 8”) to 63.40 % (“Nc=1, local_steps 4”), n = 3."
    same = [(f"{case}, j {j}", case, {"j": j}, [0.5, 0.6]) for case in "ab" for j in (1, 2)]
    assert answer(table_of(tmp_path / "same", same), "").text == "Test accuracy is 55.00 % in all cells (n = 2)."


def test_cases_that_have_baselines_of_their_own_have_sentences_of_their_own(tmp_path: Path) -> None:
    cells: list[Cell] = [
        (f"{case}, {rule}", case, {"rule": rule}, [v, v + 0.01]) for case in "ab" for rule, v in (("mean", 0.5), ("ties", 0.6))
    ]
    table = replace(table_of(tmp_path / "s", cells), by_case=True)
    first, second = answer(table, "").text.split(". “b")
    assert first == "“a, ties” is best on validation and reaches 60.50 % on the test set, 10.00 points above “a, mean” (n = 2)"
    assert second.endswith("above “b, mean” (n = 2).")


def test_tuned_values_at_an_end_or_an_edge_are_flagged(tmp_path: Path) -> None:
    table = table_of(tmp_path / "s", [("a", "a", {}, [0.5, 0.6]), ("b", "b", {}, [0.7, 0.75])])
    end = Tuned("t", "a", "optim.lr", 0.3, [(0.03, 0.7), (0.1, 0.71), (0.3, 0.72)], [])
    edge = Tuned("t", "b", "optim.lr", 0.03, [(0.01, 0.7), (0.03, 0.72), (0.09, None)], [])
    assert answer(table, "", [end, edge]).cautions == [
        "The tuned value is the lowest or highest that was tried: “a”.",
        "The tuned value lies beside one that fails: “b”.",
    ]


# --- runs that failed to learn


def test_a_diverged_seed_is_marked(tmp_path: Path) -> None:
    make_study(tmp_path / "s", {"t": [("a", "a", {}, [0.79, 0.80, 0.01]), ("b", "b", {}, [0.81, 0.82, 0.83])]})
    edit(tmp_path / "s", "*", ridge={"val_accuracy": 0.7})
    edit(tmp_path / "s", "run-0-0-2", val_accuracy=0.0104)
    table = gather([tmp_path / "s"]).studies[0].tables[0]
    assert [diverged(run) for cell in table.cells for run in cell.runs.values()] == [False, False, True, False, False, False]
    told = answer(table, "")
    assert told.cautions == ["“a”: seed 2 diverged; the mean and its interval include it."]
    assert told.text == "“b” is best on validation and reaches 82.00 % on the test set (n = 3)."  # no difference to a mean that includes it
    (cells,) = [block for block in report(gather([tmp_path / "s"])).walk() if getattr(block, "kind", "") == "cells"]
    assert cells.rows[0][2].below == "[0.00, 100.00], n = 3", "the interval ends at the possible range"


def test_a_run_has_diverged_if_it_lost_what_it_had_where_its_start_was_not_scored(tmp_path: Path) -> None:
    make_study(tmp_path / "s", {"t": [("a", "a", {}, [0.8, 0.8])]})
    edit(tmp_path / "s", "run-0-0-1", test_accuracy=0.1)
    (cell,) = gather([tmp_path / "s"]).studies[0].tables[0].cells
    assert [diverged(run) for run in cell.runs.values()] == [False, True]


def test_a_run_that_ends_below_its_start_says_so(tmp_path: Path) -> None:
    make_study(tmp_path / "s", {"t": [("a", "a", {}, [0.78, 0.80]), ("b", "b", {}, [0.81, 0.82])]})
    edit(tmp_path / "s", "*", start={"val_accuracy": 0.78})
    table = gather([tmp_path / "s"]).studies[0].tables[0]
    assert answer(table, "").cautions == ["“a” ends below θ₀ on validation in 1 of 2 seeds."]
    edit(tmp_path / "s", "run-0-1-0", start={"val_accuracy": 0.9})
    table = gather([tmp_path / "s"]).studies[0].tables[0]
    assert answer(table, "").cautions == ["Below θ₀ on validation: “a” (1 of 2 seeds) and “b” (1 of 2 seeds)."]
    edit(tmp_path / "s", "run-0-1-0", start={"val_accuracy": 0.78})
    edit(tmp_path / "s", "run-0-0-0", steps=0)
    table = gather([tmp_path / "s"]).studies[0].tables[0]
    assert not any(ends_below_start(run) for cell in table.cells for run in cell.runs.values()), "a head without a step has no other start"


# --- analyses, searches, and the form of all sentences


def test_analyses_are_told_with_their_n(tmp_path: Path) -> None:
    found = over_seeds(gather([make_study(tmp_path / "s", PLAIN, ANALYSES)]).studies[0])
    assert {kind: measured(rows, "").text for kind, rows in found.items()} == {
        "sweep": "On the test set, the α that validation chooses gains nothing over the trained model (n = 1).",
        "interpolate": "On the test set, the α that validation chooses gains nothing over the first model (n = 1).",
        "interference": "Task vectors have a cosine of 0.10 (n = 1).",
        "masks": "Masks overlap with an intersection over union of 0.62 (n = 1).",
        "forget": "Subtraction takes 50.0 points from the classes of “all: client 0”, and 0.0 from all others (n = 1).",
    }
    assert FORGET["clients"][0]["before"]["test_target"] == 0.9


def test_a_gain_along_a_task_vector_is_told(tmp_path: Path) -> None:
    (rows,) = over_seeds(
        gather([make_study(tmp_path / "s", PLAIN, [("sweep", SWEEP | {"chosen": point(0.5, 0.815)})])]).studies[0]
    ).values()
    assert (
        measured(rows, "").text
        == "On the test set, the α that validation chooses gains at most 1.50 points over the trained model (“all”, n = 1)."
    )


def searched(best: int | None, *values: float | None, default: float | None = 0.65) -> SearchResult:
    trials = [
        {"number": i, "params": {"lr": i}, "value": value, "state": "complete" if value else "failed"} for i, value in enumerate(values)
    ]
    return SearchResult("s", "here", "What rate?", "", [], ["lr"], trials, {"params": {"lr": 0}, "value": default}, best)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (searched(1, 0.65, 0.7), "The best trial reaches 70.00 % on validation, +5.00 points from the default (n = 1)."),
        (searched(0, 0.65, 0.6), "The best trial reaches 65.00 % on validation: the default configuration (n = 1)."),
        (searched(1, None, 0.7, default=None), "The best trial reaches 70.00 % on validation (n = 1)."),
        (searched(None, None), "No trial is complete."),
    ],
)
def test_a_search_is_told_with_its_default(result: SearchResult, text: str) -> None:
    assert search(result).text == text
    assert bool(search(result).cautions) == (result.best == 1), "only a winner among several can be lucky"


def sentences(found: Gathered) -> Iterator[str]:
    for block in report(found).walk():
        if isinstance(block, Answer):
            yield from re.split(r"(?<=\.) (?=[“A-Z])", block.text)


def test_every_sentence_of_the_published_results_is_short_with_at_most_three_numbers() -> None:
    told = list(sentences(gather([Path(__file__).parents[1] / "results"])))
    assert len(told) > 40
    for sentence in told:
        assert len(numbers_in(sentence)) <= 3, sentence
        assert len(sentence) < 260 and sentence.endswith("."), sentence
