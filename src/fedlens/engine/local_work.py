"""A round's work, drawn before any engine sees it: who takes part, which batches, how augmented, how many steps.

Everything is keyed by (seed, purpose, round, client): the same in every engine, in any order of clients, after any interruption.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedlens.data.partition import Index
from fedlens.engine.sampling import batch_indices, local_steps
from fedlens.optim.sgd import LocalRule
from fedlens.seeding import torch_rng
from fedlens.tasks.image import Augment, Draws


@dataclass(frozen=True)
class Work:
    """What a cohort does in a round; all tensors lead with the client axis."""

    clients: tuple[int, ...]  # ascending
    index: Tensor  # [clients, steps, batch] positions in the training set
    draws: Draws  # [clients, steps, batch]
    steps: Tensor  # [clients] local steps, fewer for stragglers
    samples: Tensor  # [clients] n_k
    keep: Tensor | None = None  # [clients, steps, batch, features] dropout masks

    def __len__(self) -> int:
        return len(self.clients)

    def part(self, where: slice) -> "Work":
        keep = None if self.keep is None else self.keep[where]
        return Work(self.clients[where], self.index[where], self.draws[where], self.steps[where], self.samples[where], keep)

    def widened(self, width: int) -> "Work":
        """Filled up to `width` clients with copies of the last, whose results nobody reads."""
        if len(self) >= width:
            return self
        rows = torch.arange(width).clamp(max=len(self) - 1)
        keep = None if self.keep is None else self.keep[rows]
        clients = tuple(self.clients[i] for i in rows.tolist())
        return Work(clients, self.index[rows], self.draws.rows(rows), self.steps[rows], self.samples[rows], keep)


@dataclass(frozen=True)
class Update:
    """What comes back from one client. Its vector is the engine's to use again once the next update is asked for."""

    client: int
    samples: int
    steps: int
    delta: Tensor  # [P]
    loss: Tensor  # mean training loss over its steps
    clients: int = 1  # that it stands for: under secure aggregation their mean is all that comes


class Engine(Protocol):
    """How a cohort's local steps are executed: server state and work in, updates out, in client order."""

    name: str

    def updates(self, theta: Tensor, work: Work, rule: LocalRule, offsets: "Offsets | None" = None) -> Iterator[Update]: ...


class Offsets(Protocol):
    """Control variates: the vector that a client adds to each gradient."""

    def __call__(self, client: int, /) -> Tensor: ...


def plan_round(
    seed: int,
    round_: int,
    cohort: Sequence[int],
    shards: Sequence[Index] | Mapping[int, Index],
    *,
    steps: int,
    batch: int,
    augment: Augment,
    straggler_rate: float = 0.0,
    dropout: float = 0.0,
    features: int = 0,
) -> Work:
    """The batches and augmentation of every client that takes part."""
    index, draws, keep, counts, samples = [], [], [], [], []
    for client in cohort:
        shard = torch.from_numpy(np.ascontiguousarray(shards[client]))
        index.append(shard[batch_indices(len(shard), steps, batch, torch_rng(seed, "batches", round_, client))])
        draws.append(augment.draw((steps, batch), torch_rng(seed, "augment", round_, client)))
        if dropout:
            rng = torch_rng(seed, "dropout", round_, client)
            keep.append((torch.rand(steps, batch, features, generator=rng) >= dropout).float() / (1 - dropout))
        counts.append(local_steps(seed, round_, client, steps, straggler_rate))
        samples.append(len(shard))
    return Work(
        tuple(cohort),
        torch.stack(index),
        Draws.stack(draws),
        torch.tensor(counts),
        torch.tensor(samples),
        torch.stack(keep) if keep else None,
    )
