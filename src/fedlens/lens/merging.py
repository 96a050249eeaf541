"""Merge rules: task vectors [clients, P] and weights [clients] -> one direction [P].

The same rules serve the server's aggregation and offline editing: FedAvg is the weighted mean of client task vectors
(McMahan et al. 2017); the coordinate-wise median and trimmed mean are the robust ones of Yin et al. (2018).
A rule takes its options by keyword and ignores those of others, because the server passes all; `merge` refuses them.
fedlens.config imports RULES from here to check `server.merge`, so this module imports little beyond torch.
"""

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fedlens.errors import UserError, bad_value, unknown
from fedlens.lens.norms import kth_smallest, l2
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector, check_fits
from fedlens.seeding import torch_rng

Rule = Callable[..., Tensor]


def mean(deltas: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """The weighted mean, summed in client order."""
    total = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        total.add_(delta, alpha=float(weight))
    return total.div_(float(weights.sum()))


def weighted_sum(deltas: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """Task addition (Ilharco et al. 2023): n times the weighted mean, so with equal weights the plain sum."""
    return mean(deltas, weights).mul_(len(deltas))


def median(deltas: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """The median of each coordinate, unweighted; of an even number the mean of the middle two."""
    ordered = deltas.sort(dim=0).values
    middle = (len(deltas) - 1) // 2
    return (ordered[middle] + ordered[len(deltas) // 2]) / 2


def trimmed_mean(deltas: Tensor, weights: Tensor, *, trim: float = 0.1, **_: Any) -> Tensor:
    """The mean of each coordinate without its `trim` largest and smallest fractions (of fewer than 1/trim clients nobody is cut), unweighted."""
    if not 0 <= trim < 0.5:
        raise bad_value("server.trim", trim, "0 <= trim < 0.5")
    cut = int(trim * len(deltas) + 1e-9)  # 0.29 of 100 is 29
    return deltas.sort(dim=0).values[cut : len(deltas) - cut].mean(0)


def clipped_mean(deltas: Tensor, weights: Tensor, *, clip_norm: float | None = None, **_: Any) -> Tensor:
    """The weighted mean of updates scaled down to norm `clip_norm`; null: the median of the cohort's norms."""
    if clip_norm is not None and not clip_norm > 0:
        raise bad_value("server.clip_norm", clip_norm, "> 0 or null")
    norms = torch.tensor([l2(delta) for delta in deltas], device=deltas.device, dtype=deltas.dtype)
    bound = norms.median() if clip_norm is None else torch.tensor(clip_norm, device=deltas.device)
    return mean(deltas * (bound / norms.clamp(min=1e-12)).clamp(max=1)[:, None], weights)


def ties(deltas: Tensor, weights: Tensor, *, density: float = 0.2, **_: Any) -> Tensor:
    """TIES (Yadav et al. 2023): each trimmed to its `density` largest entries, a sign elected by mass, the mean of those that agree."""
    if not 0 < density <= 1:
        raise bad_value("ties density", density, "0 < density <= 1")
    keep = max(1, round(density * deltas.shape[1]))
    # the mass and the weight on either side, in one pass over the clients; float64, so that an election is not decided by rounding
    up, down, up_weight, down_weight = (_wide_zeros(deltas) for _ in range(4))  # [P] each
    for delta, weight in zip(deltas, weights.tolist(), strict=True):
        kept = torch.where(_largest(delta.abs(), keep), delta, 0.0)
        up.add_(kept.clamp(min=0), alpha=weight)
        down.add_(kept.clamp(max=0), alpha=weight)
        up_weight.add_((kept > 0).to(up.dtype), alpha=weight)
        down_weight.add_((kept < 0).to(up.dtype), alpha=weight)
    positive = up + down >= 0  # balanced mass elects +, as in the common implementations
    mass, weight_there = torch.where(positive, up, down), torch.where(positive, up_weight, down_weight)
    return torch.where(weight_there > 0, mass / weight_there, 0.0).to(deltas.dtype)


def dare(
    deltas: Tensor, weights: Tensor, *, drop: float = 0.5, seed: int = 0, round: int = 0, clients: Sequence[int] | None = None, **_: Any
) -> Tensor:
    """DARE (Yu et al. 2024): each entry is dropped with probability `drop`, the rest divided by 1 − drop, then the weighted mean."""
    if not 0 <= drop < 1:
        raise bad_value("dare drop", drop, "0 <= drop < 1")
    ids = range(len(deltas)) if clients is None else clients  # whose randomness a row gets, whatever the order of rows
    if len(ids) != len(deltas):
        raise bad_value("dare clients", len(ids), f"one id for each of {len(deltas)} task vectors")
    total = torch.zeros_like(deltas[0])

    def stays(client: int) -> Tensor:
        return torch.rand(deltas.shape[1], generator=torch_rng(seed, "dare", round, client)) >= drop  # on the CPU: alike on every device

    with ThreadPoolExecutor(min(len(deltas), os.cpu_count() or 1)) as pool:  # a draw is the work of one thread
        for delta, weight, kept in zip(deltas, weights.tolist(), pool.map(stays, ids), strict=True):
            total.add_(torch.where(kept.to(delta.device), delta, 0.0), alpha=weight / (1 - drop))
    return total.div_(float(weights.sum()))


def fisher(deltas: Tensor, weights: Tensor, *, fishers: Sequence[Tensor] | Tensor | None = None, **_: Any) -> Tensor:
    """Fisher merging (Matena & Raffel 2022): Σ w F ⊙ Δ / Σ w F with sensitivities `fishers` [n, P]; where all are 0, the weighted mean."""
    if fishers is None or len(fishers) != len(deltas):
        raise bad_value("fisher fishers", None if fishers is None else len(fishers), f"one sensitivity a task vector: {len(deltas)}")
    above, below = _wide_zeros(deltas), _wide_zeros(deltas)
    for delta, weight, sensitivity in zip(deltas, weights.tolist(), fishers, strict=True):
        if sensitivity.shape != delta.shape:
            raise bad_value("fisher fishers", tuple(sensitivity.shape), f"the shape {tuple(delta.shape)}")
        if not bool(((sensitivity >= 0) & sensitivity.isfinite()).all()):
            raise UserError("fisher fishers: negative or not finite, allowed is >= 0")
        share = weight * sensitivity.to(delta.device, above.dtype)
        above.add_(share * delta)
        below.add_(share)
    return torch.where(below > 0, above / below, mean(deltas, weights)).to(deltas.dtype)


def breadcrumbs(
    deltas: Tensor, weights: Tensor, *, top: float = 0.01, bottom: float = 0.85, sizes: Sequence[int] | None = None, **_: Any
) -> Tensor:
    """Breadcrumbs (Davari & Belilovsky 2024): the `top` largest and `bottom` smallest fractions of each tensor zeroed, then the mean."""
    if not (top >= 0 and bottom >= 0 and top + bottom <= 1):
        raise bad_value("breadcrumbs top, bottom", (top, bottom), ">= 0 each and at most 1 together")
    sizes = [deltas.shape[1]] if sizes is None else list(sizes)
    if sum(sizes) != deltas.shape[1]:
        raise bad_value("breadcrumbs sizes", sum(sizes), f"tensor sizes that add up to {deltas.shape[1]}")
    return torch.cat([mean(_middle(part, top, bottom), weights) for part in torch.split(deltas, sizes, dim=1)])


def _middle(part: Tensor, top: float, bottom: float) -> Tensor:
    """[n, size] with both tails of each row zeroed."""
    size, magnitudes = part.shape[1], part.abs()
    above, below = round(top * size), round(bottom * size)
    kept = _largest(magnitudes, max(size - below, above)) & ~_largest(magnitudes, above)
    return torch.where(kept, part, 0.0)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """[…, size] -> mask of exactly `count` largest a row; of equal ones those of lower index. Selection, not sorting."""
    size = magnitudes.shape[-1]
    if count == 0 or count == size:
        return torch.full_like(magnitudes, count > 0, dtype=torch.bool)
    threshold = kth_smallest(magnitudes, size - count + 1)
    above, level = magnitudes > threshold, magnitudes == threshold
    missing = count - above.sum(-1, keepdim=True)  # [..., 1]: how many of those on the threshold belong
    if not torch.equal(level.sum(-1, keepdim=True), missing):
        level &= level.cumsum(-1, dtype=torch.int32) <= missing
    return above | level


def _wide_zeros(deltas: Tensor) -> Tensor:
    """[P] zeros that accumulate in float64 where the device has it."""
    return torch.zeros(deltas.shape[1], dtype=torch.float32 if deltas.device.type == "mps" else torch.float64, device=deltas.device)


RULES: dict[str, Rule] = {
    "mean": mean,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "clipped_mean": clipped_mean,
    "sum": weighted_sum,
    "ties": ties,
    "dare": dare,
    "fisher": fisher,
    "breadcrumbs": breadcrumbs,
}


def rule(name: str) -> Rule:
    if name not in RULES:
        raise unknown("server.merge", name, RULES)
    return RULES[name]


def options_of(name: str) -> list[str]:
    """The options that `merge` takes for a rule: its keywords, less `sizes`, which the space of the task vectors knows."""
    found = inspect.signature(RULES[name]).parameters.values()
    return [option.name for option in found if option.kind is option.KEYWORD_ONLY and option.name != "sizes"]


def merge(
    task_vectors: Sequence[TaskVector], rule: str = "mean", weights: Sequence[float] | Tensor | None = None, **options: Any
) -> TaskVector:
    """One task vector of several by a rule of RULES; an option that the rule does not have is an error.

    `weights` (sample counts) default to ones. For "fisher", `fishers` holds a sensitivity for each: name -> tensor, or flat; where it lacks a name
    (a frozen head, a buffer) the mean is taken.
    """
    vectors = list(task_vectors)
    if not vectors:
        raise UserError("merge: no task vectors given, allowed is one or more")
    if rule not in RULES:
        raise unknown("merge rule", rule, RULES)
    for name in options:
        if name not in options_of(rule):
            listed = ", ".join(options_of(rule)) or "none"
            raise UserError(f"merge: option {name!r} is unknown to {rule!r}; allowed is {listed}")
    space = vectors[0].space
    rows = torch.stack([vectors[0].aligned(v) for v in vectors])  # [n, P]
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # sums by sample counts leave what half precision holds
    for index, row in enumerate(rows):
        if not bool(row.isfinite().all()):
            raise UserError(f"merge: task vector {index} is not finite")
    if rule == "breadcrumbs":
        options["sizes"] = space.sizes
    if options.get("fishers") is not None:
        options["fishers"] = [_flat_fisher(vectors[0], f) for f in options["fishers"]]
    merged = checked(rule, RULES[rule](rows, _checked_weights(weights, len(vectors)), **options), rows)
    return TaskVector(space, merged, frozenset().union(*(vector.origins for vector in vectors)))


def checked(rule: str, merged: Any, rows: Tensor) -> Tensor:
    """What a rule gave for rows [n, P]: one of one's own is found out here, not in the model."""
    if not isinstance(merged, Tensor) or merged.shape != rows.shape[1:] or not merged.is_floating_point():
        given = f"{merged.dtype} {list(merged.shape)}" if isinstance(merged, Tensor) else type(merged).__name__
        raise UserError(f"merge: {rule!r} gave {given}, allowed is a floating-point tensor [{rows.shape[1]}]")
    if not bool(merged.isfinite().all()):
        raise UserError(f"merge: {rule!r} gave values that are not finite")
    return merged.to(rows.dtype)


def _flat_fisher(like: TaskVector, sensitivity: Mapping[str, Tensor] | Tensor) -> Tensor:
    if isinstance(sensitivity, Tensor):
        return sensitivity
    known = {name: shape for name, shape in like.space.shapes.items() if name in sensitivity}
    if not known or len(known) != len(sensitivity):
        raise UserError(
            "fisher fishers: a sensitivity names what the task vectors have not, allowed are their names, those that are 0 left out"
        )
    check_fits(ParamSpace(known), sensitivity, "a sensitivity in fishers")
    whole = {name: sensitivity.get(name, torch.zeros(shape)) for name, shape in like.space.shapes.items()}
    return like.space.flatten({name: tensor.to(like.vector.device) for name, tensor in whole.items()})


def _checked_weights(weights: Sequence[float] | Tensor | None, count: int) -> Tensor:
    found = [1.0] * count if weights is None else [float(w) for w in weights]
    if len(found) != count:
        raise bad_value("merge weights", len(found), f"one for each of {count} task vectors")
    if not all(math.isfinite(w) and w >= 0 for w in found) or not any(found):
        raise bad_value("merge weights", found, "finite, >= 0 and not all 0")
    return torch.tensor(found, dtype=torch.float64)
