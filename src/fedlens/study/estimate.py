"""Estimates of a study's time, disk space and device memory before it starts, from its plan and a measurement of a few seconds."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedlens.config import Config
from fedlens.models.vit import ViT
from fedlens.study.runner import Study
from fedlens.training.bench import Bench, set_up

PROBE_SECONDS = 1.0
SETUP_SECONDS = 2.0  # per run: reading data, writing files
BLOCK_NUMBERS = 17  # per token and feature, kept by a block for its backward pass (Korthikanti et al. 2022, without attention's matrix)


@dataclass(frozen=True)
class Speed:
    """Measured speed of one model on this device, and the sizes that the estimates need."""

    train: float  # images per second, forward and backward
    evaluate: float
    samples: int
    val: int
    test: int
    parameters: int

    def seconds(self, config: Config) -> float:
        """Return the time of one run. The head's features are counted in full, although runs of a study share them."""
        fed, trained, evaluated = config.federated, 0.0, float(self.test)
        if config.trainer == "federated":
            trained += fed.rounds * max(1, round(fed.participation * fed.clients)) * fed.local_steps * config.optim.batch_size
            evaluated += self._scored(fed.rounds, fed.eval_every, fed.test_every)
        else:
            trained += config.train.epochs * self.samples
            evaluated += self._scored(config.train.epochs, 1, config.train.test_every)
        if config.mask.strategy is not None:
            trained += (config.mask.samples or self.val) * config.mask.rounds
        if config.head == "ridge":
            evaluated += self.samples + self.val
        return SETUP_SECONDS + trained / self.train + evaluated / self.evaluate

    def _scored(self, length: int, eval_every: int, test_every: int) -> float:
        return length * (self.val / eval_every + (self.test / test_every if test_every else 0))

    def bytes(self, config: Config, checkpoints: bool) -> float:
        """Return the size of a finished run (start and final model), or of its checkpoints (model and optimizer)."""
        return 4 * self.parameters * (2 * (config.run.keep_last + 1) if checkpoints else 2)


def memory(config: Config, model: ViT, trained: int, *, half: bool) -> int:
    """Return the bytes that training takes on a GPU with everything at once, where `trained` weights move; runs halve what does not fit.

    The recorded peaks on an H200 are within 10 % (benchmarks/records, gpu-round and mask-rules).
    """
    tokens, dense = 1 + (model.image_size // model.shape.patch) ** 2, sum(p.numel() for p in model.parameters())
    clients = max(1, round(config.federated.participation * config.federated.clients)) if config.trainer == "federated" else 1
    clients = min(clients, config.federated.chunk or clients)
    images = clients * min(config.optim.batch_size, config.train.chunk or config.optim.batch_size)
    blocks = model.shape.depth - 1  # the last one computes the class token alone
    activations = images * tokens * model.shape.dim * blocks * BLOCK_NUMBERS * (2 if half else 4)
    clients_bytes = clients * 8 * (dense + trained)  # weights and gradients are dense, θ and momentum only what trains
    return activations + clients_bytes + 16 * dense  # the model, θ, the merged update and one that is being read


def measure(config: Config) -> Speed:
    """Time the model of a configuration on its device, after one step to warm up."""
    bench = set_up(config)
    inputs, labels = bench.task.batch(bench.train, torch.arange(min(config.optim.batch_size, len(bench.train))))

    def step() -> None:
        with bench.precision.autocast():
            loss = bench.task.loss(bench.model(inputs).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]

    evaluation = torch.arange(min(config.train.eval_batch_size, len(bench.train)))
    rates = _rate(step, len(labels), bench), _rate(lambda: bench.evaluate(bench.train, samples=evaluation), len(evaluation), bench)
    sizes = len(bench.train), len(bench.val), len(bench.dataset.test), sum(p.numel() for p in bench.model.parameters())
    return Speed(*rates, *sizes)


def _rate(work: Callable[[], object], images: int, bench: Bench) -> float:
    """Return images per second."""
    work()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < PROBE_SECONDS:
        work()
        if bench.device.type == "cuda":
            torch.cuda.synchronize(bench.device)
        count += 1
    return count * images / (time.perf_counter() - started)


def estimate(study: Study, jobs: int) -> str:
    """Return one line: runs that are left, their time, and the disk space of the study."""
    todo, trials = study.missing(), [search.spec for search in study.searches if search.next and search.spec.cell.table in study.tables]
    short = [spec.base for spec in trials for _ in range(min(3, spec.tries))]
    left, every = [planned.config for planned in todo], [planned.config for planned in study.selected()]
    if not left and not short:
        return f"{len(every)} runs, all finished."
    speeds = {key: measure(config) for key, config in {_key(config): config for config in (*left, *short)}.items()}
    seconds = sum(speeds[_key(config)].seconds(config) for config in (*left, *short)) / jobs
    disk = sum((speeds[_key(config)].bytes(config, False) for config in left), start=0.0)
    peak = disk + jobs * max(speeds[_key(config)].bytes(config, True) for config in (*left, *short))
    tuning = f" and about {len(short)} short runs to tune" if short else ""
    return (
        f"{len(every)} runs, {len(left)} to do{tuning}: about {seconds / 60:.0f} minutes with --jobs {jobs}, "
        f"{disk / 1e9:.1f} GB on disk at the end, at most {peak / 1e9:.1f} GB before."
    )


def _key(config: Config) -> tuple[object, ...]:
    return config.data.name, config.model.name, config.model.image_size, config.optim.batch_size, config.train.precision
