"""A run from configuration to summary, and run folders as objects: shared by `fedlens run`, `fedlens resume` and the Python API."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.config import Config, validate
from fedlens.engine.ranks import Ranks
from fedlens.errors import UserError, bad_value, system_errors
from fedlens.lens.mask import Mask
from fedlens.lens.task_vectors import TaskVector
from fedlens.overrides import compose, from_file, to_yaml
from fedlens.runs import digests
from fedlens.runs.environment import environment
from fedlens.runs.folder import RunFolder, reopen
from fedlens.runs.identity import identity, known_weights, origin_of
from fedlens.runs.session import Session
from fedlens.runs.store import (
    CHECKPOINTS,
    CLIENTS_FOLDER,
    CONFIG_FILE,
    START_FILE,
    is_finished,
    read_environment,
    read_mask,
    read_metrics,
    read_model,
    read_summary,
)
from fedlens.runs.trackers import Tracker, Trackers
from fedlens.training import centralized, federated
from fedlens.training.bench import Bench, pick_device, set_up
from fedlens.training.clients import Clients

log = logging.getLogger("fedlens")


class Run:
    """A run folder to read. `.resume()` continues an unfinished one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / CONFIG_FILE).is_file():
            raise UserError(f"run: {self.path} is not a run folder: it has no {CONFIG_FILE}.")

    @property
    def config(self) -> Config:
        """The configuration that the run was started with."""
        digests.verify(self.path, CONFIG_FILE)
        return from_file(self.path / CONFIG_FILE, to_train=False)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per line of metrics.jsonl."""
        return read_metrics(self.path)

    @property
    def finished(self) -> bool:
        """True if the run has an intact summary."""
        return is_finished(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """The result of a finished run."""
        return read_summary(self.path)

    @property
    def state(self) -> dict[str, Tensor]:
        """name -> tensor of the final model: the one evaluated on the test set."""
        return read_model(self.path)

    @property
    def start(self) -> dict[str, Tensor]:
        """name -> tensor of θ₀: the pretrained point with its head, before the first step."""
        return read_model(self.path, START_FILE)

    @property
    def mask(self) -> Mask | None:
        """The coordinates that could move; None: all."""
        return read_mask(self.path)

    def task_vector(self) -> TaskVector:
        """Return τ = θ_T − θ₀, what the run learned."""
        tau = TaskVector.between(self.start, self.state)
        return TaskVector(tau.space, tau.vector, [self.origin])

    @property
    def origin(self) -> str:
        """The metadata of the run's vectors: which samples they may have seen."""
        return origin_of(self.config, self.path.name)

    def client_vectors(self, of: Iterable[int] | None = None) -> dict[int, TaskVector]:
        """Return what each client, or each of these, added to the final model; needs federated.client_vectors."""
        files = {int(Path(name).stem): name for name in digests.written(self.path, f"{CLIENTS_FOLDER}/*.safetensors")}
        if not files:
            raise UserError(f"run: {self.path} has no client vectors; run it with federated.client_vectors=true")
        wanted = sorted(files) if of is None else list(of)
        if missing := [client for client in wanted if client not in files]:
            raise bad_value("client", missing[0], f"one that added to the final model: {', '.join(map(str, sorted(files)))}")
        digests.verify(self.path, *(files[client] for client in wanted))
        vectors, origin = {client: TaskVector.load(self.path / files[client]) for client in wanted}, self.origin
        return {client: TaskVector(tau.space, tau.vector, [origin]) for client, tau in vectors.items()}

    def resume(self) -> "Run":
        """Continue from the last intact checkpoint. A finished run is left as it is, but what is damaged is made again, if it can be."""
        if not self.finished or reopen(self.path):
            config = validate(self.config)
            config.run.dir = str(self.path)
            execute(config, resume=True)
        return self

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {'finished' if self.finished else 'unfinished'})"


def default_folder(config: Config) -> Path:
    """Return the folder of a run that names none."""
    return Path("runs") / f"{config.experiment}-{time.strftime('%Y%m%d-%H%M%S')}-{identity(config)[:6]}"


def execute(
    config: Config, *, resume: bool = False, watch: Tracker | None = None, clients: Callable[[Bench], Clients] | None = None
) -> Run:
    """Set up, open the run folder, train. The folder appears only after the input has proved sound.

    Under torchrun every process calls this; the first one has the folder.
    `clients`: returns clients on other machines; None: simulate all of them here, split by data.partition.
    `watch` receives every line of metrics, as the trackers do, and ends the run by raising.
    """
    federation = config.trainer == "federated"
    if not federation and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"experiment: {config.experiment} runs in one process; torchrun is for federated experiments.")
    if config.privacy.secure_aggregation and clients is None:
        raise UserError(
            "privacy.secure_aggregation needs a deployment (fedlens federate): a simulation has no server to hide updates from."
        )
    with ExitStack() as stack:
        ranks = Ranks.start(pick_device(config.device))
        stack.callback(ranks.stop)
        path, resume = ranks.broadcast(_where(config, resume) if ranks.first else None)
        if resume and ranks.broadcast(is_finished(path) if ranks.first else None):
            return Run(path)
        if resume and ranks.world == 1 and pick_device(config.device).type == "cpu":
            stack.enter_context(_threads_of(path))
        bench = set_up(config)
        shards = federated.make_shards(bench) if federation and clients is None else []
        folder = stack.enter_context(_open_folder(config, path, resume, simulated=clients is None)) if ranks.first else None
        trackers = Trackers(config.run.trackers if ranks.first else [], path, asdict(config), watch)
        unit = "round" if federation else "epoch"
        session = stack.enter_context(closing(Session(config, folder, trackers, unit=unit, broadcast=ranks.broadcast)))
        if federation:
            if folder and clients is None:
                federated.describe_partition(bench, shards, folder)
            federated.train(bench, clients(bench) if clients else federated.simulated(bench, shards, ranks), session, ranks)
        else:
            centralized.train(bench, session)
        ranks.wait()
    return Run(path)


@contextmanager
def _open_folder(config: Config, path: Path, resume: bool, simulated: bool) -> Iterator[RunFolder]:
    """Open or create the run folder. A new simulation that fails before it trained leaves no folder; that of a federation keeps its log."""
    keep = {"keep_last": config.run.keep_last, "keep_best": config.run.keep_best}
    started = environment() | ({"weights": known_weights(config.model.weights)} if config.model.weights else {})
    folder = RunFolder.open(path, **keep) if resume else RunFolder.create(path, to_yaml(config), started, **keep)
    try:
        with folder:
            log.info("run %s", path)
            yield folder
    except (UserError, OSError, MemoryError, RuntimeError):  # such as an error in the input that shows only when head or mask are made
        if simulated and not resume and not any((path / CHECKPOINTS).glob("step-*")) and not read_metrics(path):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _where(config: Config, resume: bool) -> tuple[Path, bool]:
    """Return the run's folder, and True if the run continues what is there."""
    path = Path(config.run.dir) if config.run.dir else default_folder(config)
    if resume or not (path / CONFIG_FILE).is_file():
        return path, resume
    if config.run.if_exists == "error":
        raise UserError(f"run.dir: {path} already holds a run; resume it: fedlens resume {path}")
    digests.verify(path, CONFIG_FILE)
    if identity(from_file(path / CONFIG_FILE), read_environment(path).get("weights")) != identity(config):
        raise UserError(f"run.dir: {path} holds a run of another configuration; choose another folder.")
    return path, True


@contextmanager
def _threads_of(path: Path) -> Iterator[None]:
    """Use as many threads as the run started with, if there are cores for them: on a CPU the last bits of a sum depend on their number."""
    now, recorded = torch.get_num_threads(), str(read_environment(path).get("threads", ""))
    before = int(recorded) if recorded.isdecimal() else now
    if before != now and before > _cores():
        log.warning("started with %d threads, now there are %d: the last bits may differ from those of an uninterrupted run", before, now)
    elif before != now:
        log.info("using %d threads, as at the start, instead of %d: the last bits of sums depend on it", before, now)
        torch.set_num_threads(before)
    try:
        yield
    finally:
        torch.set_num_threads(now)


def _cores() -> int:
    """Return the cores of this process, which may be pinned to some of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(overrides: Sequence[str]) -> Run:
    """Run an experiment, as `fedlens run …` does: fl.run(["experiment=centralized", "seed=3"])."""
    with system_errors():
        return execute(compose(overrides))


def load_run(path: str | Path) -> Run:
    """Return the run of a folder."""
    return Run(path)
