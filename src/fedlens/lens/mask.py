"""Masks: one bit per coordinate of a model, their algebra, their file, and where in the network the active coordinates lie."""

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedlens.errors import UserError, bad_value, first_line
from fedlens.files import disk_errors, write_atomic
from fedlens.lens.space import ParamSpace, misfits

BITS = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)  # the first coordinate is the highest bit of a byte
PAUSED = "_paused_by_a_mask"  # marks a parameter frozen by a mask, not by the user: the next mask may choose it again
KINDS = {  # kind of weight -> end of the module's path, in DINO's, timm's and Hugging Face's names
    "query": r"(query|q_proj)$",
    "key": r"(key|k_proj)$",
    "value": r"(value|v_proj)$",
    "attention output": r"(attn\.proj|o_proj|out_proj|attention\.output\.dense)$",
    "mlp in": r"(fc1|intermediate\.dense)$",
    "mlp out": r"(fc2|output\.dense)$",
    "norm": r"(?i)(^|[._])(norm|layernorm|ln)[^.]*$",
    "patch embedding": r"patch_embed",
    "other": "",
}
LAYERS = {
    r"(?:^|\.)(?:blocks|layers?|h)\.(\d+)\.": "block",
    r"embed|cls_token": "embed",
    r"^(backbone\.)?(norm|layernorm|ln)[^.]*\.": "final norm",
}
Rows = slice | tuple[()]  # () selects all rows
K = TypeVar("K", bound=Hashable)


class MaskLike(Protocol):
    """An object that returns its masks by parameter name, as Mask does."""

    def as_dict(self) -> Mapping[str, Tensor]: ...


class Mask:
    """One bool per coordinate of a model, `vector` [P], and which coordinates were eligible, `eligible` [P]; on the CPU."""

    def __init__(self, masks: Mapping[str, Tensor], eligible: Mapping[str, Tensor] | None = None) -> None:
        self.space = ParamSpace({name: mask.shape for name, mask in masks.items()})
        self.vector = _flat(self.space, masks)
        self.eligible = torch.ones_like(self.vector) if eligible is None else _flat(self.space, eligible)
        if bool((self.vector & ~self.eligible).any()):
            raise UserError("mask: an active coordinate is not eligible.")

    @property
    def names(self) -> list[str]:
        return list(self.space.shapes)

    @property
    def size(self) -> int:
        return self.space.size

    @property
    def active(self) -> int:
        return int(self.vector.sum())

    @property
    def eligible_count(self) -> int:
        return int(self.eligible.sum())

    @property
    def density(self) -> float:
        """The fraction of the eligible coordinates that trains."""
        return self.active / max(1, self.eligible_count)

    @property
    def bitmap_bytes(self) -> int:
        """Bytes to send the mask at one bit per coordinate."""
        return -(-self.size // 8)

    def as_dict(self) -> dict[str, Tensor]:
        """Return name -> bool tensor like the parameter; views of `vector`."""
        return self.space.views(self.vector)

    def _aligned(self, other: "Mask") -> tuple[Tensor, Tensor]:
        """Return the other mask's `vector` and `eligible` in this mask's order."""
        if self.space.shapes != other.space.shapes:
            raise UserError("mask: the two masks belong to different models: their names or shapes differ.")
        return self.space.flatten(other.as_dict()), self.space.flatten(other.space.views(other.eligible))

    def _with(self, vector: Tensor, eligible: Tensor) -> "Mask":
        return Mask(self.space.views(vector), self.space.views(eligible))

    def __and__(self, other: "Mask") -> "Mask":
        vector, eligible = self._aligned(other)
        return self._with(self.vector & vector, self.eligible | eligible)

    def __or__(self, other: "Mask") -> "Mask":
        vector, eligible = self._aligned(other)
        return self._with(self.vector | vector, self.eligible | eligible)

    def __invert__(self) -> "Mask":
        return self._with(self.eligible & ~self.vector, self.eligible)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask) or self.space.shapes != other.space.shapes:
            return False
        vector, eligible = self._aligned(other)
        return torch.equal(self.vector, vector) and torch.equal(self.eligible, eligible)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Mask({self.active:,} of {self.eligible_count:,} eligible coordinates, density {self.density:.4g}, {len(self.names)} tensors)"
        )

    def iou(self, other: "Mask") -> float:
        """Return intersection over union of the active coordinates; 1 for two empty masks."""
        vector, _ = self._aligned(other)
        union = int((self.vector | vector).sum())
        return int((self.vector & vector).sum()) / union if union else 1.0

    def _count(self, groups: Callable[[str, tuple[int, ...]], Mapping[K, Rows]]) -> dict[K, tuple[int, int]]:
        """Return group -> (active, eligible); `groups` maps a tensor's name and shape to the rows of each group."""
        masks, eligible, counts = self.as_dict(), self.space.views(self.eligible), dict[K, tuple[int, int]]()
        for name, shape in self.space.shapes.items():
            for group, rows in groups(name, shape).items():
                active, total = counts.get(group, (0, 0))
                counts[group] = active + int(masks[name][rows].sum()), total + int(eligible[name][rows].sum())
        return counts

    def per_tensor(self) -> dict[str, tuple[int, int]]:
        """Return name -> (active, eligible)."""
        return self._count(lambda name, _: {name: ()})

    def composition(self) -> dict[str, dict[str, float]]:
        """Return kind of weight -> active and eligible coordinates, and its share of all active ones."""
        total, counts = max(1, self.active), dict.fromkeys(KINDS, (0, 0)) | self._count(parts)
        return {kind: {"active": active, "eligible": eligible, "share": active / total} for kind, (active, eligible) in counts.items()}

    def by_layer(self) -> list[tuple[str, int, int]]:
        """Return (label, active, eligible) from input to output: embed, block 0, block 1, …, final norm, other."""
        counts = self._count(lambda name, _: {_layer(name): ()})
        return [(layer[2], active, eligible) for layer, (active, eligible) in sorted(counts.items())]

    def freeze(self, model: nn.Module) -> None:
        """Freeze every tensor without active coordinates. The mask must name exactly the model's parameters."""
        params = dict(model.named_parameters())
        if problems := misfits({name: param.shape for name, param in params.items()}, self.as_dict()):
            raise UserError(f"mask: does not fit the model: {'; '.join(problems[:8])}.")
        for name, mask in self.as_dict().items():
            if not bool(mask.any()):
                params[name].requires_grad_(False)
                setattr(params[name], PAUSED, True)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, 8 coordinates per byte, atomically."""
        tensors = {"mask": pack_bits(self.vector), "eligible": pack_bits(self.eligible)}
        shapes = list(self.space.shapes.items())
        metadata = {"shapes": shapes, "sha256": _digest(shapes, tensors)}
        write_tensors(Path(path), tensors, {"fedlens.mask": json.dumps(metadata)})

    @classmethod
    def load(cls, path: str | Path) -> "Mask":
        """Read a file that `save` wrote; a damaged one is an error."""
        try:
            with safe_open(path, "pt") as file:
                metadata = json.loads((file.metadata() or {})["fedlens.mask"])
                tensors = {name: file.get_tensor(name) for name in ("mask", "eligible")}
            space = ParamSpace(dict(metadata["shapes"]))
            sizes_fit = all(bits.shape == (-(-space.size // 8),) for bits in tensors.values())
            if not sizes_fit or metadata["sha256"] != _digest(metadata["shapes"], tensors):
                raise ValueError("its content differs from what was written")
            return cls(*(space.views(unpack_bits(tensors[name], space.size)) for name in ("mask", "eligible")))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"mask: {path} cannot be read as a mask ({first_line(error)[:120]}).") from None


def _flat(space: ParamSpace, masks: Mapping[str, Tensor]) -> Tensor:
    if not masks or {name: tuple(mask.shape) for name, mask in masks.items()} != space.shapes:
        raise UserError("mask: it names no tensor, or `eligible` has other names or shapes.")
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise bad_value(f"mask of {name}", str(mask.dtype), "torch.bool")
    return space.flatten({name: mask.detach().cpu() for name, mask in masks.items()})


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically, in a folder that is made if necessary."""
    with disk_errors(path, SafetensorError, run=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda part: save_file(tensors, part, metadata))


def pack_bits(vector: Tensor) -> Tensor:
    """Return [⌈P/8⌉] uint8 of [P] bool, the first coordinate in the highest bit."""
    bits = torch.cat([vector, vector.new_zeros(-len(vector) % 8)]).view(-1, 8)
    return (bits * BITS).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """Return [size] bool of packed bits, the inverse of pack_bits."""
    return ((packed[:, None] & BITS) != 0).flatten()[:size]


def _digest(shapes: list[tuple[str, tuple[int, ...]]], tensors: Mapping[str, Tensor]) -> str:
    content = [json.dumps(shapes).encode(), *(tensors[name].numpy().tobytes() for name in sorted(tensors))]
    return hashlib.sha256(b"".join(content)).hexdigest()


def parts(name: str, shape: tuple[int, ...]) -> dict[str, Rows]:
    """Return kind of weight -> rows of the tensor: three kinds for an attention's qkv, one for everything else."""
    path, rows = name.rpartition(".")[0], shape[0] if shape else 1
    if own := re.search(r"(q|k|v)_proj_weight$", name):  # torch's attention, like in_proj below
        path = own[0].removesuffix("_weight")
    if (path.endswith("qkv") or re.search(r"in_proj_(weight|bias)$", name)) and rows % 3 == 0:
        return {kind: slice(i * rows // 3, (i + 1) * rows // 3) for i, kind in enumerate(("query", "key", "value"))}
    return {next(kind for kind, pattern in KINDS.items() if re.search(pattern, path)): ()}


def _layer(name: str) -> tuple[int, int, str]:
    """Return (position from input to output, block number, label)."""
    for pattern, label in LAYERS.items():
        if match := re.search(pattern, name):
            return (1, int(match[1]), f"block {match[1]}") if label == "block" else (0 if label == "embed" else 2, 0, label)
    return 3, 0, "other"
