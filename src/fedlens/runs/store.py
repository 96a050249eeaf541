"""The run folder: config.yaml, metrics.jsonl, summary.json, checkpoints/, log.txt. All files but the logs are written atomically.

digests.json has the SHA-256 of all files but the logs (runs/digests.py), and a run is finished when it lists the summary. metrics.jsonl
grows, so each checkpoint records the digest of the lines before it.

A checkpoint is a folder `checkpoints/step-N` with tensors.safetensors, state.json and a digests.json of its own. It is written under
another name, flushed to disk and renamed, so it is complete unless the disk damages it later. A damaged checkpoint is skipped with a
warning, and the run resumes from the one before.

Training does not wait for the disk: a thread writes a copy. One write is in progress at a time; reading checkpoints and closing the
folder wait for it, and its disk errors are raised there or at the next checkpoint.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
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

from fedlens.errors import OneLine, UserError, first_line
from fedlens.files import disk_errors, fsync, remove_parts, sha256_of_file, write_atomic
from fedlens.lens.mask import Mask
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector
from fedlens.runs import digests
from fedlens.runs.digests import ENVIRONMENT_FILE, Damaged, verify

log = logging.getLogger("fedlens")
CHECKPOINTS = "checkpoints"
CONFIG_FILE, SECRET_FILE = "config.yaml", "secret"
SUMMARY_FILE, METRICS_FILE, PARTITION_FILE = "summary.json", "metrics.jsonl", "partition.json"
MODEL_FILE, START_FILE, MASK_FILE, CLIENTS_FOLDER = "model.safetensors", "start.safetensors", "mask.safetensors", "clients"
STATE_FILE, TENSORS_FILE = "state.json", "tensors.safetensors"  # of a checkpoint
INPUTS = (CONFIG_FILE, ENVIRONMENT_FILE, SECRET_FILE)  # what a run that starts again from its first step reads
NUMBER, NONE = (int, float), (type(None),)
COUNTERS = {
    "seconds": NUMBER,
    "stale": (int,),
    "best_step": (int, *NONE),
    "best_score": NUMBER + NONE,
    "score": NUMBER + NONE,
    "facts": (dict,),
}
FORMAT = 3  # of state.json; version 0.2 wrote none, and format 2 had a digest of the tensors only
COPIED = 2**30  # bytes; a larger checkpoint is written while training waits, to avoid holding it in memory twice


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from disk, its digest verified."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def to_json(value: Any, *, compact: bool = False) -> str:
    return json.dumps(value, indent=None if compact else 1, separators=(",", ":") if compact else None) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_atomic(path, to_json(value))


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
        folder.write(ENVIRONMENT_FILE, to_json({**environment, **digests.MARK}))
        folder.digests[CONFIG_FILE] = digests.sha256(config_yaml.encode())
        folder.keep_digests()
        folder.write(CONFIG_FILE, config_yaml)
        folder._log_to_file()
        return folder

    @classmethod
    def open(cls, path: Path, *, keep_last: int = 2, keep_best: int = 1) -> "RunFolder":
        """Open the folder of an unfinished run: check its files and remove what a killed process left half-written."""
        if not (path / CONFIG_FILE).is_file():
            raise UserError(f"run.dir: {path} is not a run folder: it has no {CONFIG_FILE}.")
        with disk_errors(path):
            folder = cls(path, take_lock(path), keep_last, keep_best)
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
        lines = [] if record else [line for line in _parsed(self.path) if line["step"] <= step]
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
        part, final = self.checkpoints / f".part-{step:09d}", self.checkpoints / f"step-{step:09d}"
        with disk_errors(final, SafetensorError):
            try:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                save_file(_on_cpu(tensors), part / TENSORS_FILE)
                (part / STATE_FILE).write_text(to_json({"format": FORMAT, "step": step, **state}))
                digests.write_all(part)
                for file in part.iterdir():
                    fsync(file)
                if final.exists():
                    shutil.rmtree(final)  # a damaged one that was skipped on resume
                os.rename(part, final)
                fsync(self.checkpoints)
            except (OSError, SafetensorError, UserError):
                shutil.rmtree(part, ignore_errors=True)
                raise
        self._prune()

    def _prune(self) -> None:
        steps = steps_of(self.path)
        scores = {step: score for step in steps if isinstance(score := _state(self.path, step).get("score"), int | float)}
        best = sorted(scores, key=lambda s: (-scores[s], s))[: self.keep_best]
        for step in set(steps) - set(steps[-self.keep_last :]) - set(best):
            shutil.rmtree(_folder_of(self.path, step))

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
            shutil.rmtree(_folder_of(self.path, step))
        return None


def _folder_of(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:09d}"


def steps_of(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, intact or not; folders of other names are ignored."""
    folders = [path for path in (run / CHECKPOINTS).glob("step-*") if path.is_dir() and not path.is_symlink()]
    return sorted(int(path.name[5:]) for path in folders if re.fullmatch(r"step-[0-9]{9,18}", path.name))


def _state(run: Path, step: int) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json; empty if it is damaged. Formats 1 and 2 have no digest of it."""
    folder = _folder_of(run, step)
    try:
        listed, content = digests.read(folder), (folder / STATE_FILE).read_bytes()
        state: dict[str, Any] = json.loads(content)
        intact = state.get("format", 1) in (1, 2) if listed is None else listed[STATE_FILE] == digests.sha256(content)
        return state if intact else {}
    except (OSError, ValueError, KeyError, AttributeError, RecursionError, Damaged):
        return {}


def read_checkpoint(run: Path, step: int) -> Checkpoint | None:
    """Return a checkpoint whose files match their digests, or None."""
    folder, state = _folder_of(run, step), _state(run, step)
    try:
        listed, data = digests.read(folder), (folder / TENSORS_FILE).read_bytes()
        if digests.sha256(data) != (state["sha256"] if listed is None else listed[TENSORS_FILE]) or state["step"] != step:
            return None
        checkpoint = _upgraded(Checkpoint(step, load_bytes(data), state))
        counters = {**checkpoint.state.get("session", {}), "score": checkpoint.state.get("score")}
        return checkpoint if all(type(value) in COUNTERS[name] for name, value in counters.items() if name in COUNTERS) else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, Damaged):
        return None


def _upgraded(old: Checkpoint) -> Checkpoint:
    """Return a checkpoint in today's format. That of version 0.2 has the same content under other names."""
    state = dict(old.state)
    if (number := state.get("format", 1)) in (2, FORMAT):
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
    return (
        path.name in ("lock", ENVIRONMENT_FILE, digests.FILE)
        or path.suffix == ".part"
        or (path.name == CHECKPOINTS and not any(path.iterdir()))
    )


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
    """Return the lines of metrics.jsonl; those of an unfinished run are checked up to its last checkpoint."""
    verify(path, METRICS_FILE)
    if not is_finished(path) and (record := _metrics_record(path)):
        recorded_metrics(path, record)
    return _parsed(path)


def _metrics_record(path: Path) -> dict[str, Any] | None:
    """Return what the newest intact checkpoint recorded of the lines before it."""
    records = (_state(path, step).get("metrics") for step in reversed(steps_of(path)))
    return next(filter(None, records), None)


def recorded_metrics(path: Path, record: Mapping[str, Any]) -> bytes:
    """Return the lines before a checkpoint, which `record` counts; raise if they differ from what was written."""
    file = path / METRICS_FILE
    lines = (_bytes(file) if file.exists() else b"").splitlines(keepends=True)[: int(record["lines"])]
    if digests.sha256(content := b"".join(lines)) != record["sha256"]:
        raise Damaged(
            f"run: {file} is damaged: its first {record['lines']} lines differ from those before the last checkpoint. Restore it from a copy, "
            f"or remove {path / CHECKPOINTS} to train again from the start."
        )
    return content


def _parsed(path: Path) -> list[dict[str, Any]]:
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
    """Return the environment recorded when the run started. Of a run without digests, an empty dict if the file is missing or damaged."""
    verify(path, ENVIRONMENT_FILE)
    try:
        environment = json.loads((path / ENVIRONMENT_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return environment if isinstance(environment, dict) else {}


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary of a finished run."""
    file = path / SUMMARY_FILE
    if not has_summary(path):
        raise UserError(f"run: {path} is not finished; resume it: fedlens resume {path}")
    try:
        verify(path, SUMMARY_FILE)
        summary = json.loads(_bytes(file))
    except (ValueError, Damaged):
        summary = None
    if isinstance(summary, dict) and "val_accuracy" in summary:
        return summary
    raise UserError(f"run: {file} is damaged: it is not the summary of a finished run. Remove it and resume: fedlens resume {path}")


def has_summary(path: Path) -> bool:
    """Return True if the run was finished, though its summary may be damaged now."""
    return bool(digests.written(path, SUMMARY_FILE))


def problems(path: Path) -> list[str]:
    """Return what is damaged in a run folder, and whether `fedlens resume` makes it again."""
    try:
        bad, steps = digests.damaged(path), steps_of(path)
    except Damaged as error:
        return [str(error)]
    lost = [*needed_by(path), *([METRICS_FILE] if steps else [])]
    fix = {True: "restore it from a copy, or repeat the run", False: f"made again by: fedlens resume {path}"}
    lines = [f"{name} is damaged ({why}); {fix[name in lost]}" for name, why in bad.items()]
    try:
        read_metrics(path)
    except UserError as error:
        lines += [] if METRICS_FILE in bad else [str(error)]
    broken = [step for step in steps if not read_checkpoint(path, step)]
    return lines + [f"the checkpoint of step {step} is damaged; a resume uses the one before" for step in broken]


def needed_by(path: Path) -> list[str]:
    """Return the files that an unfinished run reads and does not write again."""
    return [*INPUTS, *((START_FILE, MASK_FILE) if steps_of(path) else ())]


def runs_below(path: Path) -> list[Path]:
    """Return all run folders below a path, also those with missing files."""
    folders = {file.parent for name in (CONFIG_FILE, digests.FILE) for file in path.rglob(name)}
    return sorted(f for f in folders if (f / CONFIG_FILE).is_file() or CONFIG_FILE in (f / digests.FILE).read_text(errors="replace"))


def is_finished(path: Path) -> bool:
    """Return True if the run has an intact summary."""
    try:
        return bool(read_summary(path))
    except UserError:
        return False


def reopen(path: Path) -> bool:
    """Return True if a finished run has damaged files that a resume makes again, and make it unfinished; raise if it cannot make them."""
    bad = digests.damaged(path)
    if METRICS_FILE in bad and (record := _metrics_record(path)):
        recorded_metrics(path, record)
    if bad:
        with RunFolder.open(path):
            log.warning("damaged files are made again: %s", ", ".join(f"{name} ({why})" for name, why in bad.items()))
    return bool(bad)


def read_model(path: Path, name: str = MODEL_FILE) -> dict[str, Tensor]:
    """Return the tensors of the final model, or of another file of the run."""
    file = path / name
    if not file.is_file() and has_summary(path):
        raise UserError(
            f"run: {path} is finished, but {name} is missing: published runs have no weights. Use the original folder, or repeat the run."
        )
    if not digests.written(path, name):
        raise UserError(f"run: {path} is not finished, so it has no final model; resume it: fedlens resume {path}")
    verify(path, name)
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"run: {file} is damaged ({first_line(error)}); restore it or repeat the run.") from None


def read_mask(path: Path, sparse: bool = False) -> Mask | None:
    """Return the mask of a run; None: all coordinates may move. `sparse`: the run is known to have one."""
    file = path / MASK_FILE
    if digests.written(path, MASK_FILE):
        verify(path, MASK_FILE)
        return Mask.load(file)
    if sparse or (has_summary(path) and read_summary(path).get("mask")):
        raise UserError(f"run: {path} is sparse, but {file.name} is missing: published runs have no weights. Use the original folder.")
    return None
