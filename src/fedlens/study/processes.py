"""How studies and searches do runs: in this process, or in workers that share the GPUs and end with their parent.

A task that fails leaves a `Failure`, and the others continue. A folder has one owner at a time.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, TypeVar

import torch

from fedlens.errors import Elsewhere, UserError, first_line
from fedlens.files import remove_parts
from fedlens.runs.digests import Damaged
from fedlens.runs.store import take_lock

Task = TypeVar("Task")
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # sent by users, batch systems and a kernel without memory
INTERRUPTED = "interrupted: "  # prefix of the failures of tasks whose process was killed: the next start continues them


class Killed(ChildProcessError):
    """A worker process that a signal from outside ended: its task is interrupted, not failed."""


@dataclass(frozen=True)
class Failure:
    """The reason why a task failed. The cause decides whether it counts against its configuration.

    values: the configuration itself. device: the device or torch, which may fail for later tasks of the process too; or the process crashed.
    elsewhere: the disk, the network or a kill, so that the next start continues the task. pruned: a search ended the run early.
    """

    why: str
    cause: str


CAUSES = {  # the first that fits
    **{Killed: "elsewhere", ChildProcessError: "device", Elsewhere: "elsewhere", Damaged: "elsewhere", UserError: "values"},
    **{OSError: "elsewhere", RuntimeError: "device", MemoryError: "device"},
}


def attempt(work: Callable[..., Failure | None], *arguments: Any) -> Failure | None:
    """Do the work; return its failure, or None. The exception is dropped: its traceback would keep the run's model in memory."""
    try:
        return work(*arguments)
    except tuple(CAUSES) as error:
        cause = next(cause for kind, cause in CAUSES.items() if isinstance(error, kind))
        text = str(error) if isinstance(error, UserError | ChildProcessError) else f"{type(error).__name__}: {first_line(error)}"
        return Failure(INTERRUPTED * isinstance(error, Killed) + text, cause)


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

    def do(self, task: Any) -> Any:
        """Return the program's answer to a task, both as JSON."""
        self.send(task)
        return self.receive()

    def send(self, task: Any) -> None:
        self._process = self._process or self._start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: `receive` says why
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        """Wait for the answer to the task that was sent. Raise ChildProcessError with the last line of stderr if the process ends instead."""
        assert self._process is not None
        if answer := self.stdout.readline():
            return json.loads(answer)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        code, last = self._process.returncode, self.retire()
        if code is not None and -code in KILLS:
            raise Killed(f"its process was ended by {signal.Signals(-code).name}")
        raise ChildProcessError(last or f"the process ended with {code}")

    def failure(self) -> Failure | None:
        """Wait for the failure that the program answers with, or None. After a failure of the device, the next task gets a new process."""
        answer = self.receive()
        if answer is not None and answer["cause"] == "device":
            self.retire()
        return None if answer is None else Failure(**answer)

    @property
    def stdout(self) -> IO[str]:
        """The pipe that is readable once there is an answer, or the process has ended."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout

    def _start(self) -> "subprocess.Popen[str]":
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `retire`
        pipe, environment = subprocess.PIPE, environment_of(self.place, self.jobs)
        return subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True, env=environment)

    def retire(self) -> str:
        """End the process and return its last line of stderr. The next task starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return ""
        with self._stderr:
            with suppress(BrokenPipeError), process:  # closes its pipes and waits
                process.kill()
            self._stderr.seek(0)
            return self._stderr.read().strip().rpartition("\n")[2].strip()


class WorkerPool:
    """`jobs` workers in parallel. An interrupt ends them all; the next start resumes from their checkpoints."""

    def __init__(self, command: list[str], jobs: int) -> None:
        self.workers = [ProcessWorker(command, place, jobs) for place in range(jobs)]

    def outcomes(
        self, tasks: Sequence[Task], here: Callable[[Task], Failure | None], message: Callable[[Task], Any]
    ) -> Iterator[tuple[Task, Failure | None]]:
        """Yield each task with its failure, in order. One job does them in this process, with `here`; several send its `message` to a worker."""
        if len(self.workers) == 1:
            return ((task, attempt(here, task)) for task in tasks)
        return self._in_workers(tasks, message)

    def _in_workers(self, tasks: Sequence[Task], message: Callable[[Task], Any]) -> Iterator[tuple[Task, Failure | None]]:
        """Give every idle worker the next task, wait until one answers, and repeat."""
        waiting, busy, done = deque(range(len(tasks))), dict[ProcessWorker, int](), dict[int, Failure | None]()
        try:
            for number, task in enumerate(tasks):
                while number not in done:
                    for worker in (each for each in self.workers if waiting and each not in busy):
                        busy[worker] = waiting.popleft()
                        if failure := attempt(_send, worker, message, tasks[busy[worker]]):
                            done[busy.pop(worker)] = failure
                    answered = select.select([worker.stdout for worker in busy], [], [])[0] if busy else []
                    for worker in [each for each in busy if each.stdout in answered]:
                        done[busy.pop(worker)] = attempt(worker.failure)
                yield task, done.pop(number)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self.workers:
            worker.retire()


def _send(worker: ProcessWorker, message: Callable[[Task], Any], task: Task) -> None:
    worker.send(message(task))


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
        print(json.dumps(answer, default=asdict), file=answers, flush=True)
