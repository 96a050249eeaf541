"""`fedlens demo`: experiments on the embedded data and backbone, presented in one HTML page. Nothing is downloaded.

This module runs the experiments; sections.py describes them.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from fedlens.data.partition import partition
from fedlens.demo.results import CLASSES, DENSE, MASKED, MASKED_MERGED, MERGED, MIXED, DemoResults
from fedlens.demo.sections import CHAPTERS, lead
from fedlens.errors import UserError
from fedlens.files import write_atomic
from fedlens.overrides import quoted
from fedlens.report.blocks import Report, Text
from fedlens.report.html import page
from fedlens.runs.store import CHECKPOINTS, START_FILE, read_checkpoint, steps_of
from fedlens.study.arith import PointEvaluator
from fedlens.study.results import CellResult, RunResult, TableResult
from fedlens.training.run import Run, run

SEEDS = 3
SMALL = ["model.image_size=14"]  # four tokens per image instead of sixteen: a quarter of the time
HEAD = [
    "experiment=centralized",
    "train.epochs=0",
    "data.val_fraction=0.995",
]  # fits the head to 30 images, selects λ and temperature on the others
ROUNDS, EVERY = 20, 2  # EVERY: rounds between the models that are evaluated and averaged
FEDERATION = [
    "federated.clients=10",
    "federated.participation=0.3",  # a round samples three clients, so at Nc=1 it sees three of ten classes
    "federated.local_steps=8",
    f"federated.rounds={ROUNDS}",
    f"federated.eval_every={EVERY}",
    f"federated.test_every={EVERY}",
    "optim.batch_size=8",
    "optim.schedule=constant",
    "head=linear",  # that of the weights, frozen
    f"run.keep_last={ROUNDS // EVERY}",
]
ONE_CLASS = ["data.classes_per_client=1"]
MASK = ["mask.strategy=least_sensitive", "mask.density=0.1", "mask.samples=60"]
# Rates by validation accuracy in the federation above with a falling rate, seed 10. All values tried: benchmarks/records/2026-11-19-demo.json
RATES = {MIXED: 0.03, DENSE: 0.01, MASKED: 0.3}
ALPHAS = [quarter / 4 for quarter in range(-4, 13)]
FORGET = [half / 2 for half in range(9)]
MARK = ".fedlens-demo"


def demo(out: Path, seed: int = 0) -> Path:
    """Run the demo in a folder; return its page."""
    if out.exists() and not (out / MARK).exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out: {out} exists and is not the folder of a demo; choose another.")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()
    started = time.monotonic()
    results = run_experiments(out / "runs", range(seed, seed + SEEDS))
    for folder in (out / "runs").glob(f"*/{CHECKPOINTS}"):  # of finished runs: some 300 MB that served the means of the rounds
        shutil.rmtree(folder)
    thesis, first = lead(results)
    blocks = [block for chapter in CHAPTERS for block in chapter(results)]
    duration = Text(f"Made in {time.monotonic() - started:.0f} s.", soft=True)
    path = out / "index.html"
    write_atomic(path, page(Report(thesis, first, [*blocks, duration])))
    return path


def run_experiments(folder: Path, seeds: Sequence[int]) -> DemoResults:
    """Run everything that the page shows. The federations of a seed start from one θ₀, so that their task vectors have one origin."""

    def start(name: str, seed: int, *overrides: str) -> Run:
        return run([*SMALL, *overrides, f"run.dir={quoted(folder / f'{name}-{seed}')}", f"seed={seed}"])

    def federation(label: str, name: str, experiment: str, *overrides: str) -> dict[int, Run]:
        common = [f"experiment={experiment}", *FEDERATION, f"optim.lr={RATES[label]}", *overrides]
        return {s: start(name, s, *common, f"model.weights={quoted(heads[s].path / START_FILE)}") for s in seeds}

    heads = {seed: start("head", seed, *HEAD) for seed in seeds}
    runs = {
        MIXED: federation(MIXED, "mixed", "fedavg_iid", "run.keep_last=1"),  # no means of its rounds
        DENSE: federation(DENSE, "dense", "fedavg_noniid", *ONE_CLASS),
        MASKED: federation(MASKED, "masked", "fedavg_noniid_sparse", *ONE_CLASS, *MASK, "federated.client_vectors=true"),
    }
    curves = {label: {seed: tests_of(each) for seed, each in by_seed.items()} for label, by_seed in runs.items()}
    curves |= {
        name: {seed: tests_of_means(each) for seed, each in runs[of].items()} for name, of in ((MERGED, DENSE), (MASKED_MERGED, MASKED))
    }

    dense, masked = runs[DENSE][seeds[0]], runs[MASKED][seeds[0]]
    evaluator, subtracting = PointEvaluator(dense), PointEvaluator(masked)
    data, test = evaluator.bench.dataset, evaluator.bank(evaluator.bench.dataset.test)
    start_point = evaluator.theta(dense.start)
    tau = means_of_rounds(evaluator, dense)[max(steps_of(dense.path))] - start_point
    along = by_class(evaluator, start_point, tau, ALPHAS)
    best = max(along, key=lambda alpha: along[alpha]["all"])
    shards = partition(data.train.labels, dense.config.federated.clients, "classes", classes_per_client=1, seed=seeds[0])
    client, added = next(iter(masked.client_vectors().items()))
    return DemoResults(
        data=data,
        heads={seed: RunResult(head.path, seed) for seed, head in heads.items()},
        table=table("Three federations", runs),
        curves=curves,
        along=along,
        tested={alpha: 100 * evaluator.evaluate(start_point + alpha * tau, test)[1] for alpha in sorted({best, 1.0})},
        client=client,
        forgotten=data.class_names[int(data.train.labels[int(shards[client][0])])],
        without=by_class(subtracting, subtracting.theta(masked.state), -subtracting.direction(added), FORGET),
    )


def tests_of(run: Run) -> list[tuple[int, float]]:
    """Return (round, test accuracy in percent) of the models that a run evaluated on the test set."""
    return [(m["round"], 100 * m["test_accuracy"]) for m in run.metrics if m.get("test_accuracy") is not None]


def tests_of_means(run: Run) -> list[tuple[int, float]]:
    """Return (round, test accuracy in percent) of the means of the models up to each evaluated round."""
    evaluator = PointEvaluator(run)
    test = evaluator.bank(evaluator.bench.dataset.test)
    return [(step, 100 * evaluator.evaluate(theta, test)[1]) for step, theta in means_of_rounds(evaluator, run).items()]


def means_of_rounds(evaluator: PointEvaluator, run: Run) -> dict[int, Tensor]:
    """Return round -> mean of the models after the evaluated rounds up to it [P]: their task vectors θ_t − θ₀, merged."""
    steps = [step for step in steps_of(run.path) if step > 0]
    totals = accumulate(evaluator.theta(model_after(run, step)) for step in steps)
    return {step: total / count for count, (step, total) in enumerate(zip(steps, totals, strict=True), 1)}


def model_after(run: Run, round_: int) -> dict[str, Tensor]:
    """Return name -> tensor of the model after a round, from its checkpoint."""
    checkpoint = read_checkpoint(run.path, round_)
    assert checkpoint is not None
    prefix = "server.model."
    return {name.removeprefix(prefix): tensor for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)}


def table(name: str, runs: Mapping[str, Mapping[int, Run]]) -> TableResult:
    """Return runs by label and seed as a table of a report."""
    found = {label: {seed: RunResult(each.path, seed) for seed, each in by_seed.items()} for label, by_seed in runs.items()}
    return TableResult(name, "", [CellResult(label, "", {}, by_seed, len(by_seed)) for label, by_seed in found.items()])


def by_class(evaluator: PointEvaluator, theta: Tensor, direction: Tensor, grid: Sequence[float]) -> CLASSES:
    """Return the validation accuracy in percent at θ + α·direction, of all images and of those of each class."""
    bank = evaluator.bench.val
    groups = {"all": bank.labels >= 0} | {name: bank.labels == i for i, name in enumerate(evaluator.bench.dataset.class_names)}
    points = {}
    for alpha in grid:
        right = evaluator.logits(theta + alpha * direction, bank).argmax(1) == bank.labels
        points[alpha] = {name: 100 * float(right[of].float().mean()) for name, of in groups.items()}
    return points
