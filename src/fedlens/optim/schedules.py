"""Learning-rate schedules: a factor on the base rate as a function of progress in [0, 1].

Progress is step/steps in centralised training and round/rounds in federated training, so one schedule serves both.
A schedule takes progress and those of the keywords final, decay and milestones that it needs.
"""

import math
from collections.abc import Callable, Sequence

from fedlens.config import OptimConfig
from fedlens.registry import Registry, accepted


def constant(progress: float) -> float:
    """Use the base rate throughout."""
    return 1.0


def cosine(progress: float, *, final: float) -> float:
    """Fall from 1 to `final` along half a cosine."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def step(progress: float, *, decay: float, milestones: Sequence[float]) -> float:
    """Multiply by `decay` at each milestone."""
    return math.pow(decay, len([m for m in milestones if progress >= m]))


def exponential(progress: float, *, decay: float) -> float:
    """Fall geometrically from 1 to `decay` over the whole run."""
    return math.pow(decay, progress)


def linear(progress: float, *, final: float) -> float:
    """Fall from 1 to `final` along a straight line."""
    return 1 - (1 - final) * progress


SCHEDULES: Registry[Callable[..., float]] = Registry(
    "schedule", constant, cosine, step, exponential, linear, supplied=("final", "decay", "milestones")
)


def learning_rate(o: OptimConfig, progress: float, tick: float = 0.0) -> float:
    """Return the rate at this progress: linear during `warmup`, then by the schedule. `tick`, the progress per step, keeps step 0 above 0."""
    schedule = SCHEDULES.choose(o.schedule, "optim.schedule")
    if progress < o.warmup:
        return o.lr * min(1.0, (progress + tick) / o.warmup)
    rest = (progress - o.warmup) / (1 - o.warmup) if o.warmup < 1 else 1.0
    return o.lr * schedule(rest, **accepted(schedule, {"final": o.final, "decay": o.decay, "milestones": tuple(o.milestones)}))
