"""`fedlens keep STUDY --out RESULTS`: what a report needs of studies and searches, without weights, so that it can be published or go into a repository.

Kept are the configuration, environment, metrics, shards and summary of every finished run, the analyses, and study.json: a few kilobytes a run.
A folder that was kept is a study's folder itself: `fedlens report` reads it, and `fedlens study --out` runs what it lacks. Keeping again,
perhaps what another machine ran, adds to what is there.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.errors import UserError
from fedlens.runs.store import disk_errors, write_atomic
from fedlens.study.results import SEARCH_FILE, STUDY_FILE, read_search, read_study

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
    stays: bool = False  # the plan that was kept before

    def text(self) -> str:
        parts = [f"{self.folder}: {len(self.added)} runs kept"]
        parts += [f"{self.there} were there"] if self.there else []
        parts += [f"{self.unfinished} of its plan are not finished"] if self.unfinished else []
        parts += ["its plan stays as it was kept before"] if self.stays else []
        parts += [f"not in its plan: {', '.join(self.unnamed)}"] if self.unnamed else []
        return "; ".join(parts)


def keep(source: Path, out: Path) -> list[Kept]:
    """Every study and search in `source`, each to a folder of its name in `out`."""
    found = sorted({file.parent for name in (STUDY_FILE, SEARCH_FILE) for file in source.rglob(name)})
    if not found:
        raise UserError(f"keep: {source} holds no study (no {STUDY_FILE}) and no search (no {SEARCH_FILE})")
    goals = {folder: out / folder.resolve().name for folder in found}
    if same := next((folder for folder, goal in goals.items() if goal.resolve() == folder.resolve()), None):
        raise UserError(f"--out: {out} has {same} already: it would be kept in itself")
    if len(set(goals.values())) < len(goals):
        raise UserError(f"keep: several studies in {source} have the same folder name; keep them one by one, each with an --out of its own")
    return [_study(folder, goal) if (folder / STUDY_FILE).is_file() else _search(folder, goal) for folder, goal in goals.items()]


def _search(folder: Path, out: Path) -> Kept:
    read_search(folder)
    _write(out / SEARCH_FILE, (folder / SEARCH_FILE).read_bytes())
    return Kept(out)


def _study(folder: Path, out: Path) -> Kept:
    read_study(folder)  # a study, or an error that says why not
    told = json.loads((folder / STUDY_FILE).read_text())
    kept, named, before = Kept(out), set(_runs(told)), out / STUDY_FILE
    for name in sorted(named):
        if (out / "runs" / name / "summary.json").is_file():
            kept.there += 1
        elif (folder / "runs" / name / "summary.json").is_file():
            for file in FILES:
                if (folder / "runs" / name / file).is_file():  # shards are of federated runs alone
                    _write(out / "runs" / name / file, (folder / "runs" / name / file).read_bytes())
            kept.added.append(name)
        elif name not in told.get("unfit", {}):
            kept.unfinished += 1
    for each in told["analyses"]:
        if (folder / each["file"]).is_file():
            _write(out / each["file"], (folder / each["file"]).read_bytes())
    known = json.loads(before.read_text()) if before.is_file() else None
    if known is None or not (_part(told, known) or (_open(told) and not _open(known))):
        _write(before, (folder / STUDY_FILE).read_bytes())
        known = told
    elif told["tables"] != known["tables"]:
        kept.stays = True
    kept.unnamed = sorted({path.name for path in (out / "runs").glob("*")} - set(_runs(known)))
    return kept


def _part(told: dict[str, Any], whole: dict[str, Any]) -> bool:
    """The same cells with fewer seeds: what was planned before is not replaced by a part of it."""
    cells, known = ({(t["name"], c["label"]): c["runs"] for t in study["tables"] for c in t["cells"]} for study in (told, whole))
    return cells != known and cells.keys() == known.keys() and all(cells[key].items() <= known[key].items() for key in cells)


def _open(told: dict[str, Any]) -> bool:
    """Still being tuned: its cells have not got their values."""
    return any(tuned["value"] is None for tuned in told.get("tuned", []))


def _runs(told: dict[str, Any]) -> Iterator[str]:
    """Those of the tables and of the trials."""
    for table in told["tables"]:
        for cell in table["cells"]:
            yield from cell["runs"].values()
    for tuned in told.get("tuned", []):
        yield from tuned["runs"]


def _write(path: Path, content: bytes) -> None:
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
