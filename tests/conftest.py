"""Shared by all tests: one thread, no user folders, no network trackers."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)

# what makes a run of the embedded default take a second: a random tiny backbone would not learn, the packaged one does
FAST = ["train.epochs=2", "optim.batch_size=300", "run.progress=false", "device=cpu"]


@pytest.fixture(autouse=True)
def clean_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's data nor their weights, and no Debian copy of Fashion-MNIST, decide a test."""
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("FEDLENS_WEIGHTS", str(tmp_path / "no-weights"))


@pytest.fixture
def fast_run(tmp_path: Path) -> Callable[..., "object"]:
    """fast_run("name", overrides…) -> a finished run of the embedded default under tmp_path."""
    from fedlens.training.execute import run

    def go(name: str, *overrides: str) -> object:
        return run([*FAST, f"run.dir={tmp_path / name}", *overrides])

    return go
