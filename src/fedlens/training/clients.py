"""The clients of a federation, as the server sees them.

A simulation is one `Site` with the data of every client; a deployment is many sites behind a network (deploy). The loop in
federated.py uses `Clients` and treats both alike.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedlens.data.partition import Index
from fedlens.engine.choice import choose_engine
from fedlens.engine.local_work import Engine, Offsets, Update, plan_round
from fedlens.engine.ranks import Ranks
from fedlens.engine.sampling import cohort_size
from fedlens.lens.mask_rules import Mask
from fedlens.lens.space import ParamSpace
from fedlens.models.heads import ridge_statistics
from fedlens.optim.sgd import LocalRule
from fedlens.runs.cache import digest, split_digest
from fedlens.training.bench import Bench
from fedlens.training.head_and_mask import BYTES, Scorer, some_samples


@dataclass
class Traffic:
    """Bytes between the server and its clients so far, and the number of rejected replies."""

    up: int = 0
    down: int = 0
    refused: int = 0


class Clients(Protocol):
    """The clients as the server's loop sees them. All results are in client order."""

    traffic: Traffic

    @property
    def name(self) -> str: ...

    def ridge_sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return (A, b) of each client's features."""

    def sensitivities(self, names: Collection[str], active: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Return each client's sums in the network whose eligible but not `active` weights are softened.

        Coordinates that are not active may be zero.
        """

    def begin(self, space: ParamSpace, mask: Mask | None, fresh: bool = True) -> None:
        """Prepare for training in `space`, from the server's model. `fresh`: the clients do not have head and mask yet."""

    def fingerprint(self) -> str | None:
        """Return a digest of which client holds which data, or None if it is unknown."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, such as where each client is."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an earlier process."""

    def updates(
        self, round_: int, cohort: Sequence[int], present: Sequence[int], theta: Tensor, rule: LocalRule, offsets: Offsets | None
    ) -> Iterator[Update]:
        """Train the clients `present`: the sampled cohort without those that drop out."""

    def fishers(self, clients: Sequence[int], theta: Tensor) -> Tensor:
        """Return sensitivities [clients, P] at θ, each on the client's own data."""


class Site:
    """Clients whose data is in this process. With `ranks`, each process of torchrun trains its part of a cohort."""

    def __init__(self, bench: Bench, shards: Mapping[int, Index], ranks: Ranks | None = None, *, vectors: tuple[int, int] = (1, 1)) -> None:
        self.bench, self.shards, self.ranks = bench, shards, ranks or Ranks()
        self.vectors = vectors  # of P numbers that a client receives and sends per round
        self.traffic = Traffic()
        self.holding = [k for k, shard in sorted(shards.items()) if len(shard)]  # clients with data
        self._scored = False
        self.space: ParamSpace  # set by begin
        self.engine: Engine

    @property
    def name(self) -> str:
        return self.engine.name

    def ridge_sums(self, clients: Sequence[int] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        bench, classes = self.bench, self.bench.dataset.num_classes
        whole = bench.features(bench.train) if clients is None else None  # all clients are here: cached across runs
        for k in self.holding if clients is None else clients:
            where = torch.from_numpy(np.ascontiguousarray(self.shards[k]))
            features = bench.features(bench.train, where) if whole is None else whole[where.to(bench.device)]
            dim = features.shape[1] + 1
            self.traffic.up += 8 * (dim * (dim + 1) // 2 + dim * classes)  # A is symmetric: its upper triangle
            yield ridge_statistics(features, bench.train.labels[where.to(bench.device)], classes)
            self.traffic.down += BYTES * dim * classes  # the head that the server computes from all sums

    def sensitivities(
        self, names: Collection[str], active: Mapping[str, Tensor], clients: Sequence[int] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        score, samples = Scorer(self.bench, self.bench.train), self.bench.config.mask.samples
        bitmap = -(-sum(mask.numel() for mask in active.values()) // 8)
        scored = sum(int(active[name].sum()) for name in names)
        for k in self.holding if clients is None else clients:
            self.traffic.down += bitmap if self._scored else 0  # one bit per coordinate; the first scoring covers all of them
            self.traffic.up += BYTES * scored
            yield score(some_samples(self.shards[k], samples), names)
        self._scored = True

    def begin(self, space: ParamSpace, mask: Mask | None, fresh: bool = True) -> None:
        bench, fed, self.space = self.bench, self.bench.config.federated, space
        widest = self.ranks.largest_share(min(cohort_size(fed.clients, fed.participation), len(self.holding)))
        self.engine = choose_engine(bench.config, bench.model, space, bench.task, bench.train, bench.precision, widest)
        if mask is not None and fresh:
            self.traffic.down += len(self.holding) * mask.bitmap_bytes

    def fingerprint(self) -> str | None:
        data = split_digest(self.bench.train.split)
        return None if data is None else digest(data, *(torch.from_numpy(np.ascontiguousarray(self.shards[k])) for k in self.holding))

    def state_dict(self) -> dict[str, Any]:
        return {"registry": {}}  # every client is in this process

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def updates(
        self, round_: int, cohort: Sequence[int], present: Sequence[int], theta: Tensor, rule: LocalRule, offsets: Offsets | None
    ) -> Iterator[Update]:
        cfg = self.bench.config
        down, up = self.vectors
        self.traffic.down += len(cohort) * down * BYTES * self.space.size
        self.traffic.up += len(present) * up * BYTES * self.space.size
        if not present:
            return iter(())
        work = plan_round(
            cfg.seed,
            round_,
            present,
            self.shards,
            steps=cfg.federated.local_steps,
            batch=cfg.optim.batch_size,
            draw=self.bench.task.draw,
            straggler_rate=cfg.federated.straggler_rate,
            dropout=cfg.model.dropout,
            features=self.bench.model.head.in_features,  # type: ignore[arg-type, union-attr]
        )
        return self.engine.updates(theta, self.ranks.part(work), rule, offsets)

    def fishers(self, clients: Sequence[int], theta: Tensor) -> Tensor:
        space, bench = self.space, self.bench
        self.traffic.up += len(clients) * BYTES * space.size
        space.write(bench.model, theta)
        score, samples = Scorer(bench, bench.train), bench.config.server.fisher_samples
        return torch.stack(
            [space.compact(space.flatten(score(some_samples(self.shards[k], samples), list(space.shapes)))) for k in clients]
        )
