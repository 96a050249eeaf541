"""SparseSGDM: SGD with momentum that moves only the entries of a mask (TaLoS, Iurada et al. 2025)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import Optimizer, ParamsT

from fedlens.errors import UserError, bad_value
from fedlens.lens.mask import PAUSED

# An active entry costs 12 bytes by index (int64 + float32), any entry 5 densely (float32 + mask): 3 bytes an entry against 5 here.
COMPACT_BELOW = 0.25


class MaskLike(Protocol):
    """Anything that gives its masks by parameter name."""

    def as_dict(self) -> Mapping[str, Tensor]: ...


Masks = Sequence[Tensor] | Mapping[str, Tensor] | MaskLike | None


@dataclass(frozen=True)
class _Active:
    """Where one tensor may move: only at `index` (flat), everywhere but at `frozen`, or everywhere (both None)."""

    index: Tensor | None = None
    frozen: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor, p: Tensor) -> "_Active":
        count = int(mask.sum())
        if count == p.numel():
            return cls()
        # The index is written through a flat view, which a channels_last weight does not have.
        if count == 0 or (count < COMPACT_BELOW * p.numel() and p.is_contiguous()):
            return cls(index=mask.reshape(-1).nonzero().squeeze(1))
        return cls(frozen=~mask)

    @property
    def nowhere(self) -> bool:
        return self.index is not None and self.index.numel() == 0

    def take(self, x: Tensor) -> Tensor:
        """The active entries of `x` (shaped like the parameter) as momentum is held: [k] by index, else zero where frozen."""
        if self.index is not None:
            return x.reshape(-1)[self.index]
        return x if self.frozen is None else x.masked_fill(self.frozen, 0)  # filled, not multiplied: 0 · inf is nan

    def mask(self, p: Tensor) -> Tensor:
        if self.index is not None:
            mask = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
            mask.view(-1)[self.index] = True
            return mask
        if self.frozen is not None:
            return ~self.frozen
        return torch.ones((), dtype=torch.bool, device=p.device).expand(p.shape)  # one byte, whatever the shape


def _spread(held: Tensor, mask: Tensor, p: Tensor) -> Tensor:
    """Momentum in the shape of `p`, from either way of holding it."""
    if held.shape == p.shape:
        return held
    dense = torch.zeros_like(p, dtype=held.dtype, requires_grad=False)
    dense[mask] = held
    return dense


def _checked(mask: object, p: Tensor, label: str | int) -> Tensor:
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == p.shape:
        return mask.detach().to(p.device)
    if isinstance(mask, Tensor):
        given = f"{mask.dtype} of shape {tuple(mask.shape)}"
    else:
        given = "nothing" if mask is None else type(mask).__name__
    raise UserError(f"masks[{label!r}]: {given} given, allowed is torch.bool of shape {tuple(p.shape)}")


def _check_group(group: dict[str, Any]) -> None:
    for field in ("lr", "momentum", "dampening", "weight_decay"):
        if not 0 <= group[field] < math.inf:  # written so that nan fails too
            raise bad_value(field, group[field], "a finite number >= 0")
    if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
        raise bad_value("nesterov", True, "False, or True with momentum > 0 and dampening 0")


class SparseSGDM(Optimizer):
    """v ← μv + (1−dampening)·m⊙(g + wd·θ); θ ← θ − lr·v: torch.optim.SGD bit for bit where the mask m is all ones.

    `masks` are bool, one for every parameter: in order, or by name (a mapping or a Mask) for `model.named_parameters()`; for `model.parameters()`
    in one group a mapping counts in its own order, which is the model's. None is dense. What they leave out keeps its bits. A tensor without an active entry loses requires_grad, so that backward does not visit
    it, until `set_masks` gives it entries again (None: all).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        masks: Masks = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {**defaults, "maximize": False})
        checked = self._resolve(masks)
        self._active: dict[Tensor, _Active] = {}
        self._paused: set[Tensor] = set()  # those whose requires_grad was taken here, and only those get it back
        self._apply(checked, checked)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by the constructor for each group; refused afterwards, since the new parameters would have no mask."""
        if hasattr(self, "_active"):
            raise UserError("param_group: a group given after construction, allowed is all groups at once, with a mask for every parameter")
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def set_masks(self, masks: Masks) -> None:
        """New masks. Entries that stay keep their momentum, those that leave forget it, those that join start at v = 0.

        A tensor that has not made a step yet has no v: its first one is the gradient, without dampening, as in torch.
        """
        checked = self._resolve(masks)
        self._apply(checked, [self._active[p].mask(p) for p in self._params()])

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ where only active entries count: the norm before clipping; gradients scaled in place."""
        if not max_norm >= 0:
            raise bad_value("max_norm", max_norm, ">= 0")
        moving = [p for p in self._params() if p.grad is not None and not self._active[p].nowhere]
        norm = get_total_norm([self._active[p].take(p.grad) for p in moving if p.grad is not None])
        clip_grads_with_norm_(moving, max_norm, norm)
        return norm

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step on every parameter that has a gradient and an active entry."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self._active[p].nowhere:
                    self._step(p, p.grad, group)
        return loss

    def _step(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """torch's single-tensor SGD, operation by operation, on the active entries."""
        active, theta = self._active[p], p
        if active.index is not None:
            grad, theta = active.take(grad), p.view(-1)[active.index]  # both [k], copies
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"] != 0:
            grad = grad.add(theta, alpha=group["weight_decay"])
        if active.frozen is not None:
            grad = grad.masked_fill(active.frozen, 0)  # after weight decay, which would move them
        if group["momentum"] != 0:
            v = self.state[p].get("momentum_buffer")
            if v is None:
                v = self.state[p]["momentum_buffer"] = grad.detach().clone()
            else:
                v.mul_(group["momentum"]).add_(grad, alpha=1 - group["dampening"])
            grad = grad.add(v, alpha=group["momentum"]) if group["nesterov"] else v
        theta.add_(grad, alpha=-group["lr"])
        if active.index is not None:
            p.view(-1).index_copy_(0, active.index, theta)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: torch's, and the masks by the order of the parameters, which are others there."""
        paused = [p in self._paused for p in self._params()]
        return {**super().__getstate__(), "masks": [self._active[p].mask(p) for p in self._params()], "paused": paused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        masks, paused = state.get("masks"), state.get("paused")
        super().__setstate__({key: value for key, value in state.items() if key not in ("masks", "paused")})
        if masks is not None and paused is not None:  # torch's own load_state_dict comes here, too
            self._active = {p: _Active.of(mask, p) for p, mask in zip(self._params(), masks, strict=True)}
            self._paused = {p for p, was in zip(self._params(), paused, strict=True) if was}

    def state_dict(self) -> dict[str, Any]:
        """torch's, and `masks` in the order of the parameters: outside `state`, whose tensors torch casts to float on loading."""
        return {**super().state_dict(), "masks": [self._active[p].mask(p) for p in self._params()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Momentum, options and masks as they were saved: the next step is the one that would have followed."""
        if not isinstance(state_dict.get("masks"), list):
            raise UserError("state_dict: one without masks given, allowed is one saved by SparseSGDM")
        checked = self._resolve(state_dict["masks"])
        super().load_state_dict(state_dict)
        self._apply(checked, checked)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _resolve(self, masks: Masks) -> list[Tensor]:
        """One checked mask a parameter, in order; nothing is changed before all of them are known to be good."""
        params, names = self._params(), [name for group in self.param_groups for name in group.get("param_names", ())]
        if masks is None:
            return [_Active().mask(p) for p in params]
        entries = masks.as_dict() if not isinstance(masks, Mapping) and hasattr(masks, "as_dict") else masks
        if isinstance(entries, Mapping):
            if not names and len(self.param_groups) > 1:
                raise UserError(
                    "masks: names given for groups of parameters without any, allowed is a sequence, or named_parameters() in the groups"
                )
            entries = [entries.get(name) for name in names] if names else list(entries.values())
        if not isinstance(entries, Sequence):
            raise UserError(f"masks: {type(masks).__name__} given, allowed is a sequence, a mapping by name, a Mask or None")
        if len(entries) != len(params):
            raise bad_value("masks", len(entries), f"{len(params)}, one a parameter in order (or by name, with named_parameters())")
        return [_checked(mask, p, label) for mask, p, label in zip(entries, params, names or range(len(params)), strict=True)]

    def _apply(self, masks: list[Tensor], held_by: list[Tensor]) -> None:
        """Take on `masks`; momentum held compactly until now has its entries where `held_by` is set."""
        for p, mask, before in zip(self._params(), masks, held_by, strict=True):
            active = self._active[p] = _Active.of(mask, p)
            if "momentum_buffer" in self.state.get(p, {}):
                v = _spread(self.state[p]["momentum_buffer"], before, p)
                self.state[p]["momentum_buffer"] = active.take(v).clone()  # a loaded one still belongs to the state_dict
            if active.nowhere and p.requires_grad:
                self._paused.add(p.requires_grad_(False))
                setattr(p, PAUSED, True)
                p.grad = None
            elif not active.nowhere and p in self._paused:
                self._paused.remove(p.requires_grad_(True))
                setattr(p, PAUSED, False)
