"""The sequential engine, the readable oracle: one model, one client after another, torch's own SGD (SparseSGDM under a mask).

It is slow on purpose: tests compare the other engines with it. On a GPU it also trains models that cannot be stacked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlens.engine.local_work import Engine, Offsets, Update, Work
from fedlens.optim.sgd import LocalRule, clip_gradients, make_optimizer
from fedlens.precision import Precision
from fedlens.tasks import select

Tensors = list[Tensor]


@dataclass
class Sequential(Engine):
    """The engine that the others are compared with."""

    name: ClassVar[str] = "sequential"
    forward: Callable[..., Tensor] = field(init=False)  # the model, or its compiled form

    def __post_init__(self) -> None:
        self.forward = torch.compile(self.model) if self.compile else self.model

    def updates(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None = None) -> Iterator[Update]:
        self.model.train()
        named, space, start = dict(self.model.named_parameters()), self.space, self.space.expand(theta)
        params, anchor, masks = [named[name] for name in space.shapes], list(space.views(start).values()), self.masks()
        for k, client in enumerate(work.clients):
            space.write(self.model, theta)
            optimizer = make_optimizer(params, rule, masks, fused=True)  # a new one: momentum starts at zero in each round
            offset = None if offsets is None else self.whole(offsets(client))
            losses, steps = torch.zeros((), dtype=torch.float64, device=theta.device), int(work.steps[k])
            for j in range(steps):
                loss = self.loss(self.forward, work, k, j, rule)
                local_step(loss, params, optimizer, rule, self.precision, anchor, offset)
                losses += loss.detach()
            yield Update(client, int(work.samples[k]), steps, space.read(self.model) - theta, (losses / steps).float())

    def masks(self) -> Tensors | None:
        """Return the mask of each tensor that trains; None: all of its entries do."""
        mask = self.space.mask()
        return None if mask is None else [part.bool() for part in self.space.views(mask).values()]

    def whole(self, vector: Tensor) -> Tensors:
        """Return a vector [P] as whole tensors, zero outside of the mask."""
        space = self.space
        return list(space.views(space.expand(vector, torch.zeros(space.dense_size, dtype=vector.dtype, device=vector.device))).values())

    def loss(self, forward: Callable[..., Tensor], work: Work, k: int, j: int, rule: LocalRule) -> Tensor:
        """Return the mean loss of the batch that client number k of the cohort has at step j."""
        inputs, labels = self.task.batch(self.samples, work.index[k, j], select(work.draws, (k, j)))
        keep = {} if work.keep is None else {"keep": work.keep[k, j].to(inputs.device)}
        with self.precision.autocast():
            return self.task.loss(forward(inputs, **keep), labels, rule.label_smoothing)


def local_step(
    loss: Tensor,
    params: list[nn.Parameter],
    optimizer: Optimizer,
    rule: LocalRule,
    precision: Precision,
    anchor: Tensors,
    offset: Tensors | None,
) -> None:
    """Take one step: gradient, FedProx's pull to the anchor, clipping, control offset, then the optimizer."""
    for i, (param, grad) in enumerate(zip(params, precision.gradients(loss, params), strict=True)):
        param.grad = grad  # None for unused weights, which models of other libraries may have
        if rule.prox and param.grad is not None:
            param.grad.add_(rule.prox * (param.detach() - anchor[i]))
    if rule.clip_norm is not None:
        clip_gradients(optimizer, rule.clip_norm)
    if offset is not None:
        for param, extra in zip(params, offset, strict=True):
            if param.grad is not None:
                param.grad.add_(extra)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees the gradients before the next backward pass
