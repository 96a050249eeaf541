"""How task vectors agree, interfere and disentangle: those of runs, or those of one run's clients (lens/geometry.py, measured on data)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.errors import UserError, bad_value
from fedlens.lens.editing import alphas
from fedlens.lens.geometry import cosines, disentanglement, drift_ratio, linearity_gap, sign_conflict
from fedlens.lens.task_vectors import TaskVector
from fedlens.runs.progress import progress_bar
from fedlens.study.arith import Alphas, Lab, check_same_task, check_validation
from fedlens.study.forget import holdings
from fedlens.tasks.image import ImageBank
from fedlens.training.head_and_mask import evenly
from fedlens.training.run import Run

LINEAR_AT = (0.5, 1.0)  # α at which the model is compared with its linearisation


def interference_of_runs(
    runs: Sequence[Run], grid: Alphas = "-1.5:1.5:7", samples: int = 500, *, device: str | None = None, root: str | None = None
) -> dict[str, Any]:
    """Runs of the same data and model; each is measured on validation images of the classes that it trained on."""
    if len(runs) < 2:
        raise bad_value("runs", len(runs), "two or more, or one with --clients a,b")
    for other in runs[1:]:
        check_same_task(runs[0], other)
    labs = [Lab(run, device, root) for run in runs]
    banks = [task_images(lab, trained_classes(lab), samples) for lab in labs]
    start = labs[0].theta(runs[0].start)
    apart = [float((labs[0].theta(run.start) - start).norm()) for run in runs]
    notes = [f"{run.path} starts {d:.3g} from where {runs[0].path} does" for run, d in zip(runs, apart, strict=True) if d]
    vectors = {str(run.path): run.task_vector() for run in runs}
    if len(vectors) < len(runs):
        raise UserError("runs: the same run is given twice")
    return interference(labs[0], vectors, banks, grid) | {"notes": notes}


def mask_overlap(a: Run, b: Run) -> dict[str, Any]:
    """Intersection over union of what two runs let move, and what two random masks of these sizes have."""
    first, second = a.mask, b.mask
    if first is None or second is None:
        raise UserError(f"masks: {(a if first is None else b).path} has no mask: it moves everything")
    p, q = first.density, second.density
    return {"names": [str(a.path), str(b.path)], "iou": first.iou(second), "chance": p * q / (p + q - p * q)}


def interference_of_clients(
    run: Run,
    clients: Sequence[int],
    grid: Alphas = "-1.5:1.5:7",
    samples: int = 500,
    *,
    device: str | None = None,
    root: str | None = None,
) -> dict[str, Any]:
    """Clients of one run; each is measured on validation images of the classes that it holds."""
    if len(set(clients)) < 2 or len(set(clients)) < len(clients):
        raise bad_value("clients", list(clients), "two or more, each once")
    vectors = {f"client {k}": vector for k, vector in run.client_vectors(clients).items()}
    lab = Lab(run, device, root)
    holds = holdings(lab)
    banks = [task_images(lab, np.flatnonzero(holds[k]).tolist(), samples) for k in clients]
    return interference(lab, vectors, banks, grid) | {"notes": []}


def interference(lab: Lab, vectors: Mapping[str, TaskVector], banks: Sequence[ImageBank], grid: Alphas) -> dict[str, Any]:
    """Cosines, sign conflict and drift ratio of all pairs; the linearity gap of each; of two the map ξ(α₁, α₂) as well."""
    values, names = alphas(grid), list(vectors)
    check_validation(lab)
    start, taus = lab.theta(lab.run.start), [lab.direction(v) for v in vectors.values()]
    linearity = {}
    for name, tau, bank in zip(names, taus, banks, strict=True):
        linearity[name] = linearity_gap(lambda theta, bank=bank: lab.logits(theta, bank), start, tau, LINEAR_AT)  # type: ignore[misc]
    return {
        "names": names,
        "norms": [vector.norm() for vector in vectors.values()],
        "samples": [len(bank) for bank in banks],
        "sign_conflict": sign_conflict(list(vectors.values())),
        "drift_ratio": drift_ratio(list(vectors.values())),
        "pairs": pairs(vectors),
        "linearity": linearity,
        "alphas": values,
        "xi": xi_map(lab, start, taus, banks, values).tolist() if len(taus) == 2 else None,
    }


def pairs(vectors: Mapping[str, TaskVector]) -> list[dict[str, Any]]:
    names, table = list(vectors), cosines(list(vectors.values()))
    return [
        {
            "a": a,
            "b": b,
            "cosine": float(table[i, j]),
            "sign_conflict": sign_conflict([vectors[a], vectors[b]]),
            "drift_ratio": drift_ratio([vectors[a], vectors[b]]),
        }
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i < j
    ]


def xi_map(lab: Lab, start: Tensor, taus: Sequence[Tensor], banks: Sequence[ImageBank], values: Sequence[float]) -> Tensor:
    """[len, len]: rows are α of the first, columns of the second."""
    with progress_bar("disentanglement", len(values) * (len(values) + 2)) as bar:

        def predict(theta: Tensor) -> tuple[Tensor, Tensor]:
            bar.advance()
            return lab.logits(theta, banks[0]).argmax(1), lab.logits(theta, banks[1]).argmax(1)

        return disentanglement(predict, start, taus[0], taus[1], values, values)


def task_images(lab: Lab, classes: Sequence[int], samples: int) -> ImageBank:
    """Up to `samples` validation images of these classes."""
    if samples < 1:
        raise bad_value("samples", samples, ">= 1")
    held = torch.isin(lab.bench.dataset.val.labels, torch.tensor(classes)).nonzero().squeeze(1)
    if not len(held):
        raise UserError(
            f"{lab.run.path}: no validation images of the classes in question; data.val_fraction is {lab.bench.config.data.val_fraction:g}"
        )
    return lab.bank(lab.bench.dataset.val.subset(held[evenly(len(held), samples)]))


def trained_classes(lab: Lab) -> list[int]:
    """The classes that a run trained on: all, unless clients were excluded or idle."""
    fed = lab.bench.config.federated
    if not (fed.exclude or fed.idle) or not lab.bench.config.experiment.startswith("fed"):
        return list(range(lab.bench.dataset.num_classes))
    found: list[int] = np.flatnonzero(holdings(lab).any(0)).tolist()
    return found
