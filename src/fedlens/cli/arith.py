"""`fedlens arith …`: what each command prints and writes. The computations are in study/arith.py, forget.py and interference.py."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedlens.cli.table import print_table
from fedlens.errors import UserError, bad_value
from fedlens.files import write_atomic
from fedlens.lens import merging
from fedlens.lens.geometry import cosines
from fedlens.lens.task_vectors import TaskVector
from fedlens.registry import check_options, options_of
from fedlens.report.blocks import Chart
from fedlens.report.charts import ACCURACY, VALIDATION, xi_chart
from fedlens.report.vega import Series, line_chart
from fedlens.report.vega import save as save_chart
from fedlens.runs.store import write_json
from fedlens.study import arith
from fedlens.study import forget as forgetting
from fedlens.study.interference import interference_of_clients, interference_of_runs
from fedlens.training.run import load_run

T = TypeVar("T", int, float)


# --- new vectors


def add(inputs: Sequence[str], out: str) -> int:
    """Save the sum of task vectors."""
    vectors = [*map(arith.load_vector, inputs)]
    return _save(inputs, vectors, sum(vectors[1:], start=vectors[0]), Path(out))


def negate(inputs: Sequence[str], out: str) -> int:
    """Save −τ."""
    return scale(inputs, "-1", out)


def scale(inputs: Sequence[str], factor: str, out: str) -> int:
    """Save τ times a number."""
    number, vectors = _number("factor", factor, float), [*map(arith.load_vector, inputs)]
    return _save(inputs, vectors, vectors[0] * number, Path(out))


def merge(inputs: Sequence[str], out: str, rule: str, weights: str | None, option: Sequence[str], **where: str | None) -> int:
    """Save the merge of task vectors. `where`: device and root of the data, for the rules that need it."""
    shares = None if weights is None else [_number("--weights", weight, float) for weight in weights.split(",")]
    options: dict[str, Any] = _options(rule, option)
    vectors = [*map(arith.load_vector, inputs)]
    if rule == "fisher":
        options["fishers"] = [arith.run_fisher(source, **where) for source in inputs]
    return _save(inputs, vectors, merging.merge(vectors, rule, shares, **options), Path(out))


def _options(rule: str, texts: Sequence[str]) -> dict[str, float]:
    """Return the options of a merge rule from words such as density=0.2."""
    options = dict(text.partition("=")[::2] for text in texts)
    known = options_of(merging.RULES.choose(rule, "--rule"), ("sizes", "fishers", "clients"))
    check_options("--option", rule, options, dict.fromkeys(known))
    return {name: _number("--option", value, int if name in ("seed", "round") else float) for name, value in options.items()}


def _save(inputs: Sequence[str], vectors: Sequence[TaskVector], result: TaskVector, out: Path) -> int:
    """Save the result; print its norm, density and cosines with its inputs."""
    if out.exists():
        try:
            TaskVector.load(out)
        except UserError:
            raise UserError(f"--out: {out} exists and is not a task vector; choose another name.") from None
    result.save(out)
    every = [*vectors, result]
    rows = [
        [name, f"{vector.norm():.4g}", f"{vector.density:.3g}", *(f"{cosine:+.3f}" for cosine in row[: len(vectors)])]
        for name, vector, row in zip([*inputs, str(out)], every, cosines(every).tolist(), strict=True)
    ]
    print_table(["task vector", "norm", "density", *(f"cos {i + 1}" for i in range(len(vectors)))], rows)
    return 0


# --- measurements


def sweep(run: str, tau: str | None, alphas: str | None, out: str | None, **where: str | None) -> int:
    """Measure along a task vector. `where`: device, root."""
    folder = _folder(out, run)
    result = arith.sweep_run(load_run(run), tau, alphas, **where)
    return _report_line(result, folder / "sweep", ("θ₀, α = 0", "θ₀ + τ, α = 1"))


def interpolate(runs: Sequence[str], alphas: str, out: str | None, **where: str | None) -> int:
    """Measure between two runs. `where`: device, root."""
    folder, (a, b) = _folder(out, runs[0]), map(load_run, runs)
    result = arith.interpolate_runs(a, b, alphas, **where)
    return _report_line(result, folder / "interpolate", (f"{a.path.name}, α = 0", f"{b.path.name}, α = 1"))


def _report_line(result: Mapping[str, Any], path: Path, ends: tuple[str, str]) -> int:
    """Print both ends and the best point of a line as a table; write its curve as figure and numbers."""
    named = {ends[0]: result["start"], ends[1]: result["end"], "chosen on validation": result["chosen"]}
    columns = ("val_accuracy", "test_accuracy")
    rows = [[name, f"{p['alpha']:g}", *(f"{100 * p[c]:.2f}" for c in columns)] for name, p in named.items()]
    print_table(["", "α", "validation (%)", "test (%)"], rows)
    levels = {name: named[name]["val_accuracy"] for name in ends}
    return _write(result, path, _chart(result, {"validation": "val_accuracy"}, result["chosen"]["alpha"], levels, "α"))


def forget(
    run: str, client: str | None, tau: str | None, classes: str | None, keep: str, alphas: str | None, out: str | None, **where: str | None
) -> int:
    """Subtract the contribution of a client, or any τ. `where`: device, root."""
    folder, share, loaded = _folder(out, run), _number("--keep", keep, float), load_run(run)
    if client is not None and tau is None and classes is None:
        name, number = f"client {client}", _number("--client", client, int)
        result = forgetting.forget_client(loaded, number, keep=share, grid=alphas, without=(), **where)
    elif client is None and tau is not None and classes is not None:
        name, vector, evaluator = tau, arith.load_vector(tau), arith.PointEvaluator(loaded, **where)
        numbers = forgetting.class_numbers(evaluator, classes.split(","))
        result = forgetting.forget(evaluator, vector, numbers, keep=share, grid=alphas)
        result["notes"] += arith.same_validation(loaded, vector.origins)
    else:
        raise UserError("forget: pass either --client K, or --tau RUN|FILE with --classes A,B.")
    before, after = result["before"], result["after"]
    rows = [
        [f"{part}, {split}", *(f"{100 * p[f'{key}_{part}']:.2f}" for p in (before, after))]
        for part in ("target", "control")
        for split, key in (("validation", "val"), ("test", "test"))
    ]
    print_table(["accuracy (%)", "before", f"after, α = {after['alpha']:g}"], rows, f"{name}, target {', '.join(result['classes'])}")
    lines = {"its classes (target)": "val_target", "the others (control)": "val_control"}
    levels = {f"{share:g} of the control at α = 0": share * before["val_control"]}
    chart = _chart(result, lines, after["alpha"], levels, "α subtracted")
    return _write(result, folder / f"forget-{client or 'tau'}", chart)


def interference(runs: Sequence[str], clients: str | None, alphas: str, samples: str, out: str | None, **where: str | None) -> int:
    """Measure how task vectors of runs, or of one run's clients, interfere. `where`: device, root."""
    folder, images, loaded = _folder(out, runs[0]), _number("--samples", samples, int), [load_run(path) for path in runs]
    if clients is None:
        result = interference_of_runs(loaded, alphas, images, **where)
    elif len(loaded) > 1:
        raise UserError(f"--clients needs one run, got {len(loaded)}.")
    else:
        numbers = [_number("--clients", client, int) for client in clients.split(",")]
        result = interference_of_clients(loaded[0], numbers, alphas, images, **where)
    rows = [[f"{p['a']}, {p['b']}", f"{p['cosine']:+.3f}", f"{p['sign_conflict']:.3f}", f"{p['drift_ratio']:.3f}"] for p in result["pairs"]]
    print_table(["pair", "cosine", "sign conflict", "drift ratio"], rows)
    gaps = [[name, *(f"{p['gap']:.3f}" for p in points)] for name, points in result["linearity"].items()]
    print_table(["linearity gap (0: linear)", *(f"α = {p['alpha']:g}" for p in next(iter(result["linearity"].values())))], gaps)
    names = [Path(name).name for name in result["names"]]
    chart = None if result["xi"] is None else xi_chart(result["xi"], result["alphas"], names, "xi")
    return _write(result, folder / "interference", chart)


# --- helpers


def _folder(out: str | None, run: str) -> Path:
    """Return the output folder. It is checked before the work, so that an unwritable one fails early, and created after it."""
    folder = Path(out) if out else load_run(run).path / "arith"
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise UserError(f"--out: {folder} cannot be written, because of {existing}; choose another folder.")
    return folder


def _chart(result: Mapping[str, Any], lines: Mapping[str, str], chosen: float, levels: Mapping[str, float], x: str) -> Chart:
    """Draw metrics of the points over α (label -> metric), with a ring at the chosen α and horizontal lines."""
    points = {label: [(p["alpha"], p[metric]) for p in result["points"]] for label, metric in lines.items()}
    series = [Series(label, each, ring=chosen, scale=100) for label, each in points.items()]
    flat = {label: 100 * level for label, level in levels.items()}
    return line_chart("alpha", "Validation accuracy over α", "", series, x, VALIDATION, ACCURACY, levels=flat)


def _write(result: Mapping[str, Any], path: Path, chart: Chart | None) -> int:
    """Write PATH.json, PATH.csv of the points and the chart as PATH.svg and PATH.png; print the notes and the files' names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.json")]
    write_json(files[0], result)
    if points := result.get("points"):
        files.append(path.with_name(f"{path.name}.csv"))
        lines = [",".join(points[0]), *(",".join(f"{value:.8g}" for value in point.values()) for point in points)]
        write_atomic(files[-1], "\n".join(lines) + "\n")
    files += save_chart(chart, path) if chart else []
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
