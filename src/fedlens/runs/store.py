"""The run folder: config.yaml, metrics.jsonl, summary.json, checkpoints/, log.txt. Every write is atomic.

A checkpoint is a folder `checkpoints/step-N` with tensors.safetensors and state.json, which carries the SHA-256 of the
tensors. It is written under another name, flushed to disk and renamed, so a folder of that name is whole or damaged by the
disk, never half-written; a damaged one is passed over for the one before, and that is said.

Training does not wait for the disk: it hands over a copy and goes on, while a thread writes, digests and flushes. One is under way at a time. Whatever
reads checkpoints or ends the run waits for it, and an error of the disk comes up there or at the next one.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedlens.errors import Elsewhere, UserError, first_line
from fedlens.lens.mask_rules import Mask
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector

log = logging.getLogger("fedlens")
CHECKPOINTS = "checkpoints"
SECRET_FILE = "secret"
SUMMARY_FILE, METRICS_FILE, ENVIRONMENT_FILE = "summary.json", "metrics.jsonl", "environment.json"
COPIED = 2**30  # bytes of a checkpoint: a larger one is written while training waits, not held in memory twice
MODEL_FILE, START_FILE, MASK_FILE, CLIENTS_FOLDER = "model.safetensors", "start.safetensors", "mask.safetensors", "clients"
MENDED_BY_USER = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EFBIG,
    errno.EPERM,
    errno.ENOTDIR,
    errno.ENOENT,  # a place such as /proc, where nothing can be made, or a folder that was removed
)


@contextmanager
def disk_errors(what: Path) -> Iterator[None]:
    """A full or read-only disk is the user's to mend: one line."""
    try:
        yield
    except OSError as error:
        if error.errno in MENDED_BY_USER:
            reason = (error.strerror or "cannot be written").lower()
            raise Elsewhere(f"run.dir: {what} cannot be written: {reason}; what was saved before is intact") from None
        raise
    except SafetensorError as error:  # of the disk too: its library writes files by itself
        raise Elsewhere(f"run.dir: {what} cannot be written: {first_line(error)}; what was saved before is intact") from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Whole or not at all: a temporary file beside it, flushed, then renamed."""
    part = path.with_name(path.name + ".part")
    data = content.encode() if isinstance(content, str) else content
    with disk_errors(path):
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def write_json(path: Path, content: Mapping[str, Any], *, compact: bool = False) -> None:
    write_atomic(path, json.dumps(content, indent=None if compact else 1, separators=(",", ":") if compact else None) + "\n")


def _begun(path: Path) -> bool:
    """What `create` makes before there is a run: a process that was killed there may have left it."""
    return path.name in ("lock", ENVIRONMENT_FILE) or path.suffix == ".part" or (path.name == CHECKPOINTS and not any(path.iterdir()))


@dataclass
class Checkpoint:
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class RunFolder:
    """A run on disk. `open` or `create` takes its lock, so that two processes never write one run."""

    def __init__(self, path: Path, lock: IO[str], keep_last: int = 2, keep_best: int = 1) -> None:
        self.path, self._lock = path, lock
        self.keep_last, self.keep_best = keep_last, keep_best
        self.checkpoints = path / CHECKPOINTS
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    # --- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, config_yaml: str, environment: Mapping[str, Any], *, keep_last: int = 2, keep_best: int = 1) -> "RunFolder":
        if (path / "config.yaml").exists():
            raise UserError(f"run.dir: {path} already holds a run; go on with it: fedlens resume {path}")
        if path.exists() and (not path.is_dir() or not all(_begun(p) for p in path.iterdir())):
            raise UserError(f"run.dir: {path} exists and is not an empty folder")
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path, take_lock(path), keep_last, keep_best)
            if (path / "config.yaml").exists():  # made and left by another process since we looked
                folder._lock.close()
                raise UserError(f"run.dir: {path} already holds a run; go on with it: fedlens resume {path}")
            folder.checkpoints.mkdir(exist_ok=True)
        write_json(path / ENVIRONMENT_FILE, environment)
        write_atomic(path / "config.yaml", config_yaml)  # last: from here on it is a run
        folder._log_to_file()
        return folder

    @classmethod
    def open(cls, path: Path, *, keep_last: int = 2, keep_best: int = 1) -> "RunFolder":
        if not (path / "config.yaml").is_file():
            raise UserError(f"run.dir: {path} holds no run (no config.yaml)")
        with disk_errors(path):
            folder = cls(path, take_lock(path), keep_last, keep_best)
            folder.checkpoints.mkdir(exist_ok=True)
            for leftover in folder.checkpoints.glob(".part-*"):  # of a process that was killed while writing
                shutil.rmtree(leftover)
        folder._log_to_file()
        return folder

    def _log_to_file(self) -> None:
        self._handler = logging.FileHandler(self.path / "log.txt")
        self._handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(message)s"))
        log.addHandler(self._handler)
        log.setLevel(logging.INFO)  # a run from Python keeps the same log as one from the command line

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._writer.shutdown()
            log.removeHandler(self._handler)
            self._handler.close()
            self._lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, UserError):  # for the file alone: whoever catches it tells it on the screen
            self._handler.handle(logging.makeLogRecord({"levelno": logging.ERROR, "levelname": "ERROR", "msg": str(error)}))
        with suppress(*(() if kind is None else (UserError, OSError))):  # what went wrong first is what is told
            self.close()

    # --- metrics and summary -------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return (self.path / SUMMARY_FILE).is_file()

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        with disk_errors(self.path / METRICS_FILE), (self.path / METRICS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rewind_metrics(self, step: int) -> None:
        """Drop what was written after the checkpoint that the run goes on from, a torn last line included."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write_atomic(self.path / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))

    def keep_start(self, model: Mapping[str, Tensor], mask: Mask | None) -> None:
        """θ₀, which task vectors start from, and the mask: written before the first step."""
        self._save_tensors(START_FILE, model)
        if mask is not None:
            with disk_errors(self.path / MASK_FILE):
                mask.save(self.path / MASK_FILE)

    def secret(self) -> int:
        """A number that only this folder knows, drawn once: what the noise of privacy.noise is keyed by."""
        file = self.path / SECRET_FILE
        if not file.is_file():
            file.with_name(file.name + ".part").touch(mode=0o600)  # from its first byte on
            write_atomic(file, f"{secrets.randbits(256)}\n")
        return int(file.read_text())

    def keep_client_vectors(self, vectors: Mapping[int, Mapping[str, Tensor]], model: Mapping[str, Tensor], origin: str) -> None:
        """What each client added to the final model, as one task vector a client; over all of the model, as the run's own is, so that they can be added."""
        folder = self.path / CLIENTS_FOLDER
        space = ParamSpace({name: tensor.shape for name, tensor in model.items() if tensor.is_floating_point()})
        zeros = {name: torch.zeros(shape) for name, shape in space.shapes.items()}
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            for client, vector in vectors.items():
                TaskVector(space, space.flatten({**zeros, **vector}), [origin]).save(folder / f"{client}.safetensors")

    def finish(self, summary: Mapping[str, Any], model: Mapping[str, Tensor]) -> None:
        self.settle()
        self._save_tensors(MODEL_FILE, model)
        write_json(self.path / SUMMARY_FILE, summary)

    def _save_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        part = self.path / f"{name}.part"
        with disk_errors(self.path / name):
            try:
                save_file(_cpu(tensors), part)
                _fsync(part)
                os.replace(part, self.path / name)
            except (OSError, SafetensorError):
                part.unlink(missing_ok=True)
                raise

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, wait: bool = False) -> None:
        """`state` may carry `score`: the best K by score are kept beside the last N, the earlier of two equal ones. `wait`: until it is on disk."""
        self.settle()
        if wait or sum(tensor.nbytes for tensor in tensors.values()) > COPIED:
            self._write_checkpoint(step, tensors, state)
            return
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._pending = self._writer.submit(self._write_checkpoint, step, copied, deepcopy(dict(state)))

    def settle(self) -> None:
        """Wait for the checkpoint that is being written; if it could not be, that is raised here."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_checkpoint(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        part, final = self.checkpoints / f".part-{step:09d}", self.checkpoints / f"step-{step:09d}"
        with disk_errors(final):
            try:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                save_file(_cpu(tensors), part / "tensors.safetensors")
                digest = _sha256(part / "tensors.safetensors")
                (part / "state.json").write_text(json.dumps({"sha256": digest, "step": step, **state}, indent=1))
                for file in part.iterdir():
                    _fsync(file)
                if final.exists():
                    shutil.rmtree(final)  # a damaged one that this run passed over
                os.rename(part, final)
                _fsync(self.checkpoints)
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
            found = json.loads((self.checkpoints / f"step-{step:09d}" / "state.json").read_text())
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def read_checkpoint(self, step: int) -> Checkpoint | None:
        """A checkpoint whose tensors match their digest, or None."""
        self.settle()
        state = self._state(step)
        try:
            data = (self.checkpoints / f"step-{step:09d}" / "tensors.safetensors").read_bytes()
            if not state or hashlib.sha256(data).hexdigest() != state.get("sha256"):
                return None
            return Checkpoint(step, load_bytes(data), state)
        except (OSError, SafetensorError):
            return None

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest sound checkpoint whose best-so-far is sound too. Later ones are removed: the run makes them again."""
        self.settle()
        for step in reversed(self._steps()):
            found = self.read_checkpoint(step)
            best = found.state.get("best_step") if found else None
            if found and (best is None or best == step or self.read_checkpoint(best)):
                return found
            which = f"step {step}" if not found else f"step {best}, the best before step {step},"
            log.warning("checkpoint of %s is damaged: falling back to the one before", which)
            shutil.rmtree(self.checkpoints / f"step-{step:09d}")
        return None


def take_lock(path: Path, field: str = "run.dir") -> IO[str]:
    """The folder for this process alone, until the file that comes back is closed."""
    file = (path / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel gives it back however the process ends
    except BlockingIOError:
        file.close()
        raise UserError(f"{field}: {path} is in use by another process") from None
    except OSError:  # some network and FUSE file systems (a mounted Google Drive) know no locks
        log.warning("%s: this file system has no locks; make sure that only one process uses it", path)
    return file


def _cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # folders cannot be flushed on every file system
            raise
    finally:
        os.close(descriptor)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """metrics.jsonl as dicts. A last line without an end was torn by a kill and is not a line; any other that is no record is damage, which is said:
    what follows it must not be lost."""
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
                f"run: {file}, line {number}: {_shortened(text)} given, allowed is a record with its step; mend or remove that line"
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
        raise UserError(f"run: {file} cannot be read ({first_line(error)})") from None


def read_environment(path: Path) -> dict[str, Any]:
    """Where the run began, as far as its folder says."""
    try:
        found = json.loads((path / ENVIRONMENT_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def fitting(run: "RunFolder | None", step: int) -> Iterator[None]:
    """A checkpoint is put into place: one of another model, or whose state.json was changed, is an error in one line."""
    try:
        yield
    except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else first_line(error).removesuffix(":")
        where = "" if run is None else f"{run.path}: "
        raise UserError(f"run.dir: {where}the checkpoint of step {step} does not fit the run's config.yaml ({what})") from None


def read_summary(path: Path) -> dict[str, Any]:
    """What a finished run came to; a file that is not whole is an error that says how to go on."""
    file = path / SUMMARY_FILE
    if not file.is_file():
        raise UserError(f"run: {path} is not finished; go on with it: fedlens resume {path}")
    try:
        found = json.loads(_bytes(file))
    except ValueError:
        found = None
    if isinstance(found, dict) and "val_accuracy" in found:
        return found
    raise UserError(f"run: {file} is damaged, allowed is what a finished run writes; remove it and go on: fedlens resume {path}")


def is_finished(path: Path) -> bool:
    """Whether there is a summary, and it is whole."""
    try:
        return bool(read_summary(path))
    except UserError:
        return False


def read_model(path: Path, name: str = MODEL_FILE) -> dict[str, Tensor]:
    file = path / name
    if not file.is_file() and (path / SUMMARY_FILE).is_file():
        raise UserError(
            f"run: {path} is finished, but its weights were not kept (no {name}); use the folder that it was run in, or run it again"
        )
    if not file.is_file():
        raise UserError(f"run: {path} is not finished, so it has no final model yet; go on with it: fedlens resume {path}")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"run: {file} is damaged ({first_line(error)}); bring it back, or run it again") from None
