"""Merge rules: task vectors [clients, P] and weights [clients] -> one direction [P].

The same rules serve the server's aggregation and offline editing: FedAvg is the weighted mean of client task vectors
(McMahan et al. 2017); the coordinate-wise median and trimmed mean are the robust rules of Yin et al. (2018).
A rule's keyword-only parameters are its options, except those in CONTEXT, which the caller supplies.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fedlens.errors import UserError, bad_value, first_line
from fedlens.lens.norms import extremes, l2
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector, check_fits, check_weights
from fedlens.registry import Registry, accepted, check_options, options_of
from fedlens.seeding import torch_rng

CONTEXT = ("seed", "round", "clients", "sizes", "fishers")  # supplied by the caller to a rule whose signature names it
OPTIONS = "server.merge_options"
Rule = Callable[..., Tensor]


def mean(deltas: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean, summed in client order."""
    total = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        total.add_(delta, alpha=float(weight))
    return total.div_(float(weights.sum()))


def weighted_sum(deltas: Tensor, weights: Tensor) -> Tensor:
    """Return n times the weighted mean, with equal weights the plain sum: task addition (Ilharco et al. 2023)."""
    return mean(deltas, weights).mul_(len(deltas))


def median(deltas: Tensor, weights: Tensor) -> Tensor:
    """Return the unweighted median of each coordinate; for an even number the mean of the middle two."""
    ordered = deltas.sort(dim=0).values
    middle = (len(deltas) - 1) // 2
    return (ordered[middle] + ordered[len(deltas) // 2]) / 2


def trimmed_mean(deltas: Tensor, weights: Tensor, *, trim: float = 0.1) -> Tensor:
    """Return the unweighted mean of each coordinate without its `trim` largest and smallest fractions; below 1/trim clients, of all."""
    if not 0 <= trim < 0.5:
        raise bad_value(f"{OPTIONS}.trim", trim, "in [0, 0.5)")
    cut = int(trim * len(deltas) + 1e-9)  # 0.29 of 100 is 29
    return deltas.sort(dim=0).values[cut : len(deltas) - cut].mean(0)


def clipped_mean(deltas: Tensor, weights: Tensor, *, clip_norm: float | None = None) -> Tensor:
    """Return the weighted mean of updates scaled down to norm `clip_norm`; null: the median norm of the cohort."""
    if clip_norm is not None and not clip_norm > 0:
        raise bad_value(f"{OPTIONS}.clip_norm", clip_norm, "> 0 or null")
    norms = torch.tensor([l2(delta) for delta in deltas], device=deltas.device, dtype=deltas.dtype)
    bound = norms.median() if clip_norm is None else torch.tensor(clip_norm, device=deltas.device)
    return mean(deltas * (bound / norms.clamp(min=1e-12)).clamp(max=1)[:, None], weights)


def ties(deltas: Tensor, weights: Tensor, *, density: float = 0.2) -> Tensor:
    """Trim each update to its `density` largest entries, elect a sign by mass, average those that agree: TIES (Yadav et al. 2023)."""
    if not 0 < density <= 1:
        raise bad_value(f"{OPTIONS}.density", density, "in (0, 1]")
    count = max(1, round(density * deltas.shape[1]))
    # Mass and weight on either side of zero, in one pass over the clients. In float64, so that rounding does not decide an election.
    up, down, up_weight, down_weight = (_wide_zeros(deltas) for _ in range(4))  # [P] each
    for delta, weight in zip(deltas, weights.tolist(), strict=True):
        trimmed = torch.where(extremes(delta.abs(), count), delta, 0.0)
        up.add_(trimmed.clamp(min=0), alpha=weight)
        down.add_(trimmed.clamp(max=0), alpha=weight)
        up_weight.add_((trimmed > 0).to(up.dtype), alpha=weight)
        down_weight.add_((trimmed < 0).to(up.dtype), alpha=weight)
    positive = up + down >= 0  # balanced mass elects +, as in the common implementations
    mass, agreeing = torch.where(positive, up, down), torch.where(positive, up_weight, down_weight)
    return torch.where(agreeing > 0, mass / agreeing, 0.0).to(deltas.dtype)


def dare(
    deltas: Tensor, weights: Tensor, *, drop: float = 0.5, seed: int = 0, round: int = 0, clients: Sequence[int] | None = None
) -> Tensor:
    """Drop each entry with probability `drop`, divide the rest by 1 − drop, return the weighted mean: DARE (Yu et al. 2024)."""
    if not 0 <= drop < 1:
        raise bad_value(f"{OPTIONS}.drop", drop, "in [0, 1)")
    ids = range(len(deltas)) if clients is None else clients  # draws are keyed by client, so the order of rows does not matter
    if len(ids) != len(deltas):
        raise bad_value("clients", len(ids), f"one id for each of {len(deltas)} task vectors")
    total = torch.zeros_like(deltas[0])

    def retained(client: int) -> Tensor:
        return torch.rand(deltas.shape[1], generator=torch_rng(seed, "dare", round, client)) >= drop  # on CPU: the same on every device

    with ThreadPoolExecutor(min(len(deltas), os.cpu_count() or 1)) as pool:  # each draw runs on one thread
        for delta, weight, mask in zip(deltas, weights.tolist(), pool.map(retained, ids), strict=True):
            total.add_(torch.where(mask.to(delta.device), delta, 0.0), alpha=weight / (1 - drop))
    return total.div_(float(weights.sum()))


def fisher(deltas: Tensor, weights: Tensor, *, fishers: Sequence[Tensor] | Tensor | None = None) -> Tensor:
    """Return Σ w F ⊙ Δ / Σ w F with sensitivities `fishers` [n, P], the weighted mean where all F are 0 (Matena & Raffel 2022)."""
    if fishers is None or len(fishers) != len(deltas):
        raise bad_value("fishers", None if fishers is None else len(fishers), f"one sensitivity per task vector, {len(deltas)} in all")
    above, below = _wide_zeros(deltas), _wide_zeros(deltas)
    for delta, weight, sensitivity in zip(deltas, weights.tolist(), fishers, strict=True):
        if sensitivity.shape != delta.shape:
            raise bad_value("fishers", tuple(sensitivity.shape), f"sensitivities of shape {tuple(delta.shape)}")
        if not bool(((sensitivity >= 0) & sensitivity.isfinite()).all()):
            raise UserError("fishers must be finite and >= 0.")
        share = weight * sensitivity.to(delta.device, above.dtype)
        above.add_(share * delta)
        below.add_(share)
    return torch.where(below > 0, above / below, mean(deltas, weights)).to(deltas.dtype)


def breadcrumbs(deltas: Tensor, weights: Tensor, *, top: float = 0.01, bottom: float = 0.85, sizes: Sequence[int] | None = None) -> Tensor:
    """Zero the `top` largest and `bottom` smallest fractions per tensor, return the weighted mean: Breadcrumbs (Davari & Belilovsky 2024)."""
    if not (top >= 0 and bottom >= 0 and top + bottom <= 1):
        raise bad_value(f"{OPTIONS}.top and {OPTIONS}.bottom", (top, bottom), ">= 0 and at most 1 together")
    sizes = [deltas.shape[1]] if sizes is None else list(sizes)
    if sum(sizes) != deltas.shape[1]:
        raise bad_value("sizes", sum(sizes), f"tensor sizes that add up to {deltas.shape[1]}")
    return torch.cat([mean(_without_tails(part, top, bottom), weights) for part in torch.split(deltas, sizes, dim=1)])


def _without_tails(part: Tensor, top: float, bottom: float) -> Tensor:
    """Return [n, size] with the `top` largest and `bottom` smallest fractions of each row zeroed."""
    size, magnitudes = part.shape[1], part.abs()
    above, below = round(top * size), round(bottom * size)
    return torch.where(extremes(magnitudes, max(size - below, above)) & ~extremes(magnitudes, above), part, 0.0)


def _wide_zeros(deltas: Tensor) -> Tensor:
    """Return [P] zeros that accumulate in float64 where the device supports it."""
    return torch.zeros(deltas.shape[1], dtype=torch.float32 if deltas.device.type == "mps" else torch.float64, device=deltas.device)


RULES: Registry[Rule] = Registry("merge rule", mean, median, trimmed_mean, clipped_mean, ties, dare, fisher, breadcrumbs, supplied=CONTEXT)
RULES.register(weighted_sum, "sum")


def merge_rows(rule: str, rows: Tensor, weights: Tensor, options: Mapping[str, Any], **context: Any) -> Tensor:
    """Merge rows [n, P] by the rule of this name, with its options and those of the context values that it names."""
    function = RULES.choose(rule, "server.merge")
    check_options(OPTIONS, rule, options, RULES.options(rule))
    return _checked(rule, function(rows, weights, **options, **accepted(function, context)), rows)


def check_merge(rule: str, options: Mapping[str, Any]) -> None:
    """Raise for an unknown rule or option and for a bad value, by merging three tiny vectors."""
    RULES.choose(rule, "server.merge")
    for name, default in RULES.options(rule).items():
        value = options.get(name, default)
        if isinstance(default, float) and (isinstance(value, bool) or not isinstance(value, Real)):
            raise bad_value(f"{OPTIONS}.{name}", value, "a number")
    rows = torch.arange(1.0, 13.0).view(3, 4)
    try:
        merge_rows(rule, rows, torch.ones(3), options, seed=0, round=0, clients=[0, 1, 2], sizes=[4], fishers=torch.ones(3, 4))
    except UserError:
        raise
    except Exception as error:  # a registered rule may raise anything
        fields = ", ".join(f"{OPTIONS}.{name}" for name in options) or "server.merge"
        raise UserError(f"{fields}: rule {rule!r} fails on three test vectors with {dict(options)} ({first_line(error)}).") from None


RULES.check = check_merge


def merge(
    task_vectors: Sequence[TaskVector], rule: str = "mean", weights: Sequence[float] | Tensor | None = None, **options: Any
) -> TaskVector:
    """Merge task vectors into one by a rule of RULES; an option that the rule does not have is an error.

    `weights` (sample counts) default to ones. `fishers`: one sensitivity per task vector, flat or name -> tensor; missing names count as 0.
    """
    vectors = list(task_vectors) if isinstance(task_vectors, Iterable) else [task_vectors]
    if not vectors:
        raise UserError("merge needs at least one task vector, got no task vectors.")
    if other := next((type(each).__name__ for each in vectors if not isinstance(each, TaskVector)), None):
        raise UserError(f"merge needs a list of task vectors, got {other}; fl.TaskVector.between(start, end) makes one of two state dicts.")
    check_options("merge options", rule, options, options_of(RULES.choose(str(rule), "merge rule"), ("sizes",)))
    if own := {name: value for name, value in options.items() if name not in CONTEXT}:
        check_merge(rule, own)
    space = vectors[0].space
    rows = torch.stack([vectors[0].aligned(v) for v in vectors])  # [n, P]
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # sums weighted by sample counts overflow half precision
    for index, row in enumerate(rows):
        if not bool(row.isfinite().all()):
            raise UserError(f"merge: task vector {index} is not finite.")
    context = {name: options.pop(name) for name in CONTEXT if name in options} | {"sizes": space.sizes}
    if context.get("fishers") is not None:
        context["fishers"] = [_flat_fisher(vectors[0], f) for f in context["fishers"]]
    merged = merge_rows(rule, rows, check_weights(weights, len(vectors)), options, **context)
    return TaskVector(space, merged, frozenset().union(*(vector.origins for vector in vectors)))


def _checked(rule: str, merged: Any, rows: Tensor) -> Tensor:
    """Return a rule's result in the dtype of rows [n, P]; raise unless it is a finite vector [P]."""
    if not isinstance(merged, Tensor) or merged.shape != rows.shape[1:] or not merged.is_floating_point():
        result = f"{merged.dtype} {list(merged.shape)}" if isinstance(merged, Tensor) else type(merged).__name__
        raise UserError(f"merge rule {rule!r} must return a floating-point tensor [{rows.shape[1]}], got {result}.")
    if not bool(merged.isfinite().all()):
        raise UserError(f"merge rule {rule!r} returned values that are not finite.")
    return merged.to(rows.dtype)


def _flat_fisher(like: TaskVector, sensitivity: Mapping[str, Tensor] | Tensor) -> Tensor:
    if isinstance(sensitivity, Tensor):
        return sensitivity
    known = {name: shape for name, shape in like.space.shapes.items() if name in sensitivity}
    if not known or len(known) != len(sensitivity):
        raise UserError("fishers: each sensitivity must name tensors of the task vectors, and at least one.")
    check_fits(ParamSpace(known), sensitivity, "a sensitivity in fishers")
    whole = {name: sensitivity.get(name, torch.zeros(shape)) for name, shape in like.space.shapes.items()}
    return like.space.flatten({name: tensor.to(like.vector.device) for name, tensor in whole.items()})
