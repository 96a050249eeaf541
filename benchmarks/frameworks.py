"""A round of federated averaging on two CPU cores: a plain PyTorch loop, fedlens, Flower's simulation, pfl-research; and a bound for all of them.

    python benchmarks/frameworks.py                                # all, both models, 3 turns of 3 timed rounds each
    python benchmarks/frameworks.py --only plain,threaded --models tiny --rounds 10

All do the same work (benchmarks/contenders/common.py): 100 clients, 10 a round, 4 local steps of 32 images, SGD with momentum, fp32,
the same initial parameters and the same batches; and that it is the same is checked: parameters after two rounds are compared with
those of the plain loop. Each contender runs in processes of its own, after a warm-up round, with two threads in all, bound to the
first two cores. Memory is the peak of the proportional set size (PSS: shared pages counted once) summed over the process tree.

Run it with the Python that has fedlens, on Linux, with nothing else running. Flower and pfl-research get environments of their
own under --envs, made on first use with the torch that this Python has (set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL where CPU builds of
torch come from elsewhere). What cannot be installed is reported and left out. Exit status 1: somebody failed or did other work.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODELS = {"tiny": "ViT of 1.2 M parameters, 28 px", "vits": "ViT-S/16, 21.6 M parameters, 32 px"}
CORES = 2
IMAGES = 10 * 4 * 32  # a round
TOLERANCE = 1e-4  # of the largest parameter change: sums in another order differ by less, other work by more
SAMPLING = 0.2  # seconds between two looks at memory
LIMIT = 3600  # seconds that a contender may take

MODEL_NEEDS = ["safetensors", "rich", "numpy"]  # of fedlens.models, which every contender trains
ENVIRONMENTS = {
    "flower": ["flwr[simulation]==1.41.0", *MODEL_NEEDS],  # 1.42.0 asks for a certifi newer than the index had
    "pfl": ["pfl[pytorch]==0.6.0", *MODEL_NEEDS],
}


@dataclass(frozen=True)
class Contender:
    label: str
    module: str
    variants: tuple[dict[str, Any], ...]  # of which the fastest counts
    environment: str | None = None
    processes: int = 1  # under torchrun


CONTENDERS = {
    "plain": Contender("plain PyTorch loop", "plain", ({"threads": 2},)),
    "threaded": Contender("fedlens, threaded engine", "fedlens_engines", ({"engine": "threaded", "threads": 2},)),
    "cohort": Contender("fedlens, cohort engine", "fedlens_engines", ({"engine": "cohort", "threads": 2},)),
    "torchrun": Contender("fedlens, torchrun with 2 ranks", "fedlens_engines", ({"engine": "auto", "threads": 1},), processes=2),
    "flower": Contender("Flower simulation", "flower_sim", ({"workers": 2, "threads": 1}, {"workers": 1, "threads": 2}), "flower"),
    "pfl": Contender("pfl-research simulation", "pfl_sim", ({"threads": 2},), "pfl"),
    "steps": Contender("the local steps alone, 2 processes: a bound", "steps", ({"threads": 1},)),
}


class Failed(Exception):
    """Said in the table; the rest goes on."""


# --- environments


def python_of(name: str | None, envs: Path) -> str:
    """The interpreter that has this framework; its environment is made if it is missing or was made from other requirements."""
    if name is None:
        return sys.executable
    folder, torch = envs / name, version("torch").split("+")[0]
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join([f"torch=={torch}", *ENVIRONMENTS[name], ""])
    if stamp.is_file() and stamp.read_text() == wanted:
        return str(python)
    say(f"making the environment of {name} ...")
    envs.mkdir(parents=True, exist_ok=True)
    pins = envs / "constraints.txt"
    pins.write_text(f"torch=={torch}\n")  # an open range would pull another build
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(pins)]
    steps = [[sys.executable, "-m", "venv", "--clear", str(folder)], [*install, f"torch=={torch}"], [*install, *ENVIRONMENTS[name]]]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            say(tail("\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))))
            raise Failed("could not be installed here")
    stamp.write_text(wanted)
    return str(python)


# --- one contender, watched


@dataclass
class Memory:
    """Peaks over samples of a process tree, in bytes."""

    pss: int = 0
    rss: int = 0
    seen: set[int] = field(default_factory=set)

    def sample(self, root: int) -> None:
        parents: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        tree = {root}
        while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
            tree |= more
        self.seen |= tree
        pss = rss = 0
        for pid in self.seen & parents.keys():  # a process whose parent has gone still counts
            with contextlib.suppress(OSError):
                rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
                sizes = {row[0]: int(row[1]) for row in rows}
                pss, rss = pss + 1024 * sizes["Pss:"], rss + 1024 * sizes["Rss:"]
        self.pss, self.rss = max(self.pss, pss), max(self.rss, rss)


def execute(python: str, module: str, job: dict[str, Any], processes: int = 1) -> Memory:
    """Run `contenders MODULE` to its end; what it says goes to a file and is shown if it fails."""
    out = Path(job["out"])
    (out / "job.json").write_text(json.dumps(job))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [python, *launch, "-m", "contenders", module, str(out / "job.json")]
    threads = str(job.get("threads", CORES))
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{HERE}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(out / "flwr"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    memory, until = Memory(), time.monotonic() + LIMIT
    with (out / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=out, env=environment)
        try:
            while process.poll() is None and time.monotonic() < until:
                memory.sample(process.pid)
                time.sleep(SAMPLING)
            status = process.poll()
        finally:
            stop(process, memory.seen)
    if status != 0:
        say(tail((out / "log.txt").read_text()))
        raise Failed("took too long" if status is None else "failed")
    return memory


def stop(process: subprocess.Popen[bytes], seen: set[int]) -> None:
    """End the process and what it left behind: those of its tree that are still ours, by number."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for pid in seen - {process.pid}:
        with contextlib.suppress(OSError):
            if str(HERE).encode() in Path(f"/proc/{pid}/environ").read_bytes():  # not another's process under a used number
                os.kill(pid, signal.SIGKILL)


def measure(name: str, number: int, model: str, rounds: int, envs: Path, scratch: Path) -> dict[str, Any]:
    """One turn of one variant of a contender, in processes of its own."""
    contender, variant = CONTENDERS[name], CONTENDERS[name].variants[number]
    out = Path(tempfile.mkdtemp(prefix=f"{model}-{name}-{number}-", dir=scratch))
    job = {"work": str(scratch / model), "out": str(out), "scratch": str(scratch / f"r{model[0]}{number}"), **variant}
    memory = execute(python_of(contender.environment, envs), contender.module, job, contender.processes)
    result = json.loads((out / "result.json").read_text())
    warmup, *seconds = result.pop("seconds")
    assert len(seconds) == rounds
    return {"variant": variant, "seconds": seconds, "warm_up": warmup, "memory": memory, "facts": result, "params": out / "params.npy"}


def pooled(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The measurements of a variant over all of its turns."""
    seconds = [second for turn in turns for second in turn["seconds"]]
    median = statistics.median(seconds)
    return {
        "variant": turns[0]["variant"],
        "seconds_a_round": median,
        "images_a_second": IMAGES / median,
        "seconds": seconds,
        "warm_up_seconds": [turn["warm_up"] for turn in turns],
        "peak_pss_bytes": max(turn["memory"].pss for turn in turns),
        "peak_rss_bytes": max(turn["memory"].rss for turn in turns),
        **turns[0]["facts"],
        "params": [turn["params"] for turn in turns],
    }


def compete(names: list[str], model: str, turns: int, rounds: int, envs: Path, scratch: Path) -> dict[str, dict[str, Any]]:
    """All contenders in turn, and again: what else the machine does in the meantime falls on all of them alike.

    A contender's result is that of its fastest variant, with the other variants' beside it.
    """
    found: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in names}
    failed: dict[str, str] = {}
    for turn in range(turns):
        for name in names:
            for number in range(len(CONTENDERS[name].variants)):
                if name not in failed:
                    say(f"{model}, turn {turn + 1} of {turns}: {CONTENDERS[name].label} {CONTENDERS[name].variants[number]} ...")
                    try:
                        found[name].setdefault(number, []).append(measure(name, number, model, rounds, envs, scratch))
                    except Failed as why:
                        failed[name] = str(why)
    results: dict[str, dict[str, Any]] = {}
    for name, variants in found.items():
        if name in failed:
            results[name] = {"failed": failed[name]}
            continue
        best, *rest = sorted(map(pooled, variants.values()), key=lambda result: result["seconds_a_round"])
        results[name] = best | {"others": rest}
    return results


def difference(params: Path, plain: Path, initial: Path) -> dict[str, float]:
    """How far from the plain loop's parameters: of the largest parameter, of the largest change, and in norm of the change."""
    a, b, start = (np.load(path).astype(np.float64) for path in (params, plain, initial))
    return {
        "of_largest_parameter": float(np.abs(a - b).max() / np.abs(b).max()),
        "of_largest_change": float(np.abs(a - b).max() / np.abs(b - start).max()),
        "of_change_in_norm": float(np.linalg.norm(a - b) / np.linalg.norm(b - start)),
    }


# --- what is said about it


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tail(text: str, lines: int = 25) -> str:
    return "\n".join(text.splitlines()[-lines:])


def machine() -> dict[str, Any]:
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    commit = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": names[0] if names else platform.machine(),
        "cores": CORES,
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "fedlens": version("fedlens"),
        "commit": commit,
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table of one model, headings first."""
    found = [["contender", "s a round", "range", "images/s", "against plain", "peak memory", "difference"]]
    plain = results.get("plain", {}).get("seconds_a_round")
    for name, r in results.items():
        label = CONTENDERS[name].label
        if "failed" in r:
            found.append([label, r["failed"], *[""] * 5])
            continue
        if package := {"flower": "flwr", "pfl": "pfl"}.get(name):
            label = f"{label} {r['versions'][package]}"
        if "workers" in r["variant"]:
            label += f", {r['variant']['workers']} x {r['variant']['threads']} threads"
        seconds = r["seconds_a_round"]
        found.append(
            [
                label,
                f"{seconds:.2f}",
                f"{min(r['seconds']):.2f}-{max(r['seconds']):.2f}",
                f"{r['images_a_second']:,.0f}",
                f"{seconds / plain:.2f}x" if plain else "",
                f"{r['peak_pss_bytes'] / 1e9:.2f} GB",
                f"{r['difference']['of_largest_change']:.0e}" if "difference" in r and name != "plain" else "",
            ]
        )
    return found


def markdown(record: dict[str, Any]) -> str:
    m, lines = record["machine"], ["# Federated averaging on two CPU cores", ""]
    lines += [f"`{record['command']}`, {m['date']}, commit {m['commit']}.", ""]
    lines += [f"{m['cpu']}, {m['cores']} cores, load average {m['load_average_before']} before; ", ""]
    lines[-2] += f"Python {m['python']}, torch {m['torch']}, fedlens {m['fedlens']}."
    lines += [
        f"10 clients a round (of 100), 4 local steps of 32 images. Median of n = {record['rounds'] * record['turns']} rounds: {record['turns']} turns of {record['rounds']} after a warm-up round.",
        "",
    ]
    lines += [
        "Two threads in all for each. Memory: peak PSS over the process tree. Difference: the largest difference of a parameter to",
        "",
    ]
    lines[-2] += " the plain loop's after two rounds, as a fraction of the largest change of a parameter."
    for model, results in record["models"].items():
        head, *body = rows(results)
        lines += [f"## {model}: {MODELS[model]}", "", "| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in body]
        slower = [other for r in results.values() for other in r.get("others", [])]
        for other in slower:
            v = other["variant"]
            lines += ["", f"Flower with {v['workers']} x {v['threads']} threads: {other['seconds_a_round']:.2f} s a round,"]
            lines[-1] += f" {other['peak_pss_bytes'] / 1e9:.2f} GB."
        lines.append("")
    return "\n".join(lines)


def show(model: str, results: dict[str, dict[str, Any]]) -> None:
    table = rows(results)
    wide = [max(len(row[i]) for row in table if len(row) > i and not (i == 1 and not row[2])) for i in range(len(table[0]))]
    print(f"\n{model}: {MODELS[model]}")
    for row in table:
        print("  ".join([row[0].ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(row[1:], wide[1:], strict=True))]).rstrip())
    sys.stdout.flush()


def chosen(text: str, allowed: dict[str, Any]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in allowed]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} given, allowed is {', '.join(allowed)}")
    return [name for name in allowed if name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: chosen(text, CONTENDERS), default=list(CONTENDERS), metavar="NAME,NAME")
    parser.add_argument("--models", type=lambda text: chosen(text, MODELS), default=list(MODELS), metavar="NAME,NAME")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one of warm-up")
    parser.add_argument("--turns", type=int, default=3, help="how often each contender is started, all of them in turn")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "bench-envs", help="where the environments of others are kept")
    parser.add_argument("--out", type=Path, help="the record without its ending: OUT.json and OUT.md are written")
    args = parser.parse_args()
    for name in ("rounds", "turns"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: {getattr(args, name)} given, allowed is >= 1")
    facts = machine()
    if facts["load_average_before"] > 0.5:
        say(f"the machine is not quiet (load average {facts['load_average_before']}): these figures are a trial, not a record")
    out = args.out or HERE / "records" / f"{facts['date']}-frameworks-cpu"
    command = ["python benchmarks/frameworks.py", f"--rounds {args.rounds} --turns {args.turns}"]
    command += [f"--only {','.join(args.only)}"] * (args.only != list(CONTENDERS))
    command += [f"--models {','.join(args.models)}"] * (args.models != list(MODELS))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # children inherit it

    models: dict[str, dict[str, dict[str, Any]]] = {}
    sound = True
    with tempfile.TemporaryDirectory(prefix="fb") as folder:  # short: Ray's sockets lie below it
        scratch = Path(folder)
        for model in args.models:
            (scratch / model).mkdir()
            execute(sys.executable, "common", {"work": str(scratch / model), "out": folder, "model": model, "rounds": args.rounds})
            results = models[model] = compete(args.only, model, args.turns, args.rounds, args.envs.resolve(), scratch)
            plain = results.get("plain", {}).get("params", [None])[0]
            for name, r in [(name, each) for name, result in results.items() for each in (result, *result.get("others", []))]:
                sound &= "failed" not in r
                params = r.pop("params", [])
                if plain and params and name != "steps":  # which averages nothing
                    apart = [difference(each, plain, scratch / model / "initial.npy") for each in params]
                    r["difference"] = max(apart, key=lambda found: found["of_largest_change"])
                    sound &= r["difference"]["of_largest_change"] <= TOLERANCE
            show(model, results)
    record = {"command": " ".join(command), "rounds": args.rounds, "turns": args.turns, "machine": facts, "models": models}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    out.with_name(f"{out.name}.md").write_text(markdown(record))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
