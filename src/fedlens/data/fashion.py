"""Fashion-MNIST (Xiao et al. 2017) from its idx files, and a sample of it in the package (its MIT licence is beside it)."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedlens.data.dataset import SOURCES, Raw, Split, check_labels
from fedlens.data.download import download as fetch
from fedlens.errors import UserError, first_line

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FILES = {  # name -> md5 of the .gz on the server
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist: the same contents, recompressed
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
MEAN, STD = (0.2860,), (0.3530,)


@SOURCES.register
def fashion_mnist(root: Path, download: bool) -> Raw:
    """Fashion-MNIST: 60,000 + 10,000 grey images of 28 px in 10 classes."""
    folders = [root / "fashion_mnist", root, DEBIAN]
    folder = next((f for f in folders if any(_find(f, name) for name in FILES)), None)
    if download and (folder is None or folder == folders[0]):  # also completes a partial download
        folder = folders[0]
        for name, md5 in FILES.items():
            if _find(folder, name) is None:
                fetch(f"{URL}{name}.gz", folder / f"{name}.gz", md5=md5)
    if folder is None:
        places = ", ".join(map(str, folders))
        raise UserError(f"fashion_mnist not found: no {next(iter(FILES))}[.gz] in {places}. Run: fedlens data prepare fashion_mnist")
    train, test = (_read_pair(folder, prefix) for prefix in ("train", "t10k"))
    return Raw(train, test, list(CLASSES), MEAN, STD)


@SOURCES.register
def fashion_mini(root: Path, download: bool) -> Raw:
    """Sample of Fashion-MNIST in the package: 6,000 + 1,000 images, no download."""
    with np.load(Path(__file__).parent / "assets" / "fashion_mnist_mini.npz", allow_pickle=False) as data:
        train, test = (Split(_grey(data[f"x_{part}"]), torch.from_numpy(data[f"y_{part}"]).long()) for part in ("train", "test"))
    return Raw(train, test, list(CLASSES), MEAN, STD)


def _grey(images: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Tensor:
    return torch.from_numpy(images)[:, None]  # [N, 1, 28, 28]


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_pair(folder: Path, prefix: str) -> Split:
    paths = []
    for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
        path = _find(folder, name)
        if path is None:
            raise UserError(f"{folder / name}[.gz]: missing. Run: fedlens data prepare fashion_mnist")
        paths.append(path)
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    if images.shape[1:] != (28, 28):
        raise UserError(f"{paths[0]}: images must be 28x28, got {images.shape[1]}x{images.shape[2]}.")
    if len(images) != len(labels):
        raise UserError(f"{paths[1]}: must have {len(images)} labels, one per image of {paths[0].name}, got {len(labels)}.")
    return Split(_grey(images), check_labels(torch.from_numpy(labels), len(CLASSES), paths[1]))


def read_idx(path: Path, dimensions: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read an idx file of bytes, gzipped or not: 0, 0, 8 (unsigned byte), number of dimensions, each as big-endian int32, the data."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}).") from error
    start = 4 + 4 * dimensions
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < start:
        raise UserError(f"{path}: must be an idx file of bytes with {dimensions} dimensions.")
    shape = [int(n) for n in np.frombuffer(data, ">u4", dimensions, 4)]
    expected = start + int(np.prod(shape, dtype=object))
    if len(data) != expected or not shape[0]:
        raise UserError(f"{path}: must have {expected} bytes by its header, got {len(data)}: truncated or damaged.")
    return np.frombuffer(bytearray(data[start:]), np.uint8).reshape(shape)
