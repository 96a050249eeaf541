"""A round's task vectors as running sums: the mean update and the geometry of client drift, whatever the cohort's size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.lens.norms import l1, l2, squared


@dataclass
class RoundSums:
    """Sums over the clients of a round, added in client order."""

    total: Tensor | None = None  # Σ w_k Δ_k
    directions: Tensor | None = None  # Σ Δ_k / ‖Δ_k‖
    weight: float = 0.0  # Σ w_k
    weighted_norms: float = 0.0  # Σ w_k ‖Δ_k‖
    norms: float = 0.0  # Σ ‖Δ_k‖, not scaled by an algorithm
    mass: float = 0.0  # Σ w_k ‖Δ_k‖₁
    loss: float = 0.0  # Σ w_k · training loss
    count: int = 0
    moved: int = 0  # of them with an update that is not zero: only those have a direction

    def add(self, delta: Tensor, norm: float, weight: float, loss: float, went: float | None = None) -> None:
        """An update as it is merged, with its norm. `went`: how far its client went, where an algorithm has scaled it since."""
        if self.total is None or self.directions is None:
            self.total, self.directions = torch.zeros_like(delta), torch.zeros_like(delta)
        self.total.add_(delta, alpha=weight)
        self.directions.add_(delta, alpha=1 / max(norm, 1e-30))
        self.weight += weight
        self.weighted_norms += weight * norm
        self.norms += norm if went is None else went
        self.mass += weight * l1(delta)
        self.loss += weight * loss
        self.count += 1
        self.moved += norm > 0

    def mean(self) -> Tensor:
        assert self.total is not None
        return self.total / self.weight

    def metrics(self) -> dict[str, float]:
        """train_loss; client_norm, the mean ‖Δ_k‖; drift_ratio ‖mean Δ‖ / mean ‖Δ‖ (1: all agree); mean pairwise cosine;
        sign_conflict, the share of |Δ| that pulls against the sign that its coordinate elects (0 to 1/2)."""
        if self.total is None or self.directions is None:
            return {}
        # ‖Σ u_k‖² = C + Σ_{k≠l} cos(Δ_k, Δ_l) for C unit vectors u_k; a zero update has cosine 0 with all others, as in TaskVector.cosine
        pairs = self.count * (self.count - 1)
        cosine = (squared(self.directions) - self.moved) / pairs if pairs else 1.0
        apart = self.weighted_norms or 1.0
        return {
            "train_loss": self.loss / self.weight,
            "client_norm": self.norms / self.count,
            "drift_ratio": l2(self.total) / apart if self.weighted_norms else 1.0,
            "cosine": cosine,
            "sign_conflict": max(0.0, (1 - l1(self.total) / self.mass) / 2) if self.mass else 0.0,
        }
