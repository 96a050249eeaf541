"""Server optimizers on the pseudo-gradient −d, where d is the merged update (Reddi et al. 2021). One function each.

With `sgd`, θ ← θ + α·d: FedAvg at α = 1, and in general the coefficient of task arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.config import ServerConfig
from fedlens.errors import UserError
from fedlens.lens.norms import l2
from fedlens.lens.space import ParamSpace
from fedlens.registry import Registry

Moments = dict[str, Tensor]


def sgd(theta: Tensor, d: Tensor, moments: Moments, c: ServerConfig) -> Tensor:
    """θ + α·d: FedAvg (McMahan et al. 2017)."""
    return torch.add(theta, d, alpha=c.lr)


def momentum(theta: Tensor, d: Tensor, moments: Moments, c: ServerConfig) -> Tensor:
    """FedAvgM: momentum over rounds (Hsu et al. 2019)."""
    moments["m"] = d + c.momentum * moments["m"] if "m" in moments else d
    return theta + c.lr * moments["m"]


def _adaptive(theta: Tensor, d: Tensor, moments: Moments, c: ServerConfig, second: Callable[[Tensor], Tensor], beta1: float) -> Tensor:
    m = moments.get("m", torch.zeros_like(d))
    moments["m"] = beta1 * m + (1 - beta1) * d
    moments["v"] = second(moments.get("v", torch.full_like(d, c.tau**2)))
    return theta + c.lr * moments["m"] / (moments["v"].sqrt() + c.tau)


def adam(theta: Tensor, d: Tensor, moments: Moments, c: ServerConfig) -> Tensor:
    """FedAdam."""
    return _adaptive(theta, d, moments, c, lambda v: c.beta2 * v + (1 - c.beta2) * d.square(), c.beta1)


def yogi(theta: Tensor, d: Tensor, moments: Moments, c: ServerConfig) -> Tensor:
    """FedYogi."""
    return _adaptive(theta, d, moments, c, lambda v: v - (1 - c.beta2) * d.square() * torch.sign(v - d.square()), c.beta1)


def adagrad(theta: Tensor, d: Tensor, moments: Moments, c: ServerConfig) -> Tensor:
    """FedAdagrad."""
    return _adaptive(theta, d, moments, c, lambda v: v + d.square(), 0.0)


SERVER: Registry[Callable[[Tensor, Tensor, Moments, ServerConfig], Tensor]] = Registry(
    "server optimizer", sgd, momentum, adam, yogi, adagrad
)


def server_step(theta: Tensor, d: Tensor, moments: Moments, config: ServerConfig) -> Tensor:
    """Return the next θ; the moments are updated in place."""
    return SERVER.choose(config.optimizer, "server.optimizer")(theta, d, moments, config)


class Server:
    """θ and the moments of the server's optimizer. The model has θ whenever `write` was called: to evaluate, to save."""

    def __init__(self, config: ServerConfig, model: nn.Module, space: ParamSpace) -> None:
        self.config, self.model, self.space = config, model, space
        self.theta = space.read(model)  # [P]
        self.moments: Moments = {}

    def step(self, d: Tensor, alpha: float, round_: int) -> float:
        """θ ← θ + α·d, or the optimizer's step; return how far θ moved. A θ that is not finite is refused."""
        before, self.theta = self.theta, server_step(self.theta, d, self.moments, replace(self.config, lr=alpha))
        moved = l2(self.theta - before)
        if not math.isfinite(moved):
            raise UserError(f"round {round_ + 1}: the server's step is not finite; try a lower server.lr. No such model was saved.")
        return moved

    def write(self, theta: Tensor | None = None) -> nn.Module:
        """Write θ, or another point, into the model; return the model."""
        self.space.write(self.model, self.theta if theta is None else theta)
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """The whole model at θ, and the moments."""
        model = {f"model.{name}": tensor for name, tensor in self.write().state_dict().items()}
        return model | {f"moment.{name}": tensor for name, tensor in self.moments.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        self.model.load_state_dict({name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")})
        self.theta = self.space.read(self.model)
        self.moments = {n.removeprefix("moment."): t.to(self.theta.device) for n, t in state.items() if n.startswith("moment.")}
