"""The work that every contender does, written once to a folder of .npy files, and the clock that every contender is timed by.

K = 100 clients with 54 images each, 10 a round, 4 local steps of 32 images, FedAvg, SGD with momentum that starts anew each round.
Images are normalised on the fly, nothing is augmented, all in fp32. Same initial parameters, same batches.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.models import create_model

CLIENTS, PARTICIPATION, STEPS, BATCH = 100, 0.1, 4, 32
LR, MOMENTUM, SEED = 0.01, 0.9, 0
SAMPLES = 54  # a client: the 5,400 training images of the embedded Fashion-MNIST sample, shared out
COMPARED = 2  # rounds after which the parameters of all contenders are compared
MODELS = {  # ours by name, classes, image size. 32 px: five tokens, so that a round takes seconds and not minutes on two cores
    "tiny": ("tiny", 10, 28),
    "vits": ("dino_vits16", 100, 32),
}


@dataclass(frozen=True)
class Work:
    """What the folder says. Arrays are memory-mapped: a process pays for what it reads."""

    facts: dict[str, Any]
    images: Tensor  # [samples, channels, size, size] uint8
    labels: Tensor  # [samples]
    shards: Tensor  # [clients, SAMPLES]
    cohorts: Tensor  # [rounds, cohort] client numbers, ascending
    index: Tensor  # [rounds, cohort, steps, batch] positions in images
    initial: Tensor  # [P]

    @classmethod
    def load(cls, folder: str | Path) -> "Work":
        folder = Path(folder)
        names = ("images", "labels", "shards", "cohorts", "index", "initial")
        arrays = {name: torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in names}
        return cls(json.loads((folder / "facts.json").read_text()), **arrays)

    def model(self) -> nn.Module:
        name, classes, size = MODELS[self.facts["model"]]
        model = create_model(name, classes, image_size=size, seed=SEED)
        with torch.no_grad():
            parts = torch.split(self.initial, [p.numel() for p in model.parameters()])
            for param, part in zip(model.parameters(), parts, strict=True):
                param.copy_(part.view_as(param))
        return model.train()

    def batch(self, round_: int, slot: int, step: int) -> tuple[Tensor, Tensor]:
        """The images, normalised, and labels of one step of the slot-th client of a round's cohort."""
        where = self.index[round_, slot, step]
        return self.normalise(self.images[where]), self.labels[where]

    def normalise(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(self.facts[key]).view(-1, 1, 1) for key in ("mean", "std"))
        return (images.float() / 255 - mean) / std

    def train_client(self, model: nn.Module, round_: int, slot: int) -> None:
        """A client's local steps, in place: the loop that anyone would write."""
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        for step in range(STEPS):
            images, labels = self.batch(round_, slot, step)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def flat(tensors: Any) -> np.ndarray:
    """Parameters in the model's order as one vector."""
    return np.concatenate([np.asarray(t.detach() if isinstance(t, Tensor) else t, dtype=np.float32).ravel() for t in tensors])


class Clock:
    """Seconds of every round, the first one being the warm-up; keeps the parameters after COMPARED rounds, off the clock."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.out, self.seconds = Path(job["out"]), []
        self.at = time.perf_counter()

    def start(self) -> None:
        self.at = time.perf_counter()

    def lap(self, params: Callable[[], np.ndarray]) -> None:
        self.seconds.append(time.perf_counter() - self.at)
        if len(self.seconds) == COMPARED:
            np.save(self.out / "params.npy", params())
        self.start()

    def finish(self, *packages: str, **facts: Any) -> None:
        versions = {name: version(name) for name in ("torch", "numpy", *packages)}
        (self.out / "result.json").write_text(json.dumps({"seconds": self.seconds, "versions": versions, **facts}))


def run(job: dict[str, Any]) -> None:
    """Write the folder, in a process of its own so that the one that measures memory never holds torch."""
    from fedlens.data.dataset import load_dataset
    from fedlens.data.partition import partition
    from fedlens.engine.local_work import plan_round
    from fedlens.engine.sampling import sample_cohort
    from fedlens.tasks.image import Augment

    folder = Path(job["work"])
    name, classes, size = MODELS[job["model"]]
    if job["model"] == "tiny":
        data = load_dataset("fashion_mini", seed=SEED)
        images, labels, mean, std = data.train.images, data.train.labels, data.mean, data.std
    else:
        rng = torch.Generator().manual_seed(SEED)
        images = torch.randint(0, 256, (CLIENTS * SAMPLES, 3, size, size), generator=rng, dtype=torch.uint8)
        labels, mean, std = torch.randint(0, classes, (len(images),), generator=rng), (0.5,) * 3, (0.29,) * 3
    shards = partition(labels, CLIENTS, "iid", seed=SEED)
    assert {len(shard) for shard in shards} == {SAMPLES}  # so that every average is a plain mean
    rounds = 1 + job["rounds"]
    cohorts = [sample_cohort(SEED, r, CLIENTS, PARTICIPATION) for r in range(rounds)]
    plans = [plan_round(SEED, r, cohorts[r], shards, steps=STEPS, batch=BATCH, draw=Augment().draw) for r in range(rounds)]
    model = create_model(name, classes, image_size=size, seed=SEED)
    arrays = {
        "images": images.numpy(),
        "labels": labels.numpy(),
        "shards": np.stack(shards),
        "cohorts": np.asarray(cohorts),
        "index": torch.stack([plan.index for plan in plans]).numpy(),
        "initial": flat(model.parameters()),
    }
    for key, array in arrays.items():
        np.save(folder / f"{key}.npy", array)
    facts = {"model": job["model"], "mean": mean, "std": std, "parameters": sum(p.numel() for p in model.parameters())}
    (folder / "facts.json").write_text(json.dumps(facts))
