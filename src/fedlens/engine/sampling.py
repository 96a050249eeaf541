"""Participants and batches of a round: pure functions of (seed, purpose, round, client)."""

import torch
from torch import Tensor

from fedlens.config import Config
from fedlens.seeding import numpy_rng


def cohort_size(clients: int, participation: float) -> int:
    """Return how many clients a round samples: a fraction of all, at least one."""
    return max(1, round(participation * clients))


def sample_cohort(seed: int, round_: int, clients: int, participation: float) -> list[int]:
    """Return the clients sampled for a round, without replacement, ascending."""
    count = cohort_size(clients, participation)
    return sorted(int(c) for c in numpy_rng(seed, "cohort", round_).choice(clients, size=count, replace=False))


def training_cohort(config: Config, round_: int) -> list[int]:
    """Return the sampled clients that train: neither excluded nor idle."""
    fed = config.federated
    return [c for c in sample_cohort(config.seed, round_, fed.clients, fed.participation) if fed.trains(c)]


def survives(seed: int, round_: int, client: int, dropout_rate: float) -> bool:
    """Return whether a sampled client answers in this round."""
    return dropout_rate == 0 or numpy_rng(seed, "client-dropout", round_, client).random() >= dropout_rate


def local_steps(seed: int, round_: int, client: int, steps: int, straggler_rate: float) -> int:
    """Return `steps`, or for a straggler a uniform number below it."""
    if straggler_rate == 0 or steps == 1:
        return steps
    rng = numpy_rng(seed, "straggler", round_, client)
    return int(rng.integers(1, steps)) if rng.random() < straggler_rate else steps


def batch_indices(samples: int, steps: int, batch: int, rng: torch.Generator) -> Tensor:
    """Return positions [steps, batch]: one shuffled pass over the samples, repeated when it ends."""
    order = torch.randperm(samples, generator=rng)
    return order[torch.arange(steps * batch) % samples].view(steps, batch)


def dropout_mask(shape: tuple[int, ...], rate: float, rng: torch.Generator) -> Tensor:
    """Return a dropout mask, divided by the keep rate."""
    return (torch.rand(shape, generator=rng) >= rate).float() / (1 - rate)
