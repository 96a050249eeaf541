"""Optional mirrors of metrics.jsonl: TensorBoard, Weights & Biases (offline too), MLflow. One function makes each.

A tracker decides nothing and may fail without harm. After a resume it continues the same tracker run; repeated lines are logged again at
the same step.
"""

import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedlens.errors import Elsewhere, UserError, first_line

log = logging.getLogger("fedlens")


class Tracker(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", "```\n" + json.dumps(config, indent=1) + "\n```")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Project and entity from WANDB_PROJECT and WANDB_ENTITY; offline with WANDB_MODE=offline, or without WANDB_API_KEY."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        note = folder / "wandb-id.txt"
        if not note.exists():
            note.write_text(uuid.uuid4().hex[:8])
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedlens"),
            name=folder.name,
            id=note.read_text(),
            resume="allow",
            dir=str(folder),
            mode=mode,  # type: ignore[arg-type]
            config=dict(config),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.run.summary.update(dict(summary))
        self.run.finish()


class MLflow:
    """MLflow at MLFLOW_TRACKING_URI, or a file store in the run folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (folder / "mlruns").resolve().as_uri()
        self.client: Any = mlflow.MlflowClient(tracking_uri=uri)
        note = folder / "mlflow-id.txt"
        if not note.exists():
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedlens")
            existing = self.client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing else self.client.create_experiment(name)
            note.write_text(self.client.create_run(experiment, run_name=folder.name).info.run_id)
            for key, value in flat(config).items():
                self.client.log_param(note.read_text(), key, value)
        self.id = note.read_text()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.client.log_metric(self.id, name, value, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for name, value in summary.items():
            if isinstance(value, int | float):
                self.client.log_metric(self.id, f"summary.{name}", value)
        self.client.set_terminated(self.id)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration as dotted key -> value."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


class Trackers:
    """All trackers of a run, and its watcher.

    A tracker that cannot be reached at the start is an error; later it is dropped with a warning. An exception of the watcher ends the run.
    """

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any], watcher: Tracker | None = None) -> None:
        self.watcher, self.all = watcher, dict[str, Tracker]()
        for name in names:
            try:
                self.all[name] = TRACKERS[name](folder, config)
            except ImportError:
                raise UserError(f"run.trackers: {name} is not installed; install it with: pip install 'fedlens[{name}]'") from None
            except Exception as error:  # each library has its own
                raise Elsewhere(f"run.trackers: {name} cannot be started: {first_line(error)}") from None

    def log(self, line: Mapping[str, Any]) -> None:
        numbers = {k: float(v) for k, v in line.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        self._notify(lambda tracker: tracker.log(numbers, int(line["step"])))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._notify(lambda tracker: tracker.finish(summary))

    def _notify(self, call: Callable[[Tracker], None]) -> None:
        if self.watcher:
            call(self.watcher)
        for name, tracker in list(self.all.items()):
            try:
                call(tracker)
            except Exception as error:
                log.warning("tracker %s: %s; the run continues without it", name, first_line(error))
                del self.all[name]
