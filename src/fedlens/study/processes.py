"""Runs in other processes: one folder for one owner, a GPU each where there are several, and no child that outlives its parent."""

import json
import os
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
from fedlens.runs.store import take_lock

Task = TypeVar("Task")
Answer = TypeVar("Answer")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if it is missing, for this process alone."""
    make_folder(folder)
    with take_lock(folder, "--out"):
        yield


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be a folder ({error.strerror})") from None


def environment_of(place: int, jobs: int) -> dict[str, str]:
    """Of the child at one of `jobs` places: one of the GPUs that this process was given, or its share of the cores."""
    found, gpus = os.environ.copy(), torch.cuda.device_count()
    if gpus > 1:
        given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()] or [str(i) for i in range(gpus)]
        found["CUDA_VISIBLE_DEVICES"] = given[place % min(gpus, len(given))]
    else:
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    return found


class Worker:
    """A process that stays for one task after another, so that what it has imported and compiled serves them all; it starts with the first.

    `command`: a program that calls `work`. One that ended on the way is told by the task that it was at, and the next task has a new one."""

    def __init__(self, command: list[str], place: int = 0, jobs: int = 1) -> None:
        """The worker at one of `jobs` places."""
        self.command, self.place, self.jobs = command, place, jobs
        self._process: subprocess.Popen[str] | None = None
        self._busy = self._closed = False
        self._guard = threading.Lock()  # of the three: a worker may be closed while it starts

    def do(self, task: Any) -> Any:
        """What the program answers; both as JSON. ChildProcessError: its process ended, with the last that it said."""
        with self._guard:
            if self._process is None:
                self._process = self._start()
            process, answer, self._busy = self._process, "", True
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError, ValueError):  # ended, or closed by who is closing this worker
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        self._busy = False
        if answer:
            return json.loads(answer)
        self._process = None
        code = self._end(process)
        raise ChildProcessError(next((line.strip() for line in reversed(self._said) if line.strip()), f"the process ended with {code}"))

    def _start(self) -> "subprocess.Popen[str]":
        if self._closed:
            raise ChildProcessError("closed")
        pipe = subprocess.PIPE
        environment = environment_of(self.place, self.jobs)
        process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        self._said: deque[str] = deque(maxlen=20)  # of its stderr
        self._reader = threading.Thread(target=self._said.extend, args=(process.stderr,), daemon=True)
        self._reader.start()
        return process

    def retire(self) -> None:
        """An idle process ends by itself, one at work is killed; another task would have a new one."""
        with self._guard:
            process, self._process, busy = self._process, None, self._busy
        if process is None:
            return
        if busy:
            process.kill()  # who waits for its answer sees the end, and does the rest
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
        if not self._reader.is_alive():  # else a process that the worker started still holds the other end
            process.stderr.close()
        return code

    def close(self) -> None:
        self._closed = True
        self.retire()


class Workers:
    """As many at a time as there are places. After an interrupt none of them outlives it: what a run has kept, the next one goes on from."""

    def __init__(self, command: list[str], jobs: int) -> None:
        self.all = [Worker(command, place, jobs) for place in range(jobs)]

    def each(self, do: Callable[[Worker, Task], Answer], tasks: Sequence[Task]) -> Iterator[tuple[Task, Answer]]:
        """Every task with what `do` makes of it with the worker that is free, in their order."""
        idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.all:
            idle.put(worker)

        def with_one(task: Task) -> Answer:
            worker = idle.get()
            try:
                return do(worker, task)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(self.all)) as pool:
            try:
                running = [(task, pool.submit(with_one, task)) for task in tasks]
                for task, future in running:
                    while not wait([future], timeout=1.0).done:
                        continue  # an interrupt just before the wait would be seen at its end
                    yield task, future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # nothing new is begun
                self.close()
                raise

    def close(self) -> None:
        for worker in self.all:
            worker.close()


def work(do: Callable[[Any], Any]) -> None:
    """The other side of a `Worker`: tasks by stdin, answers by stdout. It ends when stdin is closed: at once where it is at work, as its parent is
    gone then."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task prints is no answer
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
            torch.cuda.empty_cache()  # between tasks its memory is the others'
        idle.set()
        print(json.dumps(answer), file=answers, flush=True)
