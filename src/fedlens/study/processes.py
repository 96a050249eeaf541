"""Runs in processes of their own: one folder for one owner, a GPU each where there are several, and no child that outlives its parent."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedlens.errors import UserError
from fedlens.runs.store import take_lock


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if it is missing, for this process alone."""
    make_folder(folder)
    with take_lock(folder, "--out"):
        yield


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be a folder ({error.strerror})") from None


def environment_of(place: int, jobs: int) -> dict[str, str]:
    """Of the child at one of `jobs` places: one of the GPUs that this process was given, or its share of the cores."""
    found, gpus = os.environ.copy(), torch.cuda.device_count()
    if gpus > 1:
        given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()] or [str(i) for i in range(gpus)]
        found["CUDA_VISIBLE_DEVICES"] = given[place % min(gpus, len(given))]
    else:
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    return found


def end_with_parent() -> None:
    """For a child whose stdin is a pipe from its parent: when that is closed, however the parent ended, so is this process."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
