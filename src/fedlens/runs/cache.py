"""Work that runs share: features of the pretrained backbone, masks. Kept by content, so that a hit gives what would be computed.

Runs of one process share it in memory; processes share it on disk where FEDLENS_CACHE names a folder, as a study does for its runs.
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

T = TypeVar("T")
CACHE = "FEDLENS_CACHE"
KEPT = 8  # results in memory
READ = 2**30  # bytes of a split that are read to know it by its content
_known: OrderedDict[str, Any] = OrderedDict()


@dataclass(frozen=True)
class Form(Generic[T]):
    """How a result is written into a folder, and read from it."""

    write: Callable[[T, Path], None]
    read: Callable[[Path], T]


def remembered(key: str, make: Callable[[], T], form: Form[T] | None = None) -> T:
    """`make()`, or what it gave the last time for this key."""
    if key not in _known:
        folder = os.environ.get(CACHE)
        _known[key] = make() if folder is None or form is None else _on_disk(Path(folder) / key[:32], make, form)
        while len(_known) > KEPT:
            _known.popitem(last=False)
    _known.move_to_end(key)
    found: T = _known[key]
    return found


def _on_disk(folder: Path, make: Callable[[], T], form: Form[T]) -> T:
    """Read, or made and written: to a folder beside it that is then renamed, so that it is whole or not there."""
    if folder.is_dir():
        try:
            return form.read(folder)
        except (OSError, ValueError, KeyError, SafetensorError, UserError):
            shutil.rmtree(folder, ignore_errors=True)  # damaged
    made = make()
    with suppress(OSError, SafetensorError):  # no place to keep it, or another process was first
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
        try:
            form.write(made, part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)  # gone already where all went well
    return made


def digest(*parts: object) -> str:
    """Of tensors, mappings of tensors, and anything that prints itself; of where and by what it is computed too."""
    return content_digest(*parts, __version__, torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


def content_digest(*parts: object) -> str:
    """The same on every machine."""
    content = hashlib.sha256()
    for part in parts:
        for name, value in part.items() if isinstance(part, Mapping) else (("", part),):
            content.update(
                f"{name}={tuple(value.shape)}{value.dtype};".encode() if isinstance(value, Tensor) else f"{name}={value!r};".encode()
            )
            if isinstance(value, Tensor):
                content.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()


def split_digest(split: Split) -> str | None:
    """Of all its images and labels; None: too large to read for that."""
    return digest(split.labels, split.images) if split.nbytes <= READ else None
