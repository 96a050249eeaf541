"""The worker of a site: one long-lived process that holds data, model and compiled code in memory between messages.

A SuperNode runs a process per message. That process calls `request`, which sends the message to the worker over a socket and returns its reply. Without a
worker (in Flower's simulation, or after it died), the process does the work itself. `supervised_worker` runs the worker as a child of the SuperNode and
restarts it when it ends. The state of a site stays with Flower: it travels with every message and its changes return, so a new worker loses nothing.

This module imports neither Flower nor, outside the worker process, torch.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedlens.deploy.protocol import Payload, SiteOptions, State
from fedlens.errors import first_line

SOCKET = "FEDLENS_SITE"  # environment variable: path of the worker's socket
MEAN = "mean"  # the operation of secure aggregation: `update` as one mean
SOCKET_TIMEOUT = 60.0  # seconds for the other process to send a message that it began, or to read a reply
RESTART_PAUSE = 5.0  # seconds before another start of a worker that could not start
EXIT_FAILED = 3  # exit status of a worker after an unexpected exception
MAX_FOLDER = 90  # bytes of a temporary folder's path: socket paths are limited to about 108
CHUNK = 2**20  # bytes per read
LENGTH = struct.Struct(">Q")
SLOW_HELLO = 20.0  # seconds: the reply to a slower hello may have missed the deadline, so the next hello repeats it
HELLO_RETRY = 120.0  # seconds within which a hello counts as a repetition
_slow_hello_at = -HELLO_RETRY  # when a slow hello was answered, if it was the latest message
log = logging.getLogger("fedlens.worker")


def end_with_parent(cleanup: Callable[[], object] = lambda: None) -> None:
    """End this process, after `cleanup`, when its stdin closes: a pipe from the parent closes however the parent ends."""
    threading.Thread(target=lambda: (sys.stdin.read(), cleanup(), os._exit(1)), daemon=True).start()


def perform(operation: str, payload: Payload, options: SiteOptions, state: State) -> Payload:
    """Do the work of one message in this process."""
    from fedlens.deploy.site import answer, mean_update

    return mean_update(payload, options, state) if operation == MEAN else answer(operation, payload, options, state)


# --- client side of the socket ---------------------------------------------------------------------------------------


def request(operation: str, payload: Payload, options: SiteOptions, state: State) -> Payload:
    """Return the reply of this site's worker; without a worker, do the work in this process."""
    if path := os.environ.get(SOCKET):
        try:
            return _request_worker(path, operation, payload, options, state)
        except (OSError, EOFError) as error:
            log.warning("the site's worker is gone (%s): process %d answers %s", first_line(error), os.getpid(), operation)
    return perform(operation, payload, options, state)


def _request_worker(path: str, operation: str, payload: Payload, options: SiteOptions, state: State) -> Payload:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        send(connection, {"operation": operation, "metadata": payload.metadata, "options": asdict(options)}, payload.tensors, state)
        head, tensors, changed = receive(connection)  # without a timeout: training takes as long as it takes
    state.update(changed)
    for name in head["deleted"]:
        del state[name]
    if head["error"] is not None:
        raise RuntimeError(head["error"])
    return Payload(head["metadata"], tensors)


# --- the format on the socket: JSON head, tensors, named blobs; each preceded by its length --------------------------


def send(connection: socket.socket, head: Mapping[str, Any], tensors: bytes, blobs: Mapping[str, bytes]) -> None:
    """Write one message."""
    for part in (json.dumps({**head, "blobs": list(blobs)}).encode(), tensors, *blobs.values()):
        connection.sendall(LENGTH.pack(len(part)))
        connection.sendall(part)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes, dict[str, bytes]]:
    """Read head, tensors and blobs of one message. EOFError: the other process closed the connection."""
    head = json.loads(_read_part(connection))
    tensors = _read_part(connection)
    return head, tensors, {str(name): _read_part(connection) for name in head["blobs"]}


def _read_part(connection: socket.socket) -> bytes:
    (size,) = LENGTH.unpack(_read(connection, LENGTH.size))
    return _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(CHUNK, size - len(data)))
        if not chunk:
            raise EOFError("connection closed")
        data += chunk
    return bytes(data)


# --- the worker process ----------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> None:
    """Answer messages one at a time. Return after an unexpected exception: a failed device stays failed, so a new process must take over."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(SOCKET_TIMEOUT)
            if not _serve_one(connection):
                return
        _free_memory()


def _serve_one(connection: socket.socket) -> bool:
    """Answer one message; return False if this process must not answer another."""
    global _slow_hello_at
    try:
        head, tensors, received = receive(connection)
        operation, payload = str(head["operation"]), Payload(head["metadata"], tensors)
        options = SiteOptions(**{**head["options"], "overrides": tuple(head["options"]["overrides"])})
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("a message was incomplete: %s", first_line(error))
        return True
    if operation == "hello" and time.monotonic() - _slow_hello_at > HELLO_RETRY:
        from fedlens.deploy.site import clear_cache

        clear_cache()  # a new run: files may have changed on disk, and the device may not hold the data of two runs
        _free_memory()
    began, state, error_text = time.monotonic(), dict(received), None
    try:
        reply = perform(operation, payload, options, state)
        log.info("worker %d answered %s in %.1f s", os.getpid(), operation, time.monotonic() - began)
    except Exception as error:
        log.exception("worker %d: %s failed", os.getpid(), operation)
        reply, error_text = Payload(), f"{type(error).__name__}: {first_line(error)}"
    _slow_hello_at = time.monotonic() if operation == "hello" and time.monotonic() - began > SLOW_HELLO else -HELLO_RETRY
    changed = {name: value for name, value in state.items() if received.get(name) != value}
    head = {"metadata": reply.metadata, "error": error_text, "deleted": sorted(received.keys() - state.keys())}
    with suppress(OSError):  # the other process is gone
        send(connection, head, reply.tensors, changed)
    return error_text is None


def _free_memory() -> None:
    """Return the device's unused memory to other processes. A finished message leaves reference cycles, hence the collection."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA


def main(arguments: Sequence[str]) -> int:
    """Run the worker. Arguments: file descriptor of the listening socket, and the folder to remove if the parent cannot."""
    descriptor, folder = arguments
    end_with_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.set_inheritable(int(descriptor), False)
    os.environ.pop(SOCKET, None)
    ready = os.dup(1)
    os.dup2(2, 1)  # the supervisor reads stdout: whatever else the work prints goes to stderr
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    with socket.socket(fileno=int(descriptor)) as listener:
        import fedlens.deploy.site  # noqa: F401 - the slow imports, before the first message

        gc.freeze()  # imported modules are never garbage, so collections skip them
        os.write(ready, b"ready\n")
        serve(listener)
    return EXIT_FAILED


# --- the supervisor --------------------------------------------------------------------------------------------------


class WorkerSupervisor:
    """A worker process that is restarted when it ends. This process holds the listening socket too, so connections wait during a restart."""

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        self.listener, self.folder = listener, folder
        self._closing, self._lock = threading.Event(), threading.Lock()  # the lock guards `process` against a restart during `close`
        self.process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _start(self) -> "subprocess.Popen[str]":
        descriptor, pipe = self.listener.fileno(), subprocess.PIPE
        command = [sys.executable, "-m", "fedlens.deploy.worker", str(descriptor), str(self.folder)]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[descriptor])

    def _watch(self) -> None:
        while True:
            with self.process as process:
                assert process.stdout is not None
                ready = process.stdout.readline()
                status = process.wait()
            if self._closing.is_set():
                return
            log.warning("the site's worker %d ended (%d); starting another", process.pid, status)
            if not ready:
                self._refuse_waiting()
            if not ready or status == -signal.SIGTERM:  # SIGTERM reaches this process too when a site is stopped
                self._closing.wait(RESTART_PAUSE)
            if not self._restart():
                return

    def _restart(self) -> bool:
        """Start another process; return False once the supervisor is closing."""
        while True:
            with self._lock:
                if self._closing.is_set():
                    return False
                with suppress(OSError):  # for example out of memory: a later attempt may succeed
                    self.process = self._start()
                    return True
            self._refuse_waiting()
            self._closing.wait(RESTART_PAUSE)

    def _refuse_waiting(self) -> None:
        """Close the waiting connections: those processes then do the work themselves and report the error."""
        while select.select([self.listener], [], [], 0)[0]:
            self.listener.accept()[0].close()

    def close(self) -> None:
        with self._lock:
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
def supervised_worker() -> Iterator[WorkerSupervisor]:
    """Run a worker for this process and its descendants, which read the socket's path from the environment."""
    short = len(os.fsencode(tempfile.gettempdir())) <= MAX_FOLDER
    folder = Path(tempfile.mkdtemp(prefix="fedlens-", dir=None if short else "/tmp"))  # mkdtemp: only this user may enter
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "site"))
            listener.listen()
            os.environ[SOCKET] = str(folder / "site")
            supervisor = WorkerSupervisor(listener, folder)
            try:
                yield supervisor
            finally:
                supervisor.close()
    finally:
        os.environ.pop(SOCKET, None)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # at once: a hanging thread or device must not delay the exit
