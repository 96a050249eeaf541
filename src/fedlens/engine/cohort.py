"""The cohort engine: all clients of a round as one batched computation.

Parameters are stacked on a client axis, Θ [clients, P]; every Linear is one batched product over the clients, attention runs
over clients × images, and one fused update moves all clients. What does not train is not stacked: it is shared. Under a mask,
tensors without active entries are such; of the others only the active entries are stepped (SparseSGDM) and come back.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedlens.engine.local_work import Offsets, Update, Work
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import LocalRule, sgd_step
from fedlens.precision import Precision
from fedlens.tasks.image import ImageBank, Pipeline, transform

log = logging.getLogger("fedlens")
CPU_NUMBERS = 2**26  # of one [clients, P] matrix on a CPU, of which a step holds a handful: 256 MB each


@dataclass
class Cohort:
    """`compile`: each transformer block, the image pipeline and the update are compiled on their own. The blocks are alike, so two
    are compiled (the last gives the class token alone), in seconds, not minutes; between them little is left to fuse.
    """

    model: nn.Module
    space: ParamSpace
    bank: ImageBank
    pipeline: Pipeline
    precision: Precision
    compile: bool = False
    chunk: int | None = None  # clients at once; None: all that fit, and half as many whenever the device's memory runs out
    width: int = 1  # the most clients of any round: compiled code is for one width, so narrower cohorts are filled up to it
    name: str = "cohort"
    _network: nn.Module = field(init=False)
    _transform: Callable[..., Tensor] = field(init=False)
    _step: Callable[..., tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        if self.chunk is None and self.precision.device.type == "cpu":
            self.chunk = max(1, CPU_NUMBERS // self.space.dense_size)
        self.width = min(self.width, self.chunk or self.width)
        self._network, self._transform, self._step = self.model, transform, sgd_step
        if self.compile:
            self._network = compiled_blocks(self.model)
            self._transform = torch.compile(transform, dynamic=False)
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
                log.warning("cohort engine: out of memory with %d clients at once, going on with %d", len(filled), self.chunk)
                torch.cuda.empty_cache()
                continue
            for k, client in enumerate(part.clients):
                yield Update(client, int(part.samples[k]), int(part.steps[k]), deltas[k], losses[k])
            at += size

    def _train(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None) -> tuple[Tensor, Tensor]:
        """J local steps of every client: (Δ [clients, P], mean loss [clients])."""
        clients, device, scale, active = len(work), theta.device, self.precision.loss_scale, self.space.active
        moving = theta.expand(clients, -1).clone()  # [clients, P]
        whole = moving if active is None else self.space.expand(theta).expand(clients, -1).clone()  # [clients, dense]
        velocity = torch.zeros_like(moving) if rule.momentum else moving[:, :0]
        offset = None if offsets is None else torch.stack([offsets(client) for client in work.clients])
        anchor = theta if rule.prox else None
        index, draws, steps = work.index.to(device), work.draws.to(device), work.steps.to(device)
        uneven = bool((work.steps != work.steps[0]).any())
        losses = torch.zeros(clients, dtype=torch.float64, device=device)
        lr, fixed = torch.tensor(rule.lr, device=device), replace(rule, lr=0.0)  # a number that changes would be compiled anew each round
        shared = {name: param for name, param in self.model.named_parameters() if name not in self.space.shapes}
        for j in range(int(work.steps.max())):
            images, labels = self.bank.batch(index[:, j])  # [clients, batch, …]
            inputs = self._transform(images, draws[:, j], self.pipeline.fixed(*images.shape[-2:], device), self.pipeline.dtype)
            params = {name: view.detach().requires_grad_() for name, view in self.space.views(whole).items()}
            keep = None if work.keep is None else work.keep[:, j].to(device)
            with self.precision.autocast():
                logits = functional_call(self._network, {**shared, **params}, (inputs,), {"keep": keep})  # [clients, batch, classes]
                loss = client_losses(logits, labels, rule.label_smoothing)
            grad = self.space.compact(self.space.flatten(torch.autograd.grad(loss.sum() * scale, list(params.values()))))  # [clients, P]
            grad = grad if scale == 1 else grad / scale
            awake = (steps > j).to(moving.dtype).unsqueeze(1) if uneven else None
            moving, velocity = self._step(moving, grad, velocity, lr, fixed, j == 0, anchor, offset, awake)
            whole = moving if active is None else whole.index_copy_(1, active, moving)
            losses += torch.where(steps > j, loss.detach(), 0.0)  # not a product: who has stopped may overflow later
        return moving - theta, (losses / steps).float()


_COMPILED: dict[str, nn.Module] = {}


def compiled_blocks(model: nn.Module) -> nn.Module:
    """A network of this architecture whose blocks are compiled, made once a process: every parameter is handed to it at each call, so
    it serves all runs alike. Evaluation goes on with the model's own plain blocks."""
    key = f"{model} {[getattr(model, a, '') for a in ('shape', 'image_size', 'dropout')]} {next(model.parameters()).device}"
    if key not in _COMPILED:
        import torch._dynamo.config as dynamo

        limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
        setattr(dynamo, limit, max(64, getattr(dynamo, limit)))  # every pattern of masked tensors is code of its own
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # single precision is asked for where bits matter
        _COMPILED[key] = copy.deepcopy(model)
        for block in _COMPILED[key].blocks:  # type: ignore[union-attr]
            block.compile(dynamic=False)
    return _COMPILED[key]


def compiled_forward(model: nn.Module) -> Callable[..., Tensor]:
    """The forward pass of one model in compiled blocks; what is not a ViT of ours is compiled as a whole."""
    if not getattr(model, "client_axis", False):
        return torch.compile(model)
    network, state = compiled_blocks(model), {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def forward(*inputs: Tensor, **options: Tensor | None) -> Tensor:
        out: Tensor = functional_call(network.train(model.training), state, inputs, options)
        return out

    return forward


def client_losses(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Each client's mean cross-entropy on its own batch: [clients]."""
    each = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="none")
    return each.view(labels.shape).mean(1)
