"""Processes of the tests' own, forked from one that has imported torch: each starts in milliseconds instead of seconds."""

import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import fedlens as fl

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["preloaded"])


def _work(argv: Sequence[str], script: Path | None, environment: dict[str, str], folder: str, streams: Sequence[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdout, sys.stderr = (open(name, "w") for name in streams)  # noqa: SIM115 - for the life of the process
    if script is None:
        from fedlens.cli import main

        sys.exit(main(argv))
    sys.argv = [str(script), *argv]
    runpy.run_path(str(script), run_name="__main__")


def start(argv: Sequence[str], script: Path | None = None, streams: Sequence[str] = (os.devnull, os.devnull)) -> BaseProcess:
    """Start `fedlens argv`, or a script with these arguments, single-threaded, with this process's environment and folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        forkserver.ensure_running()  # it looks for `preloaded` there
    process = SERVER.Process(target=_work, args=(list(argv), script, dict(os.environ), str(Path.cwd()), streams))
    process.start()
    return process


def completed(argv: Sequence[str], script: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run such a process to its end and return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [f"{folder}/out", f"{folder}/err"]
        process = start(argv, script, streams)
        process.join()
        out, err = (Path(name).read_text() for name in streams)
    return subprocess.CompletedProcess(list(argv), process.exitcode or 0, out, err)


def by_two_ranks(argv: Sequence[str]) -> None:
    """Run `fedlens argv` as torchrun does on two ranks; the second rank comes a second late."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile("r") as errors, pytest.MonkeyPatch.context() as patch:
        ranks = []
        for name, value in {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            patch.setenv(name, str(value))
        for rank in range(2):
            patch.setenv("RANK", str(rank))
            patch.setenv("LOCAL_RANK", str(rank))
            time.sleep(1.2 * rank)
            ranks.append(start(argv, streams=(os.devnull, errors.name)))
        for process in ranks:
            process.join(300)
        assert [process.exitcode for process in ranks] == [0, 0], errors.read()[-3000:]


def finished(path: Path, overrides: list[str]) -> fl.Run:
    """An uninterrupted run, made like the interrupted ones."""
    assert completed(["run", *overrides, f"run.dir={path}"]).returncode == 0
    return fl.load_run(path)


def made(path: Path) -> set[str]:
    """The checkpoints that are there; one that is half written has another name."""
    return {p.name for p in (path / "checkpoints").glob("step-*")}


def killed_and_resumed(path: Path, overrides: list[str], kills: int, seed: int, step: float) -> fl.Run:
    """SIGKILL at a random moment after a checkpoint that the process has made, again and again, then to the end. `step`: seconds of a step or round;
    a kill comes within the next two, so that it meets training, validation and every part of writing a checkpoint."""
    rng, met = random.Random(seed), 0
    while True:
        before = made(path)
        process = start(["resume", str(path)] if (path / "config.yaml").exists() else ["run", *overrides, f"run.dir={path}"])
        while met < kills and process.exitcode is None and not made(path) - before:
            process.join(0.001)
        process.join(rng.uniform(0, min(2 * step, 0.15)) if met < kills else None)
        if process.exitcode is None:
            process.kill()
            process.join()
            met += 1
            continue
        assert process.exitcode == 0
        assert met == kills, f"finished after {met} kills: the run is too short for the test"
        log = (path / "log.txt").read_text()
        assert log.count("resuming at") == kills  # every process after the first went on from a checkpoint
        return fl.load_run(path)
