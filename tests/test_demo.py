"""The demo's page: what it shows, that it asks nobody for anything, and that its sentences follow the numbers."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FAST
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

import fedlens as fl
from fedlens.demo import demo as module
from fedlens.demo import sections
from fedlens.demo.html_page import DemoPage
from fedlens.demo.results import compared
from fedlens.lens.mask_rules import STRATEGIES, Mask
from fedlens.overrides import compose
from fedlens.study.figures import mask_figure

SECTIONS = ("1. Data", "2. The centralised", "3. FedAvg", "4. Moving a tenth", "5. Task arithmetic", "6. Interference", "Run it yourself")
FIGURES = 1 + 1 + 4 + 2 + 2 + 4  # per section; figures side by side count each
SHORT = ["federated.rounds=1", "federated.participation=0.1", "federated.local_steps=1", "optim.batch_size=8", "mask.samples=10"]


def test_the_demo_tells_its_six_sections_in_a_page_that_asks_nobody_for_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    central = ["train.epochs=1"]
    monkeypatch.setattr(module, "run", lambda o: fl.run([*FAST, *o, *(SHORT if any("fedavg" in x for x in o) else central)]))
    monkeypatch.setattr(module, "RATES", {rule: module.RATES[rule] for rule in ("least_sensitive", "random")})
    monkeypatch.setattr(module, "ALPHAS", (0.0, 1.0))
    monkeypatch.setattr(module, "GRID", (0.0, 1.0))
    page = module.demo(tmp_path / "it's a demo")
    text = page.read_text()

    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert all(h.startswith(c) for h, c in zip(headings, SECTIONS, strict=True))
    assert text.count("<svg") == FIGURES
    tables = re.findall(r"<thead>(.*?)</thead>", text)
    assert len(tables) == 6
    assert all("n = 1" in head for head in tables)

    runs = {path.name: fl.load_run(path) for path in (page.parent / "runs").iterdir()}
    starts = [run.start for run in runs.values()]
    assert all(torch.equal(start[name], starts[0][name]) for start in starts for name in start)  # task vectors of one θ₀
    for rule in module.RATES:
        summary = runs[f"sparse-{rule}"].summary
        row = next(r for r in re.findall(r"<tr><td>.*?</tr>", text) if f"<td>{rule.replace('_', ' ')}</td>" in r and " MB" in r)
        assert f">{100 * summary['test_accuracy']:.2f}<" in row
        assert summary["mask"]["strategy"] == rule

    own = re.sub(r'xmlns(:\w+)?="[^"]*"|<metadata>.*?</metadata>', "", text, flags=re.S)
    assert not re.search(r"https?://|<script|<img|@import|\bsrc=", own)
    if shutil.which("chromium"):
        assert "CONSOLE" not in opened(page, tmp_path)


def opened(page: Path, folder: Path) -> str:
    """What Chromium says on opening the page."""
    quiet = "--no-first-run --disable-quic --disable-background-networking --disable-component-update --disable-sync"
    flags = f"--headless --no-sandbox --disable-gpu {quiet} --enable-logging=stderr --v=0 --dump-dom".split()
    done = subprocess.run(
        ["chromium", *flags, f"--user-data-dir={folder / 'profile'}", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.count("<svg") == FIGURES
    return done.stderr


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
    page = DemoPage("title", "lead")
    sections.arithmetic(page, results)
    assert page.html().count(words) == 2


def test_the_mask_figure_shows_densities_by_layer_and_shares_that_fill_their_bar() -> None:
    shapes = {
        "patch_embed.proj.weight": (4, 4),
        "blocks.0.attn.qkv.weight": (12, 4),
        "blocks.0.mlp.fc1.weight": (8, 4),
        "norm.weight": (4,),
    }
    generator = torch.Generator().manual_seed(0)
    eligible = {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()} | {"head.weight": torch.zeros(3, 4).bool()}
    masks = {
        name: Mask({n: e & (torch.rand(e.shape, generator=generator) < density) for n, e in eligible.items()}, eligible)
        for name, density in (("few", 0.2), ("many", 0.7))
    }
    grid, bars = mask_figure(masks).axes
    assert [t.get_text() for t in grid.get_xticklabels()] == ["embed", "block 0", "final norm"]  # no column for what nothing may choose
    shown = np.asarray(grid.images[0].get_array())
    for row, mask in zip(shown, masks.values(), strict=True):
        assert row == pytest.approx([100 * active / allowed for _, active, allowed in mask.by_layer() if allowed])
    widths = np.array([[bar.get_width() for bar in container] for container in bars.containers])  # type: ignore[attr-defined]
    assert widths.sum(0) == pytest.approx([100, 100])
