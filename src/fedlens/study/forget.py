"""Forgetting by negation (Ilharco et al. 2023): θ_T − α·τ. For client k, τ_k is its contribution to the final model."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.data.dataset import Split
from fedlens.data.partition import label_counts
from fedlens.errors import UserError, bad_value
from fedlens.lens.editing import SweepPoint, alphas, negate
from fedlens.lens.task_vectors import TaskVector
from fedlens.study.arith import Alphas, PointEvaluator, check_same_task, check_validation, validated
from fedlens.training.federated import make_shards
from fedlens.training.run import Run

# Steps of 1/4, 1/2, then 1: the α that a client needs varies by an order of magnitude, and is largest for a sparse τ_k.
DEFAULT_ALPHAS = [q / 4 for q in chain(range(12), range(12, 40, 2), range(40, 164, 4))]


def forget_client(
    run: Run, client: int, *, keep: float = 0.95, grid: Alphas | None = None, without: Sequence[Run] = (), **where: str | None
) -> dict[str, Any]:
    """Subtract a client's contribution. Target: the classes that it holds; control: all others. `where`: device, root.

    without: candidates for a comparison. A run that excluded this client only is evaluated as "retrained", and its head, which has never seen the
    client's data, on this run's model as "reheaded".
    """
    tau, evaluator = run.client_vectors([client])[client], PointEvaluator(run, **where)
    holds = client_classes(evaluator)
    classes: list[int] = np.flatnonzero(holds[client]).tolist()
    shared = [c for c in classes if holds[:, c].sum() > 1]
    result = forget(evaluator, tau, classes, keep=keep, grid=grid)
    names = evaluator.bench.dataset.class_names
    if shared:
        result["notes"].append(f"other clients hold {_listed(names, shared)} too, so the target is not client {client} alone")
    again = next((other for other in without if list(other.config.federated.exclude) == [client]), None)
    if again is not None:
        check_same_task(run, again)
        test = target_and_control(evaluator, evaluator.bench.dataset.test, "test", classes)
        result |= {"retrained": test(evaluator.theta(again.state)), "reheaded": test(evaluator.theta(_reheaded(run, again)))}
    return {"client": client, "shared_classes": [names[c] for c in shared], **result}


def _reheaded(run: Run, again: Run) -> dict[str, Tensor]:
    """Return trained tensors from `run` and untouched ones from the start of the other run: a frozen head."""
    start, state, other = run.start, run.state, again.start
    return {name: other[name] if torch.equal(tensor, start[name]) else tensor for name, tensor in state.items()}


def forget(
    evaluator: PointEvaluator, tau: TaskVector, classes: Sequence[int], *, keep: float = 0.95, grid: Alphas | None = None
) -> dict[str, Any]:
    """Choose α of θ_T − α·τ: the lowest accuracy on `classes` (target) at which the others (control) have at least `keep` of theirs.

    Both accuracies are on validation. grid None: α rises up to 40, until the target is 0 or the control is lost."""
    values = DEFAULT_ALPHAS if grid is None else sorted({0.0, *alphas(grid)})
    if values[0] < 0:
        raise bad_value("alphas", values[0], ">= 0, because forgetting subtracts")
    if not 0 <= keep <= 1:
        raise bad_value("keep", keep, "in [0, 1]")
    check_validation(evaluator)
    data, theta, step = evaluator.bench.dataset, evaluator.theta(evaluator.run.state), evaluator.direction(-tau)
    if len(set(classes)) == data.num_classes:
        raise UserError("forget: the target has all classes, so there is no control; choose fewer classes.")
    validate, test = (target_and_control(evaluator, split, name, classes) for split, name in ((data.val, "val"), (data.test, "test")))
    points = scan_alphas(lambda alpha: validate(theta + alpha * step), values, keep if grid is None else None)
    chosen = negate(points, "val_target", "val_control", keep) or points[0]
    before, after = ({"alpha": p.alpha, **p.metrics, **test(theta + p.alpha * step)} for p in (points[0], chosen))
    return {
        "run": str(evaluator.run.path),
        "classes": [data.class_names[c] for c in classes],
        "keep": keep,
        "norm": tau.norm(),
        "density": tau.density,
        "points": [{"alpha": p.alpha, **p.metrics} for p in points],
        "before": before,
        "after": after,
        "notes": [] if chosen.alpha else ["no α lowers the target while the control stays"],
    }


def class_numbers(evaluator: PointEvaluator, classes: Sequence[str]) -> list[int]:
    """Return the numbers of classes, from their numbers or names as text."""
    names = evaluator.bench.dataset.class_names
    numbers = {str(i): i for i in range(len(names))} | {name: i for i, name in enumerate(names)}
    if wrong := [text for text in classes if text not in numbers]:
        listed = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise bad_value("classes", wrong[0], f"a number below {len(names)} or one of {listed}")
    return [numbers[text] for text in classes]


def scan_alphas(validate: Callable[[float], dict[str, float]], values: Sequence[float], keep: float | None) -> list[SweepPoint]:
    """Validate at each α, ascending from 0. With `keep`, stop at a target of 0 or after two controls in a row that are too low."""
    points: list[SweepPoint] = []
    for point in validated(validate, values):
        points.append(point)
        if keep is not None and _is_done(points, keep):
            break
    return points


def _is_done(points: Sequence[SweepPoint], keep: float) -> bool:
    floor = keep * points[0].metrics["val_control"]
    lost = [p.metrics["val_control"] < floor for p in points[-2:]]
    return lost == [True, True] or (points[-1].metrics["val_target"] == 0 and not lost[-1])


def target_and_control(evaluator: PointEvaluator, split: Split, name: str, classes: Sequence[int]) -> Callable[[Tensor], dict[str, float]]:
    """Return a function of θ that measures the accuracy on these classes (NAME_target) and on all others (NAME_control)."""
    banks = {f"{name}_target": evaluator.bank(split, classes), f"{name}_control": evaluator.bank(split, classes, others=True)}
    if empty := next((key for key, bank in banks.items() if not len(bank)), None):
        raise UserError(f"forget: {_listed(evaluator.bench.dataset.class_names, classes)} as target leaves {empty} without images.")
    return lambda theta: {key: evaluator.evaluate(theta, bank)[1] for key, bank in banks.items()}


def client_classes(evaluator: PointEvaluator) -> NDArray[np.bool_]:
    """Return [clients, classes] bool: the classes that each client trained on; none for excluded and idle clients."""
    fed = evaluator.bench.config.federated
    shards = [shard if fed.trains(k) else shard[:0] for k, shard in enumerate(make_shards(evaluator.bench))]
    return label_counts(evaluator.bench.dataset.train.labels, shards) > 0


def _listed(names: Sequence[str], classes: Iterable[int]) -> str:
    selected = [names[c] for c in classes]
    return ", ".join(selected[:5]) + (", …" if len(selected) > 5 else "")
