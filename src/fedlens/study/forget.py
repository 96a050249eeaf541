"""Forgetting by negation (Ilharco et al. 2023): θ_T − α·τ; of a client, τ_k is what it added to the final model."""

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
from fedlens.runs.progress import progress_bar
from fedlens.study.arith import Alphas, Lab, check_same_task, check_validation
from fedlens.training.federated import make_shards
from fedlens.training.run import Run

# by quarters, then halves, then ones: how far is needed differs by an order between clients, and a sparse τ_k needs most
LADDER = [q / 4 for q in chain(range(12), range(12, 40, 2), range(40, 164, 4))]


def forget_client(
    run: Run,
    client: int,
    *,
    keep: float = 0.95,
    grid: Alphas | None = None,
    without: Sequence[Run] = (),
    device: str | None = None,
    root: str | None = None,
) -> dict[str, Any]:
    """Subtract what the client added: the target is the classes that it holds, the control all others.

    without: runs to compare with, of which one that excluded this client and no other was trained as if it had never been there ("retrained").
    Its head, which the client's sums never entered, is also tried on this run's model ("reheaded"): what is to be had without a vector.
    """
    tau, lab = run.client_vectors([client])[client], Lab(run, device, root)
    classes, shared = held_classes(lab, client)
    found = forget(lab, tau, classes, keep=keep, grid=grid)
    names = lab.bench.dataset.class_names
    if shared:
        found["notes"].append(f"other clients hold {_listed(names, shared)} too, so the target is not client {client} alone")
    again = next((other for other in without if list(other.config.federated.exclude) == [client]), None)
    if again is not None:
        check_same_task(run, again)
        test = measure(lab, lab.bench.dataset.test, "test", classes)
        found |= {"retrained": test(lab.theta(again.state)), "reheaded": test(lab.theta(_reheaded(run, again)))}
    return {"client": client, "shared_classes": [names[c] for c in shared], **found}


def _reheaded(run: Run, again: Run) -> dict[str, Tensor]:
    """What training moved as it is, what it did not move as it began in the other run: that is the head, where it is frozen."""
    start, state, other = run.start, run.state, again.start
    return {name: other[name] if torch.equal(tensor, start[name]) else tensor for name, tensor in state.items()}


def forget(lab: Lab, tau: TaskVector, classes: Sequence[int], *, keep: float = 0.95, grid: Alphas | None = None) -> dict[str, Any]:
    """Task negation with a control: θ_T − α·τ with the α that lowers the accuracy on `classes` (target) most while that on the others
    (control) stays at `keep` of what it was, both on validation. grid None: α rises up to 40, until the target is 0 or the control
    is lost."""
    values = LADDER if grid is None else sorted({0.0, *alphas(grid)})
    if values[0] < 0:
        raise bad_value("alphas", values[0], ">= 0: forgetting subtracts")
    if not 0 <= keep <= 1:
        raise bad_value("keep", keep, "0 to 1")
    check_validation(lab)
    data, theta, step = lab.bench.dataset, lab.theta(lab.run.state), lab.direction(-tau)
    if len(set(classes)) == data.num_classes:
        raise UserError("forget: the target is every class, so there is no control; allowed is some of the classes")
    validate, test = (measure(lab, split, name, classes) for split, name in ((data.val, "val"), (data.test, "test")))
    points = climb(lambda alpha: validate(theta + alpha * step), values, keep if grid is None else None)
    chosen = negate(points, "val_target", "val_control", keep) or points[0]
    before, after = ({"alpha": p.alpha, **p.metrics, **test(theta + p.alpha * step)} for p in (points[0], chosen))
    return {
        "run": str(lab.run.path),
        "classes": [data.class_names[c] for c in classes],
        "keep": keep,
        "norm": tau.norm(),
        "density": tau.density,
        "points": [{"alpha": p.alpha, **p.metrics} for p in points],
        "before": before,
        "after": after,
        "notes": [] if chosen.alpha else ["no alpha lowers the target while the control stays"],
    }


def named_classes(lab: Lab, given: Sequence[str]) -> list[int]:
    """Classes by number or by name."""
    names = lab.bench.dataset.class_names
    numbers = {str(i): i for i in range(len(names))} | {name: i for i, name in enumerate(names)}
    if wrong := [g for g in given if g not in numbers]:
        raise bad_value(
            "classes", wrong[0], f"a number below {len(names)} or one of {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
        )
    return [numbers[g] for g in given]


def climb(validate: Callable[[float], dict[str, float]], values: Sequence[float], keep: float | None) -> list[SweepPoint]:
    """Validation at each α from 0 up. With `keep`, no further than a target of 0 or two controls in a row that are too low."""
    points: list[SweepPoint] = []
    with progress_bar("validation", len(values)) as bar:
        for alpha in values:
            points.append(SweepPoint(alpha, validate(alpha)))
            bar.advance()
            if keep is not None and _enough(points, keep):
                break
    return points


def _enough(points: Sequence[SweepPoint], keep: float) -> bool:
    floor = keep * points[0].metrics["val_control"]
    lost = [p.metrics["val_control"] < floor for p in points[-2:]]
    return lost == [True, True] or (points[-1].metrics["val_target"] == 0 and not lost[-1])


def measure(lab: Lab, split: Split, name: str, classes: Sequence[int]) -> Callable[[Tensor], dict[str, float]]:
    """θ -> accuracy on these classes (NAME_target) and on all others (NAME_control)."""
    banks = {f"{name}_target": lab.bank(split, classes), f"{name}_control": lab.bank(split, classes, others=True)}
    if empty := next((which for which, bank in banks.items() if not len(bank)), None):
        raise UserError(f"client: it holds {_listed(lab.bench.dataset.class_names, classes)}, which leaves {empty} without images")
    return lambda theta: {which: lab.evaluate(theta, bank)[1] for which, bank in banks.items()}


def held_classes(lab: Lab, client: int) -> tuple[list[int], list[int]]:
    """(the classes that the client holds, those of them that another client holds too)."""
    holds = holdings(lab)
    mine: list[int] = np.flatnonzero(holds[client]).tolist()
    return mine, [c for c in mine if holds[:, c].sum() > 1]


def holdings(lab: Lab) -> NDArray[np.bool_]:
    """[clients, classes] bool: who trained on what. Clients that were excluded or idle on nothing."""
    fed = lab.bench.config.federated
    shards = [shard if fed.trains(k) else shard[:0] for k, shard in enumerate(make_shards(lab.bench))]
    return label_counts(lab.bench.dataset.train.labels, shards) > 0


def _listed(names: Sequence[str], classes: Iterable[int]) -> str:
    found = [names[c] for c in classes]
    return ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
