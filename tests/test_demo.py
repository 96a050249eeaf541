"""The demo's page: what it shows, that it makes no request, and that its sentences follow the numbers."""

import re
import shlex
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
from fedlens.demo.results import compared
from fedlens.lens.mask_rules import STRATEGIES
from fedlens.overrides import compose
from fedlens.report.blocks import Text

SECTIONS = ("1. Data", "2. The centralised", "3. FedAvg", "4. Moving a tenth", "5. Task arithmetic", "6. Interference", "Run it yourself")
FIGURES = 1 + 1 + 4 + 2 + 2 + 4  # per section; figures side by side count each
SHORT = ["federated.rounds=1", "federated.participation=0.1", "federated.local_steps=1", "optim.batch_size=8", "mask.samples=10"]


def test_the_demo_tells_its_six_sections_in_a_page_that_makes_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    central = ["train.epochs=1"]
    monkeypatch.setattr(module, "run", lambda o: fl.run([*FAST, *o, *(SHORT if any("fedavg" in x for x in o) else central)]))
    monkeypatch.setattr(module, "RATES", {rule: module.RATES[rule] for rule in ("least_sensitive", "random")})
    monkeypatch.setattr(module, "ALPHAS", (0.0, 1.0))
    monkeypatch.setattr(module, "GRID", (0.0, 1.0))
    page = module.demo(tmp_path / "it's a demo")
    text = page.read_text()

    headings = re.findall(r"<h2 [^>]*>(.*?)</h2>", text)
    assert all(h.startswith(c) for h, c in zip(headings, SECTIONS, strict=True))
    assert text.count('<figure class="chart') == FIGURES
    tables = re.findall(r"<thead>(.*?)</thead>", text)
    assert len(tables) == 6
    assert all("n = 1" in head for head in tables)

    runs = {path.name: fl.load_run(path) for path in (page.parent / "runs").iterdir()}
    starts = [run.start for run in runs.values()]
    assert all(torch.equal(start[name], starts[0][name]) for start in starts for name in start)  # task vectors of one θ₀
    for rule in module.RATES:
        summary = runs[f"sparse-{rule}"].summary
        row = next(r for r in re.findall(r"<tr>.*?</tr>", text) if f">{rule.replace('_', ' ')}</th>" in r and "B</td>" in r)
        assert f">{100 * summary['test_accuracy']:.2f}<" in row
        assert summary["mask"]["strategy"] == rule

    swept = next(shlex.split(line)[-1] for line in unescape(text).split("<br>") if line.startswith("fedlens arith sweep"))
    assert Path(swept).resolve() == runs["dense-2_classes_per_client"].path.resolve()

    with chromium() as browser:
        browser.emulate()
        browser.open(page)
        browser.draw()
        assert browser.log("browser") == []
        assert browser.js("document.querySelectorAll('.canvas > svg').length") == FIGURES
        assert browser.requests() == [browser.js("location.href")]


def test_the_demo_compares_every_rule_and_the_sparse_experiments_have_recipes() -> None:
    assert set(module.RATES) == set(STRATEGIES) - {"random_layerwise"}
    for experiment, rate in (("centralized", 0.1), ("fedavg_iid", 1.0), ("fedavg_noniid", 0.03)):
        assert compose([f"experiment={experiment}_sparse"]).optim.lr == rate


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12))
def test_a_path_of_any_characters_passes_through_an_override(name: str) -> None:
    parsed = OverridesParser.create().parse_override(f"run.dir={module.quoted(Path('out') / name)}")
    assert parsed.value() == str(Path("out") / name)


@pytest.mark.parametrize(
    ("value", "reference", "words"),
    [(86.0, 85.0, "1.0 points above"), (84.5, 85.0, "0.5 points below"), (85.01, 85.0, "level with")],
)
def test_words_for_a_comparison_follow_the_numbers(value: float, reference: float, words: str) -> None:
    assert compared(value, reference) == words


@pytest.mark.parametrize(("alpha", "words"), [(1.5, "stopped short"), (0.5, "went too far"), (1.0, "ended where they should")])
def test_what_is_said_of_the_chosen_alpha_follows_the_sweep(alpha: float, words: str) -> None:
    def point(at: float) -> dict[str, float]:
        return {"alpha": at, "val_accuracy": 0.8, "val_loss": 0.5, "test_accuracy": 0.8, "test_loss": 0.5}

    points = [point(0.0), point(1.0), point(alpha)]
    sweep = {"points": points, "start": points[0], "end": points[1], "chosen": points[2], "norm": 1.0, "density": 0.5}
    results: Any = SimpleNamespace(sweeps={"dense": sweep, "random": sweep}, ridge=points[0], followed="random", studied="a split")
    texts = [block.text for block in sections.arithmetic(results) if isinstance(block, Text)]
    assert " ".join(texts).count(words) == 2
