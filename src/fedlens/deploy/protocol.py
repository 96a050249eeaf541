"""Messages between server and sites: metadata as JSON, tensors as safetensors bytes. Nothing received is trusted or unpickled.

torch is imported only where tensors are read: the process that Flower starts per message forwards payloads unopened.
"""

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from safetensors import SafetensorError

from fedlens.errors import UserError, first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Expected = Mapping[str, tuple["torch.dtype", tuple[int, ...]]]  # name -> dtype and shape
OPERATIONS = ("hello", "ridge", "sensitivity", "update", "fisher")  # the requests that a site answers: functions in site.py
MAX_METADATA = 2**20  # characters
SITE_KEYS = ("device", "data.name", "data.root", "model.weights", "train.compile", "train.precision")  # set by the site, not by the server
State = MutableMapping[str, bytes]  # what a site remembers between messages


def to_setting(text: str) -> str:
    """Quote a text for Flower's configuration, which cannot escape quotes: quotes and rare characters become %XX as in a URL."""
    return json.dumps(quote(text, safe=" /=.,:;@~+-_()[]{}"))


def from_setting(value: object) -> str:
    """Return the text that `to_setting` quoted."""
    return unquote(str(value))


def check_site_overrides(overrides: Sequence[str]) -> None:
    """Raise for an override of a key that only the server may set."""
    for override in overrides:
        if (key := override.partition("=")[0]) not in SITE_KEYS:
            raise UserError(f"federate client: a site may set {', '.join(SITE_KEYS)}, got {key!r}; the server sets all other keys.")


class Rejected(Exception):
    """A received message without the expected form; the text says why, in one line."""


class Failure(str):
    """The reason why a site has no usable reply, in one line. `size`: bytes received all the same."""

    size: int = 0

    @classmethod
    def of(cls, reason: object, size: int = 0) -> "Failure":
        """Return the reason as one printable line of at most 300 characters: it goes to a terminal."""
        printable = "".join(letter if letter.isprintable() else " " for letter in str(reason)[:2000])
        failure = cls(" ".join(printable.split())[:300] or "no reason given")
        failure.size = size
        return failure


class NoReply(Failure):
    """No reply before the deadline; it may still come."""


@dataclass(frozen=True)
class SiteOptions:
    """The place of a site among all sites. With `own_data` its training data is client `number`; otherwise it holds clients number, number + sites, …"""

    number: int
    sites: int
    own_data: bool = False
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Payload:
    """The content of one message."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: bytes = b""

    def __getitem__(self, name: str) -> Any:
        """Return a field of the metadata; raise Rejected if it is missing."""
        if name not in self.metadata:
            raise Rejected(f"the message lacks {name!r}")
        return self.metadata[name]

    @classmethod
    def pack(cls, metadata: Mapping[str, Any], tensors: "Mapping[str, Tensor] | None" = None) -> "Payload":
        """Return a payload with these tensors serialised."""
        from safetensors.torch import save

        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or {}).items()}
        return cls(metadata, save(on_cpu) if on_cpu else b"")

    @classmethod
    def parse(cls, metadata: object, tensors: object) -> "Payload":
        """Return a received payload. Its metadata must be a JSON object; `unpack` checks the tensors later."""
        if not isinstance(metadata, str) or not isinstance(tensors, bytes):
            raise Rejected("the message is not metadata and tensors")
        if len(metadata) > MAX_METADATA:
            raise Rejected(f"the metadata has {len(metadata):,} characters, at most {MAX_METADATA:,} are accepted")
        try:
            parsed = json.loads(metadata)
        except (ValueError, RecursionError) as error:
            raise Rejected(f"the metadata is not JSON ({first_line(error)})") from None
        if not isinstance(parsed, dict):
            raise Rejected("the metadata is not a JSON object")
        return cls(parsed, tensors)

    @property
    def metadata_json(self) -> str:
        return json.dumps(self.metadata, separators=(",", ":"))

    @property
    def size(self) -> int:
        """Return the size of the content on the wire, in bytes."""
        return len(self.tensors) + len(self.metadata_json.encode())

    def load(self) -> "dict[str, Tensor]":
        """Return the tensors of a payload made by this process, unchecked."""
        from safetensors.torch import load

        return load(self.tensors)

    def unpack(self, expected: Expected) -> "dict[str, Tensor]":
        """Return exactly these tensors, of these dtypes and shapes; raise Rejected for anything else."""
        limit = sum(prod(shape) * dtype.itemsize for dtype, shape in expected.values()) + 256 * (len(expected) + 1)
        if len(self.tensors) > limit:
            raise Rejected(f"the message has {len(self.tensors):,} bytes of tensors, at most {limit:,} were expected")
        if not expected:
            return {}
        try:
            tensors = self.load()
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise Rejected(f"the tensors are not safetensors ({first_line(error)})") from None
        if set(tensors) != set(expected):
            names = ", ".join(sorted(ascii(name)[1:-1][:40] for name in list(tensors)[:20]))
            raise Rejected(f"the message holds {names or 'no tensors'}, expected {', '.join(sorted(expected))}")
        for name, (dtype, shape) in expected.items():
            if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shape:
                raise Rejected(f"{name} is {_form(tensors[name].dtype, tensors[name].shape)}, expected {_form(dtype, shape)}")
        return tensors


def _form(dtype: "torch.dtype", shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
