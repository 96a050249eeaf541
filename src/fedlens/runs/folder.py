"""Writing a run folder (its files: runs/store.py). All files but the logs are written atomically.

A checkpoint is written under another name, flushed to disk and renamed, so it is complete unless the disk damages it later.

Training does not wait for the disk: a thread writes a copy. One write is in progress at a time; reading checkpoints and closing the
folder wait for it, and its disk errors are raised there or at the next checkpoint.
"""

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
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fedlens.errors import OneLine, UserError
from fedlens.files import disk_errors, fsync, remove_parts, sha256_of_file, write_atomic
from fedlens.lens.mask import Mask
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector
from fedlens.runs import digests
from fedlens.runs.digests import ENVIRONMENT_FILE, verify
from fedlens.runs.store import (
    CHECKPOINTS,
    CLIENTS_FOLDER,
    CONFIG_FILE,
    FORMAT,
    INPUTS,
    MASK_FILE,
    METRICS_FILE,
    MODEL_FILE,
    SECRET_FILE,
    START_FILE,
    STATE_FILE,
    SUMMARY_FILE,
    TENSORS_FILE,
    Checkpoint,
    check_metrics,
    checkpoint_folder,
    needed_by,
    parsed_metrics,
    read_checkpoint,
    read_state,
    recorded_metrics,
    steps_of,
    take_lock,
    to_json,
)

log = logging.getLogger("fedlens")
COPIED = 2**30  # bytes; a larger checkpoint is written while training waits, to avoid holding it in memory twice


class RunFolder:
    """A run folder that this process has locked for writing: a context manager made by `create` or `open`."""

    def __init__(self, path: Path, lock: IO[str], keep_last: int = 2, keep_best: int = 1) -> None:
        self.path, self._lock = path, lock
        self.keep_last, self.keep_best = keep_last, keep_best
        self.checkpoints = path / CHECKPOINTS
        self.digests: digests.Digests = {}
        self._metrics, self._lines = hashlib.sha256(), 0  # of metrics.jsonl so far
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    # --- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, config_yaml: str, environment: Mapping[str, Any], **keep: int) -> "RunFolder":
        """Make the folder of a new run. The configuration is written last: with it, the folder is a run."""
        taken = f"run.dir: {path} already holds a run; resume it: fedlens resume {path}"
        if (path / CONFIG_FILE).exists():
            raise UserError(taken)
        if path.exists() and (not path.is_dir() or not all(_is_unfinished_start(p) for p in path.iterdir())):
            raise UserError(f"run.dir: {path} exists and is not an empty folder.")
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path, take_lock(path), **keep)
            if (path / CONFIG_FILE).exists():  # created by another process in the meantime
                folder._lock.close()
                raise UserError(taken)
            folder.checkpoints.mkdir(exist_ok=True)
        folder.write(ENVIRONMENT_FILE, to_json({**environment, **digests.MARK}))
        folder.digests[CONFIG_FILE] = digests.sha256(config_yaml.encode())
        folder.keep_digests()
        folder.write(CONFIG_FILE, config_yaml)
        folder._log_to_file()
        return folder

    @classmethod
    def open(cls, path: Path, **keep: int) -> "RunFolder":
        """Open the folder of an unfinished run: check its files and remove what a killed process left half-written."""
        if not (path / CONFIG_FILE).is_file():
            raise UserError(f"run.dir: {path} is not a run folder: it has no {CONFIG_FILE}.")
        with disk_errors(path):
            folder = cls(path, take_lock(path), **keep)
            try:
                folder._check()
            except UserError:
                folder._lock.close()
                raise
            folder.checkpoints.mkdir(exist_ok=True)
            for place in (path, path / CLIENTS_FOLDER, folder.checkpoints):
                remove_parts(place)
        folder._log_to_file()
        return folder

    def _check(self) -> None:
        """Raise if a file is damaged that this run will not write again. A run of version 0.2 gets digests now."""
        recorded = digests.read(self.path)
        if recorded is None:
            there = [name for name in (*INPUTS, START_FILE, MASK_FILE) if (self.path / name).is_file()]
            recorded = {name: sha256_of_file(self.path / name) for name in there}
        verify(self.path, *needed_by(self.path))
        self.digests = {name: digest for name, digest in recorded.items() if name in needed_by(self.path)}
        self.keep_digests()

    def _log_to_file(self) -> None:
        with disk_errors(self.path / "log.txt"):
            self._handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(OneLine("%(asctime)s | %(levelname)s | %(message)s"))
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

    def write(self, name: str, content: str) -> None:
        """Write a text file and note its digest; `keep_digests` or a later step records it."""
        write_atomic(self.path / name, content)
        self.digests[name] = digests.sha256(content.encode())

    def keep_digests(self, *names: str) -> None:
        """Record the digests of these files and of those that `write` wrote."""
        self.digests |= {name: sha256_of_file(self.path / name) for name in names}
        write_atomic(self.path / digests.FILE, digests.to_text(self.digests))

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl and flush it to disk."""
        text = (json.dumps(line) + "\n").encode()
        with disk_errors(self.path / METRICS_FILE), (self.path / METRICS_FILE).open("ab") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._metrics.update(text)
        self._lines += 1

    def rewind_metrics(self, step: int, record: Mapping[str, Any] | None = None) -> None:
        """Drop the lines after the checkpoint that the run resumes from, a torn last line included.

        `record`: the checkpoint's count and digest of the lines before it; None: keep the lines up to `step`.
        """
        lines = [] if record else [line for line in parsed_metrics(self.path) if line["step"] <= step]
        content = recorded_metrics(self.path, record) if record else "".join(json.dumps(line) + "\n" for line in lines).encode()
        write_atomic(self.path / METRICS_FILE, content)
        self._metrics, self._lines = hashlib.sha256(content), content.count(b"\n")

    def keep_start(self, model: Mapping[str, Tensor], mask: Mask | None) -> None:
        """Write θ₀, the start of task vectors, and the mask; called before the first step."""
        self._save_tensors(START_FILE, model)
        if mask is not None:
            with disk_errors(self.path / MASK_FILE):
                mask.save(self.path / MASK_FILE)
        self.keep_digests(START_FILE, *([MASK_FILE] if mask is not None else []))

    def secret(self) -> int:
        """Return the key of the noise of privacy.noise: drawn once, stored in this folder only."""
        file = self.path / SECRET_FILE
        if not digests.written(self.path, SECRET_FILE):
            write_atomic(file, f"{secrets.randbits(256)}\n", mode=0o600)
            self.keep_digests(SECRET_FILE)
        verify(self.path, SECRET_FILE)
        return int(file.read_text())

    def keep_client_vectors(self, vectors: Mapping[int, Mapping[str, Tensor]], model: Mapping[str, Tensor], origin: str) -> None:
        """Write what each client added to the final model, one task vector per client.

        Each covers the whole model, as the run's own task vector does, so that they can be added.
        """
        folder, names = self.path / CLIENTS_FOLDER, [f"{CLIENTS_FOLDER}/{client}.safetensors" for client in vectors]
        space = ParamSpace({name: tensor.shape for name, tensor in model.items() if tensor.is_floating_point()})
        zeros = {name: torch.zeros(shape) for name, shape in space.shapes.items()}
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier end of this run, which may have had other clients
            folder.mkdir()
            fsync(self.path)
            for name, vector in zip(names, vectors.values(), strict=True):
                TaskVector(space, space.flatten({**zeros, **vector}), [origin]).save(self.path / name)
        self.digests |= {name: sha256_of_file(self.path / name) for name in names}

    def finish(self, summary: Mapping[str, Any], model: Mapping[str, Tensor]) -> None:
        """Write the final model, the summary, and the digests of both: a run whose summary has a digest is finished."""
        self.wait_for_checkpoint()
        self._save_tensors(MODEL_FILE, model)
        self.write(SUMMARY_FILE, to_json(summary))
        self.digests |= {METRICS_FILE: self._metrics.hexdigest()} if self._lines else {}
        self.keep_digests(MODEL_FILE)

    def _save_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        with disk_errors(self.path / name, SafetensorError):
            write_atomic(self.path / name, lambda part: save_file(_on_cpu(tensors), part))

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Write a checkpoint in the background, or before returning if `wait`.

        `state` may have a `score`: the best checkpoints by score are kept beside the latest, the earlier of two equal ones.
        """
        self.wait_for_checkpoint()
        state = {"metrics": {"lines": self._lines, "sha256": self._metrics.hexdigest()}, **state}
        if wait or sum(tensor.nbytes for tensor in tensors.values()) > COPIED:
            self._write_checkpoint(step, tensors, state)
            return
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._pending = self._writer.submit(self._write_checkpoint, step, copied, deepcopy(state))

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint in progress; raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_checkpoint(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        part, final = self.checkpoints / f".part-{step:09d}", checkpoint_folder(self.path, step)
        with disk_errors(final, SafetensorError):
            try:
                part.mkdir()
                save_file(_on_cpu(tensors), part / TENSORS_FILE)
                (part / STATE_FILE).write_text(to_json({"format": FORMAT, "step": step, **state}))
                digests.write_all(part)
                for file in part.iterdir():
                    fsync(file)
                if final.exists():
                    shutil.rmtree(final)  # a damaged one that was skipped on resume
                part.rename(final)
                fsync(self.checkpoints)
            finally:
                shutil.rmtree(part, ignore_errors=True)  # already renamed if all went well
        self._prune()

    def _prune(self) -> None:
        steps = steps_of(self.path)
        scores = {step: score for step in steps if isinstance(score := read_state(self.path, step).get("score"), int | float)}
        best = sorted(scores, key=lambda s: (-scores[s], s))[: self.keep_best]
        for step in set(steps) - set(steps[-self.keep_last :]) - set(best):
            shutil.rmtree(checkpoint_folder(self.path, step))

    def read_checkpoint(self, step: int) -> Checkpoint | None:
        """Return a checkpoint that is intact, or None."""
        self.wait_for_checkpoint()
        return read_checkpoint(self.path, step)

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint that is intact and whose best checkpoint is intact; remove newer ones, whose steps the run repeats."""
        self.wait_for_checkpoint()
        for step in reversed(steps_of(self.path)):
            checkpoint = self.read_checkpoint(step)
            best = checkpoint.state.get("session", {}).get("best_step") if checkpoint else None
            if checkpoint and (best is None or best == step or self.read_checkpoint(best)):
                return checkpoint
            which = f"step {step}" if not checkpoint else f"step {best}, the best before step {step},"
            log.warning("checkpoint of %s is damaged: falling back to the one before", which)
            shutil.rmtree(checkpoint_folder(self.path, step))
        return None


def reopen(path: Path) -> bool:
    """Return True if a finished run has damaged files that a resume makes again, and make it unfinished; raise if it cannot make them."""
    bad = digests.damaged(path)
    if METRICS_FILE in bad:
        check_metrics(path)
    if bad:
        with RunFolder.open(path):
            log.warning("damaged files are made again: %s", ", ".join(f"{name} ({why})" for name, why in bad.items()))
    return bool(bad)


def _is_unfinished_start(path: Path) -> bool:
    """Return True for a file that `create` writes before the configuration: a killed process may have left it."""
    return (
        path.name in ("lock", ENVIRONMENT_FILE, digests.FILE)
        or path.suffix == ".part"
        or (path.name == CHECKPOINTS and not any(path.iterdir()))
    )


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
