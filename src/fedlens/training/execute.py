"""A run from configuration to summary, and runs as objects: what `fedlens run`, `fedlens resume` and the Python API share."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlens.config import Config, compose, from_file, identity, to_yaml
from fedlens.errors import UserError
from fedlens.runs.store import RunFolder, read_metrics, read_model
from fedlens.runs.trackers import Trackers
from fedlens.training import centralized
from fedlens.training.setup import environment, set_up

log = logging.getLogger("fedlens")


class Run:
    """A run folder, read. `.resume()` goes on with an unfinished one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.yaml").is_file():
            raise UserError(f"run: {self.path} holds no run (no config.yaml)")

    @property
    def config(self) -> Config:
        return from_file(self.path / "config.yaml")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict a line of metrics.jsonl."""
        return read_metrics(self.path)

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    @property
    def summary(self) -> dict[str, Any]:
        if not self.finished:
            raise UserError(f"run: {self.path} is not finished; go on with it: fedlens resume {self.path}")
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return found

    @property
    def state(self) -> dict[str, Tensor]:
        """name -> tensor of the final model: the one that met the test set."""
        return read_model(self.path)

    def resume(self) -> "Run":
        """Go on from the last sound checkpoint; a finished run is left as it is."""
        if not self.finished:
            config = self.config
            config.run.dir = str(self.path)
            execute(config, go_on=True)
        return self

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {'finished' if self.finished else 'unfinished'})"


def default_folder(config: Config) -> Path:
    return Path("runs") / f"{config.experiment}-{time.strftime('%Y%m%d-%H%M%S')}-{identity(config)[:6]}"


def execute(config: Config, *, go_on: bool = False) -> Run:
    """Set up, open the run folder, train. The folder appears only when the input has proved sound."""
    path = Path(config.run.dir) if config.run.dir else default_folder(config)
    if not go_on and config.run.if_exists == "resume" and (path / "config.yaml").is_file():
        saved = from_file(path / "config.yaml")
        if identity(saved) != identity(config):
            raise UserError(f"run.dir: {path} holds a run of another configuration; choose another folder")
        go_on = True
    if go_on and (path / "summary.json").is_file():
        return Run(path)
    if not go_on and (path / "config.yaml").is_file():
        raise UserError(f"run.dir: {path} already holds a run; go on with it: fedlens resume {path}")
    keep = {"keep_last": config.run.keep_last, "keep_best": config.run.keep_best}
    bench = set_up(config)
    folder = RunFolder.open(path, **keep) if go_on else RunFolder.create(path, to_yaml(config), environment(), **keep)
    with folder:
        trackers = Trackers(config.run.trackers, path, asdict(config))
        log.info("run %s", path)
        try:
            centralized.train(bench, folder, trackers)
        except UserError as error:
            log.error("%s", error)
            raise
    return Run(path)


def run(overrides: Sequence[str]) -> Run:
    """The same as `fedlens run …`: fl.run(["experiment=centralized", "seed=3"])."""
    return execute(compose(overrides))


def load_run(path: str | Path) -> Run:
    return Run(path)
