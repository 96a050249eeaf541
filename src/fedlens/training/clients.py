"""Where the clients are, and all that a server may ask of them.

A simulation is one `Site` that has every client's data; a deployment is many of them behind a network (deploy). The loop in federated.py
sees `Clients` and cannot tell one from the other.
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
    """Bytes between the server and its clients so far, and how many answers were not let in."""

    up: int = 0
    down: int = 0
    refused: int = 0


class Clients(Protocol):
    """What the server's loop knows of its clients. All results are in client order, whoever answered first."""

    traffic: Traffic

    @property
    def name(self) -> str: ...

    def ridge_sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(A, b) of each client's features."""
        ...

    def sensitivities(self, names: Collection[str], active: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Each client's sums in the network whose eligible but not `active` weights are softened; coordinates that are not active may be zero."""
        ...

    def begin(self, space: ParamSpace, mask: Mask | None, fresh: bool = True) -> None:
        """Head and mask are decided: what moves is `space`, and the server's model is where it starts. `fresh`: the clients do not know yet."""
        ...

    def fingerprint(self) -> str | None:
        """Who holds what, by content; None: not known here."""
        ...

    def registry(self) -> dict[str, Any]:
        """Which client is where, for a checkpoint."""
        ...

    def recall(self, registry: Mapping[str, Any]) -> None:
        """The registry of the process before this one."""
        ...

    def updates(
        self, round_: int, cohort: Sequence[int], present: Sequence[int], theta: Tensor, rule: LocalRule, offsets: Offsets | None
    ) -> Iterator[Update]:
        """The local training of a round; `present` are those of the cohort that do not drop out."""
        ...

    def fishers(self, clients: Sequence[int], theta: Tensor) -> Tensor:
        """[clients, P] sensitivities at θ, each on the client's own data."""
        ...


class Site:
    """Clients whose data is in this process. `ranks`: under torchrun each process trains its part of a cohort."""

    def __init__(self, bench: Bench, shards: Mapping[int, Index], ranks: Ranks | None = None, *, vectors: tuple[int, int] = (1, 1)) -> None:
        self.bench, self.shards, self.ranks = bench, shards, ranks or Ranks()
        self.vectors = vectors  # of P numbers that a client gets and sends in a round
        self.traffic = Traffic()
        self.holding = [k for k, shard in sorted(shards.items()) if len(shard)]  # who has data
        self._scored = False
        self._space: ParamSpace | None = None
        self._engine: Engine | None = None

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def space(self) -> ParamSpace:
        assert self._space is not None, "begin comes first"
        return self._space

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "begin comes first"
        return self._engine

    def ridge_sums(self, clients: Sequence[int] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        bench, classes = self.bench, self.bench.dataset.num_classes
        whole = bench.features(bench.train) if clients is None else None  # all clients are here: shared with other runs
        for k in self.holding if clients is None else clients:
            where = torch.from_numpy(np.ascontiguousarray(self.shards[k]))
            features = bench.features(bench.train, where) if whole is None else whole[where.to(bench.device)]
            dim = features.shape[1] + 1
            self.traffic.up += 8 * (dim * (dim + 1) // 2 + dim * classes)  # A is symmetric: its upper triangle
            yield ridge_statistics(features, bench.train.labels[where.to(bench.device)], classes)
            self.traffic.down += BYTES * dim * classes  # the head that the server makes of them all

    def sensitivities(
        self, names: Collection[str], active: Mapping[str, Tensor], clients: Sequence[int] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        score, samples = Scorer(self.bench, self.bench.train), self.bench.config.mask.samples
        every = sum(mask.numel() for mask in active.values())
        asked = sum(int(active[name].sum()) for name in names)
        for k in self.holding if clients is None else clients:
            self.traffic.down += -(-every // 8) if self._scored else 0  # what is still in question, a bit a coordinate: at first all
            self.traffic.up += BYTES * asked
            yield score(some_samples(self.shards[k], samples), names)
        self._scored = True

    def begin(self, space: ParamSpace, mask: Mask | None, fresh: bool = True) -> None:
        bench = self.bench
        self._space = space
        fed = bench.config.federated
        widest = self.ranks.most(min(cohort_size(fed.clients, fed.participation), len(self.holding)))
        self._engine = choose_engine(bench.config, bench.model, space, bench.train, bench.pipeline, bench.precision, widest)
        if mask is not None and fresh:
            self.traffic.down += len(self.holding) * mask.bitmap_bytes

    def fingerprint(self) -> str | None:
        data = split_digest(self.bench.train.split)
        return None if data is None else digest(data, *(torch.from_numpy(np.ascontiguousarray(self.shards[k])) for k in self.holding))

    def registry(self) -> dict[str, Any]:
        return {}  # all here

    def recall(self, registry: Mapping[str, Any]) -> None:
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
            augment=self.bench.augment,
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
