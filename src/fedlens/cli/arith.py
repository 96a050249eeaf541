"""`fedlens arith …`: the arguments and output of each command. The computations are in study/arith.py, forget.py and interference.py.

Heavy modules are imported when a command runs, because `fedlens --help` imports this one.
"""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedlens.cli.table import print_table
from fedlens.errors import UserError, bad_value

if TYPE_CHECKING:
    from fedlens.lens.task_vectors import TaskVector
    from fedlens.report.blocks import Chart

T = TypeVar("T", int, float)
INPUT = "run folders (their τ) or task-vector files"
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)  # argparse takes -1e-3 for an option before Python 3.14
ALPHAS = "start:stop:count or a,b,c; write it with =, as in --alphas=-1:2:13"


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `arith` to the command line. `command` adds a parser with help and example."""
    text = "Task arithmetic on finished runs: combine task vectors, move along them, forget clients."
    arith = commands.add_parser("arith", help=text, description=text, epilog="example: fedlens arith sweep runs/centralized-…")
    parts = arith.add_subparsers(dest="part", metavar="COMMAND", required=True)
    _register_algebra(parts, command)
    _register_measurements(parts, command)


def _register_algebra(parts: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    merge = "fedlens arith merge RUN_A RUN_B --rule ties --option density=0.2 --out tau.safetensors"
    for name, call, about, example in (
        ("add", algebra_command, "The sum of task vectors.", "fedlens arith add RUN_A RUN_B --out tau.safetensors"),
        ("negate", algebra_command, "−τ.", "fedlens arith negate RUN --out tau.safetensors"),
        ("scale", algebra_command, "τ times a number.", "fedlens arith scale RUN 0.5 --out tau.safetensors"),
        ("merge", merge_command, "Merge task vectors into one.", merge),
    ):
        c = command(parts, name, call, about, example)
        c.add_argument("inputs", nargs="+" if name in ("add", "merge") else 1, metavar="RUN|FILE", help=INPUT)
        if name == "scale":
            c.add_argument("factor")
            c._negative_number_matcher = NEGATIVE
        c.add_argument("--out", required=True, help="file of the new task vector")
    rules = "mean, median, trimmed_mean, clipped_mean, sum, ties, dare, fisher (runs only), breadcrumbs"
    c.add_argument("--rule", default="mean", help=rules)
    c.add_argument("--weights", help="one number per input, as in 1,2 (default: equal)")
    c.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the rule, as in density=0.2")
    _add_device(c)


def _register_measurements(parts: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    about = "θ₀ + α·τ: validation chooses α; test accuracy at that α, 0 and 1."
    c = command(parts, "sweep", sweep_command, about, "fedlens arith sweep runs/fedavg_iid-… --alphas=-1:2:13 --out sweep")
    c.add_argument("run", metavar="RUN", help="the run with θ₀, model and data")
    c.add_argument("tau", nargs="?", metavar="TAU", help="another run folder or task-vector file (default: RUN's own τ)")
    c.add_argument("--alphas", help=f"{ALPHAS} (default: from -1 to 2; for a sparse τ to 1/density, at most 10)")
    _add_out(c)

    about = "W_a + α(W_b − W_a) between two finished runs of the same data and model."
    c = command(parts, "interpolate", interpolate_command, about, "fedlens arith interpolate runs/centralized-… runs/fedavg_iid-…")
    c.add_argument("runs", nargs=2, metavar="RUN")
    c.add_argument("--alphas", default="0:1:11", help=f"{ALPHAS} (default: 0:1:11)")
    _add_out(c)

    about = "Subtract a client's contribution (needs federated.client_vectors=true) or any τ, so that its classes are forgotten."
    c = command(parts, "forget", forget_command, about, "fedlens arith forget runs/fedavg_noniid-… --client 3 --keep 0.95")
    c.add_argument("run", metavar="RUN")
    c.add_argument("--client", help="number of the client; the target is the classes that it holds")
    c.add_argument("--tau", metavar="RUN|FILE", help="the task vector to subtract instead of a client's")
    c.add_argument("--classes", help="with --tau: the target classes, as in 3,7 or by name")
    c.add_argument("--keep", default="0.95", help="fraction of the other classes' accuracy that must remain (default: 0.95)")
    c.add_argument("--alphas", help=f"{ALPHAS}, each >= 0 (default: rising up to 40, until the target is 0 or the control is lost)")
    _add_out(c)

    about = "Cosines, sign conflict, drift ratio and linearity of task vectors; for two also the map ξ(α₁, α₂)."
    c = command(parts, "interference", interference_command, about, "fedlens arith interference runs/fedavg_noniid-… --clients 0,3")
    c.add_argument("runs", nargs="+", metavar="RUN", help="two or more runs, or one with --clients")
    c.add_argument("--clients", help="clients of one run, as in 0,3 (needs federated.client_vectors=true)")
    c.add_argument("--alphas", default="-1.5:1.5:7", help=f"α along both axes of the map: {ALPHAS} (default: -1.5:1.5:7)")
    c.add_argument("--samples", default="500", help="validation images per task (default: 500)")
    _add_out(c)


def _add_device(c: argparse.ArgumentParser) -> None:
    c.add_argument("--device", help="auto, cpu, cuda, … (default: the run's)")
    c.add_argument("--root", help="folder of the data (default: the run's)")


def _add_out(c: argparse.ArgumentParser) -> None:
    c.add_argument("--out", help="folder for the figure and the numbers (default: RUN/arith)")
    _add_device(c)


# --- new vectors


def algebra_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import load_vector

    factor = _number("factor", args.factor, float) if args.part == "scale" else -1.0
    vectors = [load_vector(source) for source in args.inputs]
    return _save(args, vectors, sum(vectors[1:], start=vectors[0]) if args.part == "add" else vectors[0] * factor)


def merge_command(args: argparse.Namespace) -> int:
    from fedlens.lens.merging import merge
    from fedlens.study.arith import load_vector, run_fisher

    weights = None if args.weights is None else [_number("--weights", w, float) for w in args.weights.split(",")]
    options: dict[str, Any] = _options(args.rule, args.option)
    vectors = [load_vector(source) for source in args.inputs]
    if args.rule == "fisher":
        options["fishers"] = [run_fisher(source, args.device, args.root) for source in args.inputs]
    return _save(args, vectors, merge(vectors, args.rule, weights, **options))


def _options(rule: str, texts: Sequence[str]) -> dict[str, float]:
    """Return the options of a merge rule from words such as density=0.2."""
    from fedlens.lens.merging import RULES
    from fedlens.registry import check_options, options_of

    options = dict(text.partition("=")[::2] for text in texts)
    known = options_of(RULES.choose(rule, "--rule"), ("sizes", "fishers", "clients"))
    check_options("--option", rule, options, dict.fromkeys(known))
    return {name: _number("--option", value, int if name in ("seed", "round") else float) for name, value in options.items()}


def _save(args: argparse.Namespace, vectors: "Sequence[TaskVector]", result: "TaskVector") -> int:
    """Save the result; print its norm, density and cosines with its inputs."""
    from fedlens.lens.geometry import cosines
    from fedlens.lens.task_vectors import TaskVector

    out = Path(args.out)
    if out.exists():
        try:
            TaskVector.load(out)
        except UserError:
            raise UserError(f"--out: {out} exists and is not a task vector; choose another name.") from None
    result.save(out)
    every = [*vectors, result]
    rows = [
        [name, f"{vector.norm():.4g}", f"{vector.density:.3g}", *(f"{cosine:+.3f}" for cosine in row[: len(vectors)])]
        for name, vector, row in zip([*args.inputs, str(out)], every, cosines(every).tolist(), strict=True)
    ]
    print_table(["task vector", "norm", "density", *(f"cos {i + 1}" for i in range(len(vectors)))], rows)
    return 0


# --- measurements


def sweep_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import sweep_run
    from fedlens.training.run import load_run

    out = _folder(args.out, args.run)
    result = sweep_run(load_run(args.run), args.tau, args.alphas, device=args.device, root=args.root)
    return _report_line(result, out / "sweep", ("θ₀, α = 0", "θ₀ + τ, α = 1"))


def interpolate_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import interpolate_runs
    from fedlens.training.run import load_run

    out = _folder(args.out, args.runs[0])
    a, b = map(load_run, args.runs)
    result = interpolate_runs(a, b, args.alphas, device=args.device, root=args.root)
    return _report_line(result, out / "interpolate", (f"{a.path.name}, α = 0", f"{b.path.name}, α = 1"))


def _report_line(result: Mapping[str, Any], path: Path, ends: tuple[str, str]) -> int:
    """Print both ends and the best point of a line as a table; write its curve as figure and numbers."""
    named = {ends[0]: result["start"], ends[1]: result["end"], "chosen on validation": result["chosen"]}
    columns = ("val_accuracy", "test_accuracy")
    rows = [[name, f"{p['alpha']:g}", *(f"{100 * p[c]:.2f}" for c in columns)] for name, p in named.items()]
    print_table(["", "α", "validation (%)", "test (%)"], rows)
    levels = {name: named[name]["val_accuracy"] for name in ends}
    return _write(result, path, _chart(result, {"validation": "val_accuracy"}, result["chosen"]["alpha"], levels, "α"))


def forget_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import PointEvaluator, load_vector, same_validation
    from fedlens.study.forget import class_numbers, forget, forget_client
    from fedlens.training.run import load_run

    out, keep, run = _folder(args.out, args.run), _number("--keep", args.keep, float), load_run(args.run)
    if (args.client is None) == (args.tau is None) or (args.tau is None) != (args.classes is None):
        raise UserError("forget: pass either --client K, or --tau RUN|FILE with --classes A,B.")
    if args.client is not None:
        name, client = f"client {args.client}", _number("--client", args.client, int)
        result = forget_client(run, client, keep=keep, grid=args.alphas, device=args.device, root=args.root)
    else:
        name, tau, evaluator = str(args.tau), load_vector(args.tau), PointEvaluator(run, args.device, args.root)
        result = forget(evaluator, tau, class_numbers(evaluator, args.classes.split(",")), keep=keep, grid=args.alphas)
        result["notes"] += same_validation(run, tau.origins)
    before, after = result["before"], result["after"]
    rows = [
        [f"{part}, {split}", *(f"{100 * p[f'{key}_{part}']:.2f}" for p in (before, after))]
        for part in ("target", "control")
        for split, key in (("validation", "val"), ("test", "test"))
    ]
    print_table(["accuracy (%)", "before", f"after, α = {after['alpha']:g}"], rows, f"{name}, target {', '.join(result['classes'])}")
    lines = {"its classes (target)": "val_target", "the others (control)": "val_control"}
    levels = {f"{keep:g} of the control at α = 0": keep * before["val_control"]}
    chart = _chart(result, lines, after["alpha"], levels, "α subtracted")
    return _write(result, out / f"forget-{args.client or 'tau'}", chart)


def interference_command(args: argparse.Namespace) -> int:
    from fedlens.report.charts import xi_chart
    from fedlens.study.interference import interference_of_clients, interference_of_runs
    from fedlens.training.run import load_run

    out, samples, runs = _folder(args.out, args.runs[0]), _number("--samples", args.samples, int), [load_run(path) for path in args.runs]
    options = {"device": args.device, "root": args.root}
    if args.clients is None:
        result = interference_of_runs(runs, args.alphas, samples, **options)
    elif len(runs) > 1:
        raise UserError(f"--clients needs one run, got {len(runs)}.")
    else:
        clients = [_number("--clients", k, int) for k in args.clients.split(",")]
        result = interference_of_clients(runs[0], clients, args.alphas, samples, **options)
    rows = [[f"{p['a']}, {p['b']}", f"{p['cosine']:+.3f}", f"{p['sign_conflict']:.3f}", f"{p['drift_ratio']:.3f}"] for p in result["pairs"]]
    print_table(["pair", "cosine", "sign conflict", "drift ratio"], rows)
    gaps = [[name, *(f"{p['gap']:.3f}" for p in points)] for name, points in result["linearity"].items()]
    print_table(["linearity gap (0: linear)", *(f"α = {p['alpha']:g}" for p in next(iter(result["linearity"].values())))], gaps)
    names = [Path(name).name for name in result["names"]]
    chart = None if result["xi"] is None else xi_chart(result["xi"], result["alphas"], names, "xi")
    return _write(result, out / "interference", chart)


# --- helpers


def _folder(out: str | None, run: str) -> Path:
    """Return the output folder. It is checked before the work, so that an unwritable one fails early, and created after it."""
    from fedlens.training.run import load_run

    folder = Path(out) if out else load_run(run).path / "arith"
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise UserError(f"--out: {folder} cannot be written, because of {existing}; choose another folder.")
    return folder


def _chart(result: Mapping[str, Any], lines: Mapping[str, str], chosen: float, levels: Mapping[str, float], x: str) -> "Chart":
    """Draw metrics of the points over α (label -> metric), with a ring at the chosen α and horizontal lines."""
    from fedlens.report.charts import ACCURACY, VALIDATION
    from fedlens.report.vega import Series, line_chart

    points = {label: [(p["alpha"], p[metric]) for p in result["points"]] for label, metric in lines.items()}
    series = [Series(label, each, ring=chosen, scale=100) for label, each in points.items()]
    flat = {label: 100 * level for label, level in levels.items()}
    return line_chart("alpha", "Validation accuracy over α", "", series, x, VALIDATION, ACCURACY, levels=flat)


def _write(result: Mapping[str, Any], path: Path, chart: "Chart | None") -> int:
    """Write PATH.json, PATH.csv of the points and the chart as PATH.svg and PATH.png; print the notes and the files' names."""
    from fedlens.files import write_atomic
    from fedlens.report.vega import save
    from fedlens.runs.store import write_json

    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.json")]
    write_json(files[0], result)
    if points := result.get("points"):
        files.append(path.with_name(f"{path.name}.csv"))
        lines = [",".join(points[0]), *(",".join(f"{value:.8g}" for value in point.values()) for point in points)]
        write_atomic(files[-1], "\n".join(lines) + "\n")
    files += save(chart, path) if chart else []
    for note in result["notes"]:
        print(f"note: {note}")
    print(f"written: {path.parent}/{{{','.join(file.name for file in files)}}}")
    return 0


def _number(field: str, text: str, kind: Callable[[str], T]) -> T:
    """Return a finite number; `kind` is int or float."""
    try:
        number = kind(text)
        if abs(number) < float("inf"):
            return number
    except ValueError:
        pass
    raise bad_value(field, text, "a whole number" if kind is int else "a number")
