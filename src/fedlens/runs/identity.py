"""The identity of a run: a hash of everything that determines its result, so that the same request finds the same run."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedlens.config import Config, as_in_version_2, keys, trainer_of, upgraded
from fedlens.files import sha256_of_file
from fedlens.runs.store import MODEL_FILE, START_FILE

NEUTRAL_SECTIONS = ("run", "device", "deploy")  # they do not change the result


def known_by(config: Mapping[str, Any], weights: str | None = None) -> dict[str, Any]:
    """Return what determines a run's result: all keys but where it runs, where its data and weights lie and how it is displayed.

    A key that a later version added counts only where it is not the default, and a key that moved counts under its old name: so a run of
    an older version keeps its identity. `weights`: the fingerprint of the initial weights when the run began; None: compute it now.
    """
    plain = as_in_version_2(upgraded({name: value for name, value in config.items() if name not in NEUTRAL_SECTIONS}))
    data, model = plain.get("data") or {}, plain.get("model") or {}
    data.pop("download", None)
    if data.get("name") != "folder":  # a folder of images is identified by its path
        data.pop("root", None)
    if model.get("weights"):
        model["weights"] = weights or known_weights(str(model["weights"]))
    if model.get("freeze_head", False) is None and plain.get("head") == "ridge":  # version 0.1 wrote the decision
        model["freeze_head"] = not model.get("freeze_backbone")
    for path, key in keys().items():
        section, _, name = path.rpartition(".")
        values = (plain.get(section) or {}) if section else plain
        neutral = trainer_of(plain["experiment"]) if path == "trainer" and "experiment" in plain else key.default
        if key.since and name in values and (key.shown_only or values[name] == neutral):
            del values[name]
    if set(plain.get("privacy") or {}) <= {"delta", "range"}:  # options of a protection that is off
        plain.pop("privacy", None)
    return plain


def known_weights(path: str) -> str:
    """Return the fingerprint of initial weights: the file's name, and for files that runs write a digest of the content as well."""
    file = Path(path)
    if file.name not in (MODEL_FILE, START_FILE):
        return file.name
    try:
        status = file.stat()
        return f"{file.name} {_digest(file.resolve(), status.st_mtime_ns, status.st_size)}"
    except OSError:  # reading the weights will report it
        return file.name


@lru_cache(maxsize=64)
def _digest(path: Path, _changed: int, _size: int) -> str:
    return sha256_of_file(path)[:12]


def origin_of(config: Config, name: str) -> str:
    """Return the metadata of a run's task vectors: which samples they may have seen."""
    return json.dumps({"run": name, "data": config.data.name, "seed": config.seed, "val_fraction": config.data.val_fraction})


def identity(config: Config, weights: str | None = None) -> str:
    """Return the hash of what determines a run's result."""
    return hashlib.sha256(json.dumps(known_by(asdict(config), weights), sort_keys=True).encode()).hexdigest()[:12]
