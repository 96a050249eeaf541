"""`fedlens arith …`: the arguments of each command and what it prints. The work is in arith.py, forget.py and interference.py.

Nothing heavy is imported before a command runs: `fedlens --help` reads this module.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.errors import UserError, bad_value, unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedlens.lens.task_vectors import TaskVector

INPUT = "run folders (their τ) or task-vector files"
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)  # argparse's own takes -1e-3 for an option, before Python 3.14
ALPHAS = "start:stop:count or a,b,c; write it with =, as in --alphas=-1:2:13"


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `arith` to the command line. `command` is the command line's own way to add one with help and example."""
    text = "Task arithmetic on finished runs: combine task vectors, walk along them, forget clients."
    arith = commands.add_parser("arith", help=text, description=text, epilog="example: fedlens arith sweep runs/centralized-…")
    parts = arith.add_subparsers(dest="part", metavar="COMMAND", required=True)
    for name, call, about, example in (
        ("add", add_command, "The sum of task vectors.", "fedlens arith add RUN_A RUN_B --out tau.safetensors"),
        ("negate", negate_command, "−τ.", "fedlens arith negate RUN --out tau.safetensors"),
        ("scale", scale_command, "τ times a number.", "fedlens arith scale RUN 0.5 --out tau.safetensors"),
    ):
        c = command(parts, name, call, about, example)
        c.add_argument("inputs", nargs="+" if name == "add" else 1, metavar="RUN|FILE", help=INPUT)
        if name == "scale":
            c.add_argument("factor")
            c._negative_number_matcher = NEGATIVE
        c.add_argument("--out", required=True, help="the new task vector's file")

    example = "fedlens arith merge RUN_A RUN_B --rule ties --option density=0.2 --out tau.safetensors"
    c = command(parts, "merge", merge_command, "One task vector of several, by a merge rule.", example)
    c.add_argument("inputs", nargs="+", metavar="RUN|FILE", help=INPUT)
    c.add_argument(
        "--rule", default="mean", help="mean, median, trimmed_mean, clipped_mean, sum, ties, dare, fisher (runs only), breadcrumbs"
    )
    c.add_argument("--weights", help="one number an input, as in 1,2 (default: all alike)")
    c.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the rule, as in density=0.2")
    c.add_argument("--out", required=True, help="the new task vector's file")
    _where(c)

    about = "θ₀ + α·τ: α chosen on validation, the test set read there and at α = 0 and 1."
    c = command(parts, "sweep", sweep_command, about, "fedlens arith sweep runs/fedavg_iid-… --alphas=-1:2:13 --out sweep")
    c.add_argument("run", metavar="RUN", help="the run that gives θ₀, the model and the data")
    c.add_argument("tau", nargs="?", metavar="TAU", help="another run folder or task-vector file (default: RUN's own τ)")
    c.add_argument("--alphas", help=f"{ALPHAS} (default: from -1 to 2; of a sparse τ to 1/density, at most 10)")
    _written(c)

    about = "W_a + α(W_b − W_a) between two finished runs of the same data and model."
    c = command(parts, "interpolate", interpolate_command, about, "fedlens arith interpolate runs/centralized-… runs/fedavg_iid-…")
    c.add_argument("runs", nargs=2, metavar="RUN")
    c.add_argument("--alphas", default="0:1:11", help=f"{ALPHAS} (default: 0:1:11)")
    _written(c)

    about = "Subtract what a client added (federated.client_vectors=true), or any τ: its classes fall, the others stay."
    c = command(parts, "forget", forget_command, about, "fedlens arith forget runs/fedavg_noniid-… --client 3 --keep 0.95")
    c.add_argument("run", metavar="RUN")
    c.add_argument("--client", help="its number; the target is the classes that it holds")
    c.add_argument("--tau", metavar="RUN|FILE", help="instead of a client: the task vector to subtract")
    c.add_argument("--classes", help="of --tau: the target, as in 3,7 or by name")
    c.add_argument("--keep", default="0.95", help="how much of the other classes' accuracy must stay (default: 0.95)")
    c.add_argument("--alphas", help=f"{ALPHAS}, each >= 0 (default: rising up to 40, until the target is 0 or the control is lost)")
    _written(c)

    about = "How task vectors agree and interfere: cosines, sign conflict, drift ratio, linearity; of two the map ξ(α₁, α₂)."
    c = command(parts, "interference", interference_command, about, "fedlens arith interference runs/fedavg_noniid-… --clients 0,3")
    c.add_argument("runs", nargs="+", metavar="RUN", help="two or more runs, or one with --clients")
    c.add_argument("--clients", help="clients of one run, as in 0,3 (needs federated.client_vectors=true)")
    c.add_argument("--alphas", default="-1.5:1.5:7", help=f"the map's α along both axes: {ALPHAS} (default: -1.5:1.5:7)")
    c.add_argument("--samples", default="500", help="validation images a task (default: 500)")
    _written(c)


def _where(c: argparse.ArgumentParser) -> None:
    c.add_argument("--device", help="auto, cpu, cuda, … (default: the run's)")
    c.add_argument("--root", help="where the data lies (default: where the run found it)")


def _written(c: argparse.ArgumentParser) -> None:
    c.add_argument("--out", help="folder for the figure and the numbers (default: RUN/arith)")
    _where(c)


# --- new vectors


def add_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import load_vector

    vectors = [load_vector(source) for source in args.inputs]
    return _keep(args, vectors, sum(vectors[1:], start=vectors[0]))


def negate_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import load_vector

    (tau,) = map(load_vector, args.inputs)
    return _keep(args, [tau], -tau)


def scale_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import load_vector

    factor = _number("factor", args.factor)
    (tau,) = map(load_vector, args.inputs)
    return _keep(args, [tau], tau * factor)


def merge_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import merge_sources

    weights = None if args.weights is None else [_number("--weights", w) for w in args.weights.split(",")]
    options = _options(args.rule, args.option)
    return _keep(args, *merge_sources(args.inputs, args.rule, weights, device=args.device, root=args.root, **options))


def _options(rule: str, given: Sequence[str]) -> dict[str, float]:
    from fedlens.lens.merging import RULES, options_of

    if rule not in RULES:
        raise unknown("--rule", rule, RULES)
    allowed = [name for name in options_of(rule) if name not in ("fishers", "clients")]  # no numbers: not for the command line
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in allowed:
            raise UserError(f"--option: {name!r} is unknown to {rule!r}; allowed is {', '.join(allowed) or 'none'}")
        found[name] = _whole("--option", value) if name in ("seed", "round") else _number("--option", value)
    return found


def _keep(args: argparse.Namespace, vectors: "Sequence[TaskVector]", result: "TaskVector") -> int:
    """Save the result, and say how long it is, how sparse, and how its parts lie to one another."""
    from fedlens.lens.task_vectors import TaskVector
    from fedlens.study.arith import describe

    out = Path(args.out)
    if out.exists():
        try:
            TaskVector.load(out)
        except UserError:
            raise UserError(f"--out: {out} exists and is not a task vector; choose another name") from None
    result.save(out)
    rows = []
    for name, row in zip([*args.inputs, str(out)], describe(vectors, result), strict=True):
        rows.append([name, f"{row['norm']:.4g}", f"{row['density']:.3g}", *(f"{cosine:+.3f}" for cosine in row["cosines"])])
    _table(["task vector", "norm", "density", *(f"cos {i + 1}" for i in range(len(vectors)))], rows)
    return 0


# --- measurements


def sweep_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import sweep_run
    from fedlens.training.run import load_run

    out = _folder(args.out, args.run)
    found = sweep_run(load_run(args.run), args.tau, args.alphas, device=args.device, root=args.root)
    return _line(found, out / "sweep", ("θ₀, α = 0", "θ₀ + τ, α = 1"))


def interpolate_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import interpolate_runs
    from fedlens.training.run import load_run

    out = _folder(args.out, args.runs[0])
    a, b = map(load_run, args.runs)
    found = interpolate_runs(a, b, args.alphas, device=args.device, root=args.root)
    return _line(found, out / "interpolate", (f"{a.path.name}, α = 0", f"{b.path.name}, α = 1"))


def _line(found: Mapping[str, Any], path: Path, ends: tuple[str, str]) -> int:
    """What was found along a line: the curve as figure and numbers, its ends and its best point as a table."""
    from fedlens.study.edit_figures import alpha_figure

    named = {ends[0]: found["start"], ends[1]: found["end"], "chosen on validation": found["chosen"]}
    columns = ("val_accuracy", "test_accuracy")
    rows = [[name, f"{p['alpha']:g}", *(f"{100 * p[c]:.2f}" for c in columns)] for name, p in named.items()]
    _table(["", "α", "validation (%)", "test (%)"], rows)
    curve = {"validation": [(p["alpha"], 100 * p["val_accuracy"]) for p in found["points"]]}
    levels = {name: 100 * named[name]["val_accuracy"] for name in ends}
    return _written_to(found, path, alpha_figure(curve, found["chosen"]["alpha"], levels, y="validation accuracy (%)"))


def forget_command(args: argparse.Namespace) -> int:
    from fedlens.study.arith import Lab, load_vector, same_validation
    from fedlens.study.edit_figures import alpha_figure
    from fedlens.study.forget import forget, forget_client, named_classes
    from fedlens.training.run import load_run

    out, keep, run = _folder(args.out, args.run), _number("--keep", args.keep), load_run(args.run)
    if (args.client is None) == (args.tau is None) or (args.tau is None) != (args.classes is None):
        raise UserError("forget: allowed is --client K, or --tau RUN|FILE with --classes A,B")
    if args.client is not None:
        what, client = f"client {args.client}", _whole("--client", args.client)
        found = forget_client(run, client, keep=keep, grid=args.alphas, device=args.device, root=args.root)
    else:
        what, tau, lab = str(args.tau), load_vector(args.tau), Lab(run, args.device, args.root)
        found = forget(lab, tau, named_classes(lab, args.classes.split(",")), keep=keep, grid=args.alphas)
        found["notes"] += same_validation(run, tau.origins)
    before, after = found["before"], found["after"]
    rows = [
        [f"{which}, {split}", *(f"{100 * p[f'{key}_{which}']:.2f}" for p in (before, after))]
        for which in ("target", "control")
        for split, key in (("validation", "val"), ("test", "test"))
    ]
    _table(["accuracy (%)", "before", f"after, α = {after['alpha']:g}"], rows, f"{what}, target {', '.join(found['classes'])}")
    curves = {
        "its classes (target)": [(p["alpha"], 100 * p["val_target"]) for p in found["points"]],
        "the others (control)": [(p["alpha"], 100 * p["val_control"]) for p in found["points"]],
    }
    levels = {f"{keep:g} of the control at α = 0": 100 * keep * before["val_control"]}
    return _written_to(
        found,
        out / f"forget-{args.client or 'tau'}",
        alpha_figure(curves, after["alpha"], levels, "α subtracted", "validation accuracy (%)"),
    )


def interference_command(args: argparse.Namespace) -> int:
    from fedlens.study.edit_figures import xi_figure
    from fedlens.study.interference import interference_of_clients, interference_of_runs
    from fedlens.training.run import load_run

    out, samples, runs = _folder(args.out, args.runs[0]), _whole("--samples", args.samples), [load_run(path) for path in args.runs]
    where = {"device": args.device, "root": args.root}
    if args.clients is None:
        found = interference_of_runs(runs, args.alphas, samples, **where)
    elif len(runs) > 1:
        raise UserError(f"--clients: given with {len(runs)} runs, allowed is one")
    else:
        clients = [_whole("--clients", k) for k in args.clients.split(",")]
        found = interference_of_clients(runs[0], clients, args.alphas, samples, **where)
    numbers = ("cosine", "sign_conflict", "drift_ratio")
    rows = [[f"{p['a']}, {p['b']}", f"{p['cosine']:+.3f}", *(f"{p[key]:.3f}" for key in numbers[1:])] for p in found["pairs"]]
    _table(["pair", "cosine", "sign conflict", "drift ratio"], rows)
    gaps = [[name, *(f"{p['gap']:.3f}" for p in points)] for name, points in found["linearity"].items()]
    _table(["linearity gap (0: linear)", *(f"α = {p['alpha']:g}" for p in next(iter(found["linearity"].values())))], gaps)
    figure = None if found["xi"] is None else xi_figure(found["xi"], found["alphas"], [Path(name).name for name in found["names"]])
    return _written_to(found, out / "interference", figure)


# --- what they share


def _folder(given: str | None, run: str) -> Path:
    """Looked at before the work, so that a place that cannot be written is said at once; made after it."""
    from fedlens.training.run import load_run

    out = Path(given) if given else load_run(run).path / "arith"
    there = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise UserError(f"--out: {out} cannot be written, because of {there}; choose another folder")
    return out


def _written_to(found: Mapping[str, Any], path: Path, figure: "Figure | None") -> int:
    """PATH.json, PATH.csv where there are points, the figure; then the notes and where everything is."""
    from fedlens.runs.store import write_atomic, write_json
    from fedlens.study.edit_figures import save_figure

    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_name(f"{path.name}.json")]
    write_json(written[0], found)
    if points := found.get("points"):
        written.append(path.with_name(f"{path.name}.csv"))
        lines = [",".join(points[0]), *(",".join(f"{value:.8g}" for value in point.values()) for point in points)]
        write_atomic(written[-1], "\n".join(lines) + "\n")
    written += save_figure(figure, path) if figure else []
    for note in found["notes"]:
        print(f"note: {note}")
    print(f"written: {path.parent}/{{{','.join(file.name for file in written)}}}")
    return 0


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*header, title=None if title is None else escape(title))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else 250).print(table)


def _number(field: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not abs(number) < float("inf"):
        raise bad_value(field, text, "a number")
    return number


def _whole(field: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise bad_value(field, text, "a whole number") from None
