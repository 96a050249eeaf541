"""A cache by content for results that runs share: backbone features and masks. A hit returns exactly what would be computed.

Runs of one process share it in memory. Processes share it on disk if FEDLENS_CACHE names a folder, as a study does for its runs.
"""

import hashlib
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedlens import __version__
from fedlens.data.dataset import Split
from fedlens.errors import UserError
from fedlens.runs import digests

T = TypeVar("T")
CACHE = "FEDLENS_CACHE"
CAPACITY = 8  # results in memory
LARGEST_SPLIT = 2**30  # bytes: larger splits are not read to compute a digest
_memory: OrderedDict[str, Any] = OrderedDict()


@dataclass(frozen=True)
class Codec(Generic[T]):
    """How a result is written to a folder and read back."""

    write: Callable[[T, Path], None]
    read: Callable[[Path], T]


def cached(key: str, make: Callable[[], T], codec: Codec[T] | None = None) -> T:
    """Return the cached result for this key, or call `make` and cache its result; on disk only with a codec."""
    if key not in _memory:
        folder = os.environ.get(CACHE)
        _memory[key] = make() if folder is None or codec is None else _on_disk(Path(folder) / key[:32], make, codec)
        while len(_memory) > CAPACITY:
            _memory.popitem(last=False)
    _memory.move_to_end(key)
    result: T = _memory[key]
    return result


def _on_disk(folder: Path, make: Callable[[], T], codec: Codec[T]) -> T:
    """Read the result, or make it and write it to a temporary folder that is then renamed: it is complete or absent."""
    if folder.is_dir():
        try:
            if digests.read(folder) and not digests.damaged(folder):
                return codec.read(folder)
            raise ValueError("damaged, or of version 0.2")
        except (OSError, ValueError, KeyError, SafetensorError, UserError):
            shutil.rmtree(folder, ignore_errors=True)
    result = make()
    with suppress(OSError, SafetensorError):  # the folder is not writable, or another process was first
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
        try:
            codec.write(result, part)
            digests.write_all(part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)  # already renamed if all went well
    return result


def digest(*parts: object) -> str:
    """Return a digest of tensors, mappings of tensors and printable values, which also covers versions and device."""
    return content_digest(*parts, __version__, torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


def content_digest(*parts: object) -> str:
    """Return a digest of the values alone, the same on every machine."""
    content = hashlib.sha256()
    for part in parts:
        for name, value in part.items() if isinstance(part, Mapping) else (("", part),):
            text = f"{tuple(value.shape)}{value.dtype}" if isinstance(value, Tensor) else repr(value)
            content.update(f"{name}={text};".encode())
            if isinstance(value, Tensor):
                content.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()


def split_digest(split: Split) -> str | None:
    """Return a digest of all inputs and labels, or None if the split is too large to read for that."""
    return digest(split.labels, split.inputs) if split.nbytes <= LARGEST_SPLIT else None
