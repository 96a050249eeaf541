"""Downloads are resumed, checked and atomic; only the listed members of an archive are unpacked."""

import errno
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedlens.data import download as module
from fedlens.data.download import download, extract_tar
from fedlens.errors import UserError

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT; `script` says for each request in turn what to do, and `seen` keeps the Range headers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[str] = []
        self.seen: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/set.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.seen.append(wanted)
        act = self.server.script.pop(0) if self.server.script else "serve"
        if act == "missing":
            return self.send_error(404)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and act != "ignore range" else 0
        if start >= len(CONTENT):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        body = CONTENT[start:]
        self.wfile.write({"cut": body[:100_000], "cut at once": b""}.get(act, body))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as it:
        thread = threading.Thread(target=it.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield it
        it.shutdown()
        thread.join()


def part_of(dest: Path) -> Path:
    return dest.with_name(dest.name + ".part")


def test_a_file_url_is_copied_and_checked_and_no_part_is_left(tmp_path: Path) -> None:
    origin, dest = tmp_path / "origin.bin", tmp_path / "new" / "set.bin"
    origin.write_bytes(CONTENT)
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert download(origin.as_uri(), dest, md5=MD5, sha256=sha256, size=len(CONTENT)) == dest
    assert dest.read_bytes() == CONTENT and not part_of(dest).exists()


def test_a_cut_connection_is_taken_up_where_it_broke_off(tmp_path: Path, server: Server) -> None:
    server.script = ["cut", "cut"]
    download(server.url, tmp_path / "set.bin", md5=MD5)
    assert (tmp_path / "set.bin").read_bytes() == CONTENT
    assert server.seen == [None, "bytes=100000-", "bytes=200000-"]


def test_after_a_failure_the_next_call_resumes_from_the_part(tmp_path: Path, server: Server) -> None:
    dest = tmp_path / "set.bin"
    server.script = ["cut", "cut at once"]
    with pytest.raises(UserError, match=r"by hand") as caught:
        download(server.url, dest, md5=MD5)
    message = str(caught.value)
    assert server.url in message and str(dest) in message and "\n" not in message
    assert not dest.exists() and part_of(dest).read_bytes() == CONTENT[:100_000]
    download(server.url, dest, md5=MD5)
    assert dest.read_bytes() == CONTENT and server.seen[-1] == "bytes=100000-"


def test_a_server_that_ignores_range_is_read_from_the_start(tmp_path: Path, server: Server) -> None:
    dest = tmp_path / "set.bin"
    part_of(dest).write_bytes(b"x" * 1000)
    server.script = ["ignore range"]
    download(server.url, dest, md5=MD5)
    assert dest.read_bytes() == CONTENT


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_complete_part_is_verified_and_kept(tmp_path: Path, server: Server, size: int | None) -> None:
    dest = tmp_path / "set.bin"
    part_of(dest).write_bytes(CONTENT)
    download(server.url, dest, md5=MD5, size=size)
    assert dest.read_bytes() == CONTENT
    assert server.seen == ([] if size else [f"bytes={len(CONTENT)}-"])


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_part_longer_than_the_file_is_thrown_away(tmp_path: Path, server: Server, size: int | None) -> None:
    dest = tmp_path / "set.bin"
    part_of(dest).write_bytes(b"x" * (len(CONTENT) + 5))
    download(server.url, dest, md5=MD5, size=size)
    assert dest.read_bytes() == CONTENT


def test_a_wrong_checksum_deletes_the_part_and_names_url_expected_and_got(tmp_path: Path, server: Server) -> None:
    dest = tmp_path / "set.bin"
    with pytest.raises(UserError) as caught:
        download(server.url, dest, md5="0" * 32)
    assert all(word in str(caught.value) for word in (server.url, "0" * 32, MD5))
    assert list(tmp_path.iterdir()) == []


def test_a_file_put_there_by_hand_is_checked_and_not_fetched(tmp_path: Path, server: Server) -> None:
    dest = tmp_path / "set.bin"
    dest.write_bytes(CONTENT)
    download(server.url, dest, md5=MD5)
    dest.write_bytes(b"something else")
    with pytest.raises(UserError, match="delete it"):
        download(server.url, dest, md5=MD5)
    assert server.seen == [] and dest.exists()


def test_an_http_error_and_a_dead_server_are_one_line(tmp_path: Path, server: Server) -> None:
    server.script = ["missing"]
    with pytest.raises(UserError, match=r"HTTP 404.*by hand"):
        download(server.url, tmp_path / "set.bin")
    with pytest.raises(UserError, match="by hand"):
        download((tmp_path / "nothing").as_uri(), tmp_path / "set.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_fetch", full)
    with pytest.raises(UserError, match="no space left on the disk"):
        download("file:///x", tmp_path / "set.bin")


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


def test_only_listed_regular_files_leave_an_archive(tmp_path: Path) -> None:
    archive = tar_of(
        tmp_path / "a.tar.gz",
        (tarfile.TarInfo("set/train.bin"), b"train"),
        (tarfile.TarInfo("../escaped"), b"evil"),
        (tarfile.TarInfo("/tmp/fedlens-escaped"), b"evil"),
        (tarfile.TarInfo("set/other.bin"), b"other"),
        (link("set/link", "/etc/passwd"), b""),
    )
    extract_tar(archive, tmp_path / "out", ["set/train.bin"])
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {"train.bin": b"train"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar.gz", "out"]


def test_a_listed_name_that_is_a_link_counts_as_missing_and_nothing_is_written(tmp_path: Path) -> None:
    archive = tar_of(tmp_path / "a.tar.gz", (tarfile.TarInfo("set/a"), b"a"), (link("set/b", "/etc/passwd"), b""))
    with pytest.raises(UserError, match="has no file set/b"):
        extract_tar(archive, tmp_path / "out", ["set/a", "set/b"])
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "not a tar"])
def test_a_damaged_archive_is_one_line_and_nothing_is_written(tmp_path: Path, damage: str) -> None:
    archive = tar_of(tmp_path / "a.tar.gz", (tarfile.TarInfo("set/a"), CONTENT))
    data = bytearray(archive.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 0xFF
        data[-6] ^= 0xFF
    archive.write_bytes({"truncated": data[: len(data) // 2], "flipped": data, "not a tar": b"hello"}[damage])
    with pytest.raises(UserError, match=r"not a readable tar archive"):
        extract_tar(archive, tmp_path / "out", ["set/a"])
    assert list((tmp_path / "out").iterdir()) == []
