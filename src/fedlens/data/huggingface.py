"""Image sets from the Hugging Face hub or a local path, through `datasets`: decoded once and mapped, like image folders."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.data.dataset import Raw, Split, channel_statistics, check_labels
from fedlens.data.folder import Item, cached_images, natural_size
from fedlens.errors import UserError, bad_value, first_line, optional

LABELS = ["fine_label", "label", "labels"]  # preferred names, the first that exists


def load_hf(name: str, root: Path, download: bool) -> Raw:
    """Return the set `hf:NAME[:CONFIG]`, where NAME is on the hub or a local path."""
    dataset, _, config = name.removeprefix("hf:").partition(":")
    if not dataset:
        raise bad_value("data.name", name, "hf:NAME or hf:NAME:CONFIG")
    splits = _open(name, dataset, config or None, download)
    held_out = next((s for s in ("test", "validation", "valid", "val") if s in splits), None)
    if "train" not in splits or held_out is None:
        raise UserError(f"{name}: must have a split train and a split test or validation; it has {', '.join(splits)}.")
    image, label = _columns(name, splits["train"].features)
    names = list(splits["train"].features[label].names)
    if getattr(splits[held_out].features.get(label), "names", None) != names or image not in splits[held_out].features:
        raise UserError(f"{name}: train and {held_out} must have the same columns and class names.")
    rows = splits["train"]
    size = natural_size(list(_items(name, rows.select(range(0, len(rows), max(1, -(-len(rows) // 64)))), image)))
    cache = root / "hf" / re.sub(r"[^\w.-]+", "_", name.removeprefix("hf:")).strip("_")
    train, test = (_split(name, part, splits[part], image, label, len(names), cache, size) for part in ("train", held_out))
    return Raw(train, test, names, *channel_statistics(train.stored))


def _open(name: str, dataset: str, config: str | None, download: bool) -> Any:
    datasets = optional("datasets", "hf", f"data.name: {name}")
    local = Path(dataset).expanduser()
    try:
        if (local / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(local))
        with nullcontext() if download else _offline():
            return datasets.load_dataset(str(local) if local.exists() else dataset, config)
    except Exception as error:  # the library raises errors of many types
        hint = "" if download or local.exists() else f" To download it, run: fedlens data prepare {name}"
        raise UserError(f"{name}: cannot be loaded ({type(error).__name__}: {first_line(error)}).{hint}") from error


@contextmanager
def _offline() -> Iterator[None]:
    """Set the libraries' offline switch, which they read from the environment only at import. Their cache still works."""
    import datasets
    import huggingface_hub

    switches = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in switches]
    for module in switches:
        setattr(module, "HF_HUB_OFFLINE", True)  # noqa: B010 (mypy)
    try:
        yield
    finally:
        for module, value in zip(switches, before, strict=True):
            setattr(module, "HF_HUB_OFFLINE", value)  # noqa: B010


def _columns(name: str, features: Any) -> tuple[str, str]:
    """Return the names of the image column and the label column."""
    import datasets

    images = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if not images or not labels:
        raise UserError(f"{name}: must have an Image and a ClassLabel column; it has {', '.join(features)}.")
    return images[0], next((column for column in LABELS if column in labels), labels[0])


def _items(name: str, rows: Any, image: str) -> Iterator[Item]:
    """Yield the encoded images; they are decoded later, in threads."""
    import datasets

    for i, row in enumerate(rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))):
        value = row[image] or {}
        data = value.get("bytes") or (Path(value["path"]) if value.get("path") else b"")
        yield data, f"{name}: image {i}"


def _split(name: str, part: str, rows: Any, image: str, label: str, classes: int, cache: Path, size: int) -> Split:
    if not len(rows):
        raise UserError(f"{name}: the split {part} is empty.")
    numbers: list[int | None] = list(rows.with_format(None)[label])
    labels: Tensor = check_labels(torch.tensor([-1 if n is None else n for n in numbers]), classes, f"{name}: {part}.{label}")
    fingerprint = [name, part, image, rows._fingerprint]
    return Split(cached_images(cache, part, fingerprint, _items(name, rows, image), len(rows), size), labels)
