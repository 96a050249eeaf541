"""Every source reads its real file format, refuses damaged files in one line, and keeps train, validation and test apart."""

import gzip
import hashlib
import os
import pickle
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedlens.data import SOURCES, Dataset, Split, cifar, dataset, fashion, load_dataset
from fedlens.data import folder as folder_module
from fedlens.data.dataset import channel_statistics, stratified_split
from fedlens.data.folder import load_folder
from fedlens.data.pickles import read_pickle
from fedlens.errors import UserError

torch.set_num_threads(1)
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


# The split --------------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=200), st.floats(0, 1, exclude_max=True), st.integers(0, 5))
def test_the_validation_split_is_stratified_complete_sorted_and_exact(labels: list[int], fraction: float, seed: int) -> None:
    y = torch.tensor(labels, dtype=torch.int64)
    train, val = stratified_split(y, fraction, seed)
    assert len(val) == round(fraction * len(y))
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(len(y)))
    assert np.all(np.diff(train) > 0) and np.all(np.diff(val) > 0)
    for c in set(labels):
        assert abs(int((y[val] == c).sum()) - fraction * labels.count(c)) < 1 + 1e-9
    again = stratified_split(y, fraction, seed)
    assert np.array_equal(train, again[0]) and np.array_equal(val, again[1])


def test_another_seed_gives_another_split_and_zero_gives_no_validation() -> None:
    y = np.arange(1000) % 10
    assert not np.array_equal(stratified_split(y, 0.1, 0)[1], stratified_split(y, 0.1, 1)[1])
    assert len(stratified_split(y, 0, 0)[1]) == 0


def test_classes_that_tie_for_a_validation_sample_are_drawn_by_seed_not_taken_in_order() -> None:
    y = np.repeat(np.arange(100), 5)
    assert y[stratified_split(y, 0.1, 0)[1]].max() > 49


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan")])
def test_a_fraction_outside_zero_to_one_names_the_field(fraction: float) -> None:
    with pytest.raises(UserError, match=r"data\.val_fraction"):
        load_dataset("fashion_mini", val_fraction=fraction)


def numbered(n: int) -> Split:
    return Split(torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 3, 2, 2).contiguous(), torch.arange(n))


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_subsets_of_subsets_read_the_same_in_memory_and_by_index(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(dataset, "IN_MEMORY_BYTES", limit)
    split = numbered(20).subset(np.arange(19, -1, -2)).subset(torch.tensor([0, 3, 5]))
    assert split.images[:, 0, 0, 0].tolist() == split.labels.tolist() == [19, 13, 9]
    assert split.gather(torch.tensor([2, 0]))[:, 0, 0, 0].tolist() == [9, 19]
    assert len(split) == 3 and split.nbytes == 36 and (split.index is None) == (limit > 0)


def test_images_and_labels_must_be_in_step() -> None:
    with pytest.raises(ValueError, match="3 images but 2 labels"):
        Split(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(2))


def test_channel_statistics_are_those_of_numpy() -> None:
    images = torch.randint(0, 256, (300, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = channel_statistics(images)
    x = images.numpy() / 255
    assert mean == pytest.approx(x.mean((0, 2, 3))) and std == pytest.approx(x.std((0, 2, 3)))
    assert channel_statistics(torch.zeros(2, 1, 3, 3, dtype=torch.uint8))[1][0] > 0


# Names ------------------------------------------------------------------------------------------------------------------------


def test_every_source_has_a_name_and_one_line_of_documentation() -> None:
    assert set(SOURCES) == {"cifar100", "cifar10", "fashion_mnist", "fashion_mini", "folder"}
    assert all(f.__doc__ and "\n" not in f.__doc__ for f in SOURCES.values())


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"data\.name.*'cifar100'\?"):
        load_dataset("cifar1000")


@pytest.mark.parametrize("name", ["cifar100", "cifar10", "fashion_mnist"])
def test_a_set_that_is_not_there_says_where_it_was_looked_for_and_what_to_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "no")
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "empty"))
    with pytest.raises(UserError) as caught:
        load_dataset(name)
    assert str(tmp_path / "empty") in str(caught.value) and f"fedlens data prepare {name}" in str(caught.value)


# CIFAR ------------------------------------------------------------------------------------------------------------------------


def cifar_arrays(name: str, seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.permutation(n).astype(np.uint8) % cifar.LAYOUTS[name].classes


def cifar_parts(name: str) -> list[tuple[str, str, np.ndarray, np.ndarray]]:
    """(binary file, python file, pixels, labels) of a tiny set."""
    layout = cifar.LAYOUTS[name]
    binary = (*layout.train, *layout.test)
    python = ("train", "test") if name == "cifar100" else (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    return [(b, p, *cifar_arrays(name, i, 200)) for i, (b, p) in enumerate(zip(binary, python, strict=True))]


def write_binary(name: str, folder: Path) -> Path:
    layout = cifar.LAYOUTS[name]
    folder.mkdir(parents=True)
    for file, _, pixels, labels in cifar_parts(name):
        head = np.repeat(labels[:, None], layout.label_bytes, axis=1)
        head[:, : layout.label_bytes - 1] = 19  # the coarse label
        np.concatenate([head, pixels], axis=1).tofile(folder / file)
    (folder / layout.names).write_text("".join(f"name_{i}\n" for i in range(layout.classes)) + "\n")
    return folder


def write_python(name: str, folder: Path, protocol: int = 2) -> Path:
    layout = cifar.LAYOUTS[name]
    folder.mkdir(parents=True)
    for _, file, pixels, labels in cifar_parts(name):
        batch = {b"data": pixels, layout.label_key.encode(): labels.tolist(), b"filenames": [b"a.png"]}
        (folder / file).write_bytes(pickle.dumps(batch, protocol))
    names = [f"name_{i}".encode() for i in range(layout.classes)]
    (folder / layout.python_names).write_bytes(pickle.dumps({layout.names_key.encode(): names}, protocol))
    return folder


def assert_is_tiny_cifar(data: Dataset, name: str) -> None:
    parts = cifar_parts(name)
    pixels = torch.from_numpy(np.concatenate([p for _, _, p, _ in parts[:-1]])).view(-1, 3, 32, 32)
    assert torch.equal(data.train.images, pixels) and data.train.images.dtype == torch.uint8
    assert torch.equal(data.test.images, torch.from_numpy(parts[-1][2]).view(-1, 3, 32, 32))
    assert data.train.labels.tolist() == np.concatenate([y for _, _, _, y in parts[:-1]]).tolist()
    assert data.test.labels.tolist() == parts[-1][3].tolist() and data.test.labels.dtype == torch.int64
    assert data.class_names == [f"name_{i}" for i in range(data.num_classes)] and data.num_classes == cifar.LAYOUTS[name].classes


@pytest.mark.parametrize("name", ["cifar100", "cifar10"])
@pytest.mark.parametrize("inside", [True, False])
def test_cifar_reads_the_same_from_binary_and_python_files_below_root_or_in_it(name: str, inside: bool, tmp_path: Path) -> None:
    layout = cifar.LAYOUTS[name]
    binary = write_binary(name, tmp_path / "b" / layout.folder)
    python = write_python(name, tmp_path / "p" / layout.python_folder)
    for folder in (binary, python):
        assert_is_tiny_cifar(load_dataset(name, folder if inside else folder.parent, val_fraction=0), name)


def test_validation_comes_from_training_and_the_test_set_has_no_influence_on_it(tmp_path: Path) -> None:
    folder = write_binary("cifar100", tmp_path / "cifar-100-binary")
    data = load_dataset("cifar100", tmp_path, val_fraction=0.2, seed=3)
    whole = {row.tobytes() for row in cifar_parts("cifar100")[0][2]}
    train, val = ({i.numpy().tobytes() for i in split.images} for split in (data.train, data.val))
    assert (len(train), len(val)) == (160, 40) and train | val == whole and not train & val
    (folder / "test.bin").write_bytes((folder / "test.bin").read_bytes()[: 3074 * 7])
    other = load_dataset("cifar100", tmp_path, val_fraction=0.2, seed=3)
    assert torch.equal(other.val.images, data.val.images) and torch.equal(other.train.labels, data.train.labels) and len(other.test) == 7


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("train.bin", lambda data: data[:-1], "must be a multiple of 3074 bytes"),
        ("train.bin", lambda data: b"", "must be a multiple of 3074 bytes"),
        ("test.bin", lambda data: b"\0\xc8" + data[2:], "labels must be 0 to 99, got 0 to 200"),
        ("fine_label_names.txt", lambda data: b"cat dog", "must have 100 class names, got 2"),
        ("test.bin", None, "missing"),
        ("fine_label_names.txt", None, "missing"),
    ],
)
def test_a_damaged_binary_cifar_is_one_line_that_names_the_file(file: str, damage, message: str, tmp_path: Path) -> None:
    path = write_binary("cifar100", tmp_path / "cifar-100-binary") / file
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(UserError, match=message) as caught:
        load_dataset("cifar100", tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "batch",
    [
        {b"data": np.zeros((4, 3071), np.uint8), b"fine_labels": [0] * 4},
        {b"data": np.zeros((4, 3072), np.int64), b"fine_labels": [0] * 4},
        {b"data": np.zeros((4, 3072), np.uint8), b"fine_labels": [0] * 3},
        {b"data": np.zeros((4, 3072), np.uint8), b"fine_labels": [0, 1, 2, 100]},
        {b"data": np.zeros((4, 3072), np.uint8), b"fine_labels": [0, -1, 2, 1]},
        {b"fine_labels": [0]},
        [1, 2],
    ],
)
def test_a_damaged_python_cifar_is_one_line_that_names_the_file(batch: object, tmp_path: Path) -> None:
    path = write_python("cifar100", tmp_path / "cifar-100-python") / "train"
    path.write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(UserError) as caught:
        load_dataset("cifar100", tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def serve_archive(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny set in an archive like the official one, at a file:// address that takes the official one's place."""
    layout = cifar.LAYOUTS[name]
    write_binary(name, tmp_path / "made" / layout.folder)
    archive = tmp_path / "server" / layout.url.rsplit("/", 1)[-1]
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "made" / layout.folder, layout.folder)
    data = archive.read_bytes()
    monkeypatch.setitem(cifar.LAYOUTS, name, replace(layout, url=archive.as_uri(), md5=hashlib.md5(data).hexdigest(), size=len(data)))
    return archive


@pytest.mark.parametrize("name", ["cifar100", "cifar10"])
def test_download_fetches_verifies_and_unpacks_and_then_nothing_more_is_fetched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = serve_archive(name, tmp_path, monkeypatch)
    root = tmp_path / "root"
    assert_is_tiny_cifar(load_dataset(name, root, val_fraction=0, download=True), name)
    archive.unlink()
    assert_is_tiny_cifar(load_dataset(name, root, val_fraction=0), name)


def test_download_completes_a_folder_that_was_half_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_archive("cifar100", tmp_path, monkeypatch)
    root = tmp_path / "root"
    load_dataset("cifar100", root, download=True)
    (root / "cifar-100-binary" / "test.bin").unlink()
    assert_is_tiny_cifar(load_dataset("cifar100", root, val_fraction=0, download=True), "cifar100")


def test_an_archive_with_another_checksum_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_archive("cifar100", tmp_path, monkeypatch)
    monkeypatch.setitem(cifar.LAYOUTS, "cifar100", replace(cifar.LAYOUTS["cifar100"], md5="f" * 32))
    with pytest.raises(UserError, match="f" * 32):
        load_dataset("cifar100", tmp_path / "root", download=True)
    assert list((tmp_path / "root").iterdir()) == []


# Pickles ----------------------------------------------------------------------------------------------------------------------


class Attack:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_calls_a_program_is_refused_and_nothing_runs(protocol: int, tmp_path: Path) -> None:
    path = write_python("cifar100", tmp_path / "cifar-100-python") / "train"
    path.write_bytes(pickle.dumps({b"data": Attack(tmp_path / "executed")}, protocol))
    with pytest.raises(UserError, match="refused, nothing was run") as caught:
        load_dataset("cifar100", tmp_path)
    assert str(path) in str(caught.value) and not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "name", [b"numpy\nload", b"builtins\neval", b"numpy\nndarray.__class__", b"numpy.core.multiarray\nscalar", b"os\nsystem"]
)
def test_no_name_but_the_listed_ones_is_looked_up(name: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"c" + name + b"\n.")
    with pytest.raises(UserError, match="refused"):
        read_pickle(tmp_path / "p")


@pytest.mark.parametrize("array", [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.eye(3)), np.array([True, False])])
def test_a_pickled_numeric_array_comes_back_equal(array: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(pickle.dumps({"a": [array, None, 1.5, ("x", True)]}, 2))
    got, *rest = read_pickle(tmp_path / "p")["a"]
    assert np.array_equal(got, array) and got.shape == array.shape and rest == [None, 1.5, ("x", True)]


def test_an_array_as_python_2_wrote_it_is_read(tmp_path: Path) -> None:
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01K\x01K\x03\x86"
    array += b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x03\x01\xff\x02tb"
    (tmp_path / "p").write_bytes(b"\x80\x02}U\x04data" + array + b"s.")
    assert read_pickle(tmp_path / "p")[b"data"].tolist() == [[1, 255, 2]]


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x02", b"hello", b"\x80\x02]q\x00h\x00a.", pickle.dumps({1, 2}, 2), pickle.dumps(np.array([{}]), 2)]
)
def test_a_damaged_or_odd_pickle_is_one_line(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_pickle(tmp_path / "p")
    assert str(tmp_path / "p") in str(caught.value) and "\n" not in str(caught.value)


# Fashion-MNIST ----------------------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def fashion_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte": rng.integers(0, 256, (40, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": np.arange(40, dtype=np.uint8) % 10,
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": np.arange(20, dtype=np.uint8) % 10,
    }


def write_fashion(folder: Path, zipped: bool) -> Path:
    folder.mkdir(parents=True)
    for name, array in fashion_arrays().items():
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return folder


def assert_is_tiny_fashion(data: Dataset) -> None:
    arrays = list(fashion_arrays().values())
    assert torch.equal(data.train.images, torch.from_numpy(arrays[0])[:, None]) and data.train.images.shape == (40, 1, 28, 28)
    assert torch.equal(data.test.images, torch.from_numpy(arrays[2])[:, None])
    assert data.train.labels.tolist() == arrays[1].tolist() and data.test.labels.tolist() == arrays[3].tolist()


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist_is_read_from_idx_files_zipped_or_not(zipped: bool, tmp_path: Path) -> None:
    folder = write_fashion(tmp_path / "fashion_mnist", zipped)
    for root in (tmp_path, folder):
        assert_is_tiny_fashion(load_dataset("fashion_mnist", root, val_fraction=0))


def test_fashion_mnist_is_downloaded_and_a_stopped_download_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = write_fashion(tmp_path / "server", zipped=True)
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "no")
    monkeypatch.setattr(fashion, "URL", served.as_uri() + "/")
    sums = {name: hashlib.md5((served / f"{name}.gz").read_bytes()).hexdigest() for name in fashion.FILES}
    monkeypatch.setattr(fashion, "FILES", sums)
    root = tmp_path / "root"
    assert_is_tiny_fashion(load_dataset("fashion_mnist", root, val_fraction=0, download=True))
    (root / "fashion_mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\[\.gz\]: missing"):
        load_dataset("fashion_mnist", root)
    assert_is_tiny_fashion(load_dataset("fashion_mnist", root, val_fraction=0, download=True))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("train-images-idx3-ubyte", idx(np.zeros((40, 28, 28), np.uint8))[:-1]),
        ("train-images-idx3-ubyte", idx(np.zeros((40, 28, 27), np.uint8))),
        ("train-images-idx3-ubyte", idx(np.zeros(40, np.uint8))),
        ("train-images-idx3-ubyte", b""),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(19, np.uint8))),
        ("t10k-labels-idx1-ubyte", idx(np.full(20, 10, np.uint8))),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_idx_file_is_one_line_that_names_it(file: str, content: bytes, zipped: bool, tmp_path: Path) -> None:
    path = write_fashion(tmp_path / "fashion_mnist", zipped) / (file + ".gz" * zipped)
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(UserError) as caught:
        load_dataset("fashion_mnist", tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_truncated_gzip_is_one_line_that_names_it(tmp_path: Path) -> None:
    path = write_fashion(tmp_path / "fashion_mnist", True) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="train-images"):
        load_dataset("fashion_mnist", tmp_path)


def test_the_packaged_sample_needs_no_files_and_is_balanced(tmp_path: Path) -> None:
    data = load_dataset("fashion_mini", tmp_path / "nowhere")
    assert (len(data.train), len(data.val), len(data.test)) == (5400, 600, 1000)
    assert data.train.images.shape == (5400, 1, 28, 28) and data.train.images.dtype == torch.uint8
    assert data.num_classes == 10 and data.class_names[9] == "Ankle boot"
    assert all(set(torch.bincount(split.labels).tolist()) == {len(split) // 10} for split in (data.train, data.val, data.test))
    assert not (tmp_path / "nowhere").exists()
    assets = Path(fashion.__file__).parent / "assets"
    assert (assets / "fashion_mnist_mini.npz").stat().st_size <= 3_500_000 and "MIT" in (assets / "fashion_mnist_LICENSE.txt").read_text()


# Image folders ----------------------------------------------------------------------------------------------------------------


def write_folder(root: Path, held_out: str = "test", side: int = 24) -> Path:
    rng = np.random.default_rng(0)
    for part, per_class in (("train", 4), (held_out, 2)):
        for label in ("cat", "dog", "owl"):
            (root / part / label).mkdir(parents=True)
            for i in range(per_class):
                pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / label / f"{i}.{['png', 'bmp', 'PPM', 'png'][i]}")
    return root


def pixels_of(path: Path) -> torch.Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_a_folder_of_images_is_read_pixel_by_pixel_and_classes_are_sorted(held_out: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path, held_out)
    data = load_dataset("folder", root, val_fraction=0)
    assert data.class_names == ["cat", "dog", "owl"] and data.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.test.labels.tolist() == [0, 0, 1, 1, 2, 2] and data.train.images.shape == (12, 3, 24, 24)  # small ones stay small
    assert torch.equal(data.train.images[4], pixels_of(root / "train/dog/0.png"))
    assert torch.equal(data.test.images[5], pixels_of(root / held_out / "owl/1.bmp"))
    assert data.mean == channel_statistics(data.train.images)[0] and len(data.std) == 3


def test_images_are_resized_by_the_shorter_side_and_cropped_in_the_centre(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, 40:80, 0] = 200  # the centre is red
    for file in (root / "train" / "cat").iterdir():
        file.unlink()
    Image.fromarray(wide).save(root / "train" / "cat" / "wide.webp", lossless=True)
    Image.fromarray(wide.transpose(1, 0, 2)).convert("P").save(root / "train" / "cat" / "tall.png")
    raw = load_folder(root, size=20)
    assert raw.train.images.shape[1:] == (3, 20, 20)
    inner = raw.train.images[:2, :, 2:-2, 2:-2].int()  # without the seam that bicubic blurs
    assert (inner[:, 0] - 200).abs().max() <= 8 and inner[:, 1:].max() <= 8


def test_large_images_are_brought_to_256(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.new("RGB", (600, 300), (10, 20, 30)).save(tmp_path / part / "a" / "0.png")
    assert load_dataset("folder", tmp_path, val_fraction=0).train.images.shape == (1, 3, 256, 256)


def mapped_at(tensor: torch.Tensor) -> str:
    """The file behind a tensor's memory, by the kernel's list."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(n, 16) for n in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
    return ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_set_above_the_limit_stays_on_disk_and_its_splits_are_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path)
    small = load_dataset("folder", root, val_fraction=0.25)
    monkeypatch.setattr(dataset, "IN_MEMORY_BYTES", 0)
    large = load_dataset("folder", root, val_fraction=0.25)
    assert large.train.stored.data_ptr() == large.val.stored.data_ptr()  # one file, no copy
    for got, want in ((large.train, small.train), (large.val, small.val), (large.test, small.test)):
        assert mapped_at(got.stored).endswith(".u8") and not mapped_at(want.stored).endswith(".u8")
        assert torch.equal(got.images, want.images) and torch.equal(got.labels, want.labels)
        back = torch.arange(len(got)).flip(0)
        assert torch.equal(got.gather(back), want.images.flip(0))


def test_decoding_happens_once_and_again_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path)
    before = load_dataset("folder", root, val_fraction=0)
    caches = sorted(p.name for p in (root / ".fedlens-cache").iterdir())
    assert [name.split("-")[0] + Path(name).suffix for name in caches] == ["test.json", "test.u8", "train.json", "train.u8"]
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "decode", None)  # would fail if called
        assert torch.equal(load_dataset("folder", root, val_fraction=0).train.images, before.train.images)
    Image.new("RGB", (24, 24), (1, 2, 3)).save(root / "train/cat/0.png")
    after = load_dataset("folder", root, val_fraction=0)
    assert after.train.images[0, :, 0, 0].tolist() == [1, 2, 3] and torch.equal(after.train.images[1:], before.train.images[1:])
    now = sorted(p.name for p in (root / ".fedlens-cache").iterdir())
    assert len(now) == 4 and now[:2] == caches[:2] and now[2:] != caches[2:]


def test_an_unreadable_image_is_one_line_and_leaves_no_cache(tmp_path: Path) -> None:
    bad = write_folder(tmp_path) / "train" / "dog" / "0.png"
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(UserError, match="not a readable image") as caught:
        load_folder(tmp_path, size=24)
    assert str(bad) in str(caught.value) and "\n" not in str(caught.value)
    assert list((tmp_path / ".fedlens-cache").iterdir()) == []


def test_a_postscript_file_in_disguise_is_not_handed_to_its_interpreter(tmp_path: Path) -> None:
    bad = write_folder(tmp_path) / "train" / "dog" / "0.png"
    bad.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    with pytest.raises(UserError, match="not a readable image"):
        load_folder(tmp_path)


def test_sixteen_bits_are_scaled_not_cut_off(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    deep = np.arange(24 * 24, dtype=np.uint16).reshape(24, 24) * 113
    file = sorted((root / "train").iterdir())[0] / "0.png"
    for suffix in ("png", "tif"):
        Image.fromarray(deep).save(file.with_suffix(f".{suffix}"))
        assert folder_module.decode((file.with_suffix(f".{suffix}"), "x"), 24) == np.rint(deep / 257).astype(np.uint8).tobytes() * 3
    for strange in (np.full((24, 24), 0.5, np.float32), np.full((24, 24), 70000, np.int32)):
        Image.fromarray(strange).save(tmp_path / "strange.tif")
        with pytest.raises(UserError, match="must have 8 or 16 bits"):
            folder_module.decode((tmp_path / "strange.tif", "strange.tif"), 24)


def test_eight_bits_in_a_larger_container_are_unchanged_or_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grey = np.arange(24 * 24).reshape(24, 24) % 256
    Image.fromarray(grey.astype(np.int32)).save(tmp_path / "wide.tif")
    assert folder_module.decode((tmp_path / "wide.tif", "x"), 24) == grey.astype(np.uint8).tobytes() * 3
    folder_module._warn_of_dark_images.cache_clear()
    for name in ("a.png", "b.png"):
        Image.fromarray(grey.astype(np.uint16) * 16).save(tmp_path / name)
        folder_module.decode((tmp_path / name, name), 24)
    assert caplog.text.count("nearly black") == 1


def test_a_class_without_images_and_a_link_to_nowhere_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_folder(tmp_path)
    (root / "train" / "notes").mkdir()
    (root / "train" / "notes" / "a.txt").touch()
    with pytest.raises(UserError, match=r"notes: a class without images"):
        load_folder(root)
    (root / "train" / "notes" / "a.txt").rename(sorted((root / "train").iterdir())[0] / "a.txt")
    (root / "train" / "notes").rmdir()
    with caplog.at_level("WARNING", "fedlens"):
        load_folder(root)
    assert "skipping 1 files and folders" in caplog.text
    link = sorted((root / "train").iterdir())[0] / "zz.png"
    link.symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match="zz"):
        load_folder(root, 24)


def test_folders_that_disagree_or_are_empty_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such folder.*data\.root"):
        load_dataset("folder", tmp_path)
    root = write_folder(tmp_path)
    (root / "test" / "owl").rename(root / "test" / "eagle")
    with pytest.raises(UserError, match="different classes: eagle, owl"):
        load_dataset("folder", root)
    (tmp_path / "b" / "train" / "x").mkdir(parents=True)
    with pytest.raises(UserError, match="no images"):
        load_dataset("folder", tmp_path / "b")


def test_a_cache_that_does_not_fit_on_the_disk_is_refused_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(UserError, match="GB are free"):
        load_dataset("folder", write_folder(tmp_path))


# Hugging Face -----------------------------------------------------------------------------------------------------------------


def hf_dict(**columns: str):
    datasets = pytest.importorskip("datasets")
    rng = np.random.default_rng(0)
    features = {"img": datasets.Image()} | {column: datasets.ClassLabel(names=names.split()) for column, names in columns.items()}

    def rows(n: int):
        data = {"img": [Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(n)]}
        data |= {column: [i % len(names.split()) for i in range(n)] for column, names in columns.items()}
        return datasets.Dataset.from_dict(data, features=datasets.Features(features))

    return datasets.DatasetDict(train=rows(12), test=rows(6))


def test_a_hugging_face_set_saved_to_disk_is_read_with_its_fine_labels(tmp_path: Path) -> None:
    made = hf_dict(coarse_label="animal thing", fine_label="cat dog car")
    made.save_to_disk(tmp_path / "set")
    for _ in range(2):  # decoded, then from the cache
        data = load_dataset(f"hf:{tmp_path / 'set'}", tmp_path / "root", val_fraction=0)
        assert data.class_names == ["cat", "dog", "car"] and data.train.labels.tolist() == [0, 1, 2] * 4
        assert data.train.images.shape == (12, 3, 16, 16)
        for got, want in zip(data.test.images, made["test"]["img"], strict=True):
            assert torch.equal(got, torch.from_numpy(np.array(want)).permute(2, 0, 1))


def test_a_hugging_face_image_folder_is_read_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    root = write_folder(tmp_path / "set")
    for path in root.rglob("*.PPM"):
        path.rename(path.with_suffix(".ppm"))
    data = load_dataset(f"hf:{root}", tmp_path / "root", val_fraction=0)
    assert torch.equal(data.train.images, load_dataset("folder", root, val_fraction=0).train.images)


def test_a_hugging_face_set_without_the_right_columns_or_splits_is_one_line(tmp_path: Path) -> None:
    made = hf_dict(label="a b")
    made.remove_columns("label").save_to_disk(tmp_path / "unlabelled")
    with pytest.raises(UserError, match=r"must have an Image and a ClassLabel column; it has img"):
        load_dataset(f"hf:{tmp_path / 'unlabelled'}", tmp_path)
    del made["test"]
    made.save_to_disk(tmp_path / "untested")
    with pytest.raises(UserError, match="it has train"):
        load_dataset(f"hf:{tmp_path / 'untested'}", tmp_path)


def test_without_download_the_hub_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    import socket

    requests: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: requests.append(a) or (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(UserError, match="fedlens data prepare hf:nobody/nothing"):
        load_dataset("hf:nobody/nothing", tmp_path)
    assert requests == []


def test_without_the_datasets_library_the_pip_command_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'fedlens\[hf\]'"):
        load_dataset("hf:cifar100", tmp_path)
    with pytest.raises(UserError, match="hf:NAME"):
        load_dataset("hf:", tmp_path)


# Real data --------------------------------------------------------------------------------------------------------------------


def assert_published(images: torch.Tensor, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "SAMPLED_IMAGES", len(images))
    mean, std = channel_statistics(images)
    assert mean == pytest.approx(data.mean, abs=1e-4) and std == pytest.approx(data.std, abs=1e-4)


@pytest.mark.realdata
@pytest.mark.skipif(not (SHARED / "prepare.py").exists(), reason="the shared data is not here")
def test_the_real_cifar100_has_its_published_counts_and_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, str(SHARED / "prepare.py"), str(tmp_path), "--skip-weights"], check=True, capture_output=True)
    data = load_dataset("cifar100", tmp_path)
    assert (len(data.train), len(data.val), len(data.test)) == (45_000, 5_000, 10_000) and data.class_names[0] == "apple"
    assert torch.bincount(data.train.labels).tolist() == [450] * 100 and torch.bincount(data.val.labels).tolist() == [50] * 100
    assert_published(torch.cat([data.train.images, data.val.images]), data, monkeypatch)


@pytest.mark.realdata
@pytest.mark.skipif(not fashion.DEBIAN.exists(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist_has_its_published_counts_and_contains_the_packaged_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, mini = load_dataset("fashion_mnist", tmp_path, val_fraction=0), load_dataset("fashion_mini", val_fraction=0)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert_published(data.train.images, data, monkeypatch)
    for whole, part in ((data.train, mini.train), (data.test, mini.test)):
        known = {(image.numpy().tobytes(), int(label)) for image, label in zip(whole.images, whole.labels, strict=True)}
        assert all((image.numpy().tobytes(), int(label)) in known for image, label in zip(part.images, part.labels, strict=True))
