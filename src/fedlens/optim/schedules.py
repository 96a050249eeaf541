"""Learning-rate schedules: a factor on the base rate as a function of progress in [0, 1].

Progress is step/steps in centralised training and round/rounds in federated training, so one schedule serves both.
"""

import math
from collections.abc import Callable, Sequence

from fedlens.errors import unknown


def constant(progress: float, *, final: float, decay: float, milestones: Sequence[float]) -> float:
    """The base rate throughout."""
    return 1.0


def cosine(progress: float, *, final: float, decay: float, milestones: Sequence[float]) -> float:
    """Half a cosine from 1 to `final`."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def linear(progress: float, *, final: float, decay: float, milestones: Sequence[float]) -> float:
    """A straight line from 1 to `final`."""
    return 1 - (1 - final) * progress


def step(progress: float, *, final: float, decay: float, milestones: Sequence[float]) -> float:
    """Times `decay` at each milestone."""
    return math.pow(decay, len([m for m in milestones if progress >= m]))


def exponential(progress: float, *, final: float, decay: float, milestones: Sequence[float]) -> float:
    """Geometric from 1 to `decay` over the whole run."""
    return math.pow(decay, progress)


SCHEDULES: dict[str, Callable[..., float]] = {f.__name__: f for f in (constant, cosine, step, exponential, linear)}


def schedule_factor(
    name: str,
    progress: float,
    *,
    tick: float = 0.0,
    warmup: float = 0.0,
    final: float = 0.0,
    decay: float = 0.1,
    milestones: Sequence[float] = (0.5, 0.75),
) -> float:
    """The factor at this progress; during the first `warmup` of the run it rises linearly, then the schedule begins.

    `tick` is the progress of one step: the first step of a warm-up then has a rate above zero.
    """
    if name not in SCHEDULES:
        raise unknown("optim.schedule", name, SCHEDULES)
    if progress < warmup:
        return min(1.0, (progress + tick) / warmup)
    rest = (progress - warmup) / (1 - warmup) if warmup < 1 else 1.0
    return SCHEDULES[name](rest, final=final, decay=decay, milestones=milestones)
