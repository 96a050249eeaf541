"""Federated algorithms, each defined by its differences from FedAvg: the local rule, the gradient offsets, the updates.

An algorithm is one class. Its keyword-only fields are its options (federated.algorithm_options), its class attributes say what it needs and
supports, and `state_dict` is what a checkpoint must carry. To add one, subclass FedAvg and register it:

    @fl.register("algorithm", "feddyn")
    @dataclass(kw_only=True)
    class FedDyn(FedAvg):
        alpha: float = 0.1
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlens.config import Config
from fedlens.engine.local_work import Offsets, Update
from fedlens.errors import UserError
from fedlens.optim.sgd import OPTIONS, LocalRule, effective_steps
from fedlens.registry import Registry, check_options


@dataclass
class FedAvg:
    """The mean of what clients learned (McMahan et al. 2017)."""

    config: Config
    vectors_down: ClassVar[int] = 1  # vectors of P numbers to and from each client per round
    vectors_up: ClassVar[int] = 1
    plain_mean: ClassVar[bool] = True  # the mean of the updates suffices: noise and secure aggregation are exact. Not inherited.
    uses_raw_updates: ClassVar[bool] = False  # updates are used beside the merge, unclipped
    needs_every_update: ClassVar[bool] = False  # True: every process of a distributed run sees all updates

    def local_rule(self, lr: float) -> LocalRule:
        """Return what a client does at each of its steps."""
        o = self.config.optim
        options = {name: getattr(o, name) for name in OPTIONS} | {"lr": lr}
        return LocalRule(**options, clip_norm=o.clip_norm, label_smoothing=self.config.train.label_smoothing)

    def distance(self, steps: int) -> float:
        """Return how far so many local steps of a constant unit gradient go, in units of the learning rate."""
        o = self.config.optim
        return effective_steps(steps, o.momentum, o.dampening, o.nesterov)

    def offsets(self, theta: Tensor) -> Offsets | None:
        """Return the vector that each client adds to its gradients, as a function of the client; None: nothing."""
        return None

    def scale(self, update: Update) -> float:
        """Return the factor on an update before it is merged."""
        return 1.0

    def gain(self, updates: Sequence[tuple[int, int]]) -> float:
        """Return the factor on the merged direction, from the (samples, steps) of all updates."""
        return 1.0

    def direction(self, merged: Tensor, updates: Sequence[tuple[int, int]]) -> Tensor:
        """Return the server's direction from the merged updates."""
        gain = self.gain(updates) if updates else 1.0
        return merged if gain == 1 else merged * gain

    def receive(self, update: Update, lr: float) -> None:
        """Read an update before it is merged."""

    def end_round(self) -> None:
        """Finish a round after its last update."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint must carry."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""


@dataclass
class FedProx(FedAvg):
    """FedAvg with μ/2·‖θ_k − θ‖² in the local loss (Li et al. 2020)."""

    plain_mean: ClassVar[bool] = True
    mu: float = field(default=0.01, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.mu < float("inf"):
            raise UserError(f"federated.algorithm_options.mu must be >= 0, got {self.mu}.")

    def local_rule(self, lr: float) -> LocalRule:
        return replace(super().local_rule(lr), prox=self.mu)


@dataclass
class FedNova(FedAvg):
    """Each update is divided by its number of local steps, so that longer clients do not dominate (Wang et al. 2020)."""

    plain_mean: ClassVar[bool] = False

    def scale(self, update: Update) -> float:
        return 1.0 / self.distance(update.steps)

    def gain(self, updates: Sequence[tuple[int, int]]) -> float:
        total = sum(samples for samples, _ in updates)
        return sum(n * self.distance(steps) for n, steps in updates) / total


@dataclass
class Scaffold(FedAvg):
    """Control variates against drift: each client corrects its gradient by c − c_k (Karimireddy et al. 2020, option II)."""

    vectors_down: ClassVar[int] = 2
    vectors_up: ClassVar[int] = 2
    plain_mean: ClassVar[bool] = False
    uses_raw_updates: ClassVar[bool] = True
    needs_every_update: ClassVar[bool] = True
    server: Tensor | None = field(default=None, init=False)  # c
    clients: dict[int, Tensor] = field(default_factory=dict, init=False)  # c_k of clients that have taken part
    _change: Tensor | None = field(default=None, init=False)  # Σ (c_k⁺ − c_k) of the round

    def offsets(self, theta: Tensor) -> Offsets | None:
        server = self.server = torch.zeros_like(theta) if self.server is None else self.server.to(theta.device)

        def offset(client: int) -> Tensor:
            own = self.clients.get(client)
            return server.clone() if own is None else server - own.to(theta.device)

        return offset

    def receive(self, update: Update, lr: float) -> None:
        """c_k⁺ = c_k − c − Δ_k / (steps·lr): the mean gradient that the client saw. Under momentum, a step counts for as far as it goes."""
        assert self.server is not None
        own = self.clients.get(update.client)
        own = torch.zeros_like(self.server) if own is None else own.to(self.server.device)
        new = own - self.server - update.delta / (self.distance(update.steps) * lr)
        self._change = new - own if self._change is None else self._change + (new - own)
        self.clients[update.client] = new.cpu()

    def end_round(self) -> None:
        """c ← c + Σ (c_k⁺ − c_k) / K with K the clients that ever train, so that c stays the mean of the c_k."""
        if self.server is not None and self._change is not None:
            fed = self.config.federated
            self.server = self.server + self._change / sum(map(fed.trains, range(fed.clients)))
        self._change = None

    def state_dict(self) -> dict[str, Any]:
        server = {} if self.server is None else {"server": self.server}
        return server | {f"client.{k}": c for k, c in self.clients.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.server = state.get("server")
        self.clients = {int(name.removeprefix("client.")): c for name, c in state.items() if name.startswith("client.")}


def check_algorithm(name: str, options: dict[str, Any]) -> None:
    """Raise for options that the algorithm does not have, or whose values it refuses."""
    algorithm = ALGORITHMS.choose(name, "federated.algorithm")
    check_options("federated.algorithm_options", name, options, ALGORITHMS.options(name))
    try:
        algorithm(Config(), **options)
    except TypeError as error:
        raise UserError(f"federated.algorithm_options must be values that {name} accepts, got {options} ({error}).") from None


ALGORITHMS: Registry[type[FedAvg]] = Registry("algorithm")
ALGORITHMS.check = check_algorithm
ALGORITHMS.update(fedavg=FedAvg, fedprox=FedProx, scaffold=Scaffold, fednova=FedNova)


def make_algorithm(config: Config) -> FedAvg:
    """Return the algorithm that the configuration names, with its options."""
    return ALGORITHMS.choose(config.federated.algorithm, "federated.algorithm")(config, **config.federated.algorithm_options)
