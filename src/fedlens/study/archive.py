"""`fedlens keep STUDY --out RESULTS`: what a report needs of studies and searches, without weights, so that it can be published or go into a repository.

Kept are the configuration (without places on this machine), environment, metrics, shards and summary of every finished run, the analyses, and study.json:
a few kilobytes a run.
A folder that was kept is a study's folder itself: `fedlens report` reads it, and `fedlens study --out` runs what it lacks. Keeping again,
perhaps what another machine ran, adds to what is there: cell by cell, so that parts with other tables, cells or seeds are one study in the end.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedlens.errors import UserError
from fedlens.runs.store import disk_errors, is_finished, write_atomic
from fedlens.study.results import SEARCH_FILE, STUDY_FILE, but_for_the_seed, read_config, read_search, read_study

Told = dict[str, Any]  # what study.json says, or a part of it
FILES = (
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "partition.json",
    "summary.json",
)  # the summary is last: it says that a run is whole


@dataclass
class Kept:
    folder: Path
    added: list[str] = field(default_factory=list)
    there: int = 0  # runs that had been kept before
    unfinished: int = 0
    unnamed: list[str] = field(default_factory=list)  # kept, and not in the plan
    replaced: list[str] = field(default_factory=list)  # cells that had finished runs of another configuration
    before: list[str] = field(default_factory=list)  # cells that were kept before, and are not in the plan of what is kept now

    def text(self) -> str:
        parts = [f"{self.folder}: {len(self.added)} runs kept"]
        parts += [f"{self.there} were there"] if self.there else []
        parts += [f"{self.unfinished} of its plan are not finished"] if self.unfinished else []
        parts += [f"of another configuration than before: {', '.join(self.replaced)}"] if self.replaced else []
        parts += [f"kept before, and still there: {', '.join(self.before)}"] if self.before else []
        parts += [f"not in its plan: {', '.join(self.unnamed)}"] if self.unnamed else []
        return "; ".join(parts)


def keep(sources: Sequence[Path], out: Path) -> list[Kept]:
    """Every study and search in `sources`, each to a folder of its name in `out`."""
    goals = _goals(sources, out)
    return [_study(folder, goal) if (folder / STUDY_FILE).is_file() else _search(folder, goal) for goal, folder in goals.items()]


def _goals(sources: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Where each goes -> its folder, checked before anything is written."""
    goals: dict[Path, Path] = {}
    for source in sources:
        found = sorted({file.parent for name in (STUDY_FILE, SEARCH_FILE) for file in source.rglob(name)})
        if not found:
            raise UserError(f"keep: {source} holds no study (no {STUDY_FILE}) and no search (no {SEARCH_FILE})")
        for folder in found:
            goal = out / folder.resolve().name
            if goal.resolve() == folder.resolve():
                raise UserError(f"--out: {out} has {folder} already: it would be kept in itself")
            other = goals.setdefault(goal, folder)
            if other.resolve() != folder.resolve():
                raise UserError(
                    f"keep: {other} and {folder} would both be {goal}; allowed is one at a time: parts of one study to the same --out, others to another"
                )
    return goals


def _search(folder: Path, out: Path) -> Kept:
    read_search(folder)
    _write(out / SEARCH_FILE, (folder / SEARCH_FILE).read_bytes())
    return Kept(out)


def _study(folder: Path, out: Path) -> Kept:
    told, known = _told(folder), _told(out) if (out / STUDY_FILE).is_file() else None
    if known is not None and (known["name"], known["place"]) != (told["name"], told["place"]):
        ours, theirs = (f"{study['name']!r} on {study['place']}" for study in (known, told))
        raise UserError(f"keep: {out} holds the study {ours}, and {folder} is {theirs}; allowed is the same one, or another --out")
    kept = _runs(told, folder, out)
    for each in told["analyses"]:
        if (folder / each["file"]).is_file():
            _write(out / each["file"], (folder / each["file"]).read_bytes())
    whole = told
    if known is not None:
        whole = merged(known, told, out)
        kept.replaced = [cell["label"] for cell in replaced(known, whole, out)]
        kept.before = sorted(_labels(whole) - _labels(told))
    _write(out / STUDY_FILE, (json.dumps(whole, indent=1) + "\n").encode())
    kept.unnamed = sorted({path.name for path in (out / "runs").glob("*")} - set(runs_of(whole)))
    return kept


def _runs(told: Told, folder: Path, out: Path) -> Kept:
    """The finished runs that a study names, those of `out` as they are."""
    kept = Kept(out)
    for name in sorted(set(runs_of(told))):
        if is_finished(out / "runs" / name):
            kept.there += 1
        elif is_finished(folder / "runs" / name):
            for file in FILES:
                if (folder / "runs" / name / file).is_file():  # shards are of federated runs alone
                    content = published(folder / "runs" / name) if file == "config.yaml" else (folder / "runs" / name / file).read_bytes()
                    _write(out / "runs" / name / file, content)
            kept.added.append(name)
        elif name not in told.get("unfit", {}):
            kept.unfinished += 1
    return kept


def _labels(told: Told) -> set[str]:
    return {f"{table['name']}: {cell['label']}" for table in told["tables"] for cell in table["cells"]}


def _told(folder: Path) -> Told:
    read_study(folder)  # a study, or an error that says why not
    found: Told = json.loads((folder / STUDY_FILE).read_text())
    return found


# --- two parts of one study


def merged(known: Told, told: Told, out: Path) -> Told:
    """What was kept before and what comes to it as one plan: all tables, cells and seeds of both. `out` has the finished runs of both."""

    def there(name: str) -> bool:
        return (out / name).is_file() or is_finished(out / "runs" / name)

    whole = {**told, "tables": _union(known["tables"], told["tables"], ["name"], lambda old, new: _table(old, new, out))}
    past = {name for cell in replaced(known, whole, out) for name in (cell["label"], cell["case"])}
    whole["analyses"] = _union(
        [each for each in known["analyses"] if not past & set(each["labels"])],
        told["analyses"],
        ["kind", "title", "labels", "seed", "options"],
        lambda old, new: old if there(old["file"]) and not there(new["file"]) else new,
    )
    whole["tuned"] = _union(
        known.get("tuned", []),
        told.get("tuned", []),
        ["table", "label"],
        lambda old, new: old if _how_far(old, known, out) > _how_far(new, told, out) else new,
    )
    named = {*runs_of(whole), *(each["file"] for each in whole["analyses"])}
    for key in ("unfit", "failures"):
        both = {**known.get(key, {}), **told.get(key, {})}
        whole[key] = {name: why for name, why in both.items() if name in named and not there(name)}
    return whole


def replaced(known: Told, whole: Told, out: Path) -> list[Told]:
    """Cells as they were kept before that had finished runs which are no longer of the plan."""
    named = set(runs_of(whole))
    gone = {name for name in runs_of(known) if name not in named and is_finished(out / "runs" / name)}
    return [cell for table in known["tables"] for cell in table["cells"] if gone & set(cell["runs"].values())]


def _union(known: list[Told], told: list[Told], keys: Sequence[str], both: Callable[[Told, Told], Told]) -> list[Told]:
    """What either has, in the order of the one that has more; what both have, by these keys, is made one."""
    old, new = ({json.dumps([entry.get(key) for key in keys]): entry for entry in part} for part in (known, told))
    ordered = {**new, **old} if len(new) >= len(old) else {**old, **new}
    return [both(old[key], new[key]) if key in old and key in new else entry for key, entry in ordered.items()]


def _table(old: Told, new: Told, out: Path) -> Told:
    cells = _union(old["cells"], new["cells"], ["label", "case", "values"], lambda a, b: {**b, "runs": _seeds(a["runs"], b["runs"], out)})
    labels, runs = {cell["label"] for cell in new["cells"]}, {name for cell in new["cells"] for name in cell["runs"].values()}
    renamed = [cell for cell in cells if cell["label"] not in labels and set(cell["runs"].values()) <= runs]
    return {**new, "cells": [cell for cell in cells if cell not in renamed]}


def _seeds(old: dict[str, str], new: dict[str, str], out: Path) -> dict[str, str]:
    """Seed -> run, of one cell: where both have a seed the run that is finished. Seeds of two configurations are no cell: then those that come last."""
    ours, theirs = ({seed: name for seed, name in runs.items() if is_finished(out / "runs" / name)} for runs in (old, new))
    if ours and theirs and len({_but_for_the_seed(out / "runs" / next(iter(runs.values()))) for runs in (ours, theirs)}) > 1:
        return new
    both = {**old, **new, **ours, **theirs}
    return {seed: both[seed] for seed in sorted(both, key=int)}


def _but_for_the_seed(run: Path) -> str:
    return json.dumps(but_for_the_seed(run), sort_keys=True, default=str)


def _how_far(tuned: Told, part: Told, out: Path) -> tuple[bool, bool, int]:
    """Whether runs of the cell were finished with its value; whether it has one; how many were tried."""
    cells = [cell for table in part["tables"] if table["name"] == tuned["table"] for cell in table["cells"]]
    names = [name for cell in cells if cell["label"] in tuned["label"].split("; ") for name in cell["runs"].values()]
    decided = tuned["value"] is not None
    return any(is_finished(out / "runs" / name) for name in names), decided, 0 if decided else len(tuned["tried"])


def published(run: Path) -> bytes:
    """A run's configuration; what it says of places on this machine, by which no run is known, is not for others to read."""
    config = read_config(run)
    for section, key in (("data", "root"), ("model", "weights"), ("run", "dir")):
        told = config.get(section) or {}
        if (
            Path(str(told.get(key))).expanduser().is_absolute() and told.get("name") != "folder"
        ):  # a folder of images is known by where it is
            told[key] = Path(told[key]).name if key == "weights" else None
    return OmegaConf.to_yaml(OmegaConf.create(config)).encode()


def runs_of(told: Told) -> Iterator[str]:
    """Those of the tables and of the trials."""
    for table in told.get("tables", []):
        for cell in table["cells"]:
            yield from cell["runs"].values()
    for tuned in told.get("tuned", []):
        yield from tuned["runs"]


def _write(path: Path, content: bytes) -> None:
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
