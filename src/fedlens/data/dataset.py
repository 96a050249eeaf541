"""Labelled samples in three splits. A source reads the official training and test sets; validation is cut from training only.

A set below IN_MEMORY_BYTES is copied into memory; a larger one stays memory-mapped and its splits are indices into it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlens.errors import UserError, bad_value, first_line, unknown
from fedlens.registry import Registry
from fedlens.seeding import numpy_rng

IN_MEMORY_BYTES = 2 << 30  # 2 GiB: CIFAR (184 MB) is far below, ImageNet at 256 px (252 GB) far above
SAMPLED_IMAGES = 2048  # for unpublished mean and std: within about 0.005, and 256 px images take one second

Index: TypeAlias = npt.NDArray[np.int64]


class Split:
    """Samples with their labels. `gather` reads a batch, `inputs` all samples."""

    def __init__(self, images: Tensor, labels: Tensor, index: Tensor | None = None) -> None:
        """`index`: the rows of `images` that form the split, in its order; None: all rows. `labels` has one entry per row of the split."""
        self.stored = images  # images: uint8 [rows, channels, height, width]; may be a memory-mapped file
        self.labels = labels  # int64 [len(self)]
        self.index = index
        rows = len(images) if index is None else len(index)
        if rows != len(labels):
            raise ValueError(f"{rows} images but {len(labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self)} images of {'x'.join(map(str, self.stored.shape[1:]))}{'' if self.index is None else ', indexed'})"

    @property
    def nbytes(self) -> int:
        """The size of the split's inputs in memory."""
        return len(self) * self.stored[:1].numel() * self.stored.element_size()

    @property
    def inputs(self) -> Tensor:
        """All samples of the split [len(self), …], read into memory if the split is an index."""
        return self.stored if self.index is None else self.stored.index_select(0, self.index)

    images = inputs  # of an image set: uint8 [len(self), channels, height, width]

    def gather(self, idx: Tensor) -> Tensor:
        """Return the inputs at these positions of the split; only these rows are read from disk."""
        rows = idx if self.index is None else self.index[idx.to(self.index.device)]
        return self.stored.index_select(0, rows.to(self.stored.device))

    def subset(self, index: Tensor | Index) -> "Split":
        """Return the split at these positions: a copy if the set fits in memory, otherwise an index."""
        chosen = torch.as_tensor(index, dtype=torch.int64)
        labels = self.labels[chosen]
        if self.stored.numel() < IN_MEMORY_BYTES:
            return Split(self.gather(chosen), labels)
        return Split(self.stored, labels, chosen if self.index is None else self.index[chosen])


@dataclass
class Raw:
    """The official training and test sets, unmodified, as a source returns them."""

    train: Split
    test: Split
    class_names: list[str]
    mean: tuple[float, ...]  # per channel, for pixels in [0, 1]
    std: tuple[float, ...]


@dataclass
class Dataset:
    """A data set for training. `val` is cut from the official training set; `test` is the official test set."""

    train: Split
    val: Split
    test: Split
    num_classes: int
    class_names: list[str]
    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


Source: TypeAlias = Callable[[Path, bool], Raw]  # (root, download) -> Raw
SOURCES: Registry[Source] = Registry("source")  # the command line shows the docstrings


def default_root() -> Path:
    """Return $FEDLENS_DATA, or ~/.cache/fedlens/data."""
    return Path(os.environ.get("FEDLENS_DATA") or "~/.cache/fedlens/data").expanduser()


def load_dataset(
    name: str, root: str | os.PathLike[str] | None = None, *, val_fraction: float = 0.1, seed: int = 0, download: bool = False
) -> Dataset:
    """Return a data set by name, or `hf:NAME[:CONFIG]`, with a stratified validation split. Only `download=True` uses the network."""
    where = default_root() if root is None else Path(root).expanduser()
    if name.startswith("hf:"):
        from fedlens.data.huggingface import load_hf  # imported late: it imports this module

        raw = load_hf(name, where, download)
    elif name in SOURCES:
        raw = SOURCES[name](where, download)
    else:
        raise unknown("data.name", name, [*SOURCES, "hf:NAME[:CONFIG]"])
    train, val = stratified_split(raw.train.labels, val_fraction, seed)
    if not len(train) or (val_fraction > 0 and not len(val)):
        sizes = f"{len(train)} training and {len(val)} validation samples"
        raise bad_value("data.val_fraction", val_fraction, f"a fraction that leaves both splits samples, not {sizes}")
    return Dataset(
        train=raw.train.subset(train),
        val=raw.train.subset(val),
        test=raw.test.subset(torch.arange(len(raw.test))),  # copies a small test set into memory
        num_classes=len(raw.class_names),
        class_names=list(raw.class_names),
        name=name,
        mean=raw.mean,
        std=raw.std,
    )


def as_known_to(data: Dataset, class_names: Sequence[str], mean: Sequence[float], std: Sequence[float]) -> Dataset:
    """Return the same images with the class numbers and the normalisation of a federation; raise for a class that it lacks."""
    number = {name: i for i, name in enumerate(class_names)}
    if unknown_classes := [name for name in data.class_names if name not in number]:
        classes = ", ".join(map(repr, class_names[:20]))
        raise UserError(f"data.root: class {unknown_classes[0]!r} is not one of the federation's: {classes}. Rename or remove its folder.")
    if len(mean) != len(data.mean) or len(std) != len(data.std):
        raise UserError(f"data.root: images must have {len(mean)} channels, as in the federation, got {len(data.mean)}.")
    numbers = torch.tensor([number[name] for name in data.class_names], dtype=torch.int64)
    train, val, test = (Split(split.stored, numbers[split.labels], split.index) for split in (data.train, data.val, data.test))
    return Dataset(train, val, test, len(number), list(class_names), data.name, tuple(mean), tuple(std))


def stratified_split(labels: Tensor | npt.NDArray[Any], fraction: float, seed: int) -> tuple[Index, Index]:
    """Return sorted (train, validation) indices: round(fraction·n) for validation, from each class its share to within one sample."""
    if not 0 <= fraction < 1:
        raise bad_value("data.val_fraction", fraction, "in [0, 1)")
    y = np.asarray(labels)
    rng = numpy_rng(seed, "validation")
    _, group, counts = np.unique(y, return_inverse=True, return_counts=True)
    quota = fraction * counts
    take = np.floor(quota).astype(np.int64)
    missing = round(fraction * len(y)) - int(take.sum())
    tie = rng.permutation(len(counts))  # the seed breaks ties between equal remainders
    take[np.lexsort((tie, take - quota))[:missing]] += 1  # largest remainders first
    chosen = np.zeros(len(y), dtype=bool)
    for c, k in enumerate(take):
        chosen[rng.permutation(np.flatnonzero(group == c))[:k]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std per channel, in [0, 1] units, over at most SAMPLED_IMAGES images at equal distances."""
    rows = torch.arange(0, len(images), max(1, -(-len(images) // SAMPLED_IMAGES)))
    channels = images.shape[1]
    counts = torch.zeros(channels, 256, dtype=torch.float64)  # histograms are exact for every order and chunk size
    for chunk in torch.split(rows, 128):
        pixels = images.index_select(0, chunk)
        for c in range(channels):
            counts[c] += torch.bincount(pixels[:, c].reshape(-1), minlength=256)
    value = torch.arange(256, dtype=torch.float64) / 255
    weight = counts / counts.sum(1, keepdim=True)
    mean = (weight * value).sum(1)
    std = (weight * (value - mean[:, None]) ** 2).sum(1).sqrt().clamp(min=1 / 255)  # avoids division by zero for a constant channel
    return tuple(mean.tolist()), tuple(std.tolist())


def map_file(path: Path, *shape: int) -> Tensor:
    """Map a file as a uint8 tensor of this shape, read on access. Writes to the tensor do not reach the file."""
    count = int(np.prod(shape))
    try:
        return torch.from_file(str(path), shared=False, size=count, dtype=torch.uint8).view(shape)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: cannot map {count} bytes ({first_line(error)}).") from error


def check_labels(labels: Tensor, classes: int, where: object) -> Tensor:
    """Return the labels as int64; raise with the name of their file if one is out of range."""
    labels = labels.to(torch.int64)
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise UserError(f"{where}: labels must be 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}.")
    return labels
