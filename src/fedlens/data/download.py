"""Download a file with resume and checksum; unpack only listed members of an archive."""

import errno
import gzip
import hashlib
import http.client
import logging
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedlens.errors import UserError, first_line

CHUNK = 1 << 20
TIMEOUT = 30  # seconds without a byte until the connection counts as lost
TRIES = 5  # a lost connection is resumed, as long as new bytes arrive

log = logging.getLogger(__name__)


class _Lost(Exception):
    """A network failure; received bytes stay on disk."""


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar on stderr, disabled unless that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )


def download(url: str, dest: Path, *, md5: str | None = None, sha256: str | None = None, size: int | None = None) -> Path:
    """Download `url` to `dest`, resuming from `dest.part` if it exists. An existing `dest` is only checked."""
    part = dest.with_suffix(dest.suffix + ".part")
    if dest.exists():
        if wrong := _mismatch(dest, md5, sha256, size):
            raise UserError(f"{dest}: {wrong}. To download it from {url}, delete it and run again.")
        return dest
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, part, size)
        if wrong := _mismatch(part, md5, sha256, size):
            part.unlink()
            raise UserError(f"{url}: {wrong}. The download was deleted; run again to repeat it.")
        os.replace(part, dest)
    except _Lost as error:
        resume = f" Run again to resume from {part.stat().st_size:,} bytes in {part}, or" if part.exists() else ""
        raise UserError(f"cannot download {url}: {error}.{resume or ' Or'} download it by hand to {dest} and run again.") from error
    except OSError as error:  # disk errors only: network errors arrive as _Lost
        raise disk_error(error, dest) from error
    return dest


def disk_error(error: OSError, path: Path) -> UserError:
    """Return the error for a failed write."""
    if error.errno == errno.ENOSPC:
        return UserError(f"{path}: no space left on the disk. Free some, or set data.root or FEDLENS_DATA to another disk.")
    return UserError(f"{path}: cannot be written ({error.strerror or first_line(error)}).")


def _fetch(url: str, part: Path, size: int | None) -> None:
    """Download until `part` is complete."""
    log.info("downloading %s to %s", url, part.parent)
    with progress_bar(DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(url.rsplit("/", 1)[-1], total=size)
        for attempt in range(TRIES):
            have = part.stat().st_size if part.exists() else 0
            if have == size:
                return
            if size is not None and have > size:
                part.unlink()
                have = 0
            try:
                for done, total in _receive(url, part, have):
                    bar.update(task, completed=done, total=total or size)
                return
            except _Lost:
                if attempt == TRIES - 1 or not part.exists() or part.stat().st_size <= have:
                    raise


def _receive(url: str, part: Path, have: int) -> Iterator[tuple[int, int | None]]:
    """Append the rest of `url` after the first `have` bytes; yield (bytes so far, total bytes) after every chunk."""
    request = Request(url, headers={"User-Agent": "fedlens"} | ({"Range": f"bytes={have}-"} if have else {}))
    try:
        response = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        with error:
            if error.code != 416 or not have:
                raise _Lost(f"HTTP {error.code} {error.reason}") from error
            if error.headers.get("Content-Range", "") == f"bytes */{have}":
                return  # the part is already complete
        part.unlink()  # longer than the file on the server
        yield from _receive(url, part, 0)
        return
    except (URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise _Lost(first_line(reason) if isinstance(reason, BaseException) else str(reason)) from error
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        done = have if resumed else 0  # a server that ignores Range sends the whole file again
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        with part.open("ab" if resumed else "wb") as file:
            while chunk := _read(response):
                file.write(chunk)
                done += len(chunk)
                yield done, total
    if total is not None and done < total:
        raise _Lost(f"connection lost after {done:,} of {total:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(CHUNK)  # returns what has arrived, so that a lost connection loses nothing
    except http.client.IncompleteRead as error:
        return error.partial  # the caller checks the length
    except (http.client.HTTPException, OSError) as error:
        raise _Lost(f"connection lost ({first_line(error)})") from error


def _mismatch(path: Path, md5: str | None, sha256: str | None, size: int | None) -> str | None:
    """Return what differs from the expected size or checksums, or None."""
    got_size = path.stat().st_size
    if size is not None and got_size != size:
        return f"size must be {size:,} bytes, got {got_size:,}"
    for algorithm, expected in (("md5", md5), ("sha256", sha256)):
        if expected is not None:
            with path.open("rb") as file:
                got = hashlib.file_digest(file, partial(hashlib.new, algorithm, usedforsecurity=False)).hexdigest()
            if got != expected.lower():
                return f"{algorithm} must be {expected}, got {got}"
    return None


def extract_tar(archive: Path, dest: Path, members: Collection[str]) -> None:
    """Unpack exactly these members, by base name, into the folder `dest`. Each file appears only when complete.

    Only regular files with a listed name are read; paths, links and devices in the archive have no effect.
    """
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=dest, prefix=".extract-") as folder:
            unpacked = _unpack(archive, Path(folder), set(members))
            if missing := sorted(set(members) - unpacked):
                raise UserError(f"{archive}: has no file {', '.join(missing)}.")
            for name in members:
                os.replace(Path(folder) / Path(name).name, dest / Path(name).name)
    except OSError as error:
        raise disk_error(error, dest) from error


def _unpack(archive: Path, folder: Path, wanted: set[str]) -> set[str]:
    """Unpack the wanted members into a folder and return their names."""
    unpacked = set()
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name in wanted and member.isreg() and (data := tar.extractfile(member)):
                    with (folder / Path(name).name).open("wb") as out:
                        shutil.copyfileobj(data, out, CHUNK)
                    unpacked.add(name)
            while tar.fileobj and tar.fileobj.read(CHUNK):  # gzip's checksum is at the end
                pass
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{archive}: not a readable tar archive ({first_line(error)}). Delete it and run again.") from error
    return unpacked
