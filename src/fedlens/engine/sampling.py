"""Who takes part in a round, and with which batches: pure functions of (seed, purpose, round, client)."""

import torch
from torch import Tensor

from fedlens.config import Config
from fedlens.seeding import numpy_rng


def cohort_size(clients: int, participation: float) -> int:
    """How many clients a round draws: a fraction of all, at least one."""
    return max(1, round(participation * clients))


def sample_cohort(seed: int, round_: int, clients: int, participation: float) -> list[int]:
    """A round's clients, drawn without replacement, ascending."""
    count = cohort_size(clients, participation)
    return sorted(int(c) for c in numpy_rng(seed, "cohort", round_).choice(clients, size=count, replace=False))


def training_cohort(config: Config, round_: int) -> list[int]:
    """Of a round's cohort those that train."""
    fed = config.federated
    return [c for c in sample_cohort(config.seed, round_, fed.clients, fed.participation) if fed.trains(c)]


def survives(seed: int, round_: int, client: int, dropout_rate: float) -> bool:
    """Whether a sampled client answers in this round."""
    return dropout_rate == 0 or numpy_rng(seed, "client-dropout", round_, client).random() >= dropout_rate


def local_steps(seed: int, round_: int, client: int, steps: int, straggler_rate: float) -> int:
    """J, or for a straggler a uniform number of steps below it."""
    if straggler_rate == 0 or steps == 1:
        return steps
    rng = numpy_rng(seed, "straggler", round_, client)
    return int(rng.integers(1, steps)) if rng.random() < straggler_rate else steps


def batch_indices(samples: int, steps: int, batch: int, rng: torch.Generator) -> Tensor:
    """[steps, batch] positions: one shuffled pass over the samples, wrapping round when it ends."""
    order = torch.randperm(samples, generator=rng)
    return order[torch.arange(steps * batch) % samples].view(steps, batch)
