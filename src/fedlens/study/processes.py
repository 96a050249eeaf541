"""Runs in worker processes: one owner per folder, one GPU per worker where there are several, and no worker that outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
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
        for place in (folder, folder / "configs", folder / "analyses", folder / "cache"):
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
        self._busy = self._closed = False
        self._guard = threading.Lock()  # protects the three above: close may be called while the process starts

    def do(self, task: Any) -> Any:
        """Return the program's answer to a task, both as JSON. Raises ChildProcessError with its last line of stderr if the process ends."""
        with self._guard:
            if self._process is None:
                self._process = self._start()
            process, answer, self._busy = self._process, "", True
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError, ValueError):  # it died, or another thread closed this worker
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        self._busy = False
        if answer:
            return json.loads(answer)
        self._process = None
        code = self._end(process)
        if -code in KILLS:
            raise Killed(f"its process was ended by {signal.Signals(-code).name}")
        raise ChildProcessError(next((line.strip() for line in reversed(self._stderr) if line.strip()), f"the process ended with {code}"))

    def _start(self) -> "subprocess.Popen[str]":
        if self._closed:
            raise ChildProcessError("closed")
        pipe = subprocess.PIPE
        environment = environment_of(self.place, self.jobs)
        process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        self._stderr: deque[str] = deque(maxlen=20)  # last lines
        self._reader = threading.Thread(target=self._stderr.extend, args=(process.stderr,), daemon=True)
        self._reader.start()
        return process

    def retire(self) -> None:
        """End the process: an idle one by closing its stdin, a busy one by killing it. The next task starts a new one."""
        with self._guard:
            process, self._process, busy = self._process, None, self._busy
        if process is None:
            return
        if busy:
            process.kill()  # the thread in `do` sees the end of the process and cleans up
        else:
            self._end(process)

    def _end(self, process: "subprocess.Popen[str]") -> int:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            code = process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()
        self._reader.join(timeout=10)
        if not self._reader.is_alive():  # else a grandchild still holds the other end, and close would wait for it
            process.stderr.close()
        return code

    def close(self) -> None:
        self._closed = True
        self.retire()


class WorkerPool:
    """`jobs` workers in parallel. An interrupt ends them all; the next start resumes from their checkpoints."""

    def __init__(self, command: list[str], jobs: int) -> None:
        self.workers = [ProcessWorker(command, place, jobs) for place in range(jobs)]

    def map(self, do: Callable[[ProcessWorker, Task], Answer], tasks: Sequence[Task]) -> Iterator[tuple[Task, Answer]]:
        """Yield (task, answer) in the order of the tasks; each runs on the next idle worker."""
        idle: SimpleQueue[ProcessWorker] = SimpleQueue()
        for worker in self.workers:
            idle.put(worker)

        def on_idle_worker(task: Task) -> Answer:
            worker = idle.get()
            try:
                return do(worker, task)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            try:
                running = [(task, pool.submit(on_idle_worker, task)) for task in tasks]
                for task, future in running:
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
    """Be the process of a `ProcessWorker`: read tasks from stdin, write answers to stdout, end when stdin closes.

    A closed stdin during a task means that the parent is gone, so the process ends at once."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task prints goes to stderr, not among the answers
    tasks: SimpleQueue[Any] = SimpleQueue()
    idle = threading.Event()
    idle.set()

    def read() -> None:
        for line in sys.stdin:
            idle.clear()
            tasks.put(json.loads(line))
        if not idle.is_set():
            os._exit(1)
        tasks.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (task := tasks.get()) is not None:
        answer = do(task)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # between tasks, other processes may use the memory
        idle.set()
        print(json.dumps(answer), file=answers, flush=True)
