"""Task vectors τ = θ − θ0: what was learned, as one flat vector that adds, scales and negates (Ilharco et al. 2023).

On disk a task vector is a safetensors file: dense as one tensor per name, sparse (at most a quarter non-zero) as a bitmap and its values.
"""

import copy
import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedlens.errors import UserError, bad_value, first_line
from fedlens.lens.mask import MaskLike, pack_bits, unpack_bits, write_tensors
from fedlens.lens.space import ParamSpace, misfits

FORMAT = "fedlens.task_vector.v1"
SPARSE = 0.25  # density up to which a bitmap and values are stored
M = TypeVar("M", bound=nn.Module)


class TaskVector:
    """A vector τ [P] over a ParamSpace. Operations return new vectors; operands must share names and shapes, not devices.

    `origins` name the runs it was learned from. They are carried through the algebra and the file; equality ignores them.
    """

    __array_ufunc__ = None  # lets a numpy scalar on the left defer to __rmul__
    __hash__ = None  # type: ignore[assignment]  # compared by value, and the vector is mutable

    def __init__(self, space: ParamSpace, vector: Tensor, origins: Collection[str] = ()) -> None:
        size = sum(space.sizes)  # whole tensors, even if the space is masked
        if vector.shape != (size,) or not vector.is_floating_point():
            raise UserError(f"task vector must be a floating-point vector of {size}, got {vector.dtype} {tuple(vector.shape)}.")
        self.space, self.vector, self.origins = space, vector.detach(), frozenset(origins)

    @classmethod
    def between(cls, before: nn.Module | Mapping[str, Tensor], after: nn.Module | Mapping[str, Tensor]) -> "TaskVector":
        """Return after − before over all floating-point tensors, in float32 or wider; equal entries give 0, infinities included."""
        old, new = _floats(before), _floats(after)
        if not old:
            raise UserError("task vector: the first model has no floating-point tensors.")
        space = ParamSpace({name: tensor.shape for name, tensor in old.items()})
        check_fits(space, new, "the second model", exactly=True)
        return cls(space, space.flatten({name: _difference(tensor, new[name].to(tensor.device)) for name, tensor in old.items()}))

    def __add__(self, other: "TaskVector") -> "TaskVector":
        if not isinstance(other, TaskVector):
            return NotImplemented
        return TaskVector(self.space, self.vector + self.aligned(other), self.origins | other.origins)

    def __radd__(self, other: int) -> "TaskVector":
        return self if isinstance(other, int) and other == 0 else NotImplemented  # sum([...]) starts at 0

    def __sub__(self, other: "TaskVector") -> "TaskVector":
        if not isinstance(other, TaskVector):
            return NotImplemented
        return TaskVector(self.space, self.vector - self.aligned(other), self.origins | other.origins)

    def __neg__(self) -> "TaskVector":
        return self * -1.0

    def __mul__(self, scalar: float) -> "TaskVector":
        if not isinstance(scalar, Real):
            return NotImplemented
        return self._replaced(self.vector * float(scalar))

    __rmul__ = __mul__

    def __truediv__(self, scalar: float) -> "TaskVector":
        if not isinstance(scalar, Real):
            return NotImplemented
        if scalar == 0:
            raise bad_value("task vector: divisor", scalar, "any number but 0")
        return self._replaced(self.vector / float(scalar))

    def _replaced(self, vector: Tensor) -> "TaskVector":
        return TaskVector(self.space, vector.add_(0.0), self.origins)  # + 0.0 turns −0.0 into 0.0, so that sparse files stay sparse

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TaskVector):
            return NotImplemented
        if self.space.shapes != other.space.shapes or self.vector.dtype != other.vector.dtype:
            return False
        return torch.equal(self.vector, self.aligned(other))

    def __repr__(self) -> str:
        return f"TaskVector({len(self.space.shapes)} tensors, {len(self.vector):,} entries, density {self.density:.3g}, norm {self.norm():.4g})"

    def aligned(self, other: "TaskVector") -> Tensor:
        """Return the other's vector in this one's order of names and on its device."""
        check_fits(self.space, other.state(), "the other task vector", exactly=True)
        same_order = list(self.space.shapes) == list(other.space.shapes)
        return (other.vector if same_order else self.space.flatten(other.state())).to(self.vector.device)

    def dot(self, other: "TaskVector") -> float:
        """Return ⟨τ, τ'⟩, accumulated in float64."""
        return float(double(self.vector) @ double(self.aligned(other)))

    def norm(self) -> float:
        return math.sqrt(self.dot(self))

    def cosine(self, other: "TaskVector") -> float:
        """Return the cosine in [−1, 1]; 0 if either vector is zero."""
        norms = self.norm() * other.norm()
        return max(-1.0, min(1.0, self.dot(other) / norms)) if norms else 0.0

    @property
    def density(self) -> float:
        """The fraction of entries that are not zero."""
        return int(torch.count_nonzero(self.vector)) / max(len(self.vector), 1)

    def state(self) -> dict[str, Tensor]:
        """Return name -> tensor, views of the vector."""
        return self.space.views(self.vector)

    @overload
    def apply_to(self, model: M, alpha: float = 1.0) -> M: ...
    @overload
    def apply_to(self, model: Mapping[str, Tensor], alpha: float = 1.0) -> dict[str, Tensor]: ...
    def apply_to(self, model: nn.Module | Mapping[str, Tensor], alpha: float = 1.0) -> nn.Module | dict[str, Tensor]:
        """Return a new model or state dict at θ + α·τ. Tensors that τ does not name are copied; one that the model lacks is an error."""
        if isinstance(model, nn.Module):
            moved = copy.deepcopy(model)
            moved.load_state_dict(self.apply_to(model.state_dict(), alpha), strict=True)
            return moved
        check_fits(self.space, _floats(model), "the model")
        state = {name: tensor.detach().clone() if isinstance(tensor, Tensor) else tensor for name, tensor in model.items()}
        for name, delta in self.state().items():
            edited = state[name] + alpha * delta.to(state[name].device)
            if name.endswith("running_var"):  # a batch norm's variance must stay >= 0 under subtraction
                edited = edited.clamp(min=0)
            state[name] = edited.to(state[name].dtype)
        return state

    def restricted(self, mask: MaskLike) -> "TaskVector":
        """Return m ⊙ τ; the mask must name every tensor."""
        masks = mask.as_dict()
        check_fits(self.space, masks, "the mask")
        active = self.space.flatten({name: masks[name].to(self.vector.device) for name in self.space.shapes})
        return TaskVector(self.space, torch.where(active.bool(), self.vector, 0.0), self.origins)

    def save(self, path: str | Path) -> None:
        """Write the file atomically."""
        vector = self.vector.cpu().contiguous()
        stored = (vector != 0) | torch.signbit(vector)  # −0.0 too, so that loading gives the same bits
        if sparse := int(stored.sum()) <= SPARSE * len(vector):
            tensors = {"bitmap": pack_bits(stored), "values": vector[stored]}
        else:
            tensors = self.space.views(vector)
        names = json.dumps(list(self.space.shapes.items()))
        metadata = {"format": FORMAT, "encoding": "sparse" if sparse else "dense", "space": names, "sha256": _digest(names, vector)}
        metadata |= {"origins": json.dumps(sorted(self.origins))} if self.origins else {}
        write_tensors(Path(path), tensors, metadata)

    @classmethod
    def load(cls, path: str | Path) -> "TaskVector":
        """Read a file that `save` wrote, bit by bit; a damaged or foreign file is an error."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            if metadata.get("format") != FORMAT:
                raise UserError(f"task vector: {path} is a safetensors file, but not a task vector that fedlens saved.")
            space = ParamSpace(dict(json.loads(metadata["space"])))
            vector = _unpacked(space, tensors) if metadata["encoding"] == "sparse" else space.flatten(tensors)
            if vector.shape != (space.size,) or metadata["sha256"] != _digest(metadata["space"], vector):
                raise ValueError("its content differs from what was written")
            return cls(space, vector, [str(origin) for origin in json.loads(metadata.get("origins", "[]"))])
        except FileNotFoundError:
            raise UserError(f"task vector: {path} does not exist.") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"task vector: {path} cannot be read: {first_line(error)}.") from None
        except (KeyError, ValueError, TypeError, RuntimeError, IndexError):
            raise UserError(f"task vector: {path} is damaged.") from None


def check_fits(space: ParamSpace, tensors: Mapping[str, Tensor], owner: str, exactly: bool = False) -> None:
    """Raise unless tensors hold every name of the space with its shape, and with `exactly` no other."""
    relevant = tensors if exactly else {name: tensors[name] for name in space.shapes if name in tensors}
    if problems := misfits(space.shapes, relevant):
        raise UserError(f"task vector: {owner} does not fit: {'; '.join(problems[:8])}.")


def check_weights(weights: Sequence[float] | Tensor | None, count: int) -> Tensor:
    """Return the weights of task vectors [count] in float64, by default ones; raise for a negative one or all zero."""
    try:
        checked = torch.ones(count, dtype=torch.float64) if weights is None else torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):  # texts, or lists of several lengths
        raise bad_value("weights", weights, f"{count} numbers, one per task vector") from None
    if checked.shape != (count,) or not bool((checked.isfinite() & (checked >= 0)).all()) or not bool(checked.any()):
        raise bad_value("weights", checked.tolist(), f"one finite number >= 0 for each of {count} task vectors, not all 0")
    return checked


def double(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, for sums over millions of entries; on the CPU if the device has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _difference(old: Tensor, new: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(old.dtype, new.dtype), torch.float32)  # half precision would round the difference
    old, new = old.to(wide), new.to(wide)
    return torch.where(new == old, 0.0, new - old)


def _floats(model: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    state = model.state_dict() if isinstance(model, nn.Module) else model
    tensors = {name: tensor.detach() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if name := next((name for name, tensor in tensors.items() if tensor.is_complex()), None):
        raise UserError(f"task vector: {name!r} is complex, expected floating point.")
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _unpacked(space: ParamSpace, tensors: Mapping[str, Tensor]) -> Tensor:
    bitmap, values = tensors["bitmap"], tensors["values"]
    if len(bitmap) != -(-space.size // 8):
        raise ValueError("the bitmap has another size")
    vector = torch.zeros(space.size, dtype=values.dtype)
    vector[unpack_bits(bitmap, space.size)] = values
    return vector


def _digest(names: str, vector: Tensor) -> str:
    content = hashlib.sha256(f"{names} {vector.dtype}".encode())
    content.update(vector.view(torch.uint8).numpy().data)
    return content.hexdigest()
