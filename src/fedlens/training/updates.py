"""The updates of one round, checked, counted and summed as they arrive; and each client's share of the model."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedlens.config import Config
from fedlens.engine.local_work import Update
from fedlens.engine.ranks import Ranks
from fedlens.errors import UserError
from fedlens.lens.diagnostics import RoundSums
from fedlens.lens.norms import l2
from fedlens.lens.space import ParamSpace
from fedlens.training.algorithms import FedAvg
from fedlens.training.clients import Clients, Traffic
from fedlens.training.privacy import Privacy

log = logging.getLogger("fedlens")


@dataclass(frozen=True)
class Received:
    """One accepted update. `delta` [P] is None unless a merge rule or client vectors need it."""

    client: int
    samples: int
    steps: int
    delta: Tensor | None
    loss: float  # mean training loss
    norm: float  # ‖Δ‖ as it arrived
    clients: int = 1  # clients represented: under secure aggregation, one update is the mean of many


@dataclass
class Arrived:
    """The updates of a round, checked as they arrive: drops what is not finite or too long, clips, and adds to the sums."""

    config: Config
    algorithm: FedAvg
    privacy: Privacy
    lr: float
    round_: int
    expected: int  # clients that train in this round
    sums: RoundSums = field(default_factory=RoundSums)
    updates: list[Received] = field(default_factory=list)  # the accepted ones, in client order
    nonfinite: int = 0
    refused: int = 0

    @property
    def keeps_rows(self) -> bool:
        """True if single updates are needed after the sum: by a merge rule other than the running mean, or as client vectors."""
        return self.config.server.merge != "mean" or self.config.federated.client_vectors

    def collect(self, updates: Iterator[Update], ranks: Ranks, size: int) -> None:
        """Take in the updates of this process, then those of all processes together."""
        everywhere = self.keeps_rows or self.algorithm.needs_every_update
        if everywhere:
            updates = iter(ranks.all_updates([update.owned() for update in updates], size, max(1, self.expected)))
        for update in updates:
            self._add(update)
        self.algorithm.end_round()
        if not everywhere:
            self.sums, self.updates = ranks.all_sums(self.sums, size), ranks.gather(self.updates)
            self.nonfinite, self.refused = sum(ranks.gather([self.nonfinite])), sum(ranks.gather([self.refused]))

    def _add(self, update: Update) -> None:
        norm, loss, bound = l2(update.delta), float(update.loss), self.config.server.norm_bound
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self.nonfinite += 1
            log.warning("round %d: the update of client %d is not finite and was dropped", self.round_ + 1, update.client)
            return
        if bound is not None and norm > bound:
            self.refused += 1
            facts = (self.round_ + 1, update.client, norm, bound)
            log.warning("round %d: the update of client %d has norm %.4g > server.norm_bound %.4g and was rejected", *facts)
            return
        self.algorithm.receive(update, self.lr)
        clipped = self.privacy.factor(norm)
        scale = self.algorithm.scale(update) * clipped
        delta = update.delta if scale == 1.0 else update.delta * scale
        self.sums.add(delta, norm * scale, self.privacy.weight(update.samples), loss, client_norm=norm * clipped)
        row = delta if self.keeps_rows else None  # owned: see `collect`
        self.updates.append(Received(update.client, update.samples, update.steps, row, loss, norm, update.clients))

    def check_progress(self) -> None:
        """Raise if every expected update was not finite: training has diverged."""
        if self.expected and self.nonfinite == self.expected:
            raise UserError(f"round {self.round_ + 1}: no client's update is finite; try a lower optim.lr or optim.clip_norm=1.")

    @property
    def count(self) -> int:
        """Accepted updates."""
        return self.sums.count

    @property
    def answered(self) -> int:
        """Clients whose updates were accepted."""
        return sum(update.clients for update in self.updates)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The (samples, steps) of each update."""
        return [(update.samples, update.steps) for update in self.updates]

    def rows(self) -> Tensor:
        """All updates side by side: [clients, P]."""
        return torch.stack([update.delta for update in self.updates if update.delta is not None])

    def metrics(self) -> dict[str, Any]:
        """Return the round's counts, training loss and geometry of updates; of a secure sum only the loss is known."""
        counts: dict[str, Any] = {"clients": self.answered, "nonfinite": self.nonfinite}
        if self.config.federated.client_metrics:
            counts["client_metrics"] = [{"client": u.client, "loss": u.loss, "norm": u.norm, "steps": u.steps} for u in self.updates]
        if not self.count:
            return counts
        return counts | (self.sums.metrics() if self.answered == len(self.updates) else {"train_loss": self.sums.loss / self.sums.weight})


@dataclass
class Totals:
    """Clients that dropped out, and updates that were not finite or were rejected, over all rounds."""

    dropped: int = 0
    nonfinite: int = 0
    refused: int = 0

    def begin_round(self, traffic: Traffic) -> None:
        """Count what was rejected before the round: sums for head and mask."""
        self.refused, traffic.refused = self.refused + traffic.refused, 0

    def add(self, arrived: Arrived, sampled: int, traffic: Traffic) -> None:
        """Count a round. In a deployment, clients that did not answer have dropped out as well."""
        refused, traffic.refused = arrived.refused + traffic.refused, 0
        silent = max(0, arrived.expected - arrived.answered - arrived.nonfinite - refused)
        self.dropped += sampled - arrived.expected + silent
        self.nonfinite += arrived.nonfinite
        self.refused += refused

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dropped, self.nonfinite, self.refused = (int(state[name]) for name in ("dropped", "nonfinite", "refused"))


@dataclass
class Ledger:
    """With federated.client_vectors: the vector that each client has added to θ."""

    on: bool
    device: torch.device
    algorithm: FedAvg
    added: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on and type(self.algorithm).direction is not FedAvg.direction:
            raise UserError("federated.client_vectors needs an algorithm whose direction is a weighted sum of the updates.")

    def add(self, arrived: Arrived, alpha: float) -> None:
        """Credit each client with its share of the step α·d."""
        if self.on and arrived.count:
            alpha = alpha * self.algorithm.gain(arrived.sizes)
            for update in arrived.updates:
                assert update.delta is not None
                part = alpha * update.samples / arrived.sums.weight * update.delta
                self.added[update.client] = part + self.added[update.client] if update.client in self.added else part

    def vectors(self, space: ParamSpace) -> Mapping[int, Mapping[str, Tensor]]:
        """Return each client's vector by parameter name."""
        zeros = torch.zeros(space.dense_size, device=self.device)
        return {client: space.views(space.expand(vector, zeros).cpu()) for client, vector in self.added.items()}

    def state_dict(self) -> dict[str, Any]:
        return {str(client): vector for client, vector in self.added.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.added = {int(client): vector.to(self.device) for client, vector in state.items()}


@dataclass
class ClientTraffic:
    """The clients' part of a checkpoint: bytes sent so far, and which client is at which site."""

    clients: Clients

    def bytes(self) -> dict[str, Any]:
        """Return the bytes between server and clients so far."""
        return {"bytes_up": self.clients.traffic.up, "bytes_down": self.clients.traffic.down}

    def state_dict(self) -> dict[str, Any]:
        return self.bytes() | self.clients.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        traffic = self.clients.traffic
        traffic.up, traffic.down = traffic.up + int(state["bytes_up"]), traffic.down + int(state["bytes_down"])
        self.clients.load_state_dict(state)
