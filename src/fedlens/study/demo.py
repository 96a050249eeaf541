"""`fedlens demo`: a story on the embedded data and backbone, told in one HTML page. Nothing is downloaded."""

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from fedlens.data.dataset import load_dataset
from fedlens.data.partition import label_counts, partition, partition_stats
from fedlens.errors import UserError
from fedlens.runs.store import write_atomic
from fedlens.study.figures import curves_figure, partition_figure
from fedlens.study.page import Page
from fedlens.training.execute import Run, run

log = logging.getLogger("fedlens")
CLIENTS = 50
FEDERATION = [
    f"federated.clients={CLIENTS}",
    "federated.participation=0.2",
    "federated.rounds=15",
    "federated.eval_every=1",
    "optim.batch_size=32",
    "optim.lr=0.03",  # the best for IID shards, and the same for the others: the split is all that differs
]
MARK = ".fedlens-demo"


def demo(out: Path, seed: int = 0) -> Path:
    """Run the story into a folder; returns the page."""
    if out.exists() and not (out / MARK).exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out: {out} exists and is not a demo's folder; choose another")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()
    started = time.monotonic()
    page = Page(
        "fedlens demo",
        "Fashion-MNIST mini (6,000 + 1,000 images) and a 1.2 M-parameter ViT pretrained without labels; all on this machine.",
    )
    partitions(page, seed)
    central = run([f"run.dir={out / 'runs' / 'centralized'}", f"seed={seed}"])
    baseline(page, central)
    federations = {
        name: run([f"experiment={experiment}", *FEDERATION, f"run.dir={out / 'runs' / experiment}", f"seed={seed}"])
        for name, experiment in (("IID", "fedavg_iid"), ("1 class a client", "fedavg_noniid"))
    }
    drift(page, federations, central)
    page.section("Run it yourself")
    page.code(
        "fedlens run experiment=fedavg_noniid data.classes_per_client=2 seed=1\nfedlens resume runs/…      # after an interruption, to the same bits\nfedlens run -m seed=0,1,2  # a sweep"
    )
    page.parts.append(f'<p class="soft">Made in {time.monotonic() - started:.0f} s.</p>')
    path = out / "index.html"
    write_atomic(path, page.html())
    return path


def drift(page: Page, runs: Mapping[str, Run], central: Run) -> None:
    ridge = 100 * central.summary["ridge"]["val_accuracy"]
    page.section(
        "3. FedAvg, and what client drift is",
        f"Each round {CLIENTS // 5} of {CLIENTS} clients take the global model, make 4 steps of SGD on their own images and send back what "
        "changed: a task vector Δ. The server adds the mean of the Δ to the model. Clients that hold the same mixture agree a little in "
        "every round, and the mean keeps what they agree on. When each holds one class, how far they agree depends on which classes happen to "
        "meet: updates for different classes cancel, and what is left pulls the model towards this round's classes and away from the "
        "others. That is client drift: interference between task vectors.",
    )
    curves = {name: [(m["round"], 100 * m["val_accuracy"]) for m in r.metrics if "val_accuracy" in m] for name, r in runs.items()}
    levels = {"centralised": 100 * central.summary["val_accuracy"], "ridge head only, no rounds": ridge}
    page.figure(
        curves_figure(curves, "round", "validation accuracy (%)", levels),
        "FedAvg by round, against no rounds at all and all data in one place.",
    )
    for key, label, caption in (
        ("cosine", "mean cosine between clients' Δ", "How far clients agree: the mean cosine between the updates of a round."),
        ("drift_ratio", "‖mean Δ‖ / mean ‖Δ‖", "What is left of the updates when they are averaged: 1 if all agree, 0 if they cancel."),
    ):
        page.figure(curves_figure({name: [(m["round"], m[key]) for m in r.metrics] for name, r in runs.items()}, "round", label), caption)
    rows: list[list[object]] = [["centralised", 100 * central.summary["test_accuracy"], "", central.summary["seconds"]]]
    for name, r in runs.items():
        rows.append([f"FedAvg, {name}", 100 * r.summary["test_accuracy"], f"{r.summary['bytes_up'] / 1e6:,.0f} MB", r.summary["seconds"]])
    page.table(["", "test accuracy (%), n = 1", "sent by clients", "seconds"], rows)


def partitions(page: Page, seed: int) -> None:
    labels = load_dataset("fashion_mini", seed=seed).train.labels
    plans = {
        "IID": partition(labels, CLIENTS, "iid", seed=seed),
        "2 classes a client": partition(labels, CLIENTS, "classes", classes_per_client=2, seed=seed),
        "1 class a client": partition(labels, CLIENTS, "classes", classes_per_client=1, seed=seed),
        "Dirichlet, α = 1": partition(labels, CLIENTS, "dirichlet", alpha=1.0, seed=seed),
    }
    page.section(
        "1. Data that lives apart",
        f"{len(labels):,} training images are split over {CLIENTS} clients, every image on exactly one. With IID shards all clients see the "
        "same mixture; with few classes a client their gradients point in different directions, and averaging what they learn costs accuracy.",
    )
    page.figure(
        partition_figure({name: label_counts(labels, shards) for name, shards in plans.items()}), "Samples of each class on each client."
    )
    rows = []
    for name, shards in plans.items():
        s = partition_stats(labels, shards)
        rows.append([name, f"{s.size_min} to {s.size_max}", f"{s.classes_min} to {s.classes_max}", s.label_entropy, s.tv_distance])
    page.table(["partition", "samples a client", "classes a client", "label entropy (nats)", "distance to the global label law"], rows)


def baseline(page: Page, finished: Run) -> None:
    summary, metrics = finished.summary, finished.metrics
    ridge = 100 * summary["ridge"]["val_accuracy"]
    page.section(
        "2. The centralised baseline",
        "A closed-form (ridge) head on the pretrained features needs no gradient step at all. Fine-tuning the whole network on all data in "
        "one place then gives the ceiling that a federation is measured against. The epoch is chosen on validation; the test set is read once.",
    )
    curve = {"fine-tuned, validation": [(m["epoch"], 100 * m["val_accuracy"]) for m in metrics]}
    page.figure(curves_figure(curve, "epoch", "accuracy (%)", {"ridge head only, validation": ridge}), "Validation accuracy by epoch.")
    rows: list[list[object]] = [
        ["ridge head only, validation accuracy (%)", ridge],
        ["fine-tuned, validation accuracy (%)", 100 * summary["val_accuracy"]],
        ["fine-tuned, test accuracy (%)", 100 * summary["test_accuracy"]],
        ["epochs", summary["epochs"]],
        ["seconds", summary["seconds"]],
        ["images a second", summary["images_per_second"]],
    ]
    page.table(["", "value"], rows)
