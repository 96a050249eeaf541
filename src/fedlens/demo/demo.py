"""`fedlens demo`: experiments on the embedded data and backbone, presented in one HTML page. Nothing is downloaded.

This module runs the experiments; sections.py describes them.
"""

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from fedlens.data.dataset import Dataset, load_dataset
from fedlens.data.partition import partition
from fedlens.demo.results import DemoResults
from fedlens.demo.sections import SECTIONS
from fedlens.errors import UserError
from fedlens.files import write_atomic
from fedlens.report.blocks import Report, Text
from fedlens.report.html import page
from fedlens.runs.store import MASK_FILE, START_FILE
from fedlens.study.arith import PointEvaluator, sweep_run
from fedlens.study.interference import interference_of_runs
from fedlens.training.run import Run, run

CLIENTS = 10  # all in every round: together they hold all classes, so that sampling clients does not add to client drift
ROUNDS = 6
FEDERATION = [  # small enough for thirteen federations in two minutes on two cores
    f"federated.clients={CLIENTS}",
    "federated.participation=1.0",
    "federated.local_steps=4",
    f"federated.rounds={ROUNDS}",
    "federated.eval_every=2",
    "optim.batch_size=16",
    "run.keep_last=1",
]
SPLITS = {  # split -> dense experiment and its overrides
    "IID": ["fedavg_iid"],
    "2 classes per client": ["fedavg_noniid", "data.classes_per_client=2"],
    "1 class per client": ["fedavg_noniid", "data.classes_per_client=1"],
}
STUDIED = "2 classes per client"  # the split of the sections on masks and task arithmetic: a few rounds can overcome its drift
# Rates by validation loss after the 6 rounds above, 2 classes per client, seed 0, from values a factor of 3 apart. For least_sensitive, qk_only and
# random: the best one, with a worse one on either side. No rate of the others ends below the head's loss; theirs is the largest within 0.006 of the best.
# For dense training, where 0.01 to 0.1 differ by 0.003: the middle one, on all three splits, so that only the split differs.
DENSE_RATE = 0.03
RATES = {
    "least_sensitive": 1.0,
    "most_sensitive": 0.01,
    "lowest_magnitude": 0.3,
    "highest_magnitude": 0.3,
    "random": 0.3,
    "qk_only": 1.0,
}
TALOS = "least_sensitive"  # the mask rule of the sections on task arithmetic
ALPHAS = (-1.0, -0.5, 0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
HALF_ROUNDS = 4
GRID = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5)  # both axes of the disentanglement map
GRID_SAMPLES = 60  # validation images per task of the map
MARK = ".fedlens-demo"


def demo(out: Path, seed: int = 0) -> Path:
    """Run the demo in a folder; return its page."""
    if out.exists() and not (out / MARK).exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out: {out} exists and is not the folder of a demo; choose another.")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()
    started = time.monotonic()
    results = run_experiments(out / "runs", seed)
    lead = (
        "Fashion-MNIST mini (6,000 + 1,000 images) and a 1.2 M-parameter ViT pretrained without labels; all on this machine, "
        f"every figure from one run with seed {seed}."
    )
    blocks = [block for section in SECTIONS for block in section(results)]
    duration = Text(f"Made in {time.monotonic() - started:.0f} s.", soft=True)
    path = out / "index.html"
    write_atomic(path, page(Report("fedlens demo", [Text(lead, soft=True)], [*blocks, duration])))
    return path


def run_experiments(folder: Path, seed: int) -> DemoResults:
    """Run everything that the page shows.

    The first run fits the closed-form head. Its sums add over clients, so that every federation would fit the same one. The other runs start from the
    first one's θ₀, so that their task vectors have one origin.
    """

    def start(name: str, *overrides: str) -> Run:
        return run([*overrides, f"run.dir={quoted(folder / name)}", f"seed={seed}"])

    def federation(name: str, split: str, rate: float, *overrides: str) -> Run:
        experiment = "fedavg_noniid_sparse" if any(o.startswith("mask.") for o in overrides) else SPLITS[split][0]
        head = ["head=linear", f"model.weights={quoted(central.path / START_FILE)}"]
        return start(name, f"experiment={experiment}", *SPLITS[split][1:], *FEDERATION, *head, f"optim.lr={rate}", *overrides)

    central = start("centralized", "experiment=centralized", "train.epochs=3")
    dense = {split: federation(f"dense-{split.replace(' ', '_')}", split, DENSE_RATE) for split in SPLITS}
    sparse = {rule: federation(f"sparse-{rule}", STUDIED, rate, *masked(rule)) for rule, rate in RATES.items()}
    sweeps = {name: sweep_run(source, grid=ALPHAS) for name, source in (("dense", dense[STUDIED]), (TALOS, sparse[TALOS]))}

    c = central.config
    data = load_dataset(c.data.name, c.data.root, val_fraction=c.data.val_fraction, seed=c.seed)
    groups, excluded = halves(data, seed)
    lengths = [f"federated.rounds={HALF_ROUNDS}", f"federated.eval_every={HALF_ROUNDS}"]
    maps, sums = {}, {}
    for name, rate, mask in (("dense", DENSE_RATE, []), (TALOS, RATES[TALOS], masked(TALOS, sparse[TALOS].path / MASK_FILE))):
        pair = [
            federation(f"half-{half}-{name}", "1 class per client", rate, f"federated.exclude={clients}", *lengths, *mask)
            for half, clients in zip((1, 2), excluded, strict=True)
        ]
        maps[name] = interference_of_runs(pair, GRID, GRID_SAMPLES)
        sums[name] = accuracy_of_sums(pair)
    return DemoResults(seed, CLIENTS, ROUNDS, data, central, dense, STUDIED, sparse, RATES, DENSE_RATE, TALOS, sweeps, groups, maps, sums)


def masked(rule: str, path: Path | None = None) -> list[str]:
    return [f"mask.strategy={rule}", "mask.density=0.1", "mask.samples=150", *([] if path is None else [f"mask.path={quoted(path)}"])]


def quoted(path: Path) -> str:
    """Return a path as the value of an override, quoted for Hydra, where a backslash is special only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), str(path)) + "'"


def halves(data: Dataset, seed: int) -> tuple[tuple[list[str], list[str]], tuple[list[int], list[int]]]:
    """Return two federations without a common class: the names of the classes of each, and the clients that each excludes."""
    shards = partition(data.train.labels, CLIENTS, "classes", classes_per_client=1, seed=seed)
    middle = data.num_classes // 2
    upper = [int(data.train.labels[int(shard[0])]) >= middle for shard in shards]
    names = list(data.class_names)
    return (names[:middle], names[middle:]), ([k for k, u in enumerate(upper) if u], [k for k, u in enumerate(upper) if not u])


def accuracy_of_sums(pair: Sequence[Run]) -> dict[str, float]:
    """Return the validation accuracy on all classes at θ₀, with the task vector of either half, and with both."""
    evaluator = PointEvaluator(pair[0])
    start, taus = evaluator.theta(pair[0].start), [evaluator.direction(half.task_vector()) for half in pair]
    points = {"θ₀": start, "θ₀ + τ₁": start + taus[0], "θ₀ + τ₂": start + taus[1], "θ₀ + τ₁ + τ₂": start + taus[0] + taus[1]}
    return {name: evaluator.evaluate(theta, evaluator.bench.val)[1] for name, theta in points.items()}
