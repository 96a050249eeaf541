"""Random overrides and malformed inputs: each must succeed, or be refused with one line and exit status 2.

    python benchmarks/bad_input.py --overrides 1200 --runs 150 --files 240 --out benchmarks/records/DATE-bad-input.txt

Overrides: one to three random keys with values of wrong type, huge, negative, nan, unicode, control characters or nested; each is composed
and checked, and some that are accepted are run. Files: data, weights, plans, search spaces, configurations and run folders, damaged at random.
Everything runs in this process, as `fedlens …` does; a traceback, another status or a second line of error counts as a failure.
"""

import argparse
import contextlib
import gzip
import io
import json
import logging
import os
import pickle
import platform
import random
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

import fedlens as fl
from fedlens.cli import main
from fedlens.config import CONF, keys

SECONDS = 40  # limit of one case; a run that is still training then has accepted its input
LENGTHS = ("epochs", "rounds", "local_steps", "compile")  # keys that make a run long
STRANGE = [
    *("", "null", "true", "abc", "0", "-1", "1.5", "1e-400", "1e400", "nan", "inf", "-inf", "0x10", "1_000", "'5'", "~", "=", "a=b", ",", "'", '"', "\\"),
    *(str(10**6), str(2**31), str(2**63), str(-(2**63) - 1), str(10**23), "9" * 5000, "x" * 300, "x" * 70000),
    *("é", "日本語", "😀", "\u202egnp.x", "\x1b[31mred", "a\nerror: forged", "\a\b\t\r", "\x7f", "\ud800", "\udce9", "a\x00b"),
    *("[]", "[[1]]", "[1,[2,[3]]]", "[nan]", "[null]", "[1,1]", "[-1]", "{}", "{a:1}", "{a:{b:[1,{c:2}]}}", "[{a:1}]", "[" * 30 + "]" * 30, "[" * 400 + "]" * 400),
    *("${seed}", "${oc.env:HOME}", "${nowhere}", "${", "1,2", "range(1,3)", "choice(1,2)", "!!python/object:os.system", "../../etc", "/dev/null", "/proc/self/mem", "hf:", "timm:"),
]  # fmt: skip


@dataclass
class Tally:
    """What the cases of one family came to."""

    name: str
    accepted: int = 0
    refused: int = 0
    stopped: list[str] = field(default_factory=list)  # still running after SECONDS
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        cases = self.accepted + self.refused + len(self.stopped) + len(self.failures)
        return f"{self.name:32} {cases:5} cases: {self.accepted:4} accepted, {self.refused:4} refused, {len(self.stopped):3} stopped, {len(self.failures):3} failed"


class Stopped(BaseException):
    """The time of a case is over."""


def _stop(*_: object) -> None:
    raise Stopped


def attempt(tally: Tally, label: str, call: Callable[[], int]) -> int | None:
    """Count what one command comes to; return its status, or None if it was stopped or failed."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    logging.getLogger("fedlens").handlers.clear()  # `main` adds one for the stderr of this case
    status: int | None = None
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    problem = ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = call()
            except SystemExit as stop:  # argparse
                status = int(stop.code or 0)
    except Stopped:
        tally.stopped.append(f"{label[:200]!r}: stopped")
        return None
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "fedlens" in frame.filename]
        problem = f"{type(error).__name__}: {str(error)[:120]!r} at {' '.join(ours[-3:])}"
    finally:
        signal.alarm(0)
    text = err.getvalue()
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    if not problem and status not in (0, 2):
        problem = f"status {status}"
    if not problem and ("Traceback" in text or "Logging error" in text):
        problem = "traceback on stderr: " + text.strip().splitlines()[-1][:120]
    if not problem and status == 2 and "usage: fedlens" not in text:
        if len(lines) != 1 or not text.endswith(lines[0] + "\n"):
            problem = f"{len(lines)} lines of error: {text[-200:]!r}"
        elif not lines[0].isprintable():
            problem = f"control characters: {lines[0]!r}"
    if problem:
        tally.failures.append(f"{label[:200]!r}: {problem}")
        return None
    tally.accepted, tally.refused = tally.accepted + (status == 0), tally.refused + (status == 2)
    return status


# --- overrides -------------------------------------------------------------------------------------------------------


def random_value(rng: random.Random, path: str) -> str:
    """Return a strange value, or one that only its key can judge."""
    names = [name for name in keys()[path].names if keys()[path].one_of]
    choices = [
        rng.choice(STRANGE),
        rng.choice(STRANGE),
        str(rng.uniform(-3, 3)),
        str(rng.randint(-5, 300)),
        str(10 ** rng.randint(-30, 30)),
    ]
    return rng.choice([*choices, *([rng.choice(names)] * 3 if names else [])])


def overrides(rng: random.Random, count: int, runs: int, data: Path, work: Path) -> Iterator[Tally]:
    """Compose random overrides; run some of those that are accepted."""
    composed, ran = Tally("random overrides, composed"), Tally("random overrides, run")
    known, bases = (
        list(keys()),
        ["experiment=centralized", "experiment=fedavg_iid", "experiment=fedavg_noniid_sparse", "experiment=centralized_sparse"],
    )
    small = [
        f"data.root={data}",
        "data=folder",
        "train.epochs=1",
        "federated.rounds=1",
        "federated.clients=4",
        "federated.participation=0.5",
    ]
    small += ["optim.batch_size=8", "mask.samples=8", "run.progress=false", "device=cpu", "data.classes_per_client=2"]
    for number in range(count):
        path = known[number % len(known)]  # every key in turn, and up to two more
        chosen = [path, *rng.sample(known, rng.choice([0, 0, 1, 2]))]
        argv = [rng.choice(bases), *small, *(f"{each}={random_value(rng, each)}" for each in chosen)]
        label = " ".join(argv[len(small) + 1 :])
        if attempt(composed, label, lambda argv=argv: main(["run", "--print-config", *argv])) != 0:
            continue
        if ran.accepted + ran.refused + len(ran.stopped) + len(ran.failures) < runs and not any(
            name in label for name in (*LENGTHS, "run.dir", "data.root", "device")
        ):
            attempt(ran, label, lambda argv=argv: main(["run", *argv, f"run.dir={work / 'run'}"]))
            shutil.rmtree(work / "run", ignore_errors=True)
    yield from (composed, ran)


# --- files -----------------------------------------------------------------------------------------------------------


def damage(rng: random.Random, content: bytes) -> bytes:
    """Flip, cut, repeat or replace a part of a file."""
    at, length = rng.randrange(max(1, len(content))), rng.choice([1, 1, 4, 100])
    how = rng.randrange(6)
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + rng.randbytes(length) + content[at + length :]
    if how == 2:
        return content[:at] + content[at : at + length] * 3 + content[at + length :]
    if how == 3:
        return rng.choice([b"", b"\x00" * 100, rng.randbytes(200), b"\xff\xfe" + content, b"[" * 100_000, b"{"])
    flipped = bytearray(content)
    for _ in range(rng.choice([1, 3, 20])):
        if flipped:
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def strange_node(rng: random.Random) -> Any:
    """Return a value that a field of a YAML or JSON file does not expect."""
    nested: Any = "x"
    for _ in range(50):
        nested = [nested]
    plain = [
        None,
        True,
        -1,
        0,
        3.5,
        10**23,
        float("nan"),
        float("inf"),
        "",
        "é😀",
        "\x1b[31m",
        "a\nb",
        "../../x",
        "${oc.env:HOME}",
        "a\x00b",
        "x" * 300,
    ]
    return rng.choice([*plain, [], {}, [1, [2]], {"a": {"b": 1}}, {1: 2}, nested])


def mutated(rng: random.Random, node: Any) -> Any:
    """Return the tree with one random node replaced, removed, renamed or repeated."""
    if not isinstance(node, dict | list) or not node or rng.random() < 0.15:
        return strange_node(rng)
    if isinstance(node, list):
        at = rng.randrange(len(node))
        return rng.choice([[*node[:at], mutated(rng, node[at]), *node[at + 1 :]], node[:at] + node[at + 1 :], [*node, node[at]]])
    name = rng.choice(list(node))
    rest = {key: value for key, value in node.items() if key != name}
    return rng.choice(
        [rest | {name: mutated(rng, node[name])}, rest | {name: mutated(rng, node[name])}, rest, rest | {f"{name}\x1b": node[name]}]
    )


def write_images(root: Path, seed: int = 0) -> Path:
    """Write a folder of 12 training and 8 test images in two classes."""
    rng = np.random.default_rng(seed)
    for part, count in (("train", 12), ("test", 8)):
        for i in range(2 * count):
            file = root / part / "ab"[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (28, 28, 3), np.uint8)).save(file)
    return root


def data_cases(rng: random.Random, work: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield commands on damaged data sets of every format."""
    while True:
        root = work / f"data-{rng.randrange(10**9)}"
        kind = rng.choice(["binary", "python", "idx", "images", "names"])
        if kind in ("images", "names"):
            write_images(root)
            victim = rng.choice(sorted(root.rglob("*.png")))
            if kind == "names":
                name = rng.choice([b"\xe9", b"\x1b[31m", b"x" * 250, b"a\nb", b"-a", b" ", "日".encode() * 60])
                os.rename(os.fsencode(victim.parent), os.fsencode(victim.parent.parent) + b"/" + name)
            elif rng.random() < 0.5:
                victim.write_bytes(damage(rng, victim.read_bytes()))
            else:
                victim.unlink()
                rng.choice(
                    [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path), lambda path: path.write_bytes(png_header(10**5))]
                )(victim)
            yield kind, ["data", "inspect", "data=folder", f"data.root={root}", f"--out={work / 'x.png'}", "federated.clients=2"]
            continue
        if kind == "idx":
            write_idx(root)
        else:
            write_cifar(root, binary=kind == "binary")
        victim = rng.choice([path for path in root.rglob("*") if path.is_file()])
        if rng.random() < 0.1:
            victim.unlink()
        else:
            content = victim.read_bytes()
            packed = victim.suffix == ".gz" and rng.random() < 0.5
            victim.write_bytes(gzip.compress(damage(rng, gzip.decompress(content))) if packed else damage(rng, content))
        name = "fashion_mnist" if kind == "idx" else "cifar10"
        yield kind, ["data", "inspect", f"data={name}", f"data.root={root}", f"--out={work / 'x.png'}", "federated.clients=2"]


def png_header(side: int) -> bytes:
    """Return the start of a PNG file that claims side × side pixels."""
    import zlib

    chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def write_idx(root: Path) -> None:
    """Write Fashion-MNIST's four files with a few images."""
    root.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 20)):
        images = np.random.default_rng(0).integers(0, 256, count * 784, np.uint8).tobytes()
        labels = bytes(i % 10 for i in range(count))
        (root / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(struct.pack(">IIII", 2051, count, 28, 28) + images))
        (root / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(struct.pack(">II", 2049, count) + labels))


def write_cifar(root: Path, *, binary: bool) -> None:
    """Write CIFAR-10's files with 20 images each, as binary records or as pickles."""
    folder = root / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), np.uint8)
    names = [f"class{i}" for i in range(10)]
    for file in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        if binary:
            (folder / f"{file}.bin").write_bytes(b"".join(bytes([i % 10]) + row.tobytes() for i, row in enumerate(pixels)))
        else:
            (folder / file).write_bytes(pickle.dumps({"data": pixels, "labels": [i % 10 for i in range(20)]}, protocol=2))
    if binary:
        (folder / "batches.meta.txt").write_text("\n".join(names))
    else:
        (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))


def weight_cases(rng: random.Random, data: Path, work: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield runs from damaged or odd weights."""
    good = {name: tensor.contiguous() for name, tensor in fl.create_model("tiny", 2, image_size=28).state_dict().items()}
    odd: list[Callable[[], Any]] = [
        lambda: {name: tensor * float("nan") for name, tensor in good.items()},
        lambda: {name: tensor.to(torch.int32) for name, tensor in good.items()},
        lambda: {name: tensor.to(torch.complex64) for name, tensor in good.items()},
        lambda: {f"{name}\x1b[31m\nerror: forged": tensor for name, tensor in good.items()},
        lambda: {name: tensor[..., :1].clone() for name, tensor in good.items()},
        lambda: dict(list(good.items())[: rng.randrange(1, len(good))]),
        lambda: {name: torch.zeros(()) for name in good},
        lambda: {name: torch.zeros(1).expand(2**40) for name in good},
        lambda: {name: tensor.to_sparse() for name, tensor in good.items()},
        lambda: [good],
        lambda: {"model": {"model": good}},
        lambda: {1: good["cls_token"]},
        lambda: {"teacher": None},
        lambda: {name: torch.empty(tensor.shape, device="meta") for name, tensor in good.items()},
    ]
    while True:
        path = work / f"weights-{rng.randrange(10**9)}{rng.choice(['.pth', '.safetensors'])}"
        if rng.random() < 0.4:
            state = rng.choice(odd)()
            try:
                save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
            except Exception:  # what safetensors cannot hold
                continue
        else:
            save_file(good, path) if path.suffix == ".safetensors" else torch.save(good, path)
            path.write_bytes(damage(rng, path.read_bytes()))
        argv = [
            "run",
            "data=folder",
            f"data.root={data}",
            f"model.weights={path}",
            "train.epochs=0",
            "head=linear",
            "device=cpu",
            "run.progress=false",
        ]
        yield path.suffix, [*argv, f"run.dir={work / f'run-{rng.randrange(10**9)}'}"]


def yaml_cases(rng: random.Random, work: Path) -> Iterator[tuple[str, Callable[[], int] | list[str]]]:
    """Yield commands on mutated plans, search spaces and configurations."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["run", "--print-config", "experiment=fedavg_noniid_sparse"])
    while True:
        kind = rng.choice(["study", "search", "config"])
        text = out.getvalue() if kind == "config" else rng.choice(sorted((CONF / kind).glob("*.yaml"))).read_text()
        path = work / f"{kind}-{rng.randrange(10**9)}.yaml"
        if rng.random() < 0.3:
            path.write_bytes(damage(rng, text.encode()))
        else:
            tree = yaml.safe_load(text)
            for _ in range(rng.choice([1, 1, 2, 4])):
                tree = mutated(rng, tree)
            path.write_text(yaml.safe_dump(tree, allow_unicode=True))
        if kind == "config":
            yield kind, ["run", "--config", str(path), "--print-config"]
        elif kind == "study":
            yield kind, ["study", str(path), "--plan"]
        else:
            yield kind, lambda path=path: space_status(path)


def space_status(path: Path) -> int:
    """Read a search space as `fedlens search` does, without its trials."""
    from unittest.mock import patch

    with patch("fedlens.study.search.Search", side_effect=SystemExit(0)):
        return main(["search", str(path)])


def run_cases(rng: random.Random, data: Path, work: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield commands on run folders with one damaged file."""
    fl.run(["experiment=fedavg_iid_sparse", "data=folder", f"data.root={data}", "federated.clients=4", "federated.participation=1.0", "federated.rounds=2",
            "optim.batch_size=8", "mask.samples=8", "federated.client_vectors=true", "run.progress=false", "device=cpu", f"run.dir={work / 'whole'}"])  # fmt: skip
    files = sorted(path.relative_to(work / "whole") for path in (work / "whole").rglob("*") if path.is_file())
    while True:
        run = work / f"damaged-{rng.randrange(10**9)}"
        shutil.copytree(work / "whole", run)
        if unfinished := rng.random() < 0.4:
            (run / "summary.json").unlink()
        victim = run / rng.choice([file for file in files if (run / file).is_file()])
        if rng.random() < 0.15:
            victim.unlink()
        elif victim.suffix in (".json", ".yaml") and rng.random() < 0.7:
            tree = mutated(rng, yaml.safe_load(victim.read_text()) if victim.suffix == ".yaml" else json.loads(victim.read_text()))
            victim.write_text(yaml.safe_dump(tree) if victim.suffix == ".yaml" else json.dumps(tree))
        else:
            victim.write_bytes(damage(rng, victim.read_bytes()))
        commands = [
            ["resume", str(run)],
            ["arith", "negate", str(run), "--out", str(work / "tau")],
            ["report", str(run), "--out", str(work / "report")],
        ]
        commands.append(["arith", "sweep", str(run), "--alphas=0:1:2", "--device=cpu", "--out", str(work / "sweep")])
        yield victim.name, commands[0] if unfinished else rng.choice(commands[1:])


def files(rng: random.Random, count: int, data: Path, work: Path) -> Iterator[Tally]:
    """Try `count` damaged inputs, a quarter of each family."""
    families = {"data files": data_cases(rng, work), "weights": weight_cases(rng, data, work)}
    families |= {"plans, spaces, configurations": yaml_cases(rng, work), "run folders": run_cases(rng, data, work)}
    for name, cases in families.items():
        tally = Tally(name)
        for _ in range(-(-count // len(families))):
            label, case = next(cases)
            attempt(
                tally,
                f"{label}: {case if isinstance(case, list) else 'space'}",
                (lambda case=case: main(case)) if isinstance(case, list) else case,
            )
        yield tally


def harness(seed: int, count: int, runs: int, damaged: int) -> list[Tally]:
    """Return the tallies of all families; the same seed tries the same cases."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        work = Path(folder)
        data = write_images(work / "images")
        return [*overrides(rng, count, runs, data, work), *files(rng, damaged, data, work)]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overrides", type=int, default=1200)
    parser.add_argument("--runs", type=int, default=150, help="accepted overrides that are run")
    parser.add_argument("--files", type=int, default=240)
    parser.add_argument("--out", type=Path, help="also write the record to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    args, started = parse(), time.monotonic()
    tallies = harness(args.seed, args.overrides, args.runs, args.files)
    failures = [failure for tally in tallies for failure in tally.failures]
    causes = Counter(failure.rpartition(": ")[2].rpartition(" at ")[2] for failure in failures)
    command = f"python benchmarks/bad_input.py --seed {args.seed} --overrides {args.overrides} --runs {args.runs} --files {args.files}"
    machine = (
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, fedlens {fl.__version__}"
    )
    lines = [f"$ {command}", machine, *map(str, tallies), f"{len(failures)} failures in {time.monotonic() - started:.0f} s", *failures]
    lines += [stopped for tally in tallies for stopped in tally.stopped]
    lines += [f"{number} × {cause}" for cause, number in causes.most_common(10)]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text)
