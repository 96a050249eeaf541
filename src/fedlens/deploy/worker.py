"""A site's work in one process that stays: data, model and what was compiled are there when the next message comes.

Flower starts a process for every message. That one calls `ask`, which hands the message to the site's worker over a socket and gives back what it
answers. Where there is no worker, as in Flower's simulation, or where it ended on the way, the process does the work itself. The worker is a child
of the SuperNode's process (`kept`), which starts it again if it ends. What a site has to remember stays with Flower: it is sent along with every
message and what has changed comes back, so a new worker knows as much as the one before.

Neither Flower nor, but in the worker, torch is imported here.
"""

import gc
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedlens.deploy.tied import end_with_parent
from fedlens.deploy.wire import Parcel, Place
from fedlens.errors import first_line

SITE = "FEDLENS_SITE"  # in the environment: the socket that the site's worker listens on
MEAN = "mean"  # beside what a server may ask: `update` as one mean, for secure aggregation
PATIENCE = 60.0  # seconds in which who asks has to send a message, or to take an answer, once begun
PAUSE = 5.0  # seconds before a worker that could not start is tried again
FAILED = 3  # the status of a worker whose work raised what nobody expected
LONGEST = 90  # bytes of a temporary folder's path: a socket's may have about 108
PART = 2**20  # bytes that are read at once
LENGTH = struct.Struct(">Q")
SLOW = 20.0  # seconds: a greeting that took longer may have come too late, and the next one is the same again
STALE = 120.0  # seconds in which that next one comes
Memory = MutableMapping[str, bytes]
_late = -STALE  # when a slow greeting was answered, if that was the last message
log = logging.getLogger("fedlens.worker")


def do(operation: str, asked: Parcel, place: Place, memory: Memory) -> Parcel:
    """The work itself, in whichever process."""
    from fedlens.deploy.node import answer, mean_update

    return mean_update(asked, place, memory) if operation == MEAN else answer(operation, asked, place, memory)


# --- who asks --------------------------------------------------------------------------------------------------------


def ask(operation: str, asked: Parcel, place: Place, memory: Memory) -> Parcel:
    """The answer of this site's worker, or of this process where there is none."""
    if where := os.environ.get(SITE):
        try:
            return _asked(where, operation, asked, place, memory)
        except (OSError, EOFError) as error:
            log.warning("the site's worker is gone (%s): process %d answers %s", first_line(error), os.getpid(), operation)
    return do(operation, asked, place, memory)


def _asked(where: str, operation: str, asked: Parcel, place: Place, memory: Memory) -> Parcel:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(where)
        send(connection, {"operation": operation, "facts": asked.facts, "place": asdict(place)}, asked.tensors, memory)
        head, tensors, changed = receive(connection)  # as long as it takes
    memory.update(changed)
    for name in head["forgotten"]:
        del memory[name]
    if head["failed"] is not None:
        raise RuntimeError(head["failed"])
    return Parcel(head["facts"], tensors)


# --- what crosses the socket: a head in JSON, tensors, named blobs; each with its length before it --------------------------


def send(connection: socket.socket, head: Mapping[str, Any], tensors: bytes, blobs: Mapping[str, bytes]) -> None:
    told = json.dumps({**head, "blobs": list(blobs)}).encode()
    for part in (told, tensors, *blobs.values()):
        connection.sendall(LENGTH.pack(len(part)))
        connection.sendall(part)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes, dict[str, bytes]]:
    """Head, tensors and blobs. EOFError: the other side has hung up."""
    head = json.loads(_part(connection))
    tensors = _part(connection)
    return head, tensors, {str(name): _part(connection) for name in head["blobs"]}


def _part(connection: socket.socket) -> bytes:
    (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(PART, size - len(found)))
        if not part:
            raise EOFError("it has hung up")
        found += part
    return bytes(found)


# --- the worker ------------------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> None:
    """One message after another. Returns after work that raised what `answer` does not tell as a fact: a device that has failed stays failed, and a
    process whose state nobody knows is not for the next message."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PATIENCE)
            if not _served(connection):
                return
        _give_back()


def _served(connection: socket.socket) -> bool:
    """Whether this process is fit for another message after this one."""
    global _late
    try:
        told, tensors, given = receive(connection)
        operation, asked = str(told["operation"]), Parcel(told["facts"], tensors)
        place = Place(**{**told["place"], "overrides": tuple(told["place"]["overrides"])})
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("a message did not come to its end: %s", first_line(error))
        return True
    if operation == "hello" and time.monotonic() - _late > STALE:
        from fedlens.deploy.node import forget

        forget()  # a run begins: what the site has on its disk may be other than in the run before, and two runs' data need not fit the device
        _give_back()
    began, memory, failed = time.monotonic(), dict(given), None
    try:
        reply = do(operation, asked, place, memory)
        log.info("worker %d answered %s in %.1f s", os.getpid(), operation, time.monotonic() - began)
    except Exception as error:
        log.exception("worker %d: %s failed", os.getpid(), operation)
        reply, failed = Parcel(), f"{type(error).__name__}: {first_line(error)}"
    _late = time.monotonic() if operation == "hello" and time.monotonic() - began > SLOW else -STALE
    changed = {name: value for name, value in memory.items() if given.get(name) != value}
    head = {"facts": reply.facts, "failed": failed, "forgotten": sorted(given.keys() - memory.keys())}
    with suppress(OSError):  # who asked is gone
        send(connection, head, reply.tensors, changed)
    return failed is None


def _give_back() -> None:
    """Between messages the device's memory is the others'. What is left of a message holds on to itself in circles."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # nothing where CUDA is not in use


def main(arguments: Sequence[str]) -> int:
    """The worker: descriptor of the socket, and the folder to remove should the parent not be able to."""
    descriptor, folder = arguments
    end_with_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.set_inheritable(int(descriptor), False)
    os.environ.pop(SITE, None)
    ready = os.dup(1)
    os.dup2(2, 1)  # what work prints is not for the keeper
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    with socket.socket(fileno=int(descriptor)) as listener:
        import fedlens.deploy.node  # noqa: F401 - what takes long, before anybody waits

        gc.freeze()  # what was imported is never garbage: looking for some between messages passes over it
        os.write(ready, b"ready\n")
        serve(listener)
    return FAILED


# --- who keeps it ----------------------------------------------------------------------------------------------------


class Keeper:
    """Has a worker running. Connections wait at `listener`, which this process holds too, while one starts."""

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        self.listener, self.folder = listener, folder
        self._closing, self._guard = threading.Event(), threading.Lock()  # of `process`: closed while another is started
        self.process = self._start()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _start(self) -> "subprocess.Popen[str]":
        descriptor, pipe = self.listener.fileno(), subprocess.PIPE
        command = [sys.executable, "-m", "fedlens.deploy.worker", str(descriptor), str(self.folder)]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[descriptor])

    def _keep(self) -> None:
        while True:
            process = self.process
            assert process.stdin is not None and process.stdout is not None
            ready = process.stdout.readline()
            status = process.wait()
            process.stdin.close()
            process.stdout.close()
            if self._closing.is_set():
                return
            log.warning("the site's worker %d has ended (%d); another is started", process.pid, status)
            if not ready:
                self._turn_away()
            if not ready or status == -signal.SIGTERM:  # which comes to this process too when a site is stopped
                self._closing.wait(PAUSE)
            if not self._replaced():
                return

    def _replaced(self) -> bool:
        """Whether there is another process now; else none is wanted any more."""
        while True:
            with self._guard:
                if self._closing.is_set():
                    return False
                with suppress(OSError):  # no memory for another process, say: there may be some later
                    self.process = self._start()
                    return True
            self._turn_away()
            self._closing.wait(PAUSE)

    def _turn_away(self) -> None:
        """Who waits for a worker that cannot start has to do its work itself, and to say what is wrong."""
        while select.select([self.listener], [], [], 0)[0]:
            self.listener.accept()[0].close()

    def close(self) -> None:
        with self._guard:
            self._closing.set()
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._thread.join()


@contextmanager
def kept() -> Iterator[Keeper]:
    """A worker for the processes that this one starts, theirs too; the environment tells them where."""
    short = len(os.fsencode(tempfile.gettempdir())) <= LONGEST
    folder = Path(tempfile.mkdtemp(prefix="fedlens-", dir=None if short else "/tmp"))  # for this user alone
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "site"))
            listener.listen()
            os.environ[SITE] = str(folder / "site")
            keeper = Keeper(listener, folder)
            try:
                yield keeper
            finally:
                keeper.close()
    finally:
        os.environ.pop(SITE, None)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # at once: nothing waits for threads, or for a device, that may not come back
