"""The readable oracle: one model, torch's own SGD, clients in turn. Also the engine for models that cannot be stacked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.data.batches import ImageBank, Pipeline
from fedlens.engine.work import Offsets, Update, Work
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import LocalRule
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
        local = torch.empty_like(theta)
        for name, view in self.space.views(local).items():
            params[name].data = view  # the model's parameters are this vector: nothing is copied back and forth
        anchor, scale = list(self.space.views(theta).values()), self.precision.loss_scale
        for k, client in enumerate(work.clients):
            offset = None if offsets is None else list(self.space.views(offsets(client)).values())
            local.copy_(theta)
            optimizer = torch.optim.SGD(  # a new one: momentum starts at zero each round
                trained,
                lr=rule.lr,
                momentum=rule.momentum,
                dampening=rule.dampening,
                nesterov=rule.nesterov,
                weight_decay=rule.weight_decay,
                fused=True,  # one pass over memory, which is what a step of a large model waits for
            )
            losses = torch.zeros((), dtype=torch.float64, device=theta.device)
            steps = int(work.steps[k])
            for j in range(steps):
                images, labels = self.bank.batch(work.index[k, j])
                inputs = self.pipeline(images, work.draws[k][j].to(theta.device))
                keep = {} if work.keep is None else {"keep": work.keep[k, j].to(theta.device)}
                with self.precision.autocast():
                    loss = F.cross_entropy(self.forward(inputs, **keep).float(), labels, label_smoothing=rule.label_smoothing)
                for param, grad in zip(trained, torch.autograd.grad(loss * scale, trained), strict=True):
                    param.grad = grad if scale == 1 else grad / scale
                if rule.prox:
                    self._add(trained, [rule.prox * (p.detach() - a) for p, a in zip(trained, anchor, strict=True)])
                if rule.clip_norm is not None:
                    nn.utils.clip_grad_norm_(trained, rule.clip_norm)
                if offset is not None:
                    self._add(trained, offset)
                optimizer.step()
                losses += loss.detach()
            optimizer.zero_grad(set_to_none=True)
            yield Update(client, int(work.samples[k]), steps, local - theta, (losses / steps).float())

    @staticmethod
    def _add(params: list[nn.Parameter], more: list[Tensor]) -> None:
        for param, extra in zip(params, more, strict=True):
            assert param.grad is not None
            param.grad.add_(extra)
