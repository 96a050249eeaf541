"""The run folder: config.yaml, metrics.jsonl, summary.json, checkpoints/, log.txt. All files but the logs are written atomically.

A checkpoint is a folder `checkpoints/step-N` with tensors.safetensors and state.json, which carries the SHA-256 of the tensors. It is
written under another name, flushed to disk and renamed, so it is complete unless the disk damages it later. A damaged checkpoint is
skipped with a warning, and the run resumes from the one before.

Training does not wait for the disk: a thread writes a copy. One write is in progress at a time; reading checkpoints and closing the
folder wait for it, and its disk errors are raised there or at the next checkpoint.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedlens.errors import UserError, first_line
from fedlens.files import disk_errors, fsync, sha256_of_file, write_atomic
from fedlens.lens.mask import Mask
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector

log = logging.getLogger("fedlens")
CHECKPOINTS = "checkpoints"
CONFIG_FILE, SECRET_FILE = "config.yaml", "secret"
SUMMARY_FILE, METRICS_FILE, ENVIRONMENT_FILE = "summary.json", "metrics.jsonl", "environment.json"
MODEL_FILE, START_FILE, MASK_FILE, CLIENTS_FOLDER = "model.safetensors", "start.safetensors", "mask.safetensors", "clients"
FORMAT = 2  # of state.json; version 0.2 wrote none
COPIED = 2**30  # bytes; a larger checkpoint is written while training waits, to avoid holding it in memory twice


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from disk, its digest verified."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def write_json(path: Path, value: Any, *, compact: bool = False) -> None:
    """Write a value as JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=None if compact else 1, separators=(",", ":") if compact else None) + "\n")


class RunFolder:
    """A run folder that this process has locked for writing: a context manager made by `create` or `open`."""

    def __init__(self, path: Path, lock: IO[str], keep_last: int = 2, keep_best: int = 1) -> None:
        self.path, self._lock = path, lock
        self.keep_last, self.keep_best = keep_last, keep_best
        self.checkpoints = path / CHECKPOINTS
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    # --- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, config_yaml: str, environment: Mapping[str, Any], *, keep_last: int = 2, keep_best: int = 1) -> "RunFolder":
        """Make the folder of a new run. The configuration is written last: with it, the folder is a run."""
        taken = f"run.dir: {path} already holds a run; resume it: fedlens resume {path}"
        if (path / CONFIG_FILE).exists():
            raise UserError(taken)
        if path.exists() and (not path.is_dir() or not all(_is_unfinished_start(p) for p in path.iterdir())):
            raise UserError(f"run.dir: {path} exists and is not an empty folder.")
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path, take_lock(path), keep_last, keep_best)
            if (path / CONFIG_FILE).exists():  # created by another process in the meantime
                folder._lock.close()
                raise UserError(taken)
            folder.checkpoints.mkdir(exist_ok=True)
        write_json(path / ENVIRONMENT_FILE, environment)
        write_atomic(path / CONFIG_FILE, config_yaml)
        folder._log_to_file()
        return folder

    @classmethod
    def open(cls, path: Path, *, keep_last: int = 2, keep_best: int = 1) -> "RunFolder":
        """Open the folder of an existing run and remove what a killed process left half-written."""
        if not (path / CONFIG_FILE).is_file():
            raise UserError(f"run.dir: {path} is not a run folder: it has no {CONFIG_FILE}.")
        with disk_errors(path):
            folder = cls(path, take_lock(path), keep_last, keep_best)
            folder.checkpoints.mkdir(exist_ok=True)
            for leftover in folder.checkpoints.glob(".part-*"):
                shutil.rmtree(leftover)
        folder._log_to_file()
        return folder

    def _log_to_file(self) -> None:
        self._handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(message)s"))
        log.addHandler(self._handler)
        log.setLevel(logging.INFO)  # runs started from Python write the same log as the command line

    def close(self) -> None:
        """Wait for the checkpoint in progress and release the folder."""
        try:
            self.wait_for_checkpoint()
        finally:
            self._writer.shutdown()
            log.removeHandler(self._handler)
            self._handler.close()
            self._lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, UserError):  # into the file only; the caller shows it on the screen
            self._handler.handle(logging.makeLogRecord({"levelno": logging.ERROR, "levelname": "ERROR", "msg": str(error)}))
        with suppress(*(() if kind is None else (UserError, OSError))):  # report the first error, not its consequences
            self.close()

    # --- metrics, start and end ----------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True if the run has a summary."""
        return (self.path / SUMMARY_FILE).is_file()

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl and flush it to disk."""
        with disk_errors(self.path / METRICS_FILE), (self.path / METRICS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rewind_metrics(self, step: int) -> None:
        """Drop the lines after the checkpoint that the run resumes from, a torn last line included."""
        lines = [line for line in read_metrics(self.path) if line["step"] <= step]
        write_atomic(self.path / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))

    def keep_start(self, model: Mapping[str, Tensor], mask: Mask | None) -> None:
        """Write θ₀, the start of task vectors, and the mask; called before the first step."""
        self._save_tensors(START_FILE, model)
        if mask is not None:
            with disk_errors(self.path / MASK_FILE):
                mask.save(self.path / MASK_FILE)

    def secret(self) -> int:
        """Return the key of the noise of privacy.noise: drawn once, stored in this folder only."""
        file = self.path / SECRET_FILE
        if not file.is_file():
            write_atomic(file, f"{secrets.randbits(256)}\n", mode=0o600)
        return int(file.read_text())

    def keep_client_vectors(self, vectors: Mapping[int, Mapping[str, Tensor]], model: Mapping[str, Tensor], origin: str) -> None:
        """Write what each client added to the final model, one task vector per client.

        Each covers the whole model, as the run's own task vector does, so that they can be added.
        """
        folder = self.path / CLIENTS_FOLDER
        space = ParamSpace({name: tensor.shape for name, tensor in model.items() if tensor.is_floating_point()})
        zeros = {name: torch.zeros(shape) for name, shape in space.shapes.items()}
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            for client, vector in vectors.items():
                TaskVector(space, space.flatten({**zeros, **vector}), [origin]).save(folder / f"{client}.safetensors")

    def finish(self, summary: Mapping[str, Any], model: Mapping[str, Tensor]) -> None:
        """Write the final model, then the summary: a run with a summary is finished."""
        self.wait_for_checkpoint()
        self._save_tensors(MODEL_FILE, model)
        write_json(self.path / SUMMARY_FILE, summary)

    def _save_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        with disk_errors(self.path / name, SafetensorError):
            write_atomic(self.path / name, lambda part: save_file(_on_cpu(tensors), part))

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Write a checkpoint in the background, or before returning if `wait`.

        `state` may have a `score`: the best checkpoints by score are kept beside the latest, the earlier of two equal ones.
        """
        self.wait_for_checkpoint()
        if wait or sum(tensor.nbytes for tensor in tensors.values()) > COPIED:
            self._write_checkpoint(step, tensors, state)
            return
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._pending = self._writer.submit(self._write_checkpoint, step, copied, deepcopy(dict(state)))

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint in progress; raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_checkpoint(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        part, final = self.checkpoints / f".part-{step:09d}", self.checkpoints / f"step-{step:09d}"
        with disk_errors(final, SafetensorError):
            try:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                save_file(_on_cpu(tensors), part / "tensors.safetensors")
                digest = sha256_of_file(part / "tensors.safetensors")
                (part / "state.json").write_text(json.dumps({"format": FORMAT, "sha256": digest, "step": step, **state}, indent=1))
                for file in part.iterdir():
                    fsync(file)
                if final.exists():
                    shutil.rmtree(final)  # a damaged one that was skipped on resume
                os.rename(part, final)
                fsync(self.checkpoints)
            except (OSError, SafetensorError):
                shutil.rmtree(part, ignore_errors=True)
                raise
        self._prune()

    def _steps(self) -> list[int]:
        return sorted(int(p.name.removeprefix("step-")) for p in self.checkpoints.glob("step-*"))

    def _prune(self) -> None:
        steps = self._steps()
        scores = {s: float(score) for s in steps if (score := self._state(s).get("score")) is not None}
        best = sorted(scores, key=lambda s: (-scores[s], s))[: self.keep_best]
        for step in set(steps) - set(steps[-self.keep_last :]) - set(best):
            shutil.rmtree(self.checkpoints / f"step-{step:09d}")

    def _state(self, step: int) -> dict[str, Any]:
        try:
            state = json.loads((self.checkpoints / f"step-{step:09d}" / "state.json").read_text())
            return state if isinstance(state, dict) else {}
        except (OSError, ValueError):
            return {}

    def read_checkpoint(self, step: int) -> Checkpoint | None:
        """Return a checkpoint whose tensors match their digest, or None."""
        self.wait_for_checkpoint()
        state = self._state(step)
        try:
            data = (self.checkpoints / f"step-{step:09d}" / "tensors.safetensors").read_bytes()
            if not state or hashlib.sha256(data).hexdigest() != state.get("sha256"):
                return None
            checkpoint = Checkpoint(step, load_bytes(data), state)
        except (OSError, SafetensorError):
            return None
        try:
            return _upgraded(checkpoint)
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # an edited file, not a damaged disk: keep the checkpoint
            raise UserError(f"run.dir: {self.path}: state.json of step {step} cannot be read ({first_line(error)}).") from None

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint that is intact and whose best checkpoint is intact; remove newer ones, whose steps the run repeats."""
        self.wait_for_checkpoint()
        for step in reversed(self._steps()):
            checkpoint = self.read_checkpoint(step)
            best = checkpoint.state.get("session", {}).get("best_step") if checkpoint else None
            if checkpoint and (best is None or best == step or self.read_checkpoint(best)):
                return checkpoint
            which = f"step {step}" if not checkpoint else f"step {best}, the best before step {step},"
            log.warning("checkpoint of %s is damaged: falling back to the one before", which)
            shutil.rmtree(self.checkpoints / f"step-{step:09d}")
        return None


def _upgraded(old: Checkpoint) -> Checkpoint:
    """Return a checkpoint in today's format. That of version 0.2 has the same content under other names."""
    state = dict(old.state)
    if (number := state.get("format", 1)) == FORMAT:
        return old
    if number != 1:
        raise UserError(f"run.dir: a later version of fedlens wrote the checkpoint of step {old.step} (format {number}); upgrade fedlens.")
    counts = dict(state.pop("counts", {}))
    state["session"] = {name: state.pop(name) for name in ("seconds", "stale", "best_score", "best_step") if name in state}
    state["privacy"] = {"rounds": old.step}
    state["session"]["facts"] = {name: state.pop(name, None) for name in ("ridge", "mask")}
    traffic = {name: counts.pop(name) for name in ("bytes_up", "bytes_down") if name in counts}
    if traffic:  # federated
        totals = {"dropped": 0, "nonfinite": 0, "refused": 0, **counts}
        state |= {"totals": totals, "traffic": {**traffic, "registry": state.pop("registry", {})}}
        renamed = {"model.": "server.model.", "server.": "server.moment.", "scaffold.": "algorithm.", "client.": "ledger."}
    else:
        state["training"] = {"loss_sum": state.pop("loss_sum", 0.0), "scaler": state.pop("scaler", {})}
        renamed = {"model.": "training.model.", "momentum.": "training.momentum."}

    def new_name(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in renamed.items() if name.startswith(old)), name)

    return Checkpoint(old.step, {new_name(name): tensor for name, tensor in old.tensors.items()}, {**state, "format": FORMAT})


def _is_unfinished_start(path: Path) -> bool:
    """Return True for a file that `create` writes before the configuration: a killed process may have left it."""
    return path.name in ("lock", ENVIRONMENT_FILE) or path.suffix == ".part" or (path.name == CHECKPOINTS and not any(path.iterdir()))


def take_lock(path: Path, field: str = "run.dir") -> IO[str]:
    """Lock a folder for this process until the returned file is closed."""
    file = (path / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it however the process ends
    except BlockingIOError:
        file.close()
        raise UserError(f"{field}: {path} is in use by another process.") from None
    except OSError:  # some network and FUSE file systems (a mounted Google Drive) have no locks
        log.warning("%s: this file system has no locks; make sure that only one process uses it", path)
    return file


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


# --- reading a run that may belong to another process ----------------------------------------------------------------


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl.

    A last line without a line break was torn by a kill and is dropped. Any other line that is not a record is an error, because the
    lines after it must not be lost.
    """
    file, records = path / METRICS_FILE, list[dict[str, Any]]()
    lines = _bytes(file).split(b"\n") if file.exists() else []
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
        except ValueError:
            if number == len(lines):
                break
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(
                f"run: {file}, line {number} must be a record with its step, got {_shortened(text)}; repair or remove that line."
            )
        records.append(record)
    return records


def _shortened(text: bytes, most: int = 40) -> str:
    shown = text[:most].decode(errors="replace")
    return repr(shown + ("…" if len(text) > most else ""))


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"run: {file} cannot be read ({first_line(error)}).") from None


def read_environment(path: Path) -> dict[str, Any]:
    """Return the environment recorded when the run started, or an empty dict if the file is missing or damaged."""
    try:
        environment = json.loads((path / ENVIRONMENT_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return environment if isinstance(environment, dict) else {}


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary of a finished run."""
    file = path / SUMMARY_FILE
    if not file.is_file():
        raise UserError(f"run: {path} is not finished; resume it: fedlens resume {path}")
    try:
        summary = json.loads(_bytes(file))
    except ValueError:
        summary = None
    if isinstance(summary, dict) and "val_accuracy" in summary:
        return summary
    raise UserError(f"run: {file} is damaged: it is not the summary of a finished run. Remove it and resume: fedlens resume {path}")


def is_finished(path: Path) -> bool:
    """Return True if the run has an intact summary."""
    try:
        return bool(read_summary(path))
    except UserError:
        return False


def read_model(path: Path, name: str = MODEL_FILE) -> dict[str, Tensor]:
    """Return the tensors of the final model, or of another file of the run."""
    file = path / name
    if not file.is_file() and (path / SUMMARY_FILE).is_file():
        raise UserError(
            f"run: {path} is finished, but {name} is missing: published runs have no weights. Use the original folder, or repeat the run."
        )
    if not file.is_file():
        raise UserError(f"run: {path} is not finished, so it has no final model; resume it: fedlens resume {path}")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"run: {file} is damaged ({first_line(error)}); restore it or repeat the run.") from None
