"""The demo's page: what it shows, that it makes no request, and that its thesis and its sentences follow the numbers."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from browser import chromium
from conftest import FAST
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

import fedlens as fl
from fedlens.demo import demo as module
from fedlens.demo import sections
from fedlens.demo.results import DENSE, MASKED, MERGED, MIXED, DemoResults, Thesis
from fedlens.overrides import compose
from fedlens.report.blocks import Text
from fedlens.study.arith import PointEvaluator

CHAPTERS = ("What do the clients", "Why does averaging", "Is a tenth", "How far does a task", "Can a client be", "Run it yourself")
FIGURES = 1 + 1 + 1 + 1 + 1 + 1  # the first screen's, then one per chapter
SHORT = ["federated.rounds=2", "federated.eval_every=1", "federated.test_every=1", "federated.local_steps=1", "mask.samples=10"]
SEEDS = 2
RECORD = Path(__file__).parents[1] / "benchmarks" / "records" / "2026-11-19-demo.json"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, DemoResults]]:
    """The page of a small demo, and its results."""
    results: list[DemoResults] = []

    def run(overrides: list[str]) -> fl.Run:
        return fl.run([*FAST, *overrides, *(SHORT if any("fedavg" in each for each in overrides) else ["data.val_fraction=0.5"])])

    def lead(each: DemoResults) -> Any:
        results.append(each)
        return sections.lead(each)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("run", run), ("lead", lead), ("SEEDS", SEEDS), ("ALPHAS", (0.0, 1.0)), ("FORGET", (0.0, 1.0))):
            patch.setattr(module, name, value)
        patch.setattr(module, "CHECKPOINTS", "none")  # the demo deletes its checkpoints, tests read them
        page = module.demo(tmp_path_factory.mktemp("demo") / "it's a demo")
        yield page, results[0]


def test_the_page_opens_with_its_thesis_and_has_one_question_per_chapter(shown: tuple[Path, DemoResults]) -> None:
    page, results = shown
    text = page.read_text()
    assert unescape(re.findall(r"<h1>(.*?)</h1>", text)[0]) == Thesis.of(results.accuracies).sentence
    headings = re.findall(r"<h2 [^>]*>(.*?)</h2>", text)
    assert all(h.startswith(c) for h, c in zip(headings, CHAPTERS, strict=True))
    assert text.count('<figure class="chart') == FIGURES
    folded = "".join(re.findall(r"<details>(.*?)</details>", text, re.S))
    assert text.count("<thead>") == folded.count("<thead>") == 4
    assert "tuned beforehand" in text

    runs = {path.name: fl.load_run(path) for path in (page.parent / "runs").iterdir()}
    for label, name in ((MIXED, "mixed"), (DENSE, "dense"), (MASKED, "masked")):
        for seed in range(SEEDS):
            last = runs[f"{name}-{seed}"].metrics[-1]  # the second half of two rounds
            assert results.accuracies[label][seed] == 100 * last["test_accuracy"]
            start, first = runs[f"{name}-{seed}"].start, runs[f"mixed-{seed}"].start
            assert all(torch.equal(start[key], first[key]) for key in first)  # task vectors of one θ₀
    swept = next(shlex.split(line)[-1] for line in unescape(text).split("<br>") if line.startswith("fedlens arith sweep"))
    assert Path(swept).resolve() == runs["masked-0"].path.resolve()


def test_the_mean_of_the_rounds_is_the_start_plus_the_mean_of_their_task_vectors(shown: tuple[Path, DemoResults]) -> None:
    run = fl.load_run(shown[0].parent / "runs" / "dense-1")
    evaluator = PointEvaluator(run)
    means = module.means_of_rounds(evaluator, run)
    assert list(means) == [1, 2]
    first, last = (fl.TaskVector.between(run.start, module.model_after(run, step)) for step in means)
    merged = evaluator.theta(((first + last) * 0.5).apply_to(run.start))
    torch.testing.assert_close(means[2], merged)
    assert not torch.equal(means[1], means[2])
    assert shown[1].accuracies[MERGED][1] == 100 * evaluator.evaluate(means[2], evaluator.bank(evaluator.bench.dataset.test))[1]


def test_the_page_makes_no_request_and_its_slider_moves_the_bars(shown: tuple[Path, DemoResults]) -> None:
    page, _ = shown
    with chromium() as browser:
        browser.emulate()
        browser.open(page)
        browser.draw()
        assert browser.js("document.querySelectorAll('.canvas > svg').length") == FIGURES
        before = browser.js("document.querySelector('#figure-along .canvas > svg').innerHTML")
        assert "α = 1" in before
        browser.js("document.querySelector('#figure-along input[type=range]').focus()")
        browser.keys("\ue012")  # arrow left
        browser.until("document.querySelector('#figure-along .canvas > svg').textContent.includes('α = 0')")
        assert browser.js("document.querySelector('#figure-along .canvas > svg').innerHTML") != before
        assert browser.log("browser") == []
        assert browser.requests() == [browser.js("location.href")]


def three(mixed: Sequence[float], dense: Sequence[float], merged: Sequence[float]) -> Thesis:
    return Thesis.of({name: dict(enumerate(values)) for name, values in ((MIXED, mixed), (DENSE, dense), (MERGED, merged))})


@pytest.mark.parametrize(
    ("thesis", "holds"),
    [
        (three([80, 81, 80], [70, 72, 71], [75, 77, 77]), True),
        (three([80, 81, 80], [70, 72, 71], [75, 77, 70]), False),  # not in every seed
        (three([80, 81, 80], [70, 72, 71], [71, 73, 80]), False),  # in every seed, but within the noise
        (three([70, 73, 72], [70, 72, 71], [75, 77, 76]), False),  # nothing to give back
        (three([80], [70], [75]), False),  # one seed shows no noise
    ],
)
def test_the_page_states_its_thesis_only_where_every_seed_and_both_intervals_carry_it(thesis: Thesis, holds: bool) -> None:
    assert thesis.holds == holds
    assert thesis.sentence.startswith("With one class per client" if holds else "These")


def test_the_thesis_holds_for_three_recorded_seeds_of_three() -> None:
    record = json.loads(RECORD.read_text())
    accuracies = {name: {int(seed): value for seed, value in by_seed.items()} for name, by_seed in record["test_accuracy"].items()}
    thesis = Thesis.of(accuracies)
    assert thesis.holds and thesis.seeds == [0, 1, 2]
    assert thesis.sentence == record["thesis"]
    settings = {"model": module.SMALL, "head": module.HEAD, "federation": module.FEDERATION, "mask": module.MASK, "rates": module.RATES}
    assert record["settings"] == settings
    assert record["tuning"]["seed"] not in thesis.seeds
    for name, rate in module.RATES.items():  # each the best of those that were tried on validation, with another seed
        tried = {float(lr): accuracy for lr, accuracy in record["tuning"]["val_accuracy"][name].items()}
        assert max(tried, key=tried.__getitem__) == rate


def test_the_sparse_experiments_have_recipes() -> None:
    for experiment, rate in (("centralized", 0.1), ("fedavg_iid", 1.0), ("fedavg_noniid", 0.03)):
        assert compose([f"experiment={experiment}_sparse"]).optim.lr == rate


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12))
def test_a_path_of_any_characters_passes_through_an_override(name: str) -> None:
    parsed = OverridesParser.create().parse_override(f"run.dir={module.quoted(Path('out') / name)}")
    assert parsed.value() == str(Path("out") / name)


@pytest.mark.parametrize(("alpha", "words"), [(1.5, "stopped short"), (0.5, "went too far"), (1.0, "chooses α = 1.")])
def test_the_sentence_on_the_chosen_alpha_follows_the_accuracies(alpha: float, words: str) -> None:
    along = {0.0: {"all": 70.0}, 1.0: {"all": 75.0}, alpha: {"all": 80.0}}
    results: Any = SimpleNamespace(along=along, tested={1.0: 75.0, alpha: 80.0}, seeds=[0])
    assert sum(words in block.text for block in sections.arithmetic(results) if isinstance(block, Text)) == 1


@pytest.mark.parametrize(("after", "words"), [(10.0, "is 10 % (before: 90 %)"), (95.0, "it does not work")])
def test_the_sentence_on_the_subtracted_client_follows_the_accuracies(after: float, words: str) -> None:
    points = {
        0.0: {"all": 90.0, "Bag": 90.0, "Coat": 90.0},
        1.0: {"all": 80.0, "Bag": after, "Coat": 88.0},
        2.0: {"all": 1.0, "Bag": 0.0, "Coat": 2.0},
    }
    results: Any = SimpleNamespace(forgotten="Bag", client=3, without=points, seeds=[0])
    assert sum(words in block.text for block in sections.forgetting(results) if isinstance(block, Text)) == 1
