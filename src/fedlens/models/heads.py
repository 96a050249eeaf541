"""The closed-form head: ridge regression from sums that add over clients (Fed3R, Fanì et al. 2024).

The server needs only A = Σ ZᵀZ and b = Σ ZᵀY, so the federated head equals the centralised one for any split.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.errors import UserError, bad_value

LAMBDAS = tuple(10.0**k for k in range(-4, 7))  # a wide range, since the scale of features differs between backbones


def ridge_statistics(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return (A [dim+1, dim+1], b [dim+1, classes]) in float64, bias column last; the results of clients add up."""
    if features.ndim != 2 or len(features) != len(labels):
        raise UserError(f"ridge_statistics: features must be [samples, dim], got {tuple(features.shape)} for {len(labels)} labels.")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise bad_value("ridge_statistics: labels", f"{int(labels.min())} to {int(labels.max())}", f"0 to {num_classes - 1}")
    z = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64, device=features.device)], dim=1)
    y = F.one_hot(labels.long(), num_classes).double()
    return z.T @ z, z.T @ y


def ridge_head(A: Tensor, b: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Return (A + λI)⁻¹ b as (weight [classes, dim], bias [classes]) in float64."""
    if not lam > 0:
        raise bad_value("lam", lam, "> 0")
    system = A + lam * torch.eye(len(A), dtype=A.dtype, device=A.device)
    factor, failed = torch.linalg.cholesky_ex(system)
    if int(failed):
        raise UserError(f"ridge_head: A + {lam:g}·I is not positive definite; A must be finite and a sum of squares, or lam larger.")
    solution = torch.cholesky_solve(b, factor)
    return solution[:-1].T.contiguous(), solution[-1].contiguous()


@dataclass(frozen=True)
class RidgeChoice:
    """A ridge head and its hyperparameters. Weight and bias are already divided by the temperature."""

    weight: Tensor
    bias: Tensor
    lam: float
    temperature: float
    val_accuracy: float


def choose_ridge(A: Tensor, b: Tensor, features: Tensor, labels: Tensor) -> RidgeChoice:
    """Choose λ by validation accuracy, then the temperature that minimises validation cross-entropy.

    Ridge logits approximate one-hot targets, so their softmax is nearly flat. A temperature keeps fine-tuning from rescaling the network.
    """
    if not len(labels):
        raise UserError("head: ridge chooses its lambda on validation samples, and there are none: set data.val_fraction > 0.")
    features, labels = features.double(), labels.long()
    heads = {lam: ridge_head(A, b, lam) for lam in sorted(LAMBDAS, reverse=True)}
    accuracies = {lam: float((F.linear(features, *head).argmax(1) == labels).double().mean()) for lam, head in heads.items()}
    lam = max(accuracies, key=accuracies.__getitem__)  # ties: the largest λ, which is the first
    weight, bias = heads[lam]
    logits = F.linear(features, weight, bias)
    # Cross-entropy is convex in the inverse temperature, so ternary search on its logarithm finds the minimum.
    low, high = 0.0, 3.0  # log10 of the multiplier
    for _ in range(40):
        third = (high - low) / 3
        left, right = low + third, high - third
        if F.cross_entropy(logits * 10**left, labels) <= F.cross_entropy(logits * 10**right, labels):
            high = right
        else:
            low = left
    scale = 10 ** ((low + high) / 2)
    return RidgeChoice(weight * scale, bias * scale, lam, 1 / scale, accuracies[lam])
