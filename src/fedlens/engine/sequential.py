"""The sequential engine, the readable oracle: one model, one client after another, torch's own SGD (SparseSGDM under a mask).

It is slow on purpose: tests compare the other engines with it. On a GPU it also trains models that cannot be stacked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlens.engine.local_work import Offsets, Update, Work
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import LocalRule
from fedlens.optim.sparse_sgdm import SparseSGDM
from fedlens.precision import Precision
from fedlens.tasks import Samples, Task, select

Tensors = list[Tensor]
OPTIONS = ("lr", "momentum", "dampening", "nesterov", "weight_decay")  # of a rule, named as in torch's SGD


@dataclass
class Sequential:
    """The engine that the others are compared with."""

    model: nn.Module
    space: ParamSpace
    task: Task
    samples: Samples
    precision: Precision
    compile: bool = False
    name: str = "sequential"
    forward: Callable[..., Tensor] = field(init=False)  # the model, or its compiled form

    def __post_init__(self) -> None:
        self.forward = torch.compile(self.model) if self.compile else self.model

    def updates(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None = None) -> Iterator[Update]:
        self.model.train()
        named, space, start = dict(self.model.named_parameters()), self.space, self.space.expand(theta)
        params, anchor, mask = [named[name] for name in space.shapes], list(space.views(start).values()), space.mask()
        masks = None if mask is None else [part.bool() for part in space.views(mask).values()]
        for k, client in enumerate(work.clients):
            space.write(self.model, theta)
            optimizer = make_optimizer(params, rule, masks)  # a new one: momentum starts at zero in each round
            offset = None if offsets is None else list(space.views(space.expand(offsets(client), torch.zeros_like(start))).values())
            losses, steps = torch.zeros((), dtype=torch.float64, device=theta.device), int(work.steps[k])
            for j in range(steps):
                loss = self.loss(self.forward, work, k, j, rule)
                local_step(loss, params, optimizer, rule, self.precision, anchor, offset)
                losses += loss.detach()
            yield Update(client, int(work.samples[k]), steps, space.read(self.model) - theta, (losses / steps).float())

    def loss(self, forward: Callable[..., Tensor], work: Work, k: int, j: int, rule: LocalRule) -> Tensor:
        """Return the mean loss of the batch that client number k of the cohort has at step j."""
        inputs, labels = self.task.batch(self.samples, work.index[k, j], select(work.draws, (k, j)))
        keep = {} if work.keep is None else {"keep": work.keep[k, j].to(inputs.device)}
        with self.precision.autocast():
            return self.task.loss(forward(inputs, **keep), labels, rule.label_smoothing)


def make_optimizer(params: list[nn.Parameter], rule: LocalRule, masks: list[Tensor] | None) -> Optimizer:
    """Return torch's SGD, or under a mask SparseSGDM."""
    options = {name: getattr(rule, name) for name in OPTIONS}
    return torch.optim.SGD(params, **options, fused=True) if masks is None else SparseSGDM(params, **options, masks=masks)


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
    if rule.clip_norm is not None and isinstance(optimizer, SparseSGDM):
        optimizer.clip_grad_norm_(rule.clip_norm)  # the norm of the active entries
    elif rule.clip_norm is not None:
        nn.utils.clip_grad_norm_(params, rule.clip_norm)
    if offset is not None:
        for param, extra in zip(params, offset, strict=True):
            if param.grad is not None:
                param.grad.add_(extra)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees the gradients before the next backward pass
