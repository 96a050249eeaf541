"""The cohort engine: all clients of a round as one batched computation.

Parameters are stacked on a client axis, Θ [clients, P]; every Linear is one batched product over the clients, attention runs
over clients × images, and one fused update moves all clients. What does not train is not stacked: it is shared.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedlens.data.batches import Draws, ImageBank, Pipeline
from fedlens.engine.work import Offsets, Update, Work
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import LocalRule, sgd_step
from fedlens.precision import Precision

log = logging.getLogger("fedlens")


@dataclass
class Cohort:
    model: nn.Module
    space: ParamSpace
    bank: ImageBank
    pipeline: Pipeline
    precision: Precision
    compile: bool = False
    chunk: int | None = None  # clients at once; None: all, and half as many whenever the device's memory runs out
    name: str = "cohort"
    _loss: Callable[..., Any] = field(init=False)
    _step: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self._loss = torch.compile(self.loss, dynamic=False) if self.compile else self.loss
        self._step = torch.compile(flat_step, dynamic=False) if self.compile else flat_step

    def updates(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None = None) -> Iterator[Update]:
        self.model.train()
        at = 0
        while at < len(work):
            size = min(self.chunk or len(work), len(work) - at)
            part = work.part(slice(at, at + size))
            try:
                deltas, losses = self._train(theta, part, rule, offsets)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                self.chunk = (size + 1) // 2
                log.warning("cohort engine: out of memory with %d clients at once, going on with %d", size, self.chunk)
                torch.cuda.empty_cache()
                continue
            for k, client in enumerate(part.clients):
                yield Update(client, int(part.samples[k]), int(part.steps[k]), deltas[k], losses[k])
            at += size

    def _train(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None) -> tuple[Tensor, Tensor]:
        """J local steps of every client: (Δ [clients, P], mean loss [clients])."""
        clients, device = len(work), theta.device
        local = theta.expand(clients, -1).clone()  # [clients, P]
        velocity = torch.zeros_like(local) if rule.momentum else local[:, :0]
        offset = None if offsets is None else torch.stack([offsets(client) for client in work.clients])
        index, draws = work.index.to(device), work.draws.to(device)
        steps = work.steps.to(device)
        scale = self.precision.loss_scale
        uneven = bool((work.steps != work.steps[0]).any())
        losses = torch.zeros(clients, dtype=torch.float64, device=device)
        lr, fixed = torch.tensor(rule.lr, device=device), replace(rule, lr=0.0)  # a number that changes would be compiled anew each round
        for j in range(int(work.steps.max())):
            images, labels = self.bank.batch(index[:, j])  # [clients, batch, …]
            keep = None if work.keep is None else work.keep[:, j].to(device)
            params = {name: view.detach().requires_grad_() for name, view in self.space.views(local).items()}
            with self.precision.autocast():
                loss = self._loss(params, images, draws[:, j], labels, keep, rule.label_smoothing)
            grads = torch.autograd.grad(loss.sum() * scale, list(params.values()))
            active = (steps > j).to(local.dtype).unsqueeze(1) if uneven else None
            anchor = theta if rule.prox else None
            local, velocity = self._step(self.space, local, grads, velocity, lr, scale, fixed, j == 0, anchor, offset, active)
            losses += loss.detach() * (steps > j)
        return local - theta, (losses / steps).float()

    def loss(
        self, params: dict[str, Tensor], images: Tensor, draws: Draws, labels: Tensor, keep: Tensor | None, smoothing: float
    ) -> Tensor:
        """Each client's mean cross-entropy on its own batch: [clients]."""
        with torch.autocast(images.device.type, enabled=False):
            inputs = self.pipeline(images, draws)
        logits = functional_call(self.model, params, (inputs,), {"keep": keep}).float()  # [clients, batch, classes]
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="none")
        return each.view(labels.shape).mean(1)


def flat_step(
    space: ParamSpace,
    local: Tensor,
    grads: tuple[Tensor, ...],
    velocity: Tensor,
    lr: Tensor,
    scale: float,
    rule: LocalRule,
    first: bool,
    anchor: Tensor | None,
    offset: Tensor | None,
    active: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """All clients' gradients as one matrix, then the one SGD step that the sequential engine makes too."""
    grad = space.flatten(grads)
    if scale != 1.0:
        grad = grad / scale
    return sgd_step(local, grad, velocity, lr, rule, first, anchor, offset, active)
