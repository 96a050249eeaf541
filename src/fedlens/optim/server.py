"""Server optimizers on the pseudo-gradient −d, where d is the merged update (Reddi et al. 2021). One function each.

With `sgd`, θ ← θ + α·d: FedAvg at α = 1, and in general the coefficient of task arithmetic.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedlens.config import ServerConfig
from fedlens.errors import unknown

State = dict[str, Tensor]


def sgd(theta: Tensor, d: Tensor, state: State, c: ServerConfig) -> Tensor:
    """θ + α·d: FedAvg (McMahan et al. 2017)."""
    return torch.add(theta, d, alpha=c.lr)


def momentum(theta: Tensor, d: Tensor, state: State, c: ServerConfig) -> Tensor:
    """FedAvgM: momentum over rounds (Hsu et al. 2019)."""
    state["m"] = d + c.momentum * state["m"] if "m" in state else d
    return theta + c.lr * state["m"]


def _adaptive(theta: Tensor, d: Tensor, state: State, c: ServerConfig, second: Callable[[Tensor], Tensor], beta1: float) -> Tensor:
    m = state.get("m", torch.zeros_like(d))
    state["m"] = beta1 * m + (1 - beta1) * d
    state["v"] = second(state.get("v", torch.full_like(d, c.tau**2)))
    return theta + c.lr * state["m"] / (state["v"].sqrt() + c.tau)


def adam(theta: Tensor, d: Tensor, state: State, c: ServerConfig) -> Tensor:
    """FedAdam."""
    return _adaptive(theta, d, state, c, lambda v: c.beta2 * v + (1 - c.beta2) * d.square(), c.beta1)


def yogi(theta: Tensor, d: Tensor, state: State, c: ServerConfig) -> Tensor:
    """FedYogi."""
    return _adaptive(theta, d, state, c, lambda v: v - (1 - c.beta2) * d.square() * torch.sign(v - d.square()), c.beta1)


def adagrad(theta: Tensor, d: Tensor, state: State, c: ServerConfig) -> Tensor:
    """FedAdagrad."""
    return _adaptive(theta, d, state, c, lambda v: v + d.square(), 0.0)


SERVER: dict[str, Callable[[Tensor, Tensor, State, ServerConfig], Tensor]] = {f.__name__: f for f in (sgd, momentum, adam, yogi, adagrad)}


def server_step(theta: Tensor, d: Tensor, state: State, config: ServerConfig) -> Tensor:
    """The next θ; `state` is updated in place and travels with the checkpoint."""
    if config.optimizer not in SERVER:
        raise unknown("server.optimizer", config.optimizer, SERVER)
    return SERVER[config.optimizer](theta, d, state, config)
