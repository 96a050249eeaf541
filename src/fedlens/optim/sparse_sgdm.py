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
IMPLEMENTATIONS = ("foreach", "fused", "differentiable")  # of torch.optim.SGD
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
        return momentum.to_dense()  # of sparse gradients without a mask it is sparse
    dense = torch.zeros_like(p, dtype=momentum.dtype, requires_grad=False)
    dense[mask] = momentum
    return dense


def _checked(mask: object, p: Tensor, label: str | int) -> Tensor:
    """Return a mask as bool on the device of `p`; numbers must be 0 or 1."""
    actual = type(mask).__name__
    if isinstance(mask, Tensor):
        actual = f"{mask.dtype} of shape {tuple(mask.shape)}"
        if mask.shape == p.shape:
            if mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all()):
                return mask.detach().to(p.device, torch.bool)
            actual += " with values other than 0 and 1"
    raise UserError(f"masks[{label!r}] must be torch.bool of shape {tuple(p.shape)}, got {actual}.")


class SparseSGDM(Optimizer):
    """v ← μv + (1−dampening)·m⊙(g + wd·θ); θ ← θ − lr·v: torch.optim.SGD bit for bit where the mask m is all ones.

    `masks` are bool (or numbers 0 and 1), one per parameter: a sequence, or a mapping or Mask by the names of `named_parameters()` (in its own
    order for plain `parameters()`); None activates all. A tensor without active entries has requires_grad=False until `set_masks` activates
    some. `state_dict` has each mask in the state of its parameter. A state without masks, such as torch.optim.SGD's, leaves the masks as they are.
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
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        self._active: dict[Tensor, _Active] = {}
        self._paused: set[Tensor] = set()  # tensors frozen here; only these are unfrozen later
        super().__init__(params, {**defaults, "maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused})
        if masks is not None:
            self.set_masks(masks)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; its entry `masks` takes what the constructor's `masks` takes."""
        masks = param_group.get("masks")
        param_group = {name: value for name, value in param_group.items() if name != "masks"}
        group = {**self.defaults, **param_group}
        for field in ("lr", "momentum", "dampening", "weight_decay"):
            if not 0 <= group[field] < math.inf:  # rejects nan too
                raise bad_value(field, group[field], "a finite number >= 0")
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise bad_value("nesterov", True, "False unless momentum > 0 and dampening = 0")
        for option in IMPLEMENTATIONS:
            if group[option]:
                raise bad_value(option, group[option], "False or None: torch's other implementations of SGD know no masks")
        super().add_param_group(param_group)
        try:
            checked = self._resolve(masks, self.param_groups[-1:])
        except UserError:
            self.param_groups.pop()
            raise
        self._apply(param_group["params"], checked, checked)

    def set_masks(self, masks: Masks) -> None:
        """Replace the masks. Entries that stay active keep their momentum, those that join start at v = 0."""
        params, checked = self._params(), self._resolve(masks, self.param_groups)
        self._apply(params, checked, [self._active[p].mask(p) for p in params])

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients in place by the norm of their active entries; return that norm before clipping."""
        if not max_norm >= 0:
            raise bad_value("max_norm", max_norm, ">= 0")
        moving = self._moving()
        norm = get_total_norm([self._active[p].take(grad) for p, grad, _ in moving])
        clip_grads_with_norm_([p for p, _, _ in moving], max_norm, norm)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has two overloads
        """Update every parameter that has a gradient and an active entry."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p, grad, group in self._moving():
            self._step(p, grad, group)
        return loss

    def _moving(self) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Return each parameter that has a gradient and an active entry, its gradient and its group."""
        groups = [(p, group) for group in self.param_groups for p in group["params"]]
        for i, (p, _) in enumerate(groups):
            if p.grad is not None and p.grad.is_sparse and (self._active[p].index is not None or self._active[p].frozen is not None):
                raise UserError(f"parameter {i}: sparse gradients need a mask that is all ones; use sparse=False in its nn.Embedding.")
        return [(p, p.grad, group) for p, group in groups if p.grad is not None and not self._active[p].none]

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
        """Add the masks to torch's state, for a copy or a pickle."""
        return {**super().__getstate__(), "_active": self._active, "_paused": self._paused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_active" in state:
            super().__setstate__(state)
        else:  # called by torch's load_state_dict
            self._load(state)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state; that of each parameter includes its `mask`: torch.distributed.checkpoint drops what lies outside."""
        saved, params = super().state_dict(), self._params()
        masks = {i: self._active[p].mask(p).contiguous() for i, p in enumerate(params)}
        saved["state"] = {**saved["state"], **{i: {**self.state.get(params[i], {}), "mask": mask} for i, mask in masks.items()}}
        for group in saved["param_groups"]:  # a check: it also drops the state of a tensor that is paused where it is loaded
            group["active"] = sum(int(masks[i].sum()) for i in group["params"])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore momentum, options and masks, so that training continues exactly."""
        last = self.register_load_state_dict_pre_hook(_with_masks_by_parameter)  # a user's hooks may return a state of version 0.2
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def _load(self, state: dict[str, Any]) -> None:
        """Take over what torch's `load_state_dict` has read, or raise before anything changes."""
        params, masks = self._params(), []
        for i, p in enumerate(params):
            saved = {name: value for name, value in state["state"].pop(p, {}).items() if value is not None}
            mask, v = saved.pop("mask", None), saved.get("momentum_buffer")
            masks.append(self._active[p].mask(p) if mask is None else _checked(mask, p, i))
            if v is not None and v.shape != p.shape and (mask is None or v.shape != (int(masks[i].sum()),)):
                raise bad_value(f"state_dict: momentum of parameter {i}", tuple(v.shape), f"of shape {tuple(p.shape)}, or beside its mask")
            if saved:
                state["state"][p] = saved
        left = iter(masks)
        for group, own in zip(state["param_groups"], self.param_groups, strict=True):
            active = sum(int(next(left).sum()) for _ in group["params"])
            if group.pop("active", active) != active:
                raise UserError("state_dict lacks masks of some tensors: load it into a SparseSGDM with the same masks or with masks=None.")
            group.update({name: own[name] for name in (*IMPLEMENTATIONS, "param_names") if name in own})
        super().__setstate__(state)
        self._apply(params, masks, masks)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _resolve(self, masks: Masks, groups: list[dict[str, Any]]) -> list[Tensor]:
        """Return one checked mask per parameter of the groups, in order, without changing anything."""
        params, names = ([item for group in groups for item in group.get(field, ())] for field in ("params", "param_names"))
        if masks is None:
            return [_Active().mask(p) for p in params]
        entries = masks.as_dict() if not isinstance(masks, Mapping) and hasattr(masks, "as_dict") else masks
        if isinstance(entries, Mapping):
            if not names and len(groups) > 1:
                raise UserError("masks by name need named parameters: build the groups from named_parameters(), or pass a sequence.")
            entries = [entries.get(name) for name in names] if names else list(entries.values())
        if not isinstance(entries, Sequence):
            raise UserError(f"masks must be a sequence, a mapping by name, a Mask or None, got {type(masks).__name__}.")
        if len(entries) != len(params):
            raise UserError(f"masks must be {len(params)} tensors, one per parameter, got {len(entries)}.")
        return [_checked(mask, p, label) for mask, p, label in zip(entries, params, names or range(len(params)), strict=True)]

    def _apply(self, params: list[Tensor], masks: list[Tensor], previous: list[Tensor]) -> None:
        """Set `masks`; compact momentum is indexed by the `previous` ones."""
        for p, mask, before in zip(params, masks, previous, strict=True):
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


def _with_masks_by_parameter(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Move masks from the top level, where version 0.2 saved them, into the state of their parameters."""
    if "masks" not in state_dict:
        return None
    masks, order = state_dict["masks"], [i for group in state_dict["param_groups"] for i in group["params"]]
    if not isinstance(masks, list) or len(masks) != len(order):
        raise UserError(f"state_dict: masks must be a list of {len(order)} tensors, one per parameter.")
    old = state_dict["state"]
    return {**state_dict, "state": {**old, **{i: {**old.get(i, {}), "mask": mask} for i, mask in zip(order, masks, strict=True)}}}
