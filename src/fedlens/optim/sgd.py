"""SGD with momentum: torch's optimizers for one model, and the same arithmetic on flat vectors for one [P] or a whole cohort [clients, P]."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from fedlens.config import OptimConfig
from fedlens.lens.norms import row_norms
from fedlens.optim.sparse_sgdm import Masks, SparseSGDM

OPTIONS = ("lr", "momentum", "dampening", "nesterov", "weight_decay")  # of a rule or the section optim, named as in torch's SGD


@dataclass(frozen=True)
class LocalRule:
    """The local optimizer of a round. `prox` is FedProx's μ; SCAFFOLD's control variates enter as an offset on the gradient."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    prox: float = 0.0
    label_smoothing: float = 0.0


def make_optimizer(params: ParamsT, rule: LocalRule | OptimConfig, masks: Masks, *, fused: bool | None = None) -> Optimizer:
    """Return torch's SGD, or under masks SparseSGDM, which leaves the rest bit for bit."""
    options = {name: getattr(rule, name) for name in OPTIONS}
    return torch.optim.SGD(params, **options, fused=fused) if masks is None else SparseSGDM(params, **options, masks=masks)


def clip_gradients(optimizer: Optimizer, norm: float) -> None:
    """Scale gradients down to this norm over the coordinates that may move."""
    if isinstance(optimizer, SparseSGDM):
        optimizer.clip_grad_norm_(norm)
    else:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], norm)


def sgd_step(
    theta: Tensor,
    grad: Tensor,
    velocity: Tensor,
    lr: Tensor | float,
    rule: LocalRule,
    first: bool,
    anchor: Tensor | None = None,
    offset: Tensor | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (theta, velocity) after one step. All are [..., P]; `active` [..., 1] is 0 for a client that has finished.

    Order: loss gradient with FedProx's pull, clipping to `clip_norm` per client, control offset, then weight decay and momentum as in
    torch; the first momentum step has no dampening. Under a mask, P counts active coordinates only, as in SparseSGDM.
    """
    if rule.prox and anchor is not None:
        grad = grad + rule.prox * (theta - anchor)
    if rule.clip_norm is not None:
        norm = row_norms(grad)
        grad = grad * (rule.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    if offset is not None:
        grad = grad + offset
    if rule.weight_decay:
        grad = grad + rule.weight_decay * theta
    if rule.momentum:
        velocity = grad if first else rule.momentum * velocity + (1 - rule.dampening) * grad
        grad = grad + rule.momentum * velocity if rule.nesterov else velocity
    step = lr * grad
    return theta - (step if active is None else torch.where(active > 0, step, 0.0)), velocity  # not a product: 0 · inf is nan


def effective_steps(steps: int, momentum: float, dampening: float = 0.0, nesterov: bool = False) -> float:
    """Return how far `steps` steps of a constant unit gradient go, in units of lr: FedNova's ‖a‖₁ (Wang et al. 2020)."""
    distance, velocity = 0.0, 0.0
    for j in range(steps):
        velocity = 1.0 if j == 0 else momentum * velocity + (1 - dampening) if momentum else 1.0
        distance += 1.0 + momentum * velocity if nesterov else velocity
    return distance
