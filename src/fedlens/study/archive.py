"""`fedlens keep STUDY --out RESULTS`: archive what a report needs of studies and searches, without weights, to publish it or commit it.

A received study is not trusted: every name in its file must be plain, links are refused, and nothing is written outside `--out`.

The archive has the configuration (without paths of this machine), environment, metrics, partition and summary of every finished run, the analyses,
and study.json: a few kilobytes per run. It is a study folder itself: `fedlens report` reads it, and `fedlens study --out` runs what it lacks.
Archiving another part of the same study, such as from another machine, merges the two cell by cell: other tables, cells and seeds are added.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedlens.errors import UserError
from fedlens.files import below, write_atomic
from fedlens.runs import digests
from fedlens.runs.store import has_summary, is_finished, read_summary
from fedlens.study.processes import make_folder
from fedlens.study.results import (
    SEARCH_FILE,
    STUDY_FILE,
    analysis_file,
    config_without_seed,
    read_config,
    read_search,
    read_study,
    run_folder,
)

Metadata = dict[str, Any]  # the content of study.json, or a part of it
# The summary is last, because its presence marks a complete run of version 0.2.
FILES = ("config.yaml", "environment.json", "metrics.jsonl", "partition.json", "summary.json")


def archive(sources: Sequence[Path], out: Path) -> list[str]:
    """Archive every study and search in `sources`, each in a folder of its name in `out`. Return a line of text for each."""
    lines = []
    for target, source in _targets(sources, out).items():
        outcome = (_archive_study if (source / STUDY_FILE).is_file() else _archive_search)(source, target)
        lines.append(f"{target}: {'; '.join(outcome)}")
    return lines


def _targets(sources: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Return target folder -> source folder, checked before anything is written."""
    targets: dict[Path, Path] = {}
    for source in sources:
        folders = sorted({file.parent for name in (STUDY_FILE, SEARCH_FILE) for file in source.rglob(name)})
        if not folders:
            raise UserError(f"keep: {source} holds no study (no {STUDY_FILE}) and no search (no {SEARCH_FILE}).")
        for folder in folders:
            if parts := folder.relative_to(source).parts:
                below(source, "/".join(parts), "keep", depth=len(parts))
            target = below(out, folder.resolve().name, "--out")
            if target.resolve() == folder.resolve():
                raise UserError(f"--out: {folder} is already in {out}; choose another --out.")
            other = targets.setdefault(target, folder)
            if other.resolve() != folder.resolve():
                raise UserError(
                    f"keep: {other} and {folder} would both be {target}; archive them one at a time: "
                    "parts of one study to the same --out, different studies to different ones."
                )
    return targets


def _archive_search(source: Path, out: Path) -> list[str]:
    read_search(source)  # raises if it is not a search
    _write(out, SEARCH_FILE, below(source, SEARCH_FILE, "keep").read_bytes())
    return ["0 runs added"]


def _archive_study(source: Path, out: Path) -> list[str]:
    """Archive a study, merged with the part that is there. Return what was added, and what a reader should know."""
    new, old = _read_metadata(source), _read_metadata(out) if (out / STUDY_FILE).is_file() else None
    if old is not None and (old["name"], old["place"]) != (new["name"], new["place"]):
        ours, theirs = (f"{study['name']!r} on {study['place']}" for study in (old, new))
        raise UserError(f"keep: {out} holds the study {ours}, but {source} is {theirs}; choose another --out.")
    outcome = _copy_runs(new, source, out)
    for analysis in new["analyses"]:
        if (file := analysis_file(source, analysis)).is_file():
            _write(out, analysis["file"], file.read_bytes())
    whole = new if old is None else merged(old, new, out)
    _write(out, STUDY_FILE, (json.dumps(whole, indent=1) + "\n").encode())
    names = {
        "cells with another configuration than before": [cell["label"] for cell in _replaced_cells(old or new, whole, out)],
        "cells that only the archive has": sorted(_labels(whole) - _labels(new)),
        "not in the plan": sorted({path.name for path in (out / "runs").glob("*")} - set(run_names(whole))),
    }
    return outcome + [f"{fact}: {', '.join(listed)}" for fact, listed in names.items() if listed]


def _copy_runs(study: Metadata, source: Path, out: Path) -> list[str]:
    """Copy the finished runs of a study, and return how many; those already in the archive stay as they are."""
    counts = {"runs added": 0, "were already there": 0, "planned runs are not finished": 0}
    for name in sorted(set(run_names(study))):
        run = run_folder(source, name)
        if is_finished(run_folder(out, name)):
            counts["were already there"] += 1
        elif has_summary(run):
            _copy_run(run, out, name)
            counts["runs added"] += 1
        elif name not in study.get("unfit", {}):
            counts["planned runs are not finished"] += 1
    return [f"{count} {fact}" for fact, count in counts.items() if count or fact == "runs added"]


def _copy_run(run: Path, out: Path, name: str) -> None:
    """Copy what a report needs of a run, with new digests. Only federated runs have a partition."""
    files = [file for file in FILES if digests.written(run, file)]
    read_summary(run)  # raises if it is damaged
    digests.verify(run, *files)
    content = {file: below(run, file, "keep").read_bytes() for file in files}
    content["config.yaml"] = published_config(run)
    content[digests.FILE] = digests.to_text({file: digests.sha256(data) for file, data in content.items()}).encode()
    for file, data in content.items():
        _write(out, f"runs/{name}/{file}", data)


def _labels(study: Metadata) -> set[str]:
    return {f"{table['name']}: {cell['label']}" for table in study["tables"] for cell in table["cells"]}


def _read_metadata(folder: Path) -> Metadata:
    file = below(folder, STUDY_FILE, "keep")
    read_study(folder)  # raises if it is not a study
    metadata: Metadata = json.loads(file.read_text())
    return metadata


# --- merging two parts of one study


def merged(old: Metadata, new: Metadata, out: Path) -> Metadata:
    """Return the union of two plans: all tables, cells and seeds of both. `out` has the finished runs of both."""

    def exists(name: str) -> bool:
        return analysis_file(out, {"file": name}).is_file() if "/" in name else is_finished(run_folder(out, name))

    whole = {**new, "tables": _union(old["tables"], new["tables"], ["name"], lambda a, b: _merged_table(a, b, out))}
    outdated = {name for cell in _replaced_cells(old, whole, out) for name in (cell["label"], cell["case"])}
    whole["analyses"] = _union(
        [analysis for analysis in old["analyses"] if not outdated & set(analysis["labels"])],
        new["analyses"],
        ["kind", "title", "labels", "seed", "options"],
        lambda a, b: a if exists(a["file"]) and not exists(b["file"]) else b,
    )
    whole["tuned"] = _union(
        old.get("tuned", []),
        new.get("tuned", []),
        ["table", "label"],
        lambda a, b: a if _progress(a, old, out) > _progress(b, new, out) else b,
    )
    named = {*run_names(whole), *(analysis["file"] for analysis in whole["analyses"])}
    for key in ("unfit", "failures"):
        both = {**old.get(key, {}), **new.get(key, {})}
        whole[key] = {name: why for name, why in both.items() if name in named and not exists(name)}
    return whole


def _replaced_cells(old: Metadata, whole: Metadata, out: Path) -> list[Metadata]:
    """Return the archived cells with finished runs that are no longer in the plan."""
    named = set(run_names(whole))
    gone = {name for name in run_names(old) if name not in named and is_finished(run_folder(out, name))}
    return [cell for table in old["tables"] for cell in table["cells"] if gone & set(cell["runs"].values())]


def _union(old: list[Metadata], new: list[Metadata], keys: Sequence[str], both: Callable[[Metadata, Metadata], Metadata]) -> list[Metadata]:
    """Return the entries of both lists, in the order of the longer one; `both` merges entries with equal values of `keys`."""
    a, b = ({json.dumps([entry.get(key) for key in keys]): entry for entry in part} for part in (old, new))
    ordered = {**b, **a} if len(b) >= len(a) else {**a, **b}
    return [both(a[key], b[key]) if key in a and key in b else entry for key, entry in ordered.items()]


def _merged_table(old: Metadata, new: Metadata, out: Path) -> Metadata:
    cells = _union(
        old["cells"], new["cells"], ["label", "case", "values"], lambda a, b: {**b, "runs": _merged_seeds(a["runs"], b["runs"], out)}
    )
    labels, runs = {cell["label"] for cell in new["cells"]}, {name for cell in new["cells"] for name in cell["runs"].values()}
    renamed = [cell for cell in cells if cell["label"] not in labels and set(cell["runs"].values()) <= runs]
    return {**new, "cells": [cell for cell in cells if cell not in renamed]}


def _merged_seeds(old: dict[str, str], new: dict[str, str], out: Path) -> dict[str, str]:
    """Return seed -> run of a cell, preferring finished runs. A cell has one configuration: if the two differ, the new one wins."""
    ours, theirs = ({seed: name for seed, name in runs.items() if is_finished(run_folder(out, name))} for runs in (old, new))
    if ours and theirs:
        one, other = (config_without_seed(run_folder(out, next(iter(runs.values())))) for runs in (ours, theirs))
        if json.dumps(one, sort_keys=True, default=str) != json.dumps(other, sort_keys=True, default=str):
            return new
    both = {**old, **new, **ours, **theirs}
    return {seed: both[seed] for seed in sorted(both, key=int)}


def _progress(tuned: Metadata, study: Metadata, out: Path) -> tuple[bool, bool, int]:
    """Return how far a tuned cell is: whether it has finished runs, whether its value is chosen, and the number of trials until then."""
    cells = [cell for table in study["tables"] if table["name"] == tuned["table"] for cell in table["cells"]]
    names = [name for cell in cells if cell["label"] in tuned["label"].split("; ") for name in cell["runs"].values()]
    chosen = tuned["value"] is not None
    return any(is_finished(run_folder(out, name)) for name in names), chosen, 0 if chosen else len(tuned["tried"])


def published_config(run: Path) -> bytes:
    """Return a run's configuration without absolute paths. The path of an image folder stays, because it is part of the run's identity."""
    config = read_config(run)
    for section, key in (("data", "root"), ("model", "weights"), ("run", "dir")):
        values = config.get(section) or {}
        if Path(str(values.get(key))).expanduser().is_absolute() and values.get("name") != "folder":
            values[key] = Path(values[key]).name if key == "weights" else None
    return OmegaConf.to_yaml(OmegaConf.create(config)).encode()


def run_names(study: Metadata) -> Iterator[str]:
    """Yield the names of all runs and trials of a study."""
    for table in study.get("tables", []):
        for cell in table["cells"]:
            yield from cell["runs"].values()
    for tuned in study.get("tuned", []):
        yield from tuned["runs"]


def _write(out: Path, name: str, content: bytes) -> None:
    path = below(out, name, "keep", depth=name.count("/") + 1)
    make_folder(path.parent)
    write_atomic(path, content)
