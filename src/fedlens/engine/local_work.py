"""The plan of a round, drawn before an engine runs it: participating clients, their batches, augmentation and numbers of steps.

All randomness is keyed by (seed, purpose, round, client), so a plan is the same for every engine, order of clients and resumed run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedlens.data.partition import Index
from fedlens.engine.sampling import batch_indices, dropout_mask, local_steps
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import LocalRule
from fedlens.precision import Precision
from fedlens.seeding import torch_rng
from fedlens.tasks import Draws, Samples, Task, select

Offsets: TypeAlias = Callable[[int], Tensor]  # control variates: client -> vector [P] that it adds to each gradient


@dataclass(frozen=True)
class Work:
    """Local training of a cohort in one round. All tensors lead with the client axis."""

    clients: tuple[int, ...]  # ascending
    index: Tensor  # [clients, steps, batch] positions in the training set
    draws: Draws  # each [clients, steps, batch, …]
    steps: Tensor  # [clients] local steps, fewer for stragglers
    samples: Tensor  # [clients] n_k
    keep: Tensor | None = None  # [clients, steps, batch, features] dropout masks

    def __len__(self) -> int:
        return len(self.clients)

    def part(self, where: slice | Tensor) -> "Work":
        """Return the plan of some of the clients."""
        rows = torch.arange(len(self))[where]
        keep = None if self.keep is None else self.keep[where]
        clients = tuple(self.clients[i] for i in rows.tolist())
        return Work(clients, self.index[where], select(self.draws, where), self.steps[where], self.samples[where], keep)

    def widened(self, width: int) -> "Work":
        """Return the plan filled up to `width` clients with copies of the last, whose results are ignored."""
        return self if len(self) >= width else self.part(torch.arange(width).clamp(max=len(self) - 1))


@dataclass(frozen=True)
class Update:
    """The result of one client. `delta` is borrowed from the engine until the next update is requested; `owned()` copies it."""

    client: int
    samples: int
    steps: int
    delta: Tensor  # [P]
    loss: Tensor  # mean training loss over its steps
    clients: int = 1  # number of clients that it represents: under secure aggregation only their mean arrives

    def owned(self) -> Self:
        """Return the update with memory of its own."""
        return replace(self, delta=self.delta.clone())


@dataclass
class Engine(ABC):
    """A way to run local training: updates come back in the order of the clients."""

    name: ClassVar[str]
    model: nn.Module
    space: ParamSpace
    task: Task
    samples: Samples
    precision: Precision
    compile: bool = False

    @abstractmethod
    def updates(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None = None) -> Iterator[Update]:
        """Train every client of the plan from θ [P]. The model's own parameters are overwritten."""


def plan_round(
    seed: int,
    round_: int,
    cohort: Sequence[int],
    shards: Sequence[Index] | Mapping[int, Index],
    *,
    steps: int,
    batch: int,
    draw: Callable[[tuple[int, ...], torch.Generator], Draws],
    straggler_rate: float = 0.0,
    dropout: float = 0.0,
    features: int = 0,
) -> Work:
    """Return the plan of these clients; `draw` is the task's augmentation, `features` the width of the dropout masks."""
    index, draws, keep, counts, samples = [], [], [], [], []
    for client in cohort:
        shard = torch.from_numpy(np.ascontiguousarray(shards[client]))
        index.append(shard[batch_indices(len(shard), steps, batch, torch_rng(seed, "batches", round_, client))])
        draws.append(draw((steps, batch), torch_rng(seed, "augment", round_, client)))
        if dropout:
            keep.append(dropout_mask((steps, batch, features), dropout, torch_rng(seed, "dropout", round_, client)))
        counts.append(local_steps(seed, round_, client, steps, straggler_rate))
        samples.append(len(shard))
    return Work(
        tuple(cohort),
        torch.stack(index),
        {name: torch.stack([each[name] for each in draws]) for name in draws[0]},
        torch.tensor(counts),
        torch.tensor(samples),
        torch.stack(keep) if keep else None,
    )
