"""A run from configuration to summary, and runs as objects: what `fedlens run`, `fedlens resume` and the Python API share."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.config import Config, validate
from fedlens.engine.ranks import Ranks
from fedlens.errors import UserError, bad_value
from fedlens.lens.mask_rules import Mask
from fedlens.lens.task_vectors import TaskVector
from fedlens.overrides import compose, from_file, to_yaml
from fedlens.runs.environment import environment
from fedlens.runs.identity import identity, known_weights, origin_of
from fedlens.runs.store import CLIENTS_FOLDER, MASK_FILE, START_FILE, RunFolder, read_environment, read_metrics, read_model, read_summary
from fedlens.runs.trackers import Tracker, Trackers
from fedlens.training import centralized, federated
from fedlens.training.bench import Bench, pick_device, set_up
from fedlens.training.clients import Clients

log = logging.getLogger("fedlens")


class Run:
    """A run folder, read. `.resume()` goes on with an unfinished one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.yaml").is_file():
            raise UserError(f"run: {self.path} holds no run (no config.yaml)")

    @property
    def config(self) -> Config:
        return from_file(self.path / "config.yaml", to_train=False)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict a line of metrics.jsonl."""
        return read_metrics(self.path)

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    @property
    def summary(self) -> dict[str, Any]:
        return read_summary(self.path)

    @property
    def state(self) -> dict[str, Tensor]:
        """name -> tensor of the final model: the one that met the test set."""
        return read_model(self.path)

    @property
    def start(self) -> dict[str, Tensor]:
        """name -> tensor of θ₀: the pretrained point with its head, before the first step."""
        return read_model(self.path, START_FILE)

    @property
    def mask(self) -> Mask | None:
        """What was allowed to move; None: everything."""
        file = self.path / MASK_FILE
        return Mask.load(file) if file.is_file() else None

    def task_vector(self) -> TaskVector:
        """τ = θ_T − θ₀: what the run learned."""
        tau = TaskVector.between(self.start, self.state)
        return TaskVector(tau.space, tau.vector, [self.origin])

    @property
    def origin(self) -> str:
        """What its vectors have to say of themselves: which images they may have seen."""
        return origin_of(self.config, self.path.name)

    def client_vectors(self, of: Iterable[int] | None = None) -> dict[int, TaskVector]:
        """With federated.client_vectors: what each client, or each of these in their order, added to the final model."""
        files = {int(file.stem): file for file in (self.path / CLIENTS_FOLDER).glob("*.safetensors")}
        if not files:
            raise UserError(f"run: {self.path} kept no client vectors; run it with federated.client_vectors=true")
        wanted = sorted(files) if of is None else list(of)
        if strange := [client for client in wanted if client not in files]:
            raise bad_value("client", strange[0], f"one that added to the final model: {', '.join(map(str, sorted(files)))}")
        vectors = {client: TaskVector.load(files[client]) for client in wanted}
        return {client: TaskVector(tau.space, tau.vector, [self.origin]) for client, tau in vectors.items()}

    def resume(self) -> "Run":
        """Go on from the last sound checkpoint; a finished run is left as it is."""
        if not self.finished:
            config = validate(self.config)
            config.run.dir = str(self.path)
            execute(config, go_on=True)
        return self

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {'finished' if self.finished else 'unfinished'})"


def default_folder(config: Config) -> Path:
    return Path("runs") / f"{config.experiment}-{time.strftime('%Y%m%d-%H%M%S')}-{identity(config)[:6]}"


def execute(config: Config, *, go_on: bool = False, watch: Tracker | None = None, clients: Callable[[Bench], Clients] | None = None) -> Run:
    """Set up, open the run folder, train. The folder appears only when the input has proved sound.

    Under torchrun every process comes here; the first one has the folder.
    `clients`: they are elsewhere, and this reaches them; None: all in this process, by data.partition.
    `watch` sees every line of metrics, as the trackers do, and may end the run by raising.
    """
    is_federated = config.experiment.startswith("fed")
    if not is_federated and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"experiment: {config.experiment} is one process; torchrun is for the federated ones")
    if config.privacy.secure_aggregation and clients is None:
        raise UserError("privacy.secure_aggregation: true given, allowed is false in one process, where there is nobody to hide from")
    with ExitStack() as stack:
        ranks = Ranks.start(pick_device(config.device))
        stack.callback(ranks.stop)
        path, go_on = ranks.tell(_where(config, go_on) if ranks.first else None)
        if go_on and ranks.tell((path / "summary.json").is_file()):
            return Run(path)
        if go_on and ranks.world == 1 and pick_device(config.device).type == "cpu":
            stack.enter_context(_threads_of(path))
        bench = set_up(config)
        shards = federated.make_shards(bench) if is_federated and clients is None else []
        folder = None
        if ranks.first:
            keep = {"keep_last": config.run.keep_last, "keep_best": config.run.keep_best}
            began = environment() | ({"weights": known_weights(config.model.weights)} if config.model.weights else {})
            folder = RunFolder.open(path, **keep) if go_on else RunFolder.create(path, to_yaml(config), began, **keep)
            if not go_on and clients is None:  # of a federation its log says which site was silent
                stack.enter_context(_nothing_half_written(path))
            stack.enter_context(folder)
            log.info("run %s", path)
        trackers = Trackers(config.run.trackers if ranks.first else [], path, asdict(config))
        trackers.watchers += [watch] if watch else []
        if is_federated:
            if folder and clients is None:
                federated.describe_partition(bench, shards, folder)
            site = federated.simulated(bench, shards, ranks) if clients is None else clients(bench)
            federated.train(bench, site, folder, trackers, ranks)
        else:
            assert folder is not None
            centralized.train(bench, folder, trackers)
        ranks.wait()
    return Run(path)


def _where(config: Config, go_on: bool) -> tuple[Path, bool]:
    """The run's folder, and whether it goes on with what is there."""
    path = Path(config.run.dir) if config.run.dir else default_folder(config)
    if go_on or not (path / "config.yaml").is_file():
        return path, go_on
    if config.run.if_exists == "error":
        raise UserError(f"run.dir: {path} already holds a run; go on with it: fedlens resume {path}")
    if identity(from_file(path / "config.yaml"), read_environment(path).get("weights")) != identity(config):
        raise UserError(f"run.dir: {path} holds a run of another configuration; choose another folder")
    return path, True


@contextmanager
def _nothing_half_written(path: Path) -> Iterator[None]:
    """What is wrong with the input may show only when the head or the mask is made: a folder of ours in which nothing was trained yet is not left behind."""
    try:
        yield
    except UserError:
        if not any((path / "checkpoints").glob("step-*")) and not read_metrics(path):
            shutil.rmtree(path, ignore_errors=True)
        raise


@contextmanager
def _threads_of(path: Path) -> Iterator[None]:
    """As many threads as the run began with, where there are cores for them: on a CPU the last bits of a sum depend on how many add it."""
    here, told = torch.get_num_threads(), str(read_environment(path).get("threads", ""))
    began = int(told) if told.isdecimal() else 0
    if began in (0, here):
        yield
        return
    if began > _cores():
        log.warning(
            "begun with %d threads, here are %d: the last bits of sums may differ from those of a run that was not interrupted", began, here
        )
        yield
        return
    log.info("with %d threads, as it began, not %d: the last bits of sums depend on it", began, here)
    torch.set_num_threads(began)
    try:
        yield
    finally:
        torch.set_num_threads(here)


def _cores() -> int:
    """Of this process, which may be pinned to some of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(overrides: Sequence[str]) -> Run:
    """The same as `fedlens run …`: fl.run(["experiment=centralized", "seed=3"])."""
    return execute(compose(overrides))


def load_run(path: str | Path) -> Run:
    return Run(path)
