"""The mask itself: one bit a coordinate of a model, its algebra, its file, and where in the network its active coordinates lie."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedlens.errors import UserError, bad_value, first_line
from fedlens.lens.space import ParamSpace

BITS = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)  # of a byte, the first coordinate highest
PAUSED = "_paused_by_a_mask"  # on a parameter that a mask, not the user, has frozen: the next mask may choose it again
KINDS = {  # of weights, by the end of their module's path: DINO's names, timm's and Hugging Face's
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


class Mask:
    """One bool a coordinate of a model, `vector` [P], and which coordinates were eligible, `eligible` [P]; on the CPU."""

    def __init__(self, masks: Mapping[str, Tensor], eligible: Mapping[str, Tensor] | None = None) -> None:
        self.space = ParamSpace({name: mask.shape for name, mask in masks.items()})
        self.vector = _flat(self.space, masks)
        self.eligible = torch.ones_like(self.vector) if eligible is None else _flat(self.space, eligible)
        if bool((self.vector & ~self.eligible).any()):
            raise UserError("mask: a coordinate is active that is not eligible")

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
        """What the mask costs on the wire, one bit a coordinate."""
        return -(-self.size // 8)

    def as_dict(self) -> dict[str, Tensor]:
        """name -> bool tensor like the parameter; views of `vector`."""
        return self.space.views(self.vector)

    def _other(self, other: "Mask") -> tuple[Tensor, Tensor]:
        """The other's vectors in this mask's order."""
        if self.space.shapes != other.space.shapes:
            raise UserError("mask: the two masks are of different models: their names or shapes differ")
        return self.space.flatten(other.as_dict()), self.space.flatten(other.space.views(other.eligible))

    def _with(self, vector: Tensor, eligible: Tensor) -> "Mask":
        return Mask(self.space.views(vector), self.space.views(eligible))

    def __and__(self, other: "Mask") -> "Mask":
        vector, eligible = self._other(other)
        return self._with(self.vector & vector, self.eligible | eligible)

    def __or__(self, other: "Mask") -> "Mask":
        vector, eligible = self._other(other)
        return self._with(self.vector | vector, self.eligible | eligible)

    def __invert__(self) -> "Mask":
        return self._with(self.eligible & ~self.vector, self.eligible)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask) or self.space.shapes != other.space.shapes:
            return False
        vector, eligible = self._other(other)
        return torch.equal(self.vector, vector) and torch.equal(self.eligible, eligible)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Mask({self.active:,} of {self.eligible_count:,} eligible coordinates, density {self.density:.4g}, {len(self.names)} tensors)"
        )

    def iou(self, other: "Mask") -> float:
        """Intersection over union of what is active; of two empty masks 1."""
        vector, _ = self._other(other)
        union = int((self.vector | vector).sum())
        return int((self.vector & vector).sum()) / union if union else 1.0

    def per_tensor(self) -> dict[str, tuple[int, int]]:
        """name -> (active, eligible)."""
        allowed = self.space.views(self.eligible)
        return {name: (int(mask.sum()), int(allowed[name].sum())) for name, mask in self.as_dict().items()}

    def composition(self) -> dict[str, dict[str, float]]:
        """Kind of weight -> active, eligible, and its share of all that is active."""
        table: dict[str, dict[str, float]] = {kind: {"active": 0, "eligible": 0, "share": 0} for kind in KINDS}
        masks, allowed, total = self.as_dict(), self.space.views(self.eligible), max(1, self.active)
        for name in self.names:
            for kind, rows in parts(name, self.space.shapes[name]).items():
                table[kind]["active"] += int(masks[name][rows].sum())
                table[kind]["eligible"] += int(allowed[name][rows].sum())
        for row in table.values():
            row["share"] = row["active"] / total
        return table

    def by_layer(self) -> list[tuple[str, int, int]]:
        """(label, active, eligible) from the input to the output: embed, block 0, block 1, …, final norm, other."""
        found: dict[tuple[int, int, str], list[int]] = {}
        for name, (active, allowed) in self.per_tensor().items():
            row = found.setdefault(_layer(name), [0, 0])
            row[0], row[1] = row[0] + active, row[1] + allowed
        return [(place[2], active, allowed) for place, (active, allowed) in sorted(found.items())]

    def freeze(self, model: nn.Module) -> None:
        """No gradient for a tensor without active coordinates. A parameter that the mask does not name is an error, never trained."""
        params = dict(model.named_parameters())
        problems = [f"{name} is not named" for name in params if name not in self.space.shapes]
        problems += [f"{name} is no parameter" for name in self.names if name not in params]
        problems += [
            f"{n} is {list(s)}, needs {list(params[n].shape)}" for n, s in self.space.shapes.items() if n in params and params[n].shape != s
        ]
        if problems:
            raise UserError(f"mask: does not fit the model: {'; '.join(problems[:8])}")
        for name, mask in self.as_dict().items():
            if not bool(mask.any()):
                params[name].requires_grad_(False)
                setattr(params[name], PAUSED, True)

    def save(self, path: str | Path) -> None:
        """One safetensors file, 8 coordinates a byte, written whole or not at all."""
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        tensors = {"mask": pack_bits(self.vector), "eligible": pack_bits(self.eligible)}
        shapes = list(self.space.shapes.items())
        head = {"shapes": shapes, "sha256": _digest(shapes, tensors)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, {"fedlens.mask": json.dumps(head)})
            os.replace(part, path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise UserError(f"mask: {path} cannot be written ({first_line(error)[:120]})") from None

    @classmethod
    def load(cls, path: str | Path) -> "Mask":
        try:
            with safe_open(path, "pt") as file:
                head = json.loads((file.metadata() or {})["fedlens.mask"])
                tensors = {name: file.get_tensor(name) for name in ("mask", "eligible")}
            space = ParamSpace(dict(head["shapes"]))
            if head["sha256"] != _digest(head["shapes"], tensors) or any(bits.shape != (-(-space.size // 8),) for bits in tensors.values()):
                raise ValueError("its content is not what was written")
            return cls(*(space.views(unpack_bits(tensors[name], space.size)) for name in ("mask", "eligible")))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"mask: {path} cannot be read as a mask ({first_line(error)[:120]})") from None


def _flat(space: ParamSpace, masks: Mapping[str, Tensor]) -> Tensor:
    if not masks or {name: tuple(mask.shape) for name, mask in masks.items()} != space.shapes:
        raise UserError("mask: it names no tensor, or what is eligible has other names or shapes")
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise bad_value(f"mask of {name}", str(mask.dtype), "torch.bool")
    return space.flatten({name: mask.detach().cpu() for name, mask in masks.items()})


def pack_bits(vector: Tensor) -> Tensor:
    """[P] bool -> [⌈P/8⌉] uint8, the first coordinate in the highest bit."""
    bits = torch.cat([vector, vector.new_zeros(-len(vector) % 8)]).view(-1, 8)
    return (bits * BITS).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """The reverse of pack_bits."""
    return ((packed[:, None] & BITS) != 0).flatten()[:size]


def _digest(shapes: list[tuple[str, tuple[int, ...]]], tensors: Mapping[str, Tensor]) -> str:
    content = [json.dumps(shapes).encode(), *(tensors[name].numpy().tobytes() for name in sorted(tensors))]
    return hashlib.sha256(b"".join(content)).hexdigest()


def parts(name: str, shape: tuple[int, ...]) -> dict[str, slice | tuple[()]]:
    """Kind of weight -> which rows of the tensor: an attention's qkv is three kinds, everything else is one."""
    path, rows = name.rpartition(".")[0], shape[0] if shape else 1
    if own := re.search(r"(q|k|v)_proj_weight$", name):  # of torch's attention, as is in_proj
        path = own[0].removesuffix("_weight")
    if (path.endswith("qkv") or re.search(r"in_proj_(weight|bias)$", name)) and rows % 3 == 0:
        return {kind: slice(i * rows // 3, (i + 1) * rows // 3) for i, kind in enumerate(("query", "key", "value"))}
    return {next(kind for kind, pattern in KINDS.items() if re.search(pattern, path)): ()}


def _layer(name: str) -> tuple[int, int, str]:
    """(its place from input to output, the number of the block, its label)."""
    for pattern, label in LAYERS.items():
        if found := re.search(pattern, name):
            return (1, int(found[1]), f"block {found[1]}") if label == "block" else (0 if label == "embed" else 2, 0, label)
    return 3, 0, "other"
