"""Task vectors τ = θ − θ0: what was learned, as one flat vector that adds, scales and negates (Ilharco et al. 2023).

On disk a task vector is a safetensors file: dense as one tensor a name, sparse (at most a quarter non-zero) as a bitmap and its values.
"""

import copy
import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedlens.errors import UserError, bad_value, first_line
from fedlens.lens.mask import pack_bits, unpack_bits
from fedlens.lens.space import ParamSpace

FORMAT = "fedlens.task_vector.v1"
SPARSE = 0.25  # the density up to which a bitmap and values are stored
M = TypeVar("M", bound=nn.Module)


class HasMask(Protocol):
    """What `restricted` needs of a mask."""

    def as_dict(self) -> Mapping[str, Tensor]: ...


class TaskVector:
    """τ as `vector` [P] over `space`. Operations return new ones; two of them must share names and shapes, not devices.

    `origins`: what it was learned from, in the words of whoever made it. They stay with it through the algebra and in its file; equality ignores them.
    """

    __array_ufunc__ = None  # a numpy scalar on the left leaves the product to us
    __hash__ = None  # type: ignore[assignment]  # compared by value, and the vector can change

    def __init__(self, space: ParamSpace, vector: Tensor, origins: Collection[str] = ()) -> None:
        size = sum(space.sizes)  # whole tensors, also where the space is a masked one
        if vector.shape != (size,) or not vector.is_floating_point():
            raise UserError(f"task vector: {vector.dtype} {tuple(vector.shape)} given, allowed is a floating-point vector of {size}")
        self.space, self.vector, self.origins = space, vector.detach(), frozenset(origins)

    @classmethod
    def between(cls, before: nn.Module | Mapping[str, Tensor], after: nn.Module | Mapping[str, Tensor]) -> "TaskVector":
        """after − before, over every floating-point tensor, in float32 at least; integer buffers (a count of batches) are no direction and are left
        out. What is the same in both is 0, the −inf of an attention's mask among it."""
        old, new = _floats(before), _floats(after)
        if not old:
            raise UserError("task vector: the first model has no floating-point tensors")
        space = ParamSpace({name: tensor.shape for name, tensor in old.items()})
        check_fits(space, new, "the second model", exactly=True)
        return cls(space, space.flatten({name: _difference(tensor, new[name].to(tensor.device)) for name, tensor in old.items()}))

    # --- the algebra

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
        return TaskVector(
            self.space, (self.vector * float(scalar)).add_(0.0), self.origins
        )  # + 0.0 turns −0.0 into 0.0: sparse stays sparse on disk

    __rmul__ = __mul__

    def __truediv__(self, scalar: float) -> "TaskVector":
        if not isinstance(scalar, Real):
            return NotImplemented
        if scalar == 0:
            raise bad_value("task vector: divisor", scalar, "any number but 0")
        return TaskVector(self.space, (self.vector / float(scalar)).add_(0.0), self.origins)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TaskVector):
            return NotImplemented
        if self.space.shapes != other.space.shapes or self.vector.dtype != other.vector.dtype:
            return False
        return torch.equal(self.vector, self.aligned(other))

    def __repr__(self) -> str:
        return f"TaskVector({len(self.space.shapes)} tensors, {len(self.vector):,} entries, density {self.density:.3g}, norm {self.norm():.4g})"

    def aligned(self, other: "TaskVector") -> Tensor:
        """The other's vector in this one's order of names and on its device."""
        check_fits(self.space, other.state(), "the other task vector", exactly=True)
        same_order = list(self.space.shapes) == list(other.space.shapes)
        return (other.vector if same_order else self.space.flatten(other.state())).to(self.vector.device)

    # --- geometry

    def dot(self, other: "TaskVector") -> float:
        """⟨τ, τ'⟩, accumulated in float64."""
        return float(double(self.vector) @ double(self.aligned(other)))

    def norm(self) -> float:
        return math.sqrt(self.dot(self))

    def cosine(self, other: "TaskVector") -> float:
        """In [−1, 1]; a zero vector has no direction and gives 0."""
        norms = self.norm() * other.norm()
        return max(-1.0, min(1.0, self.dot(other) / norms)) if norms else 0.0

    @property
    def density(self) -> float:
        """The fraction of entries that are not zero."""
        return int(torch.count_nonzero(self.vector)) / max(len(self.vector), 1)

    # --- use

    def state(self) -> dict[str, Tensor]:
        """name -> tensor, views of the vector."""
        return self.space.views(self.vector)

    @overload
    def apply_to(self, model: M, alpha: float = 1.0) -> M: ...
    @overload
    def apply_to(self, model: Mapping[str, Tensor], alpha: float = 1.0) -> dict[str, Tensor]: ...
    def apply_to(self, model: nn.Module | Mapping[str, Tensor], alpha: float = 1.0) -> nn.Module | dict[str, Tensor]:
        """A new model or state dict at θ + α·τ. What τ does not name stays; a name or shape that the model lacks is an error."""
        if isinstance(model, nn.Module):
            moved = copy.deepcopy(model)
            moved.load_state_dict(self.apply_to(model.state_dict(), alpha), strict=True)
            return moved
        check_fits(self.space, _floats(model), "the model")
        state = {name: tensor.detach().clone() if isinstance(tensor, Tensor) else tensor for name, tensor in model.items()}
        for name, delta in self.state().items():
            moved_to = state[name] + alpha * delta.to(state[name].device)
            if name.endswith("running_var"):  # of a batch norm: what is subtracted from a variance leaves one
                moved_to = moved_to.clamp(min=0)
            state[name] = moved_to.to(state[name].dtype)
        return state

    def restricted(self, mask: HasMask) -> "TaskVector":
        """m ⊙ τ. A tensor that the mask does not name is an error, as everywhere."""
        found = mask.as_dict()
        check_fits(self.space, found, "the mask")
        kept = self.space.flatten({name: found[name].to(self.vector.device) for name in self.space.shapes})
        return TaskVector(self.space, torch.where(kept.bool(), self.vector, 0.0), self.origins)

    # --- the file

    def save(self, path: str | Path) -> None:
        """Written beside and renamed, so the file is whole or not there."""
        path, vector = Path(path), self.vector.cpu().contiguous()
        stored = (vector != 0) | torch.signbit(vector)  # −0.0 too: loading gives the same bits
        if sparse := int(stored.sum()) <= SPARSE * len(vector):
            tensors = {"bitmap": pack_bits(stored), "values": vector[stored]}
        else:
            tensors = self.space.views(vector)
        names = json.dumps(list(self.space.shapes.items()))
        metadata = {"format": FORMAT, "encoding": "sparse" if sparse else "dense", "space": names, "sha256": _digest(names, vector)}
        metadata |= {"origins": json.dumps(sorted(self.origins))} if self.origins else {}
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, metadata)
            os.replace(part, path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                part.unlink()
            raise UserError(f"task vector: {path} cannot be written: {first_line(error)}") from None

    @classmethod
    def load(cls, path: str | Path) -> "TaskVector":
        """What `save` wrote, to the bit; a damaged or foreign file is an error."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise UserError(f"task vector: {path} is a safetensors file, but not a task vector that fedlens saved")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            space = ParamSpace(dict(json.loads(metadata["space"])))
            vector = _unpacked(space, tensors) if metadata["encoding"] == "sparse" else space.flatten(tensors)
            intact = vector.shape == (space.size,) and metadata["sha256"] == _digest(metadata["space"], vector)
            origins = [str(origin) for origin in json.loads(metadata.get("origins", "[]"))]
        except FileNotFoundError:
            raise UserError(f"task vector: {path} does not exist") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"task vector: {path} cannot be read: {first_line(error)}") from None
        except (KeyError, ValueError, TypeError, RuntimeError, IndexError):
            intact = False
        if not intact:
            raise UserError(f"task vector: {path} is damaged")
        return cls(space, vector, origins)


def check_fits(space: ParamSpace, tensors: Mapping[str, Tensor], owner: str, exactly: bool = False) -> None:
    """Every name of the space with its shape; `exactly`: and no other name. The first that does not fit is named."""
    for name, shape in space.shapes.items():
        if name not in tensors:
            raise UserError(f"task vector: {owner} has no {name!r}")
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"task vector: {name!r} has shape {tuple(tensors[name].shape)} in {owner}, allowed is {shape}")
    if exactly and (extra := next((name for name in tensors if name not in space.shapes), None)):
        raise UserError(f"task vector: {owner} has {extra!r}, which the first lacks")


def double(tensor: Tensor) -> Tensor:
    """float64, for sums over millions of entries; on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _difference(old: Tensor, new: Tensor) -> Tensor:
    """new − old; the difference of two halves is not a half."""
    wide = torch.promote_types(torch.promote_types(old.dtype, new.dtype), torch.float32)
    old, new = old.to(wide), new.to(wide)
    return torch.where(new == old, 0.0, new - old)


def _floats(model: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    found = model.state_dict() if isinstance(model, nn.Module) else model
    tensors = {name: tensor.detach() for name, tensor in found.items() if isinstance(tensor, Tensor)}
    if strange := next((name for name, tensor in tensors.items() if tensor.is_complex()), None):
        raise UserError(f"task vector: {strange!r} is complex, allowed is floating point")
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
