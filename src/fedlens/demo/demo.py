"""`fedlens demo`: a story on the embedded data and backbone, told in one HTML page. Nothing is downloaded.

Here is what is run; the page's chapters, which say what came of it, are in chapters.py.
"""

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from fedlens.data.dataset import Dataset, load_dataset
from fedlens.data.partition import partition
from fedlens.demo import chapters
from fedlens.demo.page import Page
from fedlens.demo.story import Story
from fedlens.errors import UserError
from fedlens.runs.store import MASK_FILE, START_FILE, write_atomic
from fedlens.study.arith import Lab, sweep_run
from fedlens.study.interference import interference_of_runs
from fedlens.training.run import Run, run

CLIENTS = (
    10  # all in every round: together they hold all classes, so that what drift does to a mean is seen without the luck of who was drawn
)
ROUNDS = 6
FEDERATION = [  # sized so that thirteen federations are a matter of two minutes on two cores
    f"federated.clients={CLIENTS}",
    "federated.participation=1.0",
    "federated.local_steps=4",
    f"federated.rounds={ROUNDS}",
    "federated.eval_every=2",
    "optim.batch_size=16",
    "run.keep_last=1",
]
SPLITS = {  # its dense experiment, and what that needs to be told
    "IID": ["fedavg_iid"],
    "2 classes a client": ["fedavg_noniid", "data.classes_per_client=2"],
    "1 class a client": ["fedavg_noniid", "data.classes_per_client=1"],
}
STUDIED = "2 classes a client"  # the split of the chapters on masks and task arithmetic: drift that few rounds can overcome
# Rates by validation loss after the 6 rounds above, 2 classes a client, seed 0, of values a factor of 3 apart: for least_sensitive, qk_only and random the
# best, with a worse one on either side. The others end below the head's loss at no rate; theirs is the largest that ends within 0.006 of their best. Dense
# training, where 0.01 to 0.1 differ by 0.003, has the middle one on all three splits, so that the split is all that differs.
DENSE_RATE = 0.03
RATES = {
    "least_sensitive": 1.0,
    "most_sensitive": 0.01,
    "lowest_magnitude": 0.3,
    "highest_magnitude": 0.3,
    "random": 0.3,
    "qk_only": 1.0,
}
TALOS = "least_sensitive"  # the rule that the chapters on task arithmetic follow
ALPHAS = (-1.0, -0.5, 0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
HALF_ROUNDS = 4
GRID = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5)  # both axes of the disentanglement map
GRID_SAMPLES = 60  # validation images of each task of the map
MARK = ".fedlens-demo"


def demo(out: Path, seed: int = 0) -> Path:
    """Run the story into a folder; returns the page."""
    if out.exists() and not (out / MARK).exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out: {out} exists and is not a demo's folder; choose another")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()
    started = time.monotonic()
    story = live(out / "runs", seed)
    page = Page(
        "fedlens demo",
        "Fashion-MNIST mini (6,000 + 1,000 images) and a 1.2 M-parameter ViT pretrained without labels; all on this machine, "
        f"every figure from one run with seed {seed}.",
    )
    for chapter in (
        chapters.partitions,
        chapters.baseline,
        chapters.drift,
        chapters.masks,
        chapters.arithmetic,
        chapters.interference,
        chapters.yourself,
    ):
        chapter(page, story)
    page.parts.append(f'<p class="soft">Made in {time.monotonic() - started:.0f} s.</p>')
    path = out / "index.html"
    write_atomic(path, page.html())
    return path


def live(folder: Path, seed: int) -> Story:
    """All runs and measurements of the story, in its order.

    The closed-form head is fitted once, by the first run: the sums behind it add over clients, so every federation would find the same.
    The others start where it did, at one θ₀, which is what their task vectors have in common.
    """

    def go(name: str, *overrides: str) -> Run:
        return run([*overrides, f"run.dir={quoted(folder / name)}", f"seed={seed}"])

    def federation(name: str, split: str, rate: float, *overrides: str) -> Run:
        experiment = "fedavg_noniid_sparse" if any(o.startswith("mask.") for o in overrides) else SPLITS[split][0]
        start = ["head=linear", f"model.weights={quoted(central.path / START_FILE)}"]
        return go(name, f"experiment={experiment}", *SPLITS[split][1:], *FEDERATION, *start, f"optim.lr={rate}", *overrides)

    central = go("centralized", "experiment=centralized", "train.epochs=3")
    dense = {split: federation(f"dense-{split.replace(' ', '_')}", split, DENSE_RATE) for split in SPLITS}
    sparse = {rule: federation(f"sparse-{rule}", STUDIED, rate, *masked(rule)) for rule, rate in RATES.items()}
    sweeps = {name: sweep_run(found, grid=ALPHAS) for name, found in (("dense", dense[STUDIED]), (TALOS, sparse[TALOS]))}

    data = dataset_of(central)
    groups, left_out = halves(data, seed)
    maps, sums = {}, {}
    for name, rate, mask in (("dense", DENSE_RATE, []), (TALOS, RATES[TALOS], masked(TALOS, sparse[TALOS].path / MASK_FILE))):
        pair = [
            federation(
                f"half-{half}-{name}",
                "1 class a client",
                rate,
                f"federated.exclude={gone}",
                f"federated.rounds={HALF_ROUNDS}",
                f"federated.eval_every={HALF_ROUNDS}",
                *mask,
            )
            for half, gone in zip((1, 2), left_out, strict=True)
        ]
        maps[name] = interference_of_runs(pair, GRID, GRID_SAMPLES)
        sums[name] = added(pair)
    return Story(seed, CLIENTS, ROUNDS, data, central, dense, STUDIED, sparse, RATES, DENSE_RATE, TALOS, sweeps, groups, maps, sums)


def masked(rule: str, path: Path | None = None) -> list[str]:
    return [f"mask.strategy={rule}", "mask.density=0.1", "mask.samples=150", *([] if path is None else [f"mask.path={quoted(path)}"])]


def quoted(path: Path) -> str:
    """A path as the value of an override, whatever characters it has. In Hydra's quotes a backslash is special before a quote only."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(path)) + "'"


def dataset_of(found: Run) -> Dataset:
    c = found.config
    return load_dataset(c.data.name, c.data.root, val_fraction=c.data.val_fraction, seed=c.seed)


def halves(data: Dataset, seed: int) -> tuple[tuple[list[str], list[str]], tuple[list[int], list[int]]]:
    """Two federations that share no class: the names of the classes of each, and the clients that each goes without."""
    shards = partition(data.train.labels, CLIENTS, "classes", classes_per_client=1, seed=seed)
    middle = data.num_classes // 2
    upper = [int(data.train.labels[int(shard[0])]) >= middle for shard in shards]
    names = list(data.class_names)
    return (names[:middle], names[middle:]), ([k for k, u in enumerate(upper) if u], [k for k, u in enumerate(upper) if not u])


def added(pair: Sequence[Run]) -> dict[str, float]:
    """Validation accuracy on all classes: before, after either half alone, and after adding both task vectors."""
    lab = Lab(pair[0])
    start, taus = lab.theta(pair[0].start), [lab.direction(half.task_vector()) for half in pair]
    points = {"θ₀": start, "θ₀ + τ₁": start + taus[0], "θ₀ + τ₂": start + taus[1], "θ₀ + τ₁ + τ₂": start + taus[0] + taus[1]}
    return {name: lab.evaluate(theta, lab.bench.val)[1] for name, theta in points.items()}
