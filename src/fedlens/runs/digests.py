"""digests.json: the SHA-256 of every file of a folder, so that a damaged, missing or foreign file is noticed when it is read.

A run folder, a checkpoint and a cached result each have one. It is written after the files that it lists: a file is complete when it is
listed. It carries its own digest, and a run's environment.json says that it exists. Runs of version 0.2 have none and are read unchecked.
"""

import hashlib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from fedlens.errors import UserError, first_line
from fedlens.files import below, sha256_of_file

FILE, ENVIRONMENT_FILE = "digests.json", "environment.json"
MARK = {"digests": "sha256"}  # in environment.json of a run with digests
Digests = dict[str, str]  # path below the folder -> SHA-256


class Damaged(UserError):
    """A file that differs from what was written."""


def sha256(content: bytes) -> str:
    """Return the SHA-256 of bytes as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def to_text(digests: Mapping[str, str]) -> str:
    """Return the content of digests.json."""
    files = dict(sorted(digests.items()))
    return json.dumps({"files": files, "sha256": sha256(json.dumps(files).encode())}, indent=1) + "\n"


def write_all(folder: Path) -> None:
    """Write the digests of all files of a folder that is not in use yet."""
    (folder / FILE).write_text(to_text({file.name: sha256_of_file(file) for file in folder.iterdir()}))


def read(folder: Path) -> Digests | None:
    """Return the digests of a folder's files; None if it was written without."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        if content["sha256"] == sha256(json.dumps(content["files"]).encode()):
            return dict(content["files"])
        why = "its content differs from its digest"
    except (FileNotFoundError, NotADirectoryError):
        environment = folder / ENVIRONMENT_FILE
        if not environment.is_file() or json.dumps(MARK)[1:-1].encode() not in environment.read_bytes():
            return None
        why = "it is missing"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = first_line(error)
    raise Damaged(f"run: {folder / FILE} is damaged ({why}): nothing can be checked. Restore it from a copy, or repeat the run.")


def written(folder: Path, pattern: str) -> list[str]:
    """Return the files of these names that were completed, even if they are missing or damaged now."""
    listed = read(folder)
    names = [file.relative_to(folder).as_posix() for file in folder.glob(pattern)] if listed is None else listed
    return [name for name in names if fnmatchcase(name, pattern)]


def damaged(folder: Path, *names: str) -> dict[str, str]:
    """Return name -> how it differs from what was written, of all listed files or of these."""
    listed = read(folder) or {}
    differences: dict[str, str] = {}
    for name in filter(listed.__contains__, names or listed):
        try:
            if sha256_of_file(below(folder, name, FILE, depth=name.count("/") + 1)) != listed[name]:
                differences[name] = "its content differs from its digest"
        except FileNotFoundError:
            differences[name] = "it is missing"
        except OSError as error:
            differences[name] = first_line(error)
    return differences


def verify(folder: Path, *names: str) -> None:
    """Raise if one of these files is damaged or missing. Unlisted files, and those of folders without digests, pass."""
    for name, why in (damaged(folder, *names) if names else {}).items():
        raise Damaged(f"run: {folder / name} is damaged ({why}). What can be made again: fedlens check {folder}")
