"""What a run is known by: a hash of all that determines its result, so that whoever asks for the same again finds it."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedlens.config import Config
from fedlens.runs.store import MODEL_FILE, START_FILE

LATER: list[tuple[str, str, Any]] = [  # keys that came after runs were kept, and the value at which they change nothing
    ("mask", "without", []),
    ("federated", "idle", []),
    ("train", "chunk", None),
    ("server", "norm_bound", None),
    ("server", "alphas", []),
    ("server", "alpha_samples", 1000),
    ("privacy", "clip", None),
    ("privacy", "noise", 0.0),
    ("privacy", "secure_aggregation", False),
]
NOT_KNOWN_BY = ("run", "device", "deploy")  # sections that change nothing of the result


def known_by(config: Mapping[str, Any], weights: str | None = None) -> dict[str, Any]:
    """What determines a run's result, of a configuration as plain mappings: all but where it runs, where its data and weights lie and how it is shown.
    `weights`: what they were known by when the run began; None: what they are now."""
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items() if key not in NOT_KNOWN_BY}
    data, model = plain.get("data") or {}, plain.get("model") or {}
    data.pop("download", None)
    if data.get("name") != "folder":  # a folder of images is known by where it is
        data.pop("root", None)
    if model.get("weights"):
        model["weights"] = weights or known_weights(str(model["weights"]))
    if model.get("freeze_head", False) is None and plain.get("head") == "ridge":  # runs were kept when this was said, not decided
        model["freeze_head"] = not model.get("freeze_backbone")
    for section, key, neutral in LATER:
        found = plain.get(section) or {}
        if key in found and found[key] == neutral:
            del found[key]
    if set(plain.get("privacy") or {}) <= {"delta", "range"}:  # nothing is asked for
        plain.pop("privacy", None)
    return plain


def known_weights(given: str) -> str:
    """A file of weights is known by its name, wherever it lies; what runs write has one name for all of them, so there what it holds decides."""
    path = Path(given)
    if path.name not in (MODEL_FILE, START_FILE):
        return path.name
    try:
        found = path.stat()
        return f"{path.name} {_digest(path.resolve(), found.st_mtime_ns, found.st_size)}"
    except OSError:  # not here, or no file: whoever reads it says so
        return path.name


@lru_cache(maxsize=64)
def _digest(path: Path, _changed: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def origin_of(config: Config, name: str) -> str:
    """What the vectors of a run have to say of themselves: which images they may have seen."""
    return json.dumps({"run": name, "data": config.data.name, "seed": config.seed, "val_fraction": config.data.val_fraction})


def identity(config: Config, weights: str | None = None) -> str:
    """A hash of what determines a run's result."""
    plain: Any = OmegaConf.to_container(OmegaConf.structured(config))
    return hashlib.sha256(json.dumps(known_by(plain, weights), sort_keys=True).encode()).hexdigest()[:12]
