"""Reading a run folder: config.yaml, metrics.jsonl, summary.json, checkpoints/, log.txt. The run may belong to another process.

digests.json has the SHA-256 of all files but the logs (runs/digests.py), and a run is finished when it lists the summary. metrics.jsonl
grows, so each checkpoint records the digest of the lines before it.

A checkpoint is a folder `checkpoints/step-N` with tensors.safetensors, state.json and a digests.json of its own. A damaged one is skipped
with a warning, and the run resumes from the one before. runs/folder.py writes all this.
"""

import fcntl
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import Tensor

from fedlens.errors import UserError, first_line
from fedlens.files import write_atomic
from fedlens.lens.mask import Mask
from fedlens.runs import digests
from fedlens.runs.digests import ENVIRONMENT_FILE, Damaged, verify

log = logging.getLogger("fedlens")
CHECKPOINTS = "checkpoints"
CONFIG_FILE, SECRET_FILE = "config.yaml", "secret"
SUMMARY_FILE, METRICS_FILE, PARTITION_FILE = "summary.json", "metrics.jsonl", "partition.json"
MODEL_FILE, START_FILE, MASK_FILE, CLIENTS_FOLDER = "model.safetensors", "start.safetensors", "mask.safetensors", "clients"
STATE_FILE, TENSORS_FILE = "state.json", "tensors.safetensors"  # of a checkpoint
INPUTS = (CONFIG_FILE, ENVIRONMENT_FILE, SECRET_FILE)  # what a run that starts again from its first step reads
FLOAT, SCORE = (int, float), (int, float, NoneType)
COUNTERS = {"seconds": FLOAT, "stale": (int,), "facts": (dict,), "best_step": (int, NoneType), "best_score": SCORE, "score": SCORE}
FORMAT = 3  # of state.json; version 0.2 wrote none, and format 2 had a digest of the tensors only


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from disk, its digest verified."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def to_json(value: Any, *, compact: bool = False) -> str:
    """Return a value as the content of a JSON file."""
    return json.dumps(value, indent=None if compact else 1, separators=(",", ":") if compact else None) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_atomic(path, to_json(value))


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:09d}"


def steps_of(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, intact or not; folders of other names are ignored."""
    folders = [path for path in (run / CHECKPOINTS).glob("step-*") if path.is_dir() and not path.is_symlink()]
    return sorted(int(path.name[5:]) for path in folders if re.fullmatch(r"step-[0-9]{9,18}", path.name))


def read_state(run: Path, step: int) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json; empty if it is damaged. Formats 1 and 2 have no digest of it."""
    folder = checkpoint_folder(run, step)
    try:
        listed, content = digests.read(folder), (folder / STATE_FILE).read_bytes()
        state: dict[str, Any] = json.loads(content)
        intact = state.get("format", 1) in (1, 2) if listed is None else listed[STATE_FILE] == digests.sha256(content)
        return state if intact else {}
    except (OSError, ValueError, KeyError, AttributeError, RecursionError, Damaged):
        return {}


def read_checkpoint(run: Path, step: int) -> Checkpoint | None:
    """Return a checkpoint whose files match their digests, or None."""
    folder, state = checkpoint_folder(run, step), read_state(run, step)
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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; those of an unfinished run are checked up to its last checkpoint."""
    verify(path, METRICS_FILE)
    if not is_finished(path):
        check_metrics(path)
    return parsed_metrics(path)


def check_metrics(path: Path) -> None:
    """Raise if the lines before the newest intact checkpoint differ from what was written."""
    records = (read_state(path, step).get("metrics") for step in reversed(steps_of(path)))
    if record := next(filter(None, records), None):
        recorded_metrics(path, record)


def recorded_metrics(path: Path, record: Mapping[str, Any]) -> bytes:
    """Return the lines before a checkpoint, which `record` counts; raise if they differ from what was written."""
    file = path / METRICS_FILE
    lines = _content(file).splitlines(keepends=True)[: int(record["lines"])]
    if digests.sha256(content := b"".join(lines)) != record["sha256"]:
        raise Damaged(
            f"run: {file} is damaged: its first {record['lines']} lines differ from those before the last checkpoint. Restore it from a copy, "
            f"or remove {path / CHECKPOINTS} to train again from the start."
        )
    return content


def parsed_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl.

    A last line without a line break was torn by a kill and is dropped. Any other line that is not a record is an error, because the
    lines after it must not be lost.
    """
    file, records = path / METRICS_FILE, list[dict[str, Any]]()
    lines = _content(file).split(b"\n")
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
        except ValueError:
            if number == len(lines):
                break
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            shown = text[:40].decode(errors="replace")
            raise UserError(f"run: {file}, line {number} must be a record with its step, got {shown!r}; repair or remove that line.")
        records.append(record)
    return records


def _content(file: Path) -> bytes:
    """Return the content of a file; nothing if it is missing."""
    try:
        return file.read_bytes() if file.exists() else b""
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
        summary = json.loads(_content(file))
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
