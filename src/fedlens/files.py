"""Files on disk: one atomic write, one digest, and disk errors as one line. Imports neither torch nor the rest of fedlens."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlens.errors import Elsewhere

FIXED_BY_USER = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EFBIG,
    errno.EPERM,
    errno.ENOTDIR,
    errno.ENOENT,  # a place such as /proc, where nothing can be created, or a folder that was removed
)


@contextmanager
def disk_errors(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Report a full or read-only disk as one line. `also`: further exceptions of a library that writes by itself."""
    try:
        yield
    except OSError as error:
        if error.errno in FIXED_BY_USER:
            reason = (error.strerror or "write failed").lower()
            raise Elsewhere(f"run.dir: {path} cannot be written: {reason}; earlier checkpoints are intact") from None
        raise
    except also as error:
        raise Elsewhere(f"run.dir: {path} cannot be written: {str(error).splitlines()[0]}; earlier checkpoints are intact") from None


def write_atomic(path: Path, content: str | bytes | Callable[[Path], object], *, mode: int | None = None) -> None:
    """Write a file whole or not at all: to a temporary file beside it, flushed to disk, then renamed.

    `content` may be a function that writes the file at the path it gets. `mode`: permissions from its first byte on.
    """
    part = path.with_name(path.name + ".part")
    with disk_errors(path):
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
        except BaseException:
            part.unlink(missing_ok=True)
            raise


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
