"""Agreement, interference and disentanglement of the task vectors of several runs or of one run's clients (lens/geometry.py, on data)."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.errors import UserError, bad_value
from fedlens.lens.editing import alphas
from fedlens.lens.geometry import cosines, disentanglement, drift_ratio, linearity_gap, sign_conflict
from fedlens.lens.task_vectors import TaskVector
from fedlens.runs.progress import progress_bar
from fedlens.study.arith import Alphas, PointEvaluator, check_same_task, check_validation
from fedlens.study.forget import client_classes
from fedlens.tasks import Samples
from fedlens.training.head_and_mask import evenly
from fedlens.training.run import Run

GRID = "-1.5:1.5:7"  # α along both axes of the map ξ
LINEAR_AT = (0.5, 1.0)  # α at which the model is compared with its linearisation


def interference_of_runs(runs: Sequence[Run], grid: Alphas = GRID, samples: int = 500, **where: str | None) -> dict[str, Any]:
    """Measure runs of the same data and model, each on validation images of the classes that it trained on. `where`: device, root."""
    if len(runs) < 2:
        raise bad_value("the number of runs", len(runs), ">= 2, or 1 with --clients a,b")
    for other in runs[1:]:
        check_same_task(runs[0], other)
    evaluators = [PointEvaluator(run, **where) for run in runs]
    banks = [task_images(evaluator, trained_classes(evaluator), samples) for evaluator in evaluators]
    start = evaluators[0].theta(runs[0].start)
    apart = [float((evaluators[0].theta(run.start) - start).norm()) for run in runs]
    notes = [f"the starts of {run.path} and {runs[0].path} differ by {d:.3g}" for run, d in zip(runs, apart, strict=True) if d]
    vectors = {str(run.path): run.task_vector() for run in runs}
    if len(vectors) < len(runs):
        raise UserError("runs: one run appears twice; name different runs.")
    return interference(evaluators[0], vectors, banks, grid) | {"notes": notes}


def interference_of_clients(
    run: Run, clients: Sequence[int], grid: Alphas = GRID, samples: int = 500, **where: str | None
) -> dict[str, Any]:
    """Measure clients of one run, each on validation images of the classes that it holds."""
    if len(set(clients)) < 2 or len(set(clients)) < len(clients):
        raise bad_value("clients", list(clients), "two or more different clients")
    vectors = {f"client {k}": vector for k, vector in run.client_vectors(clients).items()}
    evaluator = PointEvaluator(run, **where)
    holds = client_classes(evaluator)
    banks = [task_images(evaluator, np.flatnonzero(holds[k]).tolist(), samples) for k in clients]
    return interference(evaluator, vectors, banks, grid) | {"notes": []}


def mask_overlap(a: Run, b: Run) -> dict[str, Any]:
    """Return the intersection over union of two runs' masks, and its expectation for random masks of these densities."""
    first, second = a.mask, b.mask
    if first is None or second is None:
        raise UserError(f"masks: {(a if first is None else b).path} has no mask; choose sparse runs.")
    p, q = first.density, second.density
    return {"names": [str(a.path), str(b.path)], "iou": first.iou(second), "chance": p * q / (p + q - p * q)}


def interference(evaluator: PointEvaluator, vectors: Mapping[str, TaskVector], banks: Sequence[Samples], grid: Alphas) -> dict[str, Any]:
    """Return cosines, sign conflict and drift ratio of all pairs, the linearity gap of each vector and, for two, the map ξ(α₁, α₂)."""
    values, every = alphas(grid), list(vectors.values())
    check_validation(evaluator)
    start, taus, table = evaluator.theta(evaluator.run.start), [evaluator.direction(vector) for vector in every], cosines(every)
    predictors = [partial(evaluator.logits, bank=bank) for bank in banks]
    gaps = [linearity_gap(logits, start, tau, LINEAR_AT) for logits, tau in zip(predictors, taus, strict=True)]
    return {
        "names": list(vectors),
        "norms": [vector.norm() for vector in every],
        "samples": [len(bank) for bank in banks],
        **_disagreement(every),
        "pairs": [
            {"a": a, "b": b, "cosine": float(table[i, j]), **_disagreement([every[i], every[j]])}
            for (i, a), (j, b) in combinations(enumerate(vectors), 2)
        ],
        "linearity": dict(zip(vectors, gaps, strict=True)),
        "alphas": values,
        "xi": xi_map(evaluator, start, taus, banks, values).tolist() if len(taus) == 2 else None,
    }


def _disagreement(vectors: Sequence[TaskVector]) -> dict[str, float]:
    return {"sign_conflict": sign_conflict(vectors), "drift_ratio": drift_ratio(vectors)}


def xi_map(evaluator: PointEvaluator, start: Tensor, taus: Sequence[Tensor], banks: Sequence[Samples], values: Sequence[float]) -> Tensor:
    """Return ξ [α of the first, α of the second]."""
    with progress_bar("disentanglement", len(values) * (len(values) + 2)) as bar:

        def predict(theta: Tensor) -> tuple[Tensor, Tensor]:
            bar.advance()
            return evaluator.logits(theta, banks[0]).argmax(1), evaluator.logits(theta, banks[1]).argmax(1)

        return disentanglement(predict, start, taus[0], taus[1], values, values)


def task_images(evaluator: PointEvaluator, classes: Sequence[int], samples: int) -> Samples:
    """Return up to `samples` validation images of these classes."""
    if samples < 1:
        raise bad_value("samples", samples, ">= 1")
    indices = torch.isin(evaluator.bench.dataset.val.labels, torch.tensor(classes)).nonzero().squeeze(1)
    if not len(indices):
        fraction = evaluator.bench.config.data.val_fraction
        raise UserError(f"{evaluator.run.path} has no validation images of its classes; use a run with data.val_fraction > {fraction:g}.")
    return evaluator.bank(evaluator.bench.dataset.val.subset(indices[evenly(len(indices), samples)]))


def trained_classes(evaluator: PointEvaluator) -> list[int]:
    """Return the classes that a run trained on: all, unless clients were excluded or idle."""
    fed = evaluator.bench.config.federated
    if not (fed.exclude or fed.idle) or evaluator.bench.config.trainer != "federated":
        return list(range(evaluator.bench.dataset.num_classes))
    return [c for c, held_by in enumerate(client_classes(evaluator).T) if held_by.any()]
