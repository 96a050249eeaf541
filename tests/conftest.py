"""Shared by all tests: one thread, no user folders, no network trackers."""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


def small_folder() -> Path:
    """A tenth of the embedded images as an image folder: a real data set that an epoch of the packaged backbone passes in a second.

    The process that makes it removes it; workers and the processes that tests start use the same one.
    """
    if made := os.environ.get("FEDLENS_TESTS_SMALL"):
        return Path(made)
    from PIL import Image

    from fedlens.data.dataset import load_dataset

    data = load_dataset("fashion_mini", val_fraction=0.0)
    root = Path(tempfile.mkdtemp(prefix="fedlens-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    os.environ["FEDLENS_TESTS_SMALL"] = str(root)
    for name, split, count in (("train", data.train, 600), ("test", data.test, 100)):
        for i in range(count):
            folder = root / name / str(int(split.labels[i]))
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(split.images[i, 0].numpy()).save(folder / f"{i:04d}.png")
    return root


SMALL_DATA = small_folder()


@cache
def few_images() -> Path:
    """A fifth of those, SIDE pixels wide: 120 training and 30 test images, for runs of many steps or rounds, each with a checkpoint."""
    from PIL import Image

    root = Path(tempfile.mkdtemp(prefix="fedlens-tests-few-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for split, count in (("train", 12), ("test", 3)):
        for label in sorted((SMALL_DATA / split).iterdir()):
            (root / split / label.name).mkdir(parents=True)
            for file in sorted(label.iterdir())[:count]:
                Image.open(file).resize((SIDE, SIDE)).save(root / split / label.name / file.name)
    return root


SIDE = 14  # pixels: images of 4 patches, with which a step costs a third of one with the default's 16
FAST = [
    "data=folder",
    f"data.root={SMALL_DATA}",
    "data.crop=2",
    f"model.image_size={SIDE}",
    "train.epochs=2",
    "optim.batch_size=60",
    "run.progress=false",
    "device=cpu",
]
ALIASES = "".join(f"a{k}: &a{k} {{{','.join([f'*a{k - 1}'] * 9)}}}\n" for k in range(1, 9))
BOMB = "a0: &a0 [x]\n" + ALIASES.replace("{", "[").replace("}", "]")  # a few hundred bytes of YAML that stand for 43 million values
MERGE_BOMB = "a0: &a0 {k: v}\n" + ALIASES.replace("{", "{<<: [").replace("}", "]}")
EMBEDDED = ["data=fashion_mini", "data.root=null", "model.image_size=28", "optim.batch_size=100"]  # after FAST: the embedded set itself


def accept(run: Path) -> None:
    """Write digests of the files of a run and its checkpoints as they are now: a test has edited them on purpose."""
    from fedlens.files import sha256_of_file
    from fedlens.runs.digests import FILE, to_text

    for file in (run / FILE, *(run / "checkpoints").glob(f"step-*/{FILE}")):
        there = [name for name in json.loads(file.read_text())["files"] if (file.parent / name).is_file()]
        file.write_text(to_text({name: sha256_of_file(file.parent / name) for name in there}))


STARTS_PROCESSES = (
    "test_notebooks",
    "test_extensions",
    "test_docs",
    "test_demo",
    "killed",
    "gloo",
    "ranks_that_come",
    "sweep",
    "torn",
    "compiled",
)


LONG = (
    "federated",
    "sparse_training",
    "study",
    "resume",
    "notebooks",
    "report_html",
    "trust",
    "docs",
    "runs",
    "same_results",
    "federation",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, so that two workers end together. Mark tests that start processes or compile; `make check` leaves them out."""
    place = {f"test_{name}": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))  # a stable sort: within a file, and of the rest, nothing moves
    for item in items:
        if any(part in item.nodeid for part in STARTS_PROCESSES):
            item.add_marker("processes")


def cut_back(run: Any, kept: int) -> Path:
    """Return a copy of a finished run as a kill would have left it: with its first checkpoints alone."""
    torn: Path = run.path.with_name(f"torn-{kept}")
    shutil.copytree(run.path, torn)
    (torn / "summary.json").unlink()
    for folder in sorted((torn / "checkpoints").iterdir())[kept:]:
        shutil.rmtree(folder)
    return torn


@pytest.fixture(autouse=True)
def clean_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's data nor their weights, and no Debian copy of Fashion-MNIST, decide a test."""
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("FEDLENS_WEIGHTS", str(tmp_path / "no-weights"))


@pytest.fixture
def shuffle_test_labels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """shuffle_test_labels(): from then on the test set of every run has its labels in another order."""

    def go() -> None:
        from fedlens.training import bench

        real = bench.load_dataset

        def shuffled(*args: Any, **kw: Any) -> Any:
            data = real(*args, **kw)
            data.test.labels = data.test.labels[torch.randperm(len(data.test), generator=torch.Generator().manual_seed(0))]
            return data

        monkeypatch.setattr(bench, "load_dataset", shuffled)

    return go


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """run_once(overrides…) -> a finished run of the embedded default, made once per module; tests read it and copy it."""
    from fedlens.training.run import run

    root, made = tmp_path_factory.mktemp("once"), dict[tuple[str, ...], Any]()

    def go(*overrides: str) -> Any:
        if overrides not in made:
            made[overrides] = run([*FAST, f"run.dir={root / str(len(made)) / 'run'}", *overrides])
        return made[overrides]

    yield go
    shutil.rmtree(root)  # checkpoints add up


@pytest.fixture
def fast_run(tmp_path: Path) -> Callable[..., "object"]:
    """fast_run("name", overrides…) -> a finished run of the embedded default under tmp_path."""
    from fedlens.training.run import run

    def go(name: str, *overrides: str) -> object:
        return run([*FAST, f"run.dir={tmp_path / name}", *overrides])

    return go
