"""Files on disk: one atomic write, one digest, one check of names that files contain, and disk errors as one line. Imports no torch."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlens.errors import Elsewhere, UserError, first_line


@contextmanager
def disk_errors(path: Path, *also: type[Exception], run: bool = True) -> Iterator[None]:
    """Report a file that cannot be written as one line. `also`: exceptions of a library that writes by itself. `run`: of a run."""
    try:
        yield
    except (OSError, *also) as error:  # type: ignore[misc]  # mypy cannot unpack it
        reason = first_line(error) if not isinstance(error, OSError) or not error.strerror else error.strerror.lower()
        before, after = ("run.dir: ", "; earlier checkpoints are intact") if run else ("", "")
        raise Elsewhere(f"{before}{path} cannot be written: {reason}{after}") from None


def write_atomic(path: Path, content: str | bytes | Callable[[Path], object], *, mode: int | None = None) -> None:
    """Write a file whole or not at all: to a temporary file beside it, flushed to disk, then renamed.

    `content` may be a function that writes the file at the path it gets. `mode`: permissions from its first byte on.
    """
    part = path.with_name(path.name + ".part")
    with disk_errors(path, run=False):
        try:
            if mode is not None:
                part.unlink(missing_ok=True)
                part.touch(mode=mode)
            if callable(content):
                content(part)
            else:
                part.write_bytes(content.encode() if isinstance(content, str) else content)
            fsync(part)
            os.replace(part, path)
            fsync(path.parent)  # the name must be on disk before anything refers to it
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def below(folder: Path, name: object, field: str, depth: int = 1) -> Path:
    """Return the path that another file names: `depth` plain names below `folder`, none of them a link. Use it for every path from a file."""
    parts = name.split("/") if isinstance(name, str) else []
    if len(parts) != depth or not all(map(_is_plain, parts)):
        raise UserError(f"{field} must be a plain name below {folder}, got {name!r}.")
    path = folder
    for part in parts:
        path /= part
        if path.is_symlink():
            raise UserError(f"{field}: {path} is a link; replace it by what it points to.")
    return path


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and "\\" not in name and name.isprintable() and len(name.encode()) < 256


def remove_parts(folder: Path) -> None:
    """Remove the temporary files and folders that killed processes left. The caller holds the folder's lock."""
    for part in (*folder.glob("*.part"), *folder.glob(".part-*")):
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot flush folders
            raise
    finally:
        os.close(descriptor)


def sha256_of_file(path: Path) -> str:
    """Return a file's SHA-256 as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
