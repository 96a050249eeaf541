"""Streaming geometry of a round: the mean update and the drift of its clients, in memory that does not grow with the cohort."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.lens.norms import l1, l2, power_sum


@dataclass
class RoundSums:
    """Sums over the clients of a round, added in client order."""

    total: Tensor | None = None  # Σ w_k Δ_k
    directions: Tensor | None = None  # Σ Δ_k / ‖Δ_k‖
    weight: float = 0.0  # Σ w_k
    weighted_norms: float = 0.0  # Σ w_k ‖Δ_k‖
    norms: float = 0.0  # Σ ‖Δ_k‖ before an algorithm scales the updates
    mass: float = 0.0  # Σ w_k ‖Δ_k‖₁
    loss: float = 0.0  # Σ w_k · training loss
    count: int = 0
    moved: int = 0  # clients with a non-zero update; only those have a direction

    def add(self, delta: Tensor, norm: float, weight: float, loss: float, client_norm: float | None = None) -> None:
        """Add an update as it is merged, with its norm; `client_norm`: its norm before an algorithm scaled it."""
        if self.total is None or self.directions is None:
            self.total, self.directions = torch.zeros_like(delta), torch.zeros_like(delta)
        self.total.add_(delta, alpha=weight)
        self.directions.add_(delta, alpha=1 / max(norm, 1e-30))
        self.weight += weight
        self.weighted_norms += weight * norm
        self.norms += norm if client_norm is None else client_norm
        self.mass += weight * l1(delta)
        self.loss += weight * loss
        self.count += 1
        self.moved += norm > 0

    def mean(self) -> Tensor:
        assert self.total is not None
        return self.total / self.weight

    def metrics(self) -> dict[str, float]:
        """Return the mean training loss, the mean norm of updates, and how clients agree, as defined in geometry.py."""
        if self.total is None or self.directions is None:
            return {}
        # ‖Σ u_k‖² = C + Σ_{k≠l} cos(Δ_k, Δ_l) for C unit vectors u_k. A zero update has cosine 0, as in TaskVector.cosine.
        pairs = self.count * (self.count - 1)
        return {
            "train_loss": self.loss / self.weight,
            "client_norm": self.norms / self.count,
            "drift_ratio": l2(self.total) / self.weighted_norms if self.weighted_norms else 1.0,
            "cosine": (power_sum(self.directions, 2) - self.moved) / pairs if pairs else 1.0,
            "sign_conflict": max(0.0, (1 - l1(self.total) / self.mass) / 2) if self.mass else 0.0,
        }
