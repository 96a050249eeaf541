"""SparseSGDM: SGD with momentum that moves only the entries of a mask (TaLoS, Iurada et al. 2025)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import Optimizer, ParamsT

from fedlens.errors import UserError, bad_value
from fedlens.lens.mask import PAUSED, MaskLike

# An active entry costs 12 bytes by index (int64 + float32), every entry 5 bytes densely (float32 + mask). At this density: 3 against 5.
COMPACT_BELOW = 0.25
Masks = Sequence[Tensor] | Mapping[str, Tensor] | MaskLike | None


@dataclass(frozen=True)
class _Active:
    """The active entries of one tensor: only those at `index` (flat), all but `frozen`, or all (both None)."""

    index: Tensor | None = None
    frozen: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor, p: Tensor) -> "_Active":
        count = int(mask.sum())
        if count == p.numel():
            return cls()
        # step() writes by index through a flat view, which a channels_last weight does not have.
        if count == 0 or (count < COMPACT_BELOW * p.numel() and p.is_contiguous()):
            return cls(index=mask.reshape(-1).nonzero().squeeze(1))
        return cls(frozen=~mask)

    @property
    def none(self) -> bool:
        return self.index is not None and self.index.numel() == 0

    def take(self, x: Tensor) -> Tensor:
        """Return the entries of `x` (shaped like the parameter) as momentum is stored: [k] by index, else zero where frozen."""
        if self.index is not None:
            return x.reshape(-1)[self.index]
        return x if self.frozen is None else x.masked_fill(self.frozen, 0)  # not a product: 0 · inf is nan

    def mask(self, p: Tensor) -> Tensor:
        if self.index is not None:
            mask = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
            mask.view(-1)[self.index] = True
            return mask
        if self.frozen is not None:
            return ~self.frozen
        return torch.ones((), dtype=torch.bool, device=p.device).expand(p.shape)  # one byte for any shape


def _dense(momentum: Tensor, mask: Tensor, p: Tensor) -> Tensor:
    """Return momentum in the shape of `p`, from its compact or dense form."""
    if momentum.shape == p.shape:
        return momentum
    dense = torch.zeros_like(p, dtype=momentum.dtype, requires_grad=False)
    dense[mask] = momentum
    return dense


def _checked(mask: object, p: Tensor, label: str | int) -> Tensor:
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == p.shape:
        return mask.detach().to(p.device)
    actual = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UserError(f"masks[{label!r}] must be torch.bool of shape {tuple(p.shape)}, got {actual}.")


class SparseSGDM(Optimizer):
    """v ← μv + (1−dampening)·m⊙(g + wd·θ); θ ← θ − lr·v: torch.optim.SGD bit for bit where the mask m is all ones.

    `masks` are bool, one per parameter: a sequence, or a mapping or Mask by the names of `named_parameters()` (in its own order for plain
    `parameters()`); None activates all. A tensor without active entries has requires_grad=False until `set_masks` activates some.
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
        self._paused: set[Tensor] = set()  # tensors frozen here; only these are unfrozen later
        self._apply(checked, checked)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction; later it is an error, since the new parameters would have no mask."""
        if hasattr(self, "_active"):
            raise UserError("param_group: pass all groups to the constructor, with one mask per parameter; none can be added later.")
        group = {**self.defaults, **param_group}
        for field in ("lr", "momentum", "dampening", "weight_decay"):
            if not 0 <= group[field] < math.inf:  # rejects nan too
                raise bad_value(field, group[field], "a finite number >= 0")
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise bad_value("nesterov", True, "False unless momentum > 0 and dampening = 0")
        super().add_param_group(param_group)

    def set_masks(self, masks: Masks) -> None:
        """Replace the masks. Entries that stay active keep their momentum, those that join start at v = 0."""
        checked = self._resolve(masks)
        self._apply(checked, [self._active[p].mask(p) for p in self._params()])

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients in place by the norm of their active entries; return that norm before clipping."""
        if not max_norm >= 0:
            raise bad_value("max_norm", max_norm, ">= 0")
        params = [p for p in self._params() if p.grad is not None and not self._active[p].none]
        norm = get_total_norm([self._active[p].take(p.grad) for p in params if p.grad is not None])
        clip_grads_with_norm_(params, max_norm, norm)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has two overloads
        """Update every parameter that has a gradient and an active entry."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self._active[p].none:
                    self._step(p, p.grad, group)
        return loss

    def _step(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Apply torch's single-tensor SGD, operation by operation, to the active entries."""
        active, theta = self._active[p], p
        if active.index is not None:
            grad, theta = active.take(grad), p.view(-1)[active.index]  # both [k], copies
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"] != 0:
            grad = grad.add(theta, alpha=group["weight_decay"])
        if active.frozen is not None:
            grad = grad.masked_fill(active.frozen, 0)  # after weight decay, which would change them
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
        """Add the masks to torch's state, by position: a copy has other parameters."""
        paused = [p in self._paused for p in self._params()]
        return {**super().__getstate__(), "masks": [self._active[p].mask(p) for p in self._params()], "paused": paused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        masks, paused = state.get("masks"), state.get("paused")
        super().__setstate__({key: value for key, value in state.items() if key not in ("masks", "paused")})
        if masks is not None and paused is not None:  # torch's load_state_dict also calls this, without them
            self._active = {p: _Active.of(mask, p) for p, mask in zip(self._params(), masks, strict=True)}
            self._paused = {p for p, was in zip(self._params(), paused, strict=True) if was}

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state and `masks` in parameter order, outside `state`, whose tensors torch casts to float on loading."""
        return {**super().state_dict(), "masks": [self._active[p].mask(p) for p in self._params()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore momentum, options and masks, so that training continues exactly."""
        if not isinstance(state_dict.get("masks"), list):
            raise UserError("state_dict must come from SparseSGDM, got one without masks.")
        checked = self._resolve(state_dict["masks"])
        super().load_state_dict(state_dict)
        self._apply(checked, checked)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _resolve(self, masks: Masks) -> list[Tensor]:
        """Return one checked mask per parameter, in order, without changing anything."""
        params, names = self._params(), [name for group in self.param_groups for name in group.get("param_names", ())]
        if masks is None:
            return [_Active().mask(p) for p in params]
        entries = masks.as_dict() if not isinstance(masks, Mapping) and hasattr(masks, "as_dict") else masks
        if isinstance(entries, Mapping):
            if not names and len(self.param_groups) > 1:
                raise UserError("masks by name need named parameters: build the groups from named_parameters(), or pass a sequence.")
            entries = [entries.get(name) for name in names] if names else list(entries.values())
        if not isinstance(entries, Sequence):
            raise UserError(f"masks must be a sequence, a mapping by name, a Mask or None, got {type(masks).__name__}.")
        if len(entries) != len(params):
            raise UserError(f"masks must be {len(params)} tensors, one per parameter, got {len(entries)}.")
        return [_checked(mask, p, label) for mask, p, label in zip(entries, params, names or range(len(params)), strict=True)]

    def _apply(self, masks: list[Tensor], previous: list[Tensor]) -> None:
        """Set `masks`; compact momentum is indexed by the `previous` ones."""
        for p, mask, before in zip(self._params(), masks, previous, strict=True):
            active = self._active[p] = _Active.of(mask, p)
            if "momentum_buffer" in self.state.get(p, {}):
                v = _dense(self.state[p]["momentum_buffer"], before, p)
                self.state[p]["momentum_buffer"] = active.take(v).clone()  # a loaded tensor still belongs to the state_dict
            if active.none and p.requires_grad:
                self._paused.add(p.requires_grad_(False))
                setattr(p, PAUSED, True)
                p.grad = None
            elif not active.none and p in self._paused:
                self._paused.remove(p.requires_grad_(True))
                setattr(p, PAUSED, False)
