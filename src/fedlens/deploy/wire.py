"""What travels between server and sites: facts as JSON, tensors as safetensors bytes. Nothing that arrives is trusted, nothing is unpickled.

torch is imported where tensors are looked into: the process that Flower starts for every message hands parcels on unopened.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from safetensors import SafetensorError

from fedlens.errors import first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Expected = Mapping[str, tuple["torch.dtype", tuple[int, ...]]]
OPERATIONS = ("hello", "ridge", "sensitivity", "update", "fisher")  # what a server may ask of a site: functions in node.py
LIMIT = 2**20  # bytes of facts


def to_setting(text: str) -> str:
    """A text as a value in Flower's configuration, which has no way to say quotes: those and all rare letters as in an address (%27)."""
    return json.dumps(quote(text, safe=" /=.,:;@~+-_()[]{}"))


def from_setting(value: object) -> str:
    return unquote(str(value))


class Refused(Exception):
    """What arrived is not what was asked for; the message says why, in one line."""


class Failure(str):
    """Why there is no answer that can be used, in one line; `size`: bytes that came all the same."""

    size: int = 0

    @classmethod
    def of(cls, why: object, size: int = 0) -> "Failure":
        printable = "".join(letter if letter.isprintable() else " " for letter in str(why)[:2000])  # it goes to a terminal
        found = cls(" ".join(printable.split())[:300] or "no reason given")
        found.size = size
        return found


class Silence(Failure):
    """Nothing has come in time; it may yet."""


@dataclass(frozen=True)
class Place:
    """Which site this is. `own`: all its training data belongs to client `number`; else it holds the clients number, number + of, …"""

    number: int
    of: int
    own: bool = False
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parcel:
    """One message's content."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: bytes = b""

    @classmethod
    def of(cls, facts: Mapping[str, Any], tensors: "Mapping[str, Tensor] | None" = None) -> "Parcel":
        from safetensors.torch import save

        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or {}).items()}
        return cls(facts, save(kept) if kept else b"")

    @property
    def told(self) -> str:
        return json.dumps(self.facts, separators=(",", ":"))

    @property
    def size(self) -> int:
        """Bytes of its content, as they travel."""
        return len(self.tensors) + len(self.told.encode())

    @classmethod
    def read(cls, told: object, tensors: object) -> "Parcel":
        """A parcel from outside: facts must be a JSON object, tensors are looked into later, by `unpack`."""
        if not isinstance(told, str) or not isinstance(tensors, bytes):
            raise Refused("it is not facts and tensors")
        if len(told) > LIMIT:
            raise Refused(f"its facts have {len(told):,} characters, allowed are {LIMIT:,}")
        try:
            facts = json.loads(told)
        except (ValueError, RecursionError) as error:
            raise Refused(f"its facts are not JSON ({first_line(error)})") from None
        if not isinstance(facts, dict):
            raise Refused("its facts are not a JSON object")
        return cls(facts, tensors)

    def tensors_as_they_are(self) -> "dict[str, Tensor]":
        """Of a parcel that was made here."""
        from safetensors.torch import load

        return load(self.tensors)

    def unpack(self, expected: Expected) -> "dict[str, Tensor]":
        """Exactly these tensors, of these types and shapes; anything else is refused."""
        from safetensors.torch import load

        bound = sum(_bytes(dtype, shape) for dtype, shape in expected.values()) + 256 * (len(expected) + 1)
        if len(self.tensors) > bound:
            raise Refused(f"it has {len(self.tensors):,} bytes where {bound:,} are the most")
        if not expected:
            return {}
        try:
            found = load(self.tensors)
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise Refused(f"its tensors are not safetensors ({first_line(error)})") from None
        if set(found) != set(expected):
            held = ", ".join(sorted(ascii(name)[1:-1][:40] for name in list(found)[:20]))
            raise Refused(f"it holds {held or 'nothing'} where {', '.join(sorted(expected))} was asked for")
        for name, (dtype, shape) in expected.items():
            if found[name].dtype != dtype or tuple(found[name].shape) != shape:
                given = f"{str(found[name].dtype).removeprefix('torch.')} {list(found[name].shape)}"
                raise Refused(f"{name} is {given}, asked for was {str(dtype).removeprefix('torch.')} {list(shape)}")
        return found


def _bytes(dtype: "torch.dtype", shape: tuple[int, ...]) -> int:
    return prod(shape) * dtype.itemsize


def upper(symmetric: "Tensor") -> "Tensor":
    """[d, d] -> its upper triangle [d·(d+1)/2]: the rest is the same numbers."""
    import torch

    row, column = torch.triu_indices(len(symmetric), len(symmetric))
    return symmetric.cpu()[row, column]


def from_upper(values: "Tensor", size: int) -> "Tensor":
    import torch

    row, column = torch.triu_indices(size, size)
    whole = torch.zeros(size, size, dtype=values.dtype)
    whole[row, column] = values
    whole[column, row] = values
    return whole
