"""The readable oracle: one model, clients in turn. Also the engine for models that cannot be stacked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.data.batches import ImageBank, Pipeline
from fedlens.engine.work import Offsets, Update, Work
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import LocalRule, sgd_step_
from fedlens.precision import Precision


@dataclass
class Sequential:
    model: nn.Module
    space: ParamSpace
    bank: ImageBank
    pipeline: Pipeline
    precision: Precision
    compile: bool = False
    name: str = "sequential"
    forward: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.forward = torch.compile(self.model) if self.compile else self.model

    def updates(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None = None) -> Iterator[Update]:
        self.model.train()
        params = dict(self.model.named_parameters())
        trained = [params[name] for name in self.space.shapes]
        local, velocity, grad = torch.empty_like(theta), torch.empty_like(theta), torch.empty_like(theta)
        for name, view in self.space.views(local).items():
            params[name].data = view  # the model's parameters are this vector: nothing is copied back and forth
        scale = self.precision.loss_scale
        for k, client in enumerate(work.clients):
            offset = None if offsets is None else offsets(client)
            local.copy_(theta)
            losses = torch.zeros((), dtype=torch.float64, device=theta.device)
            steps = int(work.steps[k])
            for j in range(steps):
                images, labels = self.bank.batch(work.index[k, j])
                inputs = self.pipeline(images, work.draws[k][j].to(theta.device))
                keep = {} if work.keep is None else {"keep": work.keep[k, j].to(theta.device)}
                with self.precision.autocast():
                    loss = F.cross_entropy(self.forward(inputs, **keep).float(), labels, label_smoothing=rule.label_smoothing)
                self.space.flatten(torch.autograd.grad(loss * scale, trained), out=grad)
                if scale != 1:
                    grad.div_(scale)
                sgd_step_(local, grad, velocity, rule, j == 0, theta, offset)
                losses += loss.detach()
            yield Update(client, int(work.samples[k]), steps, torch.sub(local, theta, out=grad), (losses / steps).float())
