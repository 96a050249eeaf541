"""Geometry of task vectors, offline: agreement, interference, disentanglement, and how linear the model is along τ."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fedlens.errors import UserError
from fedlens.lens.task_vectors import TaskVector, check_weights, double

Vectors = Sequence[TaskVector] | Tensor
Predict = Callable[[Tensor], tuple[Tensor, Tensor]]  # θ -> labels predicted on the samples of two tasks
CHUNK = 1 << 20  # coordinates at a time: float64 copies of a whole cohort would not fit in memory


def cosines(vectors: Vectors) -> Tensor:
    """Return pairwise cosines [n, n] in float64; a zero vector has 0 with all."""
    gram = sum((chunk @ chunk.T for chunk in _chunks(_rows(vectors))), start=torch.zeros(()))
    norms = gram.diagonal().sqrt()
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    return (gram * scale[:, None] * scale).clamp(-1, 1)


def sign_conflict(deltas: Vectors, weights: Sequence[float] | Tensor | None = None) -> float:
    """Return (Σ|Δ| − |ΣΔ|) / 2Σ|Δ|, the fraction of mass that opposes the elected sign, in [0, 0.5]: TIES resolves this interference."""
    rows = _rows(deltas)
    share = _shares(weights, len(rows))
    mass = net = 0.0
    for chunk in _chunks(rows):
        weighted = chunk * share.to(chunk.device)[:, None]
        mass += float(weighted.abs().sum())
        net += float(weighted.sum(0).abs().sum())
    return max(0.0, (mass - net) / (2 * mass)) if mass else 0.0


def drift_ratio(deltas: Vectors, weights: Sequence[float] | Tensor | None = None) -> float:
    """Return ‖mean Δ‖ / mean ‖Δ‖: 1 if all clients move alike or not at all, 1/√n if they are orthogonal and equally long."""
    rows = _rows(deltas)
    share = _shares(weights, len(rows))
    squares, together = torch.zeros(len(rows), dtype=torch.float64), 0.0
    for chunk in _chunks(rows):
        squares += chunk.square().sum(1).cpu()
        together += float((share.to(chunk.device) @ chunk).square().sum())
    apart = float(share @ squares.sqrt())
    return together**0.5 / apart if apart else 1.0


@torch.no_grad()
def disentanglement(
    predict: Predict, theta0: Tensor, tau1: Tensor, tau2: Tensor, alphas1: Sequence[float], alphas2: Sequence[float]
) -> Tensor:
    """Return ξ(α1, α2) [len1, len2] in [0, 1]: how often adding the other task changes a prediction (Ortiz-Jiménez et al. 2023).

    Per task t, the fraction of its samples whose label differs between θ0 + α_t·τ_t and θ0 + α1·τ1 + α2·τ2; then the mean of both tasks.
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
    """Compare f(θ0 + ατ) with its linearisation f_lin(α) = f(θ0) + α·Jτ for each α (Ortiz-Jiménez et al. 2023).

    gap = ‖f − f_lin‖ / ‖f − f(θ0)‖, 0 if f is linear along τ; agreement = fraction of samples with the same argmax.
    """
    start = double(logits(theta0))  # [samples, classes]
    slope = directional_derivative(logits, theta0, tau, max((abs(a) for a in alphas), default=0.0) or 1.0)
    rows = []
    for alpha in alphas:
        true, linear = double(logits(theta0 + alpha * tau)), start + alpha * slope
        error, change = float((true - linear).norm()), float((true - start).norm())
        gap = error / change if change else (0.0 if error == 0 else float("inf"))
        agreement = float((true.argmax(-1) == linear.argmax(-1)).double().mean())
        rows.append({"alpha": float(alpha), "gap": gap, "agreement": agreement})
    return rows


@torch.no_grad()
def directional_derivative(function: Callable[[Tensor], Tensor], theta0: Tensor, tau: Tensor, scale: float = 1.0) -> Tensor:
    """Return Jτ in float64 by central differences; `scale` is an α at which the function changes visibly.

    float32 rounds small steps away and networks bend over large ones. Of the two neighbouring steps that agree best, the smaller is used.
    """
    slopes: list[Tensor] = []
    for step in (scale / 4**k for k in range(1, 6)):
        ahead, behind = theta0 + step * tau, theta0 - step * tau
        slopes.append((double(function(ahead)) - double(function(behind))) / (2 * step))
    apart = [float((finer - coarser).norm()) for coarser, finer in pairwise(slopes)]
    return slopes[1 + apart.index(min(apart))]


def _rows(vectors: Vectors) -> Tensor:
    """Return [n, P]."""
    if isinstance(vectors, Tensor):
        if vectors.ndim != 2 or not len(vectors):
            raise UserError(f"task vectors must be [n, P] with n >= 1, got shape {tuple(vectors.shape)}.")
        return vectors
    if not vectors:
        raise UserError("task vectors: at least one is needed, got none.")
    return torch.stack([vectors[0].aligned(v) for v in vectors])


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    return (double(chunk) for chunk in torch.split(rows, CHUNK, dim=1))


def _shares(weights: Sequence[float] | Tensor | None, count: int) -> Tensor:
    """Return weights [count] in float64 that add up to 1."""
    checked = check_weights(weights, count)
    return checked / checked.sum()


def _differing(ours: Tensor, theirs: Tensor) -> float:
    if not ours.numel() or ours.shape != theirs.shape:
        raise UserError(
            f"predict must return one label per sample in every call, got shapes {tuple(ours.shape)} and {tuple(theirs.shape)}."
        )
    return float((ours != theirs).double().mean())
