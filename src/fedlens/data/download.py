"""Fetch a file once, resumably, and keep it only when its checksum is right; unpack only what was asked for."""

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
TIMEOUT = 30  # seconds without a byte before the connection counts as cut
TRIES = 5  # a cut connection is taken up again where it broke off, as long as bytes keep coming

log = logging.getLogger(__name__)


class _Cut(Exception):
    """The network failed; what has arrived is kept."""


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar on stderr where that is a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )


def download(url: str, dest: Path, *, md5: str | None = None, sha256: str | None = None, size: int | None = None) -> Path:
    """`url` as `dest`, resumed from `dest.part` if there is one. A `dest` already there is checked, not fetched again."""
    part = dest.with_suffix(dest.suffix + ".part")
    if dest.exists():
        if wrong := _mismatch(dest, md5, sha256, size):
            raise UserError(f"{dest}: {wrong}; delete it and run again to fetch {url}")
        return dest
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, part, size)
        if wrong := _mismatch(part, md5, sha256, size):
            part.unlink()
            raise UserError(f"{url}: {wrong}; the download was deleted, run again to repeat it")
        os.replace(part, dest)
    except _Cut as error:
        kept = f" ({part.stat().st_size:,} bytes are kept in {part}, run again to go on from there)" if part.exists() else ""
        raise UserError(f"cannot download {url}: {error}{kept}; or fetch it by hand, put it at {dest} and run again") from error
    except OSError as error:  # of the disk: those of the network arrive as _Cut
        raise disk_error(error, dest) from error
    return dest


def disk_error(error: OSError, path: Path) -> UserError:
    if error.errno == errno.ENOSPC:
        return UserError(f"{path}: no space left on the disk; free some, or set data.root or FEDLENS_DATA to another disk, and run again")
    return UserError(f"{path}: cannot be written ({error.strerror or first_line(error)})")


def _fetch(url: str, part: Path, size: int | None) -> None:
    """Bring `part` to its full length."""
    log.info("downloading %s to %s", url, part.parent)
    with progress_bar(DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(url.rsplit("/", 1)[-1], total=size)
        for attempt in range(TRIES):
            have = part.stat().st_size if part.exists() else 0
            if size is not None and have > size:
                part.unlink()
                have = 0
            if size is not None and have == size:
                return
            try:
                for done, total in _receive(url, part, have):
                    bar.update(task, completed=done, total=total or size)
                return
            except _Cut:
                now = part.stat().st_size if part.exists() else 0
                if now <= have or attempt == TRIES - 1:
                    raise


def _receive(url: str, part: Path, have: int) -> Iterator[tuple[int, int | None]]:
    """Append the rest of `url` to the first `have` bytes; (bytes so far, bytes in all) after every chunk."""
    request = Request(url, headers={"User-Agent": "fedlens"} | ({"Range": f"bytes={have}-"} if have else {}))
    try:
        response = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        with error:
            if error.code != 416 or not have:
                raise _Cut(f"HTTP {error.code} {error.reason}") from error
            if error.headers.get("Content-Range", "") == f"bytes */{have}":
                return  # nothing beyond what we have: it is complete
        part.unlink()  # longer than the file on the server: not a piece of it
        yield from _receive(url, part, 0)
        return
    except (URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise _Cut(first_line(reason) if isinstance(reason, BaseException) else str(reason)) from error
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        done = have if resumed else 0  # a server that ignores Range sends all of it again
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        with part.open("ab" if resumed else "wb") as file:
            while chunk := _read(response):
                file.write(chunk)
                done += len(chunk)
                yield done, total
    if total is not None and done < total:
        raise _Cut(f"the connection broke off after {done:,} of {total:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(CHUNK)  # what has arrived: a cut then loses nothing
    except http.client.IncompleteRead as error:
        return error.partial  # the length is checked at the end
    except (http.client.HTTPException, OSError) as error:
        raise _Cut(f"the connection broke off ({first_line(error)})") from error


def _mismatch(path: Path, md5: str | None, sha256: str | None, size: int | None) -> str | None:
    """What is wrong with the file, or None."""
    got_size = path.stat().st_size
    if size is not None and got_size != size:
        return f"{size:,} bytes expected, got {got_size:,}"
    for algorithm, expected in (("md5", md5), ("sha256", sha256)):
        if expected is not None:
            with path.open("rb") as file:
                got = hashlib.file_digest(file, partial(hashlib.new, algorithm, usedforsecurity=False)).hexdigest()
            if got != expected.lower():
                return f"{algorithm} {expected} expected, got {got}"
    return None


def extract_tar(archive: Path, dest: Path, members: Collection[str]) -> None:
    """Unpack exactly these members, by base name, into the folder `dest`; a file appears there whole or not at all.

    Only regular files with a listed name are read: paths, links and devices in the archive have no effect.
    """
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=dest, prefix=".extract-") as folder:
            found = _unpack(archive, Path(folder), set(members))
            if missing := sorted(set(members) - found):
                raise UserError(f"{archive}: has no file {', '.join(missing)}")
            for name in members:
                os.replace(Path(folder) / Path(name).name, dest / Path(name).name)
    except OSError as error:
        raise disk_error(error, dest) from error


def _unpack(archive: Path, folder: Path, wanted: set[str]) -> set[str]:
    found = set()
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name in wanted and member.isreg() and (data := tar.extractfile(member)):
                    with (folder / Path(name).name).open("wb") as out:
                        shutil.copyfileobj(data, out, CHUNK)
                    found.add(name)
            while tar.fileobj and tar.fileobj.read(CHUNK):  # to the end: gzip's own checksum is there
                pass
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{archive}: not a readable tar archive ({first_line(error)}); delete it and run again") from error
    return found
