"""Small studies for the tests of reports: finished runs with their files, but without models."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.study.results import Gathered, gather

HOSTILE = r"50% & $x_1$ #{a}~b^c \input{/etc/passwd} <α|τ> --,, [z]* ξθ 中 ∞"
Cell = tuple[str, str, Mapping[str, Any], Sequence[float | None]]  # label, case, values, test accuracy by seed; None: not finished


def make_run(folder: Path, seed: int, accuracy: float, *, federated: bool = True, mask: bool = False, rounds: int = 3) -> None:
    """Write the files of a finished run, without a model."""
    folder.mkdir(parents=True)
    config = {
        "experiment": "fedavg_noniid" if federated else "centralized",
        "seed": seed,
        "head": "ridge",
        "data": {"name": "toy_set", "root": "/home/me/data", "partition": "classes", "classes_per_client": 1},
        "model": {"name": "tiny", "weights": "/home/me/tiny.safetensors", "image_size": 28},
        "optim": {"lr": 0.03, "batch_size": 32},
        "federated": {"clients": 3, "local_steps": 4, "rounds": rounds, "participation": 1.0},
        "mask": {"strategy": "qk_only", "density": 0.1},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    summary: dict[str, Any] = {"test_accuracy": accuracy, "val_accuracy": accuracy - 0.01, "seconds": 1.0, "parameters": 1234, "mask": None}
    lines: list[dict[str, Any]] = [{"step": 1, "epoch": 1, "val_accuracy": accuracy - 0.01}]
    if federated:
        summary |= {"rounds": rounds, "bytes_up": rounds * 10**6, "bytes_down": rounds * 10**6}
        lines = [
            {
                "step": t,
                "round": t,
                "val_accuracy": accuracy - 0.01 - 0.1 * (rounds - t),
                "bytes_up": t * 10**6,
                "drift_ratio": 0.5 + 0.01 * t,
                "cosine": 0.1 * seed,
                "sign_conflict": 0.2,
                "client_norm": 0.5 * t,
            }
            for t in range(1, rounds + 1)
        ]
        counts = [[5, 0], [0, 5], [3, 2]]
        (folder / "partition.json").write_text(json.dumps({"clients": 3, "label_counts": counts}))
    if mask:
        summary["mask"] = {
            "composition": {"query": {"eligible": 10, "active": 1, "share": 0.25}, "key": {"eligible": 10, "active": 3, "share": 0.75}},
            "by_layer": [["embed", 0, 10], ["block 0", 4, 20], ["other", 0, 0]],
        }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_study(
    folder: Path,
    tables: Mapping[str, Sequence[Cell]],
    analyses: Sequence[tuple[str, Any]] = (),
    failures: Mapping[str, str] | None = None,
    name: str = "toy",
    **options: Any,
) -> Path:
    """Write a study. Cells whose case begins with "central" are not federated; those with "sparse" in it have masks."""
    folder.mkdir(parents=True)
    listed = []
    for t, (table, cells) in enumerate(tables.items()):
        written = []
        for c, (label, case, values, accuracies) in enumerate(cells):
            runs = {str(seed): f"run-{t}-{c}-{seed}" for seed in range(len(accuracies))}
            for seed, accuracy in enumerate(accuracies):
                if accuracy is not None:
                    kind = {"federated": not case.startswith("central"), "mask": "sparse" in case}
                    make_run(folder / "runs" / runs[str(seed)], seed, accuracy, **kind, **options)
            written.append({"label": label, "case": case, "values": values, "runs": runs})
        listed.append({"name": table, "question": "", "target": 0.5, "cells": written})
    made = []
    for i, (kind, found) in enumerate(analyses):
        labels = ["half A", "half B"] if kind in ("interference", "interpolate") else ["all"]
        made.append({"kind": kind, "title": f"{kind} of all", "labels": labels, "seed": 0, "file": f"analyses/{i}.json"})
        (folder / "analyses").mkdir(parents=True, exist_ok=True)
        (folder / "analyses" / f"{i}.json").write_text(json.dumps(found))
    content = {"name": name, "place": "here", "question": "Which one wins?", "tables": listed, "analyses": made, "failures": failures or {}}
    (folder / "study.json").write_text(json.dumps(content))
    return folder


def point(alpha: float, value: float = 0.8) -> dict[str, float]:
    return {"alpha": alpha, "val_accuracy": value, "test_accuracy": value - 0.01}


SWEEP = {
    "points": [point(a, 0.8 - abs(a - 0.5) / 10) for a in (0.0, 0.5, 1.0)],
    "chosen": point(0.5),
    "start": point(0.0),
    "end": point(1.0),
}
XI = {
    "names": ["run-a", "run-b"],
    "samples": [20, 20],
    "alphas": [0.0, 1.0],
    "xi": [[0.0, 0.1], [0.1, 0.2]],
    "pairs": [{"a": "run-a", "b": "run-b", "cosine": 0.1, "sign_conflict": 0.2, "drift_ratio": 0.7}],
    "notes": ["/home/me/runs/run-b starts 2.97 from where run-a does"],
}
EDGES = [{"alpha": a, "val_target": 0.9 - a / 2, "val_control": 0.8, "test_target": 0.9 - a / 2, "test_control": 0.8} for a in (0.0, 1.0)]
FORGET = {"clients": [{"client": 0, "classes": ["Bag"], "points": EDGES, "before": EDGES[0], "after": EDGES[1], "notes": []}]}
OVERLAP = {"names": ["run-a", "run-b"], "iou": 0.625, "chance": 0.05}
ANALYSES = [("sweep", SWEEP), ("interpolate", SWEEP), ("interference", XI), ("masks", OVERLAP), ("forget", FORGET)]

PLAIN: dict[str, Sequence[Cell]] = {
    "three models": [
        ("central", "central", {}, [0.80, 0.82, 0.84]),
        ("dense", "dense", {}, [0.70, 0.72, 0.73]),
        ("sparse one", "sparse", {}, [0.86, 0.88, 0.91]),
    ]
}
GRID: dict[str, Sequence[Cell]] = {
    "Nc and J": [
        (f"Nc={nc}, local_steps {j}", f"Nc={nc}", {"federated.local_steps": j}, [0.6 + nc / 100 + j / 1000 + s / 50 for s in range(3)])
        for nc in (1, 5)
        for j in (4, 8)
    ]
}


def plain(tmp_path: Path, **options: Any) -> Gathered:
    return gather([make_study(tmp_path / "study", PLAIN, **options)])
