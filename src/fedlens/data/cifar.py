"""CIFAR-100 and CIFAR-10 (Krizhevsky 2009) from the official binary files, or from the Python files without executing pickles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlens.data.dataset import SOURCES, Raw, Split, check_labels, map_file
from fedlens.data.download import download as fetch
from fedlens.data.download import extract_tar
from fedlens.data.pickles import read_pickle
from fedlens.errors import UserError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """File layout of one set. The Python archive has the binary files' names, without .bin."""

    url: str
    md5: str
    size: int  # bytes of the archive
    classes: int
    label_bytes: int  # before the pixels of a record; the last one is the label in use
    folder: str
    python_folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    python_names: str
    label_key: str
    names_key: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


LAYOUTS = {
    "cifar100": Layout(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        size=168_513_733,
        classes=100,
        label_bytes=2,  # coarse, fine
        folder="cifar-100-binary",
        python_folder="cifar-100-python",
        train=("train.bin",),
        test=("test.bin",),
        names="fine_label_names.txt",
        python_names="meta",
        label_key="fine_labels",
        names_key="fine_label_names",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
    "cifar10": Layout(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        size=170_052_171,
        classes=10,
        label_bytes=1,
        folder="cifar-10-batches-bin",
        python_folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test=("test_batch.bin",),
        names="batches.meta.txt",
        python_names="batches.meta",
        label_key="labels",
        names_key="label_names",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
}


@SOURCES.register
def cifar100(root: Path, download: bool) -> Raw:
    """CIFAR-100: 50,000 + 10,000 colour images of 32 px in 100 classes."""
    return _load("cifar100", root, download)


@SOURCES.register
def cifar10(root: Path, download: bool) -> Raw:
    """CIFAR-10: 50,000 + 10,000 colour images of 32 px in 10 classes."""
    return _load("cifar10", root, download)


def _load(name: str, root: Path, download: bool) -> Raw:
    layout = LAYOUTS[name]
    files = (*layout.train, *layout.test)
    folder = _first_with(files, root / layout.folder, root)
    if folder and not (download and any(not (folder / file).is_file() for file in (*files, layout.names))):
        return _read_binary(layout, folder)
    if folder := _first_with([_python(file) for file in files], root / layout.python_folder, root):
        return _read_python(layout, folder)
    if not download:
        folders = f"{layout.folder}/ or {layout.python_folder}/"
        raise UserError(f"{name} not found: no {folders} in {root} (data.root). Run: fedlens data prepare {name}")
    archive = fetch(layout.url, root / layout.url.rsplit("/", 1)[-1], md5=layout.md5, size=layout.size)
    extract_tar(archive, root / layout.folder, [f"{layout.folder}/{file}" for file in (*files, layout.names)])
    return _read_binary(layout, root / layout.folder)


def _first_with(files: Sequence[str], *folders: Path) -> Path | None:
    """Return the first folder with any of the files; the reader then names the missing ones."""
    return next((folder for folder in folders if any((folder / file).is_file() for file in files)), None)


def _python(file: str) -> str:
    return file.removesuffix(".bin")


def _require(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"{path}: missing, while other files of the set exist. Download the set again.")
    return path


def _raw(layout: Layout, names_file: Path, names: list[str], read: Callable[[str], Split]) -> Raw:
    """Return the set; `read` returns the samples of one file of the layout."""
    if len(names) != layout.classes:
        raise UserError(f"{names_file}: must have {layout.classes} class names, got {len(names)}.")
    train, test = ([read(file) for file in files] for files in (layout.train, layout.test))
    whole = Split(torch.cat([part.images for part in train]), torch.cat([part.labels for part in train]))
    return Raw(whole, test[0], names, layout.mean, layout.std)


def _read_binary(layout: Layout, folder: Path) -> Raw:
    names_file = _require(folder / layout.names)
    names = names_file.read_text(encoding="utf-8", errors="replace").split()
    return _raw(layout, names_file, names, lambda file: _read_records(layout, _require(folder / file)))


def _read_records(layout: Layout, path: Path) -> Split:
    record = layout.label_bytes + PIXELS
    size = path.stat().st_size
    if size == 0 or size % record:
        raise UserError(f"{path}: size must be a multiple of {record} bytes, got {size}: truncated, or another set.")
    data = map_file(path, size // record, record)
    labels = check_labels(data[:, layout.label_bytes - 1], layout.classes, path)
    return Split(data[:, layout.label_bytes :].view(-1, 3, 32, 32), labels)  # still a view of the file


def _read_python(layout: Layout, folder: Path) -> Raw:
    names_file = _require(folder / layout.python_names)
    (names,) = _fields(names_file, layout.names_key)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise UserError(f"{names_file}: {layout.names_key!r} must be a list of class names.")
    texts = [name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names]
    return _raw(layout, names_file, texts, lambda file: _read_batch(layout, _require(folder / _python(file))))


def _read_batch(layout: Layout, path: Path) -> Split:
    data, labels = _fields(path, "data", layout.label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS or not len(data):
        raise UserError(f"{path}: 'data' must be a table of bytes with {PIXELS} columns.")
    if not isinstance(labels, list) or len(labels) != len(data) or any(label not in range(layout.classes) for label in labels):
        raise UserError(f"{path}: {layout.label_key!r} must be a list of {len(data)} integers from 0 to {layout.classes - 1}.")
    return Split(torch.from_numpy(data).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64))


def _fields(path: Path, *keys: str) -> list[Any]:
    """Return entries of a pickled dictionary. Its keys are bytes if Python 2 wrote them, as in the official files, else text."""
    content = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in read_pickle(path).items()}
    if missing := [key for key in keys if key not in content]:
        raise UserError(f"{path}: must have an entry {missing[0]!r}.")
    return [content[key] for key in keys]
