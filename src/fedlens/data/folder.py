"""Image folders, decoded once into a memory-mapped file of raw bytes: a set larger than memory streams from disk."""

import functools
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps
from rich.progress import MofNCompleteColumn
from torch import Tensor

from fedlens.data.dataset import SOURCES, Raw, Split, channel_statistics, default_root, map_file
from fedlens.data.download import disk_error, log, progress_bar
from fedlens.errors import UserError, first_line

SIZE = 256  # px: the usual source of a 224 px crop
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"}
FORMATS = ["PNG", "JPEG", "WEBP", "BMP", "PPM", "GIF", "TIFF"]  # no format that starts a program, as EPS does
FORMAT_VERSION = 3  # of the cache; increment it when decoding changes

Item: TypeAlias = tuple[Path | bytes, str]  # an image as file or contents, and its name for errors


@SOURCES.register
def folder(root: Path, download: bool) -> Raw:
    """Your own images: data.root/{train,test}/CLASS/*.png (jpg, webp, bmp, ppm, gif, tif), resized to at most 256 px."""
    return load_folder(root)


def load_folder(root: Path, size: int | None = None, *, alone: bool = False) -> Raw:
    """Return the images of root/{train,test or val}/CLASS, with the shorter side resized to `size` and the centre cropped.

    `size` None: SIZE, or the median shorter side of the training images if that is smaller, so that images are not enlarged.
    `alone`: read root/train only; the test set is empty.
    """
    held_out = "test" if (root / "test").is_dir() or not (root / "val").is_dir() else "val"
    parts = {part: _list(root / part) for part in (("train",) if alone else ("train", held_out))}
    names = {part: sorted({path.parent.name for path in files}) for part, files in parts.items()}
    if not alone and (differing := sorted(set(names["train"]) ^ set(names[held_out]))):
        shown = ", ".join(differing[:5]) + (", …" if len(differing) > 5 else "")
        raise UserError(f"data.root: train/ and {held_out}/ of {root} have different classes: {shown} in one of them only.")
    fingerprints = {part: [_fingerprint(path, root) for path in files] for part, files in parts.items()}
    if size is None:
        size = natural_size([(path, str(path)) for path in parts["train"]])
    number = {name: i for i, name in enumerate(names["train"])}
    cache = root / ".fedlens-cache"
    if not os.access(root, os.W_OK):  # a read-only data set
        cache = default_root() / "folder" / hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    splits = []
    for part, files in parts.items():
        images = cached_images(cache, part, fingerprints[part], ((path, str(path)) for path in files), len(files), size)
        splits.append(Split(images, torch.tensor([number[path.parent.name] for path in files])))
    if alone:
        splits.append(splits[0].subset(torch.zeros(0, dtype=torch.int64)))
    return Raw(splits[0], splits[1], names["train"], *channel_statistics(splits[0].stored))


def _list(part: Path) -> list[Path]:
    """Return the images of part/CLASS/, sorted by class and name."""
    if not part.is_dir():
        raise UserError(f"{part}: no such folder; data.root must contain train/CLASS/ and test/CLASS/ with images.")
    classes = sorted(d for d in part.iterdir() if d.is_dir() and not d.name.startswith("."))
    inside = {d: sorted(file for file in d.iterdir() if not file.name.startswith(".")) for d in classes}
    images = {d: [file for file in files if file.suffix.lower() in SUFFIXES] for d, files in inside.items()}
    formats = ", ".join(sorted(SUFFIXES))
    if not any(images.values()):
        raise UserError(f"{part}: no images in {part.name}/CLASS/; supported are {formats}.")
    if empty := next((d for d, files in images.items() if not files), None):
        raise UserError(f"{empty}: a class without images (data.root); add some directly in its folder ({formats}).")
    if skipped := sum(map(len, inside.values())) - sum(map(len, images.values())):
        log.warning("%s: skipping %d files and folders in its classes that are no images", part, skipped)
    return [file for files in images.values() for file in files]


def _fingerprint(path: Path, root: Path) -> list[str | int]:
    """Return what identifies a file of the set: its name, size and time of change."""
    try:
        status = path.stat()
    except OSError as error:  # a broken link
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    if not stat.S_ISREG(status.st_mode):  # a pipe would never end
        raise UserError(f"{path}: cannot be read (not a file).")
    return [path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns]


def natural_size(items: list[Item]) -> int:
    """Return SIZE, or the median shorter side of up to 64 of the images if that is smaller."""
    sides = []
    for item in items[:: -(-len(items) // 64)]:
        with open_image(item) as image:
            sides.append(min(image.size))
    return min(SIZE, int(median(sides)))


@contextmanager
def open_image(item: Item) -> Iterator[Image.Image]:
    """Open an image: its header is read, its pixels on access. An error names the image."""
    data, name = item
    try:
        with Image.open(data if isinstance(data, Path) else io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except Exception as error:  # decoders raise errors of many types
        raise UserError(f"{name}: not a readable image ({first_line(error)}).") from error


def decode(item: Item, size: int) -> bytes:
    """Return RGB bytes [3, size, size]: the shorter side resized (bicubic), the centre cropped."""
    with open_image(item) as image:
        fitted = ImageOps.fit(_eight_bits(image).convert("RGB"), (size, size), Image.Resampling.BICUBIC)
    return b"".join(channel.tobytes() for channel in fitted.split())


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16 bits per pixel to eight; PIL would clip values above 255, which turns scans white."""
    if image.mode == "F":
        raise ValueError("its pixels must have 8 or 16 bits, got real numbers")
    if not image.mode.startswith("I"):
        return image
    pixels = np.asarray(image).astype(np.int64)
    if not 0 <= pixels.min() <= pixels.max() < 2**16:
        raise ValueError(f"its pixels must have 8 or 16 bits, got {pixels.min()} to {pixels.max()}")
    if image.mode == "I" and pixels.max() < 2**8:  # 32 bits with 8-bit values
        return Image.fromarray(pixels.astype(np.uint8))
    if pixels.max() < 2**12:
        _warn_of_dark_images()
    return Image.fromarray(np.rint(pixels / 257).astype(np.uint8))


@functools.cache
def _warn_of_dark_images() -> None:
    """Warn once: a dark 16-bit image and a 12-bit image in 16 bits look alike."""
    log.warning("some 16-bit images use at most 12 bits and are read as nearly black; if that is wrong, scale them to 16 bits or 8")


def cached_images(cache: Path, part: str, fingerprint: object, items: Iterable[Item], count: int, size: int) -> Tensor:
    """Return uint8 [count, 3, size, size], mapped from `cache`; decode first unless a file with this fingerprint exists.

    The fingerprint is part of the file's name and the file is renamed when complete: an interruption or a second process is safe.
    """
    index = json.dumps({"version": FORMAT_VERSION, "size": size, "count": count, "source": fingerprint})
    path = cache / f"{part}-{size}-{hashlib.sha256(index.encode()).hexdigest()[:16]}.u8"
    if not path.is_file():
        try:
            _write(path, index, items, count, size, part)
        except OSError as error:
            raise disk_error(error, path) from error
    if path.stat().st_size != count * 3 * size * size:
        raise UserError(f"{path}: must have {count * 3 * size * size} bytes, got {path.stat().st_size}. Delete it and run again.")
    return map_file(path, count, 3, size, size)


def _write(path: Path, index: str, items: Iterable[Item], count: int, size: int, part: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    needed, free = count * 3 * size * size, shutil.disk_usage(path.parent).free
    if needed > free:
        raise UserError(f"{path}: decoded images need {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free.")
    log.info("decoding %d images (%s) to %s", count, part, path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".decode-") as work, ThreadPoolExecutor() as pool:
        data = Path(work) / "images"
        with data.open("wb") as file, progress_bar(MofNCompleteColumn()) as bar:
            task = bar.add_task(f"decoding {part}", total=count)
            images = iter(items)
            while chunk := list(islice(images, 256)):  # limits the images in memory
                for pixels in pool.map(lambda item: decode(item, size), chunk):
                    file.write(pixels)
                    bar.advance(task)
            file.flush()
            os.fsync(file.fileno())
        listing = Path(work) / "index"
        listing.write_text(index, encoding="utf-8")
        os.replace(listing, path.with_suffix(".json"))
        os.replace(data, path)
    for old in path.parent.glob(f"{part}-{size}-*"):  # from an earlier state of the set
        if old.stem != path.stem:
            old.unlink(missing_ok=True)
