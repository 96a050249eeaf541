"""Federated algorithms as what they change in FedAvg's round: the local rule, the control variates, the updates.

FedAvg changes nothing. FedProx (Li et al. 2020) adds a pull to the local loss. SCAFFOLD (Karimireddy et al. 2020, option II) adds
c − c_k to every local gradient. FedNova (Wang et al. 2020) divides each update by the client's own number of steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlens.config import Config
from fedlens.engine.local_work import Offsets, Update
from fedlens.optim.sgd import LocalRule, effective_steps


@dataclass
class FedAvg:
    """The mean of what clients learned (McMahan et al. 2017)."""

    config: Config
    vectors_down: int = 1  # vectors of P numbers to and from each client in a round
    vectors_up: int = 1

    def rule(self, lr: float) -> LocalRule:
        o = self.config.optim
        return LocalRule(
            lr=lr,
            momentum=o.momentum,
            dampening=o.dampening,
            nesterov=o.nesterov,
            weight_decay=o.weight_decay,
            clip_norm=o.clip_norm,
            label_smoothing=self.config.train.label_smoothing,
        )

    def distance(self, steps: int) -> float:
        """How far so many local steps of a constant unit gradient go, in units of lr."""
        o = self.config.optim
        return effective_steps(steps, o.momentum, o.dampening, o.nesterov)

    def offsets(self, theta: Tensor) -> Offsets | None:
        return None

    def scale(self, update: Update) -> float:
        """What the update is multiplied by before it is merged."""
        return 1.0

    def rescale(self, updates: list[tuple[int, int]]) -> float:
        """What the merged direction is multiplied by, from every (samples, steps)."""
        return 1.0

    def received(self, update: Update, lr: float) -> None:
        """Look at an update before it is merged."""

    def end_round(self) -> None:
        """After the last update of a round."""

    def tensors(self) -> dict[str, Tensor]:
        """State that a checkpoint must carry."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """The reverse of `tensors`."""


@dataclass
class FedProx(FedAvg):
    """FedAvg with μ/2·‖θ_k − θ‖² in the local loss."""

    def rule(self, lr: float) -> LocalRule:
        base = super().rule(lr)
        return LocalRule(**{**base.__dict__, "prox": self.config.federated.mu})


@dataclass
class FedNova(FedAvg):
    """Updates per step of their own, times the mean number of steps: clients that do more do not count more."""

    def scale(self, update: Update) -> float:
        return 1.0 / self.distance(update.steps)

    def rescale(self, updates: list[tuple[int, int]]) -> float:
        total = sum(samples for samples, _ in updates)
        return sum(n * self.distance(steps) for n, steps in updates) / total


@dataclass
class Scaffold(FedAvg):
    """Control variates against drift: each client corrects its gradient by c − c_k."""

    vectors_down: int = 2
    vectors_up: int = 2
    server: Tensor | None = None  # c
    clients: dict[int, Tensor] = field(default_factory=dict)  # c_k, only of clients that have taken part
    _change: Tensor | None = None  # Σ (c_k⁺ − c_k) of the round

    def offsets(self, theta: Tensor) -> Offsets | None:
        if self.server is None:
            self.server = torch.zeros_like(theta)
        server = self.server

        def offset(client: int) -> Tensor:
            own = self.clients.get(client)
            return server.clone() if own is None else server - own.to(theta.device)

        return offset

    def received(self, update: Update, lr: float) -> None:
        """c_k⁺ = c_k − c − Δ_k / (steps·lr), the mean gradient that the client saw; under momentum a step counts for as far as it goes."""
        assert self.server is not None
        own = self.clients.get(update.client)
        own = torch.zeros_like(self.server) if own is None else own.to(self.server.device)
        new = own - self.server - update.delta / (self.distance(update.steps) * lr)
        self._change = new - own if self._change is None else self._change + (new - own)
        self.clients[update.client] = new.cpu()

    def end_round(self) -> None:
        """c ← c + Σ (c_k⁺ − c_k) / K, K the clients that ever train: c stays the mean of the c_k."""
        if self.server is not None and self._change is not None:
            fed = self.config.federated
            self.server = self.server + self._change / sum(map(fed.trains, range(fed.clients)))
        self._change = None

    def tensors(self) -> dict[str, Tensor]:
        found = {} if self.server is None else {"scaffold.server": self.server}
        return found | {f"scaffold.client.{k}": c for k, c in self.clients.items()}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        for name, tensor in tensors.items():
            if name == "scaffold.server":
                self.server = tensor.to(device)
            elif name.startswith("scaffold.client."):
                self.clients[int(name.rsplit(".", 1)[1])] = tensor


ALGORITHMS: dict[str, type[FedAvg]] = {"fedavg": FedAvg, "fedprox": FedProx, "scaffold": Scaffold, "fednova": FedNova}
