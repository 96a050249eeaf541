"""The closed-form head: ridge regression from sums that add over clients (Fed3R, Fanì et al. 2024).

A = Σ ZᵀZ and b = Σ ZᵀY are all the server needs, so the federated head is the centralised one whatever the split.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.errors import UserError, bad_value

LAMBDAS = tuple(10.0**k for k in range(-4, 7))  # wide: the scale of features differs by backbone


def ridge_statistics(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """(A [dim+1, dim+1], b [dim+1, classes]) in float64, bias column last; sums over samples, so clients' results add."""
    if features.ndim != 2 or len(features) != len(labels):
        raise UserError(f"ridge_statistics: features of shape {tuple(features.shape)} for {len(labels)} labels, allowed is [samples, dim]")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise bad_value("ridge_statistics: labels", f"{int(labels.min())} to {int(labels.max())}", f"0 to {num_classes - 1}")
    z = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64, device=features.device)], dim=1)
    y = F.one_hot(labels.long(), num_classes).double()
    return z.T @ z, z.T @ y


def ridge_head(A: Tensor, b: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """W = (A + λI)⁻¹ b as (weight [classes, dim], bias [classes]), float64."""
    if not lam > 0:
        raise bad_value("lam", lam, "> 0")
    system = A + lam * torch.eye(len(A), dtype=A.dtype, device=A.device)
    factor, failed = torch.linalg.cholesky_ex(system)
    if int(failed):
        raise UserError(f"ridge_head: A + {lam:g}·I is not positive definite; A is not finite, not a sum of squares, or wants a larger lam")
    solution = torch.cholesky_solve(b, factor)
    return solution[:-1].T.contiguous(), solution[-1].contiguous()


@dataclass(frozen=True)
class RidgeChoice:
    """A head and how validation chose it. The temperature is already multiplied into weight and bias."""

    weight: Tensor
    bias: Tensor
    lam: float
    temperature: float
    val_accuracy: float


def choose_ridge(A: Tensor, b: Tensor, features: Tensor, labels: Tensor, lambdas: tuple[float, ...] = LAMBDAS) -> RidgeChoice:
    """λ by validation accuracy, then the temperature that minimises validation cross-entropy.

    Raw ridge logits approximate one-hot targets, so softmax of them is nearly flat: without a temperature the
    cross-entropy of a good head looks like that of a guess, and fine-tuning starts by rescaling the whole network.
    """
    if not len(labels):
        raise UserError("head: ridge chooses its lambda on validation samples, and there are none")
    features, labels = features.double(), labels.long()
    best: tuple[float, float, Tensor, Tensor] | None = None
    for lam in sorted(lambdas, reverse=True):  # of equally good ones the largest: the smallest weights, the gentlest gradients
        weight, bias = ridge_head(A, b, lam)
        accuracy = float((F.linear(features, weight, bias).argmax(1) == labels).double().mean())
        if best is None or accuracy > best[0]:
            best = (accuracy, lam, weight, bias)
    assert best is not None
    accuracy, lam, weight, bias = best
    logits = F.linear(features, weight, bias)
    # cross-entropy is convex in the inverse temperature: ternary search on its logarithm
    low, high = 0.0, 3.0  # log10 of the multiplier
    for _ in range(40):
        third = (high - low) / 3
        left, right = low + third, high - third
        if F.cross_entropy(logits * 10**left, labels) <= F.cross_entropy(logits * 10**right, labels):
            high = right
        else:
            low = left
    scale = 10 ** ((low + high) / 2)
    return RidgeChoice(weight * scale, bias * scale, lam, 1 / scale, accuracy)
