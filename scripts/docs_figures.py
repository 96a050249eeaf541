"""Draw the figures of the documentation from runs on the packaged data: python scripts/docs_figures.py (four minutes on one core).

Client drift of FedAvg under three partitions (all clients in every round, mean of three seeds), a sweep along a task vector, masks by rule.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from results_pages import written

import fedlens as fl
from fedlens.data.partition import label_counts
from fedlens.report.blocks import Chart
from fedlens.report.charts import ACCURACY, VALIDATION, mask_chart, partition_chart
from fedlens.report.vega import Series, line_chart
from fedlens.study.arith import sweep_run

CLIENTS = 10
FEDERATION = [f"federated.clients={CLIENTS}", "federated.participation=1.0", "federated.rounds=8", "federated.eval_every=4"]
SETTINGS = [*FEDERATION, "optim.batch_size=16", "optim.lr=0.03", "run.progress=false", "device=cpu"]
CASES = {
    "IID": ["experiment=fedavg_iid"],
    "Nc = 2": ["experiment=fedavg_noniid", "data.classes_per_client=2"],
    "Nc = 1": ["experiment=fedavg_noniid", "data.classes_per_client=1"],
}
SEEDS = (0, 1, 2)
RULES = ("least_sensitive", "most_sensitive", "highest_magnitude", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="docs/figures", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        runs = {
            name: [fl.run([*overrides, *SETTINGS, f"seed={seed}", f"run.dir={work}/{i}-{seed}"]) for seed in SEEDS]
            for i, (name, overrides) in enumerate(CASES.items())
        }
        drift_figure(runs, out)
        sweep_figure(runs["IID"][0], out)
        masks_figure(runs["IID"][0], out)
    labels = fl.load_dataset("fashion_mini").train.labels
    shards = {"IID": fl.partition(labels, 50)} | {f"Nc = {n}": fl.partition(labels, 50, "classes", classes_per_client=n) for n in (2, 1)}
    counts = {name: label_counts(labels, indices) for name, indices in shards.items()}
    write(partition_chart(counts, "partition"), out)


def write(chart: Chart, out: Path) -> None:
    for file, text in written(chart, chart.key).items():
        (out / file).write_text(text, encoding="utf-8")


def drift_figure(runs: dict[str, list[fl.Run]], out: Path) -> None:
    """Draw the drift ratio by round and print the table beside the figure: means over rounds and seeds."""
    drift = [Series(name, mean_curve(seeds, "drift_ratio")) for name, seeds in runs.items()]
    orthogonal = {f"orthogonal clients: 1/√{CLIENTS}": CLIENTS**-0.5}
    write(line_chart("drift", "Client drift", "", drift, "round", "drift ratio ‖mean Δ‖ / mean ‖Δ‖", levels=orthogonal), out)
    for name, seeds in runs.items():
        means = {key: fmean(value for _, value in mean_curve(seeds, key)) for key in ("drift_ratio", "cosine", "sign_conflict")}
        print(name, ", ".join(f"{key} {value:.2f}" for key, value in means.items()))


def mean_curve(runs: list[fl.Run], key: str) -> list[tuple[float, float]]:
    """Return (round, mean over the runs)."""
    return [(rows[0]["round"], fmean(row[key] for row in rows)) for rows in zip(*(run.metrics for run in runs), strict=True)]


def sweep_figure(run: fl.Run, out: Path) -> None:
    swept = sweep_run(run, None, "-2:4:25")
    points = [(p["alpha"], p["val_accuracy"]) for p in swept["points"]]
    curve = Series("θ₀ + α·τ", points, ring=swept["chosen"]["alpha"], scale=100)
    levels = {"θ₀: α = 0": 100 * swept["start"]["val_accuracy"]}
    write(line_chart("alpha", "Accuracy along τ", "", [curve], "α", VALIDATION, ACCURACY, levels=levels), out)


def masks_figure(run: fl.Run, out: Path) -> None:
    data = fl.load_dataset("fashion_mini")
    model = fl.create_model("tiny", data.num_classes, image_size=28)
    model.load_state_dict(run.start)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.std))
    images = (data.val.images[:200] / 255 - mean) / std
    write(mask_chart({rule: fl.calibrate_mask(model, images, strategy=rule) for rule in RULES}, "masks"), out)


if __name__ == "__main__":
    main()
