"""The cohort engine: all clients of a round as one batched computation.

Parameters are stacked on a client axis, Θ [clients, P]. Every Linear is one batched product over the clients, attention runs
over clients × samples, and one fused update moves all clients. Tensors that do not train are shared, not stacked. Under a mask
that includes tensors without active entries; in the others only active entries step (SparseSGDM) and are returned.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlens.engine.local_work import Engine, Offsets, Update, Work
from fedlens.optim.sgd import LocalRule, sgd_step
from fedlens.tasks import select

log = logging.getLogger("fedlens")
CPU_NUMBERS = 2**26  # entries of one [clients, P] matrix on a CPU: 256 MB, of which a step holds a handful


@dataclass
class Cohort(Engine):
    """The engine for models that accept a client axis.

    With `compile`, each transformer block, the batch transform and the update are compiled separately. Equal blocks share their
    code, so only two are compiled, in seconds instead of minutes. Between blocks there is little left to fuse.
    """

    name: ClassVar[str] = "cohort"
    chunk: int | None = None  # clients at once; None: all, halved whenever memory runs out
    width: int = 1  # largest cohort: compiled code has one width, so smaller cohorts are filled up to it
    _network: nn.Module = field(init=False)
    _step: Callable[..., tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        if self.chunk is None and self.precision.device.type == "cpu":
            self.chunk = max(1, CPU_NUMBERS // self.space.dense_size)
        self.width = min(self.width, self.chunk or self.width)
        self._network, self._step = self.model, sgd_step
        if self.compile:
            self._network = compiled_blocks(self.model)
            self.task = self.task.compiled()
            self._step = torch.compile(sgd_step, dynamic=False)

    def updates(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None = None) -> Iterator[Update]:
        self._network.train()
        at = 0
        while at < len(work):
            size = min(self.chunk or len(work), len(work) - at)
            part = work.part(slice(at, at + size))
            filled = part.widened(self.width) if self.compile else part
            try:
                deltas, losses = self._train(theta, filled, rule, offsets)
            except torch.OutOfMemoryError:
                if len(filled) == 1:
                    raise
                self.chunk = self.width = (len(filled) + 1) // 2
                log.warning("cohort engine: out of memory with %d clients at once, continuing with %d", len(filled), self.chunk)
                torch.cuda.empty_cache()
                continue
            for k, client in enumerate(part.clients):
                yield Update(client, int(part.samples[k]), int(part.steps[k]), deltas[k], losses[k])
            at += size

    def _train(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None) -> tuple[Tensor, Tensor]:
        """Run the local steps of every client; return Δ [clients, P] and the mean losses [clients]."""
        clients, device, active = len(work), theta.device, self.space.active
        moving = theta.expand(clients, -1).clone()  # [clients, P]
        whole = moving if active is None else self.space.expand(theta).expand(clients, -1).clone()  # [clients, dense]
        velocity = torch.zeros_like(moving) if rule.momentum else moving[:, :0]
        offset = None if offsets is None else torch.stack([offsets(client) for client in work.clients])
        anchor = theta if rule.prox else None
        index, steps = work.index.to(device), work.steps.to(device)
        draws = {name: tensor.to(device, non_blocking=True) for name, tensor in work.draws.items()}
        uneven = bool((work.steps != work.steps[0]).any())
        losses = torch.zeros(clients, dtype=torch.float64, device=device)
        lr, fixed = torch.tensor(rule.lr, device=device), replace(rule, lr=0.0)  # as a tensor, so that a new rate does not recompile
        shared = {name: param for name, param in self.model.named_parameters() if name not in self.space.shapes}
        for j in range(int(work.steps.max())):
            inputs, labels = self.task.batch(self.samples, index[:, j], select(draws, (slice(None), j)))  # [clients, batch, …]
            params = {name: view.detach().requires_grad_() for name, view in self.space.views(whole).items()}
            keep = None if work.keep is None else work.keep[:, j].to(device)
            with self.precision.autocast():
                logits = functional_call(self._network, {**shared, **params}, (inputs,), {"keep": keep})  # [clients, batch, classes]
                loss = self.task.loss(logits, labels, rule.label_smoothing, "none").mean(1)  # [clients]
            grad = self.space.compact(self.space.flatten(self.precision.gradients(loss.sum(), list(params.values()))))  # [clients, P]
            awake = (steps > j).to(moving.dtype).unsqueeze(1) if uneven else None
            moving, velocity = self._step(moving, grad, velocity, lr, fixed, j == 0, anchor, offset, awake)
            whole = moving if active is None else whole.index_copy_(1, active, moving)
            losses += torch.where(steps > j, loss.detach(), 0.0)  # not a product: a stopped client may overflow later
        return moving - theta, (losses / steps).float()


_COMPILED: dict[str, nn.Module] = {}


def compiled_blocks(model: nn.Module) -> nn.Module:
    """Return a network of this architecture with compiled blocks, one per process.

    Each call passes every parameter, so all runs share it. Evaluation uses the model's own uncompiled blocks.
    """
    key = f"{model} {[getattr(model, a, '') for a in ('shape', 'image_size', 'dropout')]} {next(model.parameters()).device}"
    if key not in _COMPILED:
        import torch._dynamo.config as dynamo

        limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
        setattr(dynamo, limit, max(64, getattr(dynamo, limit)))  # each pattern of masked tensors has its own code
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # float32 is deliberate where it is used
        _COMPILED[key] = copy.deepcopy(model)
        for block in _COMPILED[key].blocks:  # type: ignore[union-attr]
            block.compile(dynamic=False)
    return _COMPILED[key]


def compiled_forward(model: nn.Module) -> Callable[..., Tensor]:
    """Return the forward pass of a model in compiled blocks; a model without a client axis is compiled as a whole."""
    if not getattr(model, "client_axis", False):
        return torch.compile(model)
    network, state = compiled_blocks(model), {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def forward(*inputs: Tensor, **options: Tensor | None) -> Tensor:
        out: Tensor = functional_call(network.train(model.training), state, inputs, options)
        return out

    return forward
