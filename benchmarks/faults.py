"""Damage files, kill processes and fill disks: no run may give another result without a word.

    nice -n 10 python benchmarks/faults.py --out benchmarks/records/DATE-faults.txt

damage      every file of a finished run, read back; of a finished and an interrupted run, resumed. Flips, truncations, deletions, zeros
kills       SIGKILL before every file-system operation of a run, then a resume
full disks  every file-system operation from the nth on fails with ENOSPC, then a resume on a disk with space

An outcome is `same` (every number and bit as without the fault), `refused` (one line), `different` or `traceback`. Needs Linux: it forks.
"""

import argparse
import errno
import json
import logging
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import fedlens as fl
from fedlens.errors import UserError
from fedlens.study.results import gather

TIMES = {"seconds", "round_seconds", "images_per_second"}
RUNS = {  # the smallest that have every kind of file
    "federated": [
        "experiment=fedavg_noniid",
        "data.classes_per_client=1",
        "federated.clients=3",
        "federated.participation=0.7",
        "federated.local_steps=1",
        "federated.rounds=5",
        "federated.eval_every=1",
        "federated.client_vectors=true",
        "mask.strategy=least_sensitive",
        "mask.rounds=1",
        "mask.density=0.2",
    ],
    "centralized": ["experiment=centralized", "train.epochs=2", "model.dropout=0.3"],
}
SMALL = ["model.image_size=14", "model.freeze_blocks=3", "optim.batch_size=4", "data.val_fraction=0.25", "run.keep_last=3"]
SMALL += ["run.checkpoint_minutes=0", "run.progress=false", "device=cpu", "data=folder", "data.crop=1"]


def make_images(root: Path, classes: int = 3, each: int = 8) -> list[str]:
    """Write a few images of noise as an image folder; return the overrides that use them."""
    from PIL import Image

    rng = random.Random(0)
    for part, count in (("train", each), ("test", each // 2)):
        for label in range(classes):
            (root / part / str(label)).mkdir(parents=True)
            for i in range(count):
                pixels = bytes(rng.randrange(200 + 15 * label) for _ in range(14 * 14))
                Image.frombytes("L", (14, 14), pixels).save(root / part / str(label) / f"{i}.png")
    return [*SMALL, f"data.root={root}"]


# --- what a run says


def without_times(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: without_times(value) for key, value in content.items() if key not in TIMES}
    return [without_times(value) for value in content] if isinstance(content, list | tuple) else content


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (tuple(t.shape), str(t.dtype), t.contiguous().flatten().view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()
    }


def vectors(run: fl.Run) -> dict[int, Any]:
    federated = "best_round" in run.summary
    return {client: bits({"tau": tau.vector}) for client, tau in run.client_vectors().items()} if federated else {}


def report(run: fl.Run) -> Any:
    """Everything that a report reads of a run."""
    (study,) = gather([run.path]).studies
    return [
        (one.config["seed"], without_times(one.summary), without_times(one.metrics), one.partition, cell.label)
        for table in study.tables
        for cell in table.cells
        for one in cell.runs.values()
    ]


READERS: dict[str, Callable[[fl.Run], Any]] = {
    "config": lambda run: repr(replace(run.config, run=None)),  # type: ignore[arg-type]  # where it was started does not matter
    "summary": lambda run: without_times(run.summary),
    "metrics": lambda run: without_times(run.metrics),
    "state": lambda run: bits(run.state),
    "start": lambda run: bits(run.start),
    "mask": lambda run: run.mask and bits(run.mask.as_dict()),
    "clients": vectors,
    "report": report,
}


def outcome(work: Callable[[], Any], wanted: Any) -> str:
    try:
        return "same" if work() == wanted else "different"
    except UserError as error:
        return "refused" if len(str(error).splitlines()) == 1 else "more than one line"
    except Exception:
        traceback.print_exc()
        return "traceback"


def answers(path: Path) -> dict[str, Any]:
    run = fl.load_run(path)
    return {name: read(run) for name, read in READERS.items()}


def read_outcome(path: Path, truth: Mapping[str, Any]) -> str:
    """Return the worst outcome of reading a damaged finished run in every way."""
    found = {outcome(lambda read=read: read(fl.load_run(path)), truth[name]) for name, read in READERS.items()}  # type: ignore[misc]
    return next(kind for kind in ("traceback", "different", "more than one line", "refused", "same") if kind in found)


def resume_outcome(path: Path, truth: Mapping[str, Any]) -> str:
    """Return the outcome of resuming a damaged run: the end is the undamaged one's, or a refusal."""
    return outcome(lambda: answers(fl.load_run(path).resume().path), truth)


# --- damage


def damages(content: bytes, rng: random.Random, flips: int) -> Iterator[tuple[str, bytes | None]]:
    """Yield ways to damage a file. None: delete it."""
    for _ in range(flips if content else 0):
        at = rng.randrange(len(content))
        yield f"bit {at}", content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    digits = [i for i, byte in enumerate(content) if 48 <= byte < 58]
    for at in rng.sample(digits, min(flips, len(digits))):  # one digit: the file stays readable
        yield f"digit {at}", content[:at] + bytes([48 + (content[at] - 47) % 10]) + content[at + 1 :]
    yield "deleted", None
    yield "emptied", b""
    yield "half", content[: len(content) // 2]
    yield "one byte less", content[:-1]
    yield "one line less", b"\n".join(content.split(b"\n")[:-2]) + b"\n"
    yield "zeros", bytes(len(content))
    yield "longer", content + b"0"


def files_of(run: Path) -> list[Path]:
    """Return the files that decide results: all but logs and locks."""
    return sorted(file for file in run.rglob("*") if file.is_file() and file.name not in ("log.txt", "lock"))


def interrupted(finished: Path, path: Path) -> Path:
    """Return a copy of a finished run as a kill before its last step leaves it."""
    shutil.copytree(finished, path)
    for file in (path / "summary.json", path / "model.safetensors"):
        file.unlink()
    shutil.rmtree(path / "clients", ignore_errors=True)
    shutil.rmtree(sorted((path / "checkpoints").glob("step-*"))[-1])
    listed = json.loads((path / "digests.json").read_text())["files"]
    from fedlens.runs.digests import to_text

    gone = ("summary.json", "model.safetensors", "metrics.jsonl", "partition.json")
    kept = {name: digest for name, digest in listed.items() if name not in gone and not name.startswith("clients/")}
    (path / "digests.json").write_text(to_text(kept))
    return path


Case = tuple[str, str, str]  # what was done, the file and how, the outcome


def damage_cases(finished: Path, scratch: Path, truth: Mapping[str, Any], flips: int, resumes: int, seed: int = 0) -> Iterator[Case]:
    """Damage every file: read the finished run; resume the finished and the interrupted one (`resumes` of the ways for each file)."""
    rng = random.Random(seed)
    stopped = interrupted(finished, scratch / "stopped")
    for source, kind, act in (
        (finished, "read", read_outcome),
        (finished, "resume finished", resume_outcome),
        (stopped, "resume", resume_outcome),
    ):
        for file in files_of(source):
            name, ways = file.relative_to(source), list(damages(file.read_bytes(), rng, flips))
            if kind == "read" and "checkpoints" in name.parts:
                continue  # only a resume reads them
            if kind != "read":
                ways = rng.sample(ways, min(resumes, len(ways)))
            for way, content in ways:
                copy = scratch / "copy" / source.name
                shutil.copytree(source, copy)
                (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
                yield kind, f"{name}: {way}", act(copy, truth)
                shutil.rmtree(copy.parent)
    shutil.rmtree(stopped)


# --- kills and full disks, in forked processes

WRITES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


def writes(event: str, args: tuple[Any, ...], below: str) -> bool:
    """Return True for an audit event of a change below a folder."""
    changes = event in WRITES or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return bool(changes) and str(args[0]).startswith(below)


def in_child(work: Callable[[], object], below: Path, at: Callable[[int, str], None]) -> tuple[int, int]:
    """Do the work in a forked process that calls `at` before its nth change below a folder; return (exit status, number of changes)."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if writes(event, args, str(below)):
                count += 1
                at(count, event)

        status = 1
        try:
            sys.addaudithook(hook)
            work()
            status = 0
        except UserError as error:
            status = 2 if len(str(error).splitlines()) == 1 else 3
        except BaseException:
            status = 1
        finally:
            os.write(writer, str(count).encode())
            os._exit(status)
    os.close(writer)
    said = os.read(reader, 100)
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(said or 0)


def kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full(event: str) -> None:
    if event in ("open", "os.mkdir", "os.rename"):  # files can be removed from a full disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fault_cases(kind: str, overrides: list[str], scratch: Path, truth: Mapping[str, Any], every: int = 1) -> Iterator[Case]:
    """Start a run that meets a fault at its nth change of the disk, for every nth, and resume it."""
    path, fault = scratch / kind / "run", {"kill": kill, "full disk": full}[kind]
    go_on = [*overrides, f"run.dir={path}", "run.if_exists=resume"]
    _, total = in_child(lambda: fl.run(go_on), path, lambda n, event: None)
    shutil.rmtree(path)
    for n in range(1, total + 1, every):
        status, _ = in_child(lambda: fl.run(go_on), path, lambda count, event, n=n: fault(event) if count >= n else None)  # type: ignore[misc]
        done = status == 0 and n > 0.9 * total  # checkpoints are written in the background, so two runs may differ by an operation
        clean = status == -signal.SIGKILL or done if kind == "kill" else status in (0, 2)
        yield kind, f"operation {n} of {total}", outcome(lambda: answers(fl.run(go_on).path), truth) if clean else f"ended with {status}"
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--flips", type=int, default=6, help="bits, and digits, that are changed in each file")
    parser.add_argument("--resumes", type=int, default=4, help="ways to damage a file for which the run is resumed")
    parser.add_argument("--every", type=int, default=1, help="faults at every nth operation; 0: none")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fedlens").addHandler(logging.NullHandler())
    logging.getLogger("fedlens").propagate = False
    began, cases = time.monotonic(), list[Case]()

    def note(name: str, part: Iterator[Case]) -> None:
        for kind, what, found in part:
            cases.append((f"{name}, {kind}", what, found))
            if found not in ("same", "refused"):
                print(f"{name}, {kind}: {what}: {found}", flush=True)
            if arguments.out and len(cases) % 20 == 0:
                arguments.out.write_text(table(cases, time.monotonic() - began) + "\n")

    with tempfile.TemporaryDirectory(prefix="fedlens-faults-") as folder:
        scratch, truths = Path(folder), dict[str, Any]()
        common = make_images(scratch / "images")
        for name, options in RUNS.items():
            path = fl.run([*common, *options, f"run.dir={scratch / name / 'run'}"]).path
            truths[name] = answers(path)
            note(name, damage_cases(path, scratch, truths[name], arguments.flips, arguments.resumes))
        for kind in ("kill", "full disk") if arguments.every else ():
            for name, options in RUNS.items():
                note(name, fault_cases(kind, [*common, *options], scratch, truths[name], arguments.every))
    text = table(cases, time.monotonic() - began)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return int(any(found not in ("same", "refused") for *_, found in cases))


def table(cases: list[Case], seconds: float) -> str:
    lines = [f"{platform.system()} {platform.machine()}, one thread, torch {torch.__version__}, {seconds:.0f} s"]
    for kind in dict.fromkeys(kind for kind, *_ in cases):
        counts = Counter(found for each, _, found in cases if each == kind)
        lines.append(
            f"{kind:32} {sum(counts.values()):5} cases: " + ", ".join(f"{count} {found}" for found, count in sorted(counts.items()))
        )
    damaged = [found for kind, _, found in cases if "read" in kind or "resume" in kind]
    wrong = [case for case in cases if case[2] not in ("same", "refused")]
    lines.append(f"{len(damaged)} damaged files, {damaged.count('different')} silently different; {len(cases)} cases, {len(wrong)} wrong")
    return "\n".join([*lines, *(": ".join(case) for case in wrong)])


if __name__ == "__main__":
    sys.exit(main())
