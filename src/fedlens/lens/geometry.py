"""Geometry of task vectors, offline: how clients or tasks agree, interfere and disentangle, and how linear the model is along τ."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fedlens.errors import UserError
from fedlens.lens.task_vectors import TaskVector, double

Vectors = Sequence[TaskVector] | Tensor
CHUNK = 1 << 20  # coordinates at a time: float64 copies of a whole cohort would not fit


def cosines(vectors: Vectors) -> Tensor:
    """Pairwise cosines [n, n], float64; a zero vector has 0 with all."""
    gram = sum((chunk @ chunk.T for chunk in _chunks(_rows(vectors))), start=torch.zeros(()))
    norms = gram.diagonal().sqrt()
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    return (gram * scale[:, None] * scale).clamp(-1, 1)


def sign_conflict(deltas: Vectors, weights: Sequence[float] | Tensor | None = None) -> float:
    """The fraction of |mass| that opposes the elected sign, in [0, 0.5]: (Σ|Δ| − |ΣΔ|) / 2Σ|Δ| (the interference that TIES resolves)."""
    rows = _rows(deltas)
    share = _shares(weights, len(rows))
    mass = net = 0.0
    for chunk in _chunks(rows):
        weighted = chunk * share.to(chunk.device)[:, None]
        mass += float(weighted.abs().sum())
        net += float(weighted.sum(0).abs().sum())
    return max(0.0, (mass - net) / (2 * mass)) if mass else 0.0


def drift_ratio(deltas: Vectors, weights: Sequence[float] | Tensor | None = None) -> float:
    """‖mean Δ‖ / mean ‖Δ‖: 1 when all clients move alike (or not at all), 1/√n when they are orthogonal and equally long."""
    rows = _rows(deltas)
    share = _shares(weights, len(rows))
    squares, together = torch.zeros(len(rows), dtype=torch.float64), 0.0
    for chunk in _chunks(rows):
        squares += chunk.square().sum(1).cpu()
        together += float((share.to(chunk.device) @ chunk).square().sum())
    apart = float(share @ squares.sqrt())
    return together**0.5 / apart if apart else 1.0


Predict = Callable[[Tensor], tuple[Tensor, Tensor]]


@torch.no_grad()
def disentanglement(
    predict: Predict, theta0: Tensor, tau1: Tensor, tau2: Tensor, alphas1: Sequence[float], alphas2: Sequence[float]
) -> Tensor:
    """ξ(α1, α2) [len1, len2] in [0, 1] (Ortiz-Jiménez et al. 2023): how often adding the other task changes a prediction.

    `predict(θ)` gives the labels predicted on task 1's samples and on task 2's. For each task the fraction of its samples whose
    label under θ0 + α_t·τ_t differs from that under θ0 + α1·τ1 + α2·τ2; the mean of the two tasks.
    """
    alone1 = [predict(theta0 + a * tau1)[0] for a in alphas1]
    alone2 = [predict(theta0 + a * tau2)[1] for a in alphas2]
    xi = torch.zeros(len(alone1), len(alone2), dtype=torch.float64)
    for i, a1 in enumerate(alphas1):
        for j, a2 in enumerate(alphas2):
            both1, both2 = predict(theta0 + a1 * tau1 + a2 * tau2)
            xi[i, j] = (_differing(alone1[i], both1) + _differing(alone2[j], both2)) / 2
    return xi


@torch.no_grad()
def linearity_gap(logits: Callable[[Tensor], Tensor], theta0: Tensor, tau: Tensor, alphas: Sequence[float]) -> list[dict[str, float]]:
    """Post-hoc linearisation (Ortiz-Jiménez et al. 2023): f_lin(α) = f(θ0) + α·Jτ beside f(θ0 + ατ), for each α.

    gap = ‖f − f_lin‖ / ‖f − f(θ0)‖ (0: linear along τ); agreement = the fraction of samples with the same argmax.
    """
    start = double(logits(theta0))  # [samples, classes]
    slope = directional_derivative(logits, theta0, tau, max((abs(a) for a in alphas), default=0.0) or 1.0)
    lines = []
    for alpha in alphas:
        true, linear = double(logits(theta0 + alpha * tau)), start + alpha * slope
        error, change = float((true - linear).norm()), float((true - start).norm())
        gap = error / change if change else (0.0 if error == 0 else float("inf"))
        agreement = float((true.argmax(-1) == linear.argmax(-1)).double().mean())
        lines.append({"alpha": float(alpha), "gap": gap, "agreement": agreement})
    return lines


@torch.no_grad()
def directional_derivative(function: Callable[[Tensor], Tensor], theta0: Tensor, tau: Tensor, scale: float = 1.0) -> Tensor:
    """Jτ by central differences, float64. `scale` is the α at which the function changes visibly.

    A float32 forward pass rounds away small steps and a network bends over large ones, and where the two meet depends on τ. So steps
    of scale/4, /16, … are tried and of the two neighbours that agree best the smaller is taken.
    """
    slopes: list[Tensor] = []
    for step in (scale / 4**k for k in range(1, 6)):
        ahead, behind = theta0 + step * tau, theta0 - step * tau
        slopes.append((double(function(ahead)) - double(function(behind))) / (2 * step))
    apart = [float((finer - coarser).norm()) for coarser, finer in pairwise(slopes)]
    return slopes[1 + apart.index(min(apart))]


def _rows(vectors: Vectors) -> Tensor:
    """[n, P]"""
    if isinstance(vectors, Tensor):
        if vectors.ndim != 2 or not len(vectors):
            raise UserError(f"task vectors: shape {tuple(vectors.shape)} given, allowed is [n, P] with n >= 1")
        return vectors
    if not vectors:
        raise UserError("task vectors: none given, allowed is one or more")
    return torch.stack([vectors[0].aligned(v) for v in vectors])


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    return (double(chunk) for chunk in torch.split(rows, CHUNK, dim=1))


def _shares(weights: Sequence[float] | Tensor | None, count: int) -> Tensor:
    """Weights that add up to 1, float64."""
    found = torch.ones(count, dtype=torch.float64) if weights is None else torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if found.shape != (count,) or not bool((found.isfinite() & (found >= 0)).all()) or not bool(found.any()):
        raise UserError(f"weights: {found.tolist()} given, allowed is one for each of {count} vectors, finite, >= 0 and not all 0")
    return found / found.sum()


def _differing(ours: Tensor, theirs: Tensor) -> float:
    if not ours.numel() or ours.shape != theirs.shape:
        raise UserError(
            f"predict: labels of shape {tuple(ours.shape)} and {tuple(theirs.shape)} given, allowed is one label a sample, always"
        )
    return float((ours != theirs).double().mean())
