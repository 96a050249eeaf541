"""Runs in worker processes: one owner per folder, one GPU per worker where there are several, and no worker that outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from fedlens.errors import UserError
from fedlens.files import remove_parts
from fedlens.runs.store import take_lock

Task = TypeVar("Task")
Answer = TypeVar("Answer")
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # sent by users, batch systems and a kernel without memory


class Killed(ChildProcessError):
    """A worker process that a signal from outside ended: its task is interrupted, not failed."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder if it is missing, lock it for this process and remove what a killed one left half-written."""
    make_folder(folder)
    with take_lock(folder, "--out"):
        for place in (folder, folder / "analyses", folder / "cache"):
            remove_parts(place)
        yield


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot create the folder {folder} ({error.strerror}).") from None


def environment_of(place: int, jobs: int) -> dict[str, str]:
    """Return the environment of worker number `place` of `jobs`: one of this process's GPUs, or its share of the cores."""
    environment, gpus = os.environ.copy(), torch.cuda.device_count()
    if gpus > 1:
        names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()] or [str(i) for i in range(gpus)]
        environment["CUDA_VISIBLE_DEVICES"] = names[place % min(gpus, len(names))]
    else:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    return environment


class ProcessWorker:
    """A process that runs one task after another, so that imports and compiled code are reused. It starts with its first task.

    `command`: a program that calls `serve`. If it dies, its task raises ChildProcessError, or Killed if a signal from outside ended it,
    and the next task starts a new process."""

    def __init__(self, command: list[str], place: int = 0, jobs: int = 1) -> None:
        self.command, self.place, self.jobs = command, place, jobs
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._guard = threading.Lock()  # protects the two above: `close` may be called while another thread starts the process

    def do(self, task: Any) -> Any:
        """Return the program's answer to a task, both as JSON. Raises ChildProcessError with its last line of stderr if the process ends."""
        with self._guard:
            if self._closed:
                raise ChildProcessError("closed")
            process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError, ValueError):  # it died, or another thread closed this worker
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            if answer := process.stdout.readline():
                return json.loads(answer)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        code, last = process.returncode, self.retire()
        if code is not None and -code in KILLS:
            raise Killed(f"its process was ended by {signal.Signals(-code).name}")
        raise ChildProcessError(last or f"the process ended with {process.returncode}")

    def _start(self) -> "subprocess.Popen[str]":
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `retire`
        pipe, environment = subprocess.PIPE, environment_of(self.place, self.jobs)
        return subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True, env=environment)

    def retire(self) -> str:
        """End the process and return its last line of stderr. The next task starts a new one."""
        with self._guard:
            process, self._process = self._process, None
        if process is None:
            return ""
        with self._stderr:
            with suppress(BrokenPipeError), process:  # closes its pipes and waits
                process.kill()
            self._stderr.seek(0)
            return self._stderr.read().strip().rpartition("\n")[2].strip()

    def close(self) -> None:
        """End the process for good."""
        with self._guard:
            self._closed = True
        self.retire()


class WorkerPool:
    """`jobs` workers in parallel. An interrupt ends them all; the next start resumes from their checkpoints."""

    def __init__(self, command: list[str], jobs: int) -> None:
        self.workers = [ProcessWorker(command, place, jobs) for place in range(jobs)]

    def map(self, do: Callable[[ProcessWorker, Task], Answer], tasks: Sequence[Task]) -> Iterator[tuple[Task, Answer]]:
        """Yield (task, answer) in the order of the tasks. Each thread has a worker of its own and takes the next task when it is idle."""
        own, workers = threading.local(), iter(self.workers)
        with ThreadPoolExecutor(len(self.workers), initializer=lambda: setattr(own, "worker", next(workers))) as pool:
            try:
                running = [pool.submit(lambda task: do(own.worker, task), task) for task in tasks]
                for task, future in zip(tasks, running, strict=True):
                    while not wait([future], timeout=1.0).done:
                        continue  # an endless wait could miss an interrupt that comes just before it
                    yield task, future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def serve(do: Callable[[Any], Any]) -> None:
    """Be the process of a `ProcessWorker`: read tasks from stdin and write answers to stdout, until stdin closes because the parent is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task prints goes to stderr, not among the answers
    tasks: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            tasks.put(json.loads(line))
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        answer = do(tasks.get())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # between tasks, other processes may use the memory
        print(json.dumps(answer), file=answers, flush=True)
