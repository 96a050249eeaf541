"""Image folders, decoded once into a file of raw bytes and memory-mapped from there: a set larger than memory streams from disk."""

import functools
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from rich.progress import MofNCompleteColumn
from torch import Tensor

from fedlens.data.dataset import Raw, Split, channel_statistics, default_root, map_file, source
from fedlens.data.download import disk_error, log, progress_bar
from fedlens.errors import UserError, first_line

SIZE = 256  # px: what a 224 px crop is usually taken from
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"}
FORMATS = ["PNG", "JPEG", "WEBP", "BMP", "PPM", "GIF", "TIFF"]  # no format that calls a program, as EPS does
FORMAT_VERSION = 3  # of the cache: raise it when decoding changes

Item: TypeAlias = tuple[Path | bytes, str]  # an image, as a file or its contents, and what to call it in an error
T = TypeVar("T")


@source("folder")
def folder(root: Path, download: bool) -> Raw:
    """Your own images: data.root/{train,test}/CLASS/*.png (jpg, webp, bmp, ppm, gif, tif), brought to 256 px at most."""
    return load_folder(root)


def load_folder(root: Path, size: int | None = None, *, alone: bool = False) -> Raw:
    """Images of root/{train,test or val}/CLASS, their shorter side resized to `size` and the centre cropped.

    `alone`: those of root/train only; the test set is empty.
    `size` None: SIZE, or the median shorter side of the training images where that is smaller: images are not blown up.
    """
    held_out = "test" if (root / "test").is_dir() or not (root / "val").is_dir() else "val"
    parts = {part: _list(root / part) for part in (("train",) if alone else ("train", held_out))}
    names = {part: sorted({path.parent.name for path in files}) for part, files in parts.items()}
    if not alone and (differing := sorted(set(names["train"]) ^ set(names[held_out]))):
        shown = ", ".join(differing[:5]) + (", …" if len(differing) > 5 else "")
        raise UserError(f"{root}: train/ and {held_out}/ have different classes: {shown} in one of them only (data.root)")
    if size is None:
        size = natural_size([(path, str(path)) for path in parts["train"]])
    number = {name: i for i, name in enumerate(names["train"])}
    cache = root / ".fedlens-cache"
    if not os.access(root, os.W_OK):  # a read-only data set
        cache = default_root() / "folder" / hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    splits = []
    for part, files in parts.items():
        stats = [(path, _stat(path)) for path in files]
        prints = [[path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        images = cached_images(cache, part, prints, ((path, str(path)) for path in files), len(files), size)
        splits.append(Split(images, torch.tensor([number[path.parent.name] for path in files])))
    if alone:
        splits.append(splits[0].subset(torch.zeros(0, dtype=torch.int64)))
    return Raw(splits[0], splits[1], names["train"], *channel_statistics(splits[0].stored))


def _list(part: Path) -> list[Path]:
    """The images of part/CLASS/, sorted by class and name."""
    if not part.is_dir():
        raise UserError(f"{part}: no such folder; data.root must hold train/CLASS/ and test/CLASS/ with images in them")
    classes = sorted(d for d in part.iterdir() if d.is_dir() and not d.name.startswith("."))
    inside = {d: sorted(file for file in d.iterdir() if not file.name.startswith(".")) for d in classes}
    found = {d: [file for file in files if file.suffix.lower() in SUFFIXES] for d, files in inside.items()}
    if not any(found.values()):
        raise UserError(f"{part}: no images in {part.name}/CLASS/; read are {', '.join(sorted(SUFFIXES))}")
    if empty := next((d for d, files in found.items() if not files), None):
        raise UserError(f"{empty}: a class without images; read are {', '.join(sorted(SUFFIXES))}, directly in its folder (data.root)")
    if left := sum(map(len, inside.values())) - sum(map(len, found.values())):
        log.warning("%s: %d files and folders in its classes are no images and are left out", part, left)
    return [file for files in found.values() for file in files]


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:  # a link to what is no longer there
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def natural_size(items: list[Item]) -> int:
    """SIZE, or the median shorter side of at most 64 of the images where that is smaller."""
    sides = []
    for item in items[:: -(-len(items) // 64)]:
        with open_image(item) as image:
            sides.append(min(image.size))
    return min(SIZE, int(median(sides)))


def open_image(item: Item) -> Image.Image:
    """An image whose header is read and whose pixels are not yet."""
    data, name = item
    try:
        return Image.open(data if isinstance(data, Path) else io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # decoders fail in many ways
        raise UserError(f"{name}: not a readable image ({first_line(error)})") from error


def decode(item: Item, size: int) -> bytes:
    """RGB, the shorter side resized to `size` (bicubic), the centre cropped; as bytes [3, size, size]."""
    with open_image(item) as image:
        try:
            fitted = ImageOps.fit(_eight_bits(image).convert("RGB"), (size, size), Image.Resampling.BICUBIC)
        except Exception as error:
            raise UserError(f"{item[1]}: not a readable image ({first_line(error)})") from error
    return b"".join(channel.tobytes() for channel in fitted.split())


def _eight_bits(image: Image.Image) -> Image.Image:
    """Sixteen bits a pixel brought to eight: PIL would cut off all above 255, so that scans become white."""
    if image.mode == "F":
        raise ValueError("its pixels are real numbers, allowed are 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    pixels = np.asarray(image).astype(np.int64)
    if pixels.size and not 0 <= pixels.min() <= pixels.max() < 2**16:
        raise ValueError(f"its pixels go from {pixels.min()} to {pixels.max()}, allowed are 8 or 16 bits")
    if image.mode == "I" and pixels.size and pixels.max() < 2**8:  # 32 bits that hold eight
        return Image.fromarray(pixels.astype(np.uint8))
    if pixels.size and pixels.max() < 2**12:
        _tell_of_dark_images()
    return Image.fromarray(np.rint(pixels / 257).astype(np.uint8))


@functools.cache
def _tell_of_dark_images() -> None:
    """Once: a truly dark image cannot be told from one of 12 bits in 16."""
    log.warning(
        "there are images of 16 bits a pixel that use 12 of them at most: they are read as nearly black; if they are not, scale them to 16 bits or 8"
    )


def cached_images(cache: Path, part: str, fingerprint: object, items: Iterable[Item], count: int, size: int) -> Tensor:
    """uint8 [count, 3, size, size], mapped from `cache`; decoded first unless a file with this fingerprint is there.

    The fingerprint is in the file's name and the file appears whole, so neither an interruption nor a second process can mix two sets.
    """
    index = json.dumps({"version": FORMAT_VERSION, "size": size, "count": count, "source": fingerprint})
    path = cache / f"{part}-{size}-{hashlib.sha256(index.encode()).hexdigest()[:16]}.u8"
    if not path.is_file():
        try:
            _write(path, index, items, count, size, part)
        except OSError as error:
            raise disk_error(error, path) from error
    if path.stat().st_size != count * 3 * size * size:
        raise UserError(f"{path}: {path.stat().st_size} bytes, {count * 3 * size * size} expected: damaged, delete it and run again")
    return map_file(path, count, 3, size, size)


def _write(path: Path, index: str, items: Iterable[Item], count: int, size: int, part: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    needed, free = count * 3 * size * size, shutil.disk_usage(path.parent).free
    if needed > free:
        raise UserError(f"{path}: needs {needed / 1e9:.1f} GB for the decoded images, {free / 1e9:.1f} GB are free")
    log.info("decoding %d images (%s) to %s", count, part, path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".decode-") as work, ThreadPoolExecutor() as pool:
        data = Path(work) / "images"
        with data.open("wb") as file, progress_bar(MofNCompleteColumn()) as bar:
            task = bar.add_task(f"decoding {part}", total=count)
            for chunk in _chunks(iter(items), 256):  # so that only these wait in memory
                for pixels in pool.map(lambda item: decode(item, size), chunk):
                    file.write(pixels)
                    bar.advance(task)
            file.flush()
            os.fsync(file.fileno())
        listing = Path(work) / "index"
        listing.write_text(index, encoding="utf-8")
        os.replace(listing, path.with_suffix(".json"))
        os.replace(data, path)
    for old in path.parent.glob(f"{part}-{size}-*"):  # of an earlier state of the set
        if old.stem != path.stem:
            old.unlink(missing_ok=True)


def _chunks(items: Iterator[T], length: int) -> Iterator[list[T]]:
    while chunk := list(islice(items, length)):
        yield chunk
