"""What the HTML report says of analyses (task arithmetic on finished runs) and of searches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedlens.report.html_page import NONE, Cell, Page, finite, number, percent, rounded, view
from fedlens.report.markdown import shown
from fedlens.report.over_seeds import BESIDE, titled
from fedlens.study.results import Analysis, SearchResult

Row = list[Cell | str]
Names = Mapping[str, str]  # run folder -> what it is called in the report
ENDS = [{"at": 0, "text": "start", "before": True}, {"at": 1, "text": "trained"}]
WIDE = 30  # a parameter whose largest value is so many times its smallest is drawn on a logarithmic axis

SWEEPS = (
    "Validation accuracy at θ₀ + α·τ, where τ = θ_T − θ₀ is all that training changed: α = 0 is the start, α = 1 the trained model. A "
    "ring marks the α that validation chose, open diamonds the test accuracy there and at 0 and 1. A peak beyond 1 says that training "
    "stopped short, one below 1 that it went too far, a flat top that the length hardly matters. One run each (n = 1)."
)
LINES = (
    "Validation accuracy on the straight line from one model (α = 0) to another (α = 1). A line without a valley means that both lie in "
    "one basin, so that their average is a good model too. A ring marks the α that validation chose, open diamonds the test accuracy "
    "there and at the ends. One run each (n = 1)."
)
XI = (
    "ξ(α₁, α₂), the disentanglement error: how often adding the other task vector changes a prediction, in % of samples, mean of the "
    "two tasks. Near 0 (dark) the two edits leave each other alone, and their sum does what each does; bright cells are interference. "
    "Where one α is 0, only the samples of that task can change. One pair of runs (n = 1)."
)
PAIRS = (
    "Geometry of pairs of task vectors (n = 1 each): cosine 0 is unrelated; sign conflict is the share of movement against the elected "
    "sign, 0 to 1/2; drift ratio is 1 when both are alike."
)
LINEARITY = (
    "How linear the model is along each task vector (n = 1 each): gap 0 means that its outputs move in a straight line with α; agreement "
    "is how often the linearised model predicts the same."
)
OVERLAP = (
    "How far two masks overlap (n = 1 each): intersection over union, 1 where they are the same; beside it what two random masks of these "
    "sizes have. Between seeds: how much of a mask is chance."
)
BEFORE_AFTER = (
    "Test accuracy before (open) and after (filled) subtracting α times what a client added. The target is the classes that it holds "
    "and should fall; the control is all other classes and should stay. α is chosen on validation: the lowest target among those that "
    "keep the control. One run (n = 1)."
)
ALONG = (
    "The same on validation images along α: solid the target, dashed the control, a ring where α was chosen. The wider the target falls "
    "below the control before that bends too, the more cleanly the client can be forgotten."
)
TRIALS = (
    "A dot is a trial: validation accuracy against one parameter, whatever the others were. Choose the parameter above; the test set "
    "was not read."
)


def _sweeps(page: Page, found: Sequence[Analysis], names: Names) -> None:
    page.heading(3, "Task vectors scaled by α")
    _alphas(page, found, names, "Accuracy along a task vector", SWEEPS, ENDS)


def _interpolations(page: Page, found: Sequence[Analysis], names: Names) -> None:
    page.heading(3, "Between two models")
    _alphas(page, found, names, "Accuracy between two models", LINES, [])


def _alphas(page: Page, found: Sequence[Analysis], names: Names, title: str, explanation: str, verticals: Sequence[Any]) -> None:
    series: list[dict[str, Any]] = []
    rows: list[Row] = []
    for i, a in enumerate(found):
        name, start, end, chosen = f"{' → '.join(map(shown, a.labels))}, seed {a.seed}", a.found["start"], a.found["end"], a.found["chosen"]
        tests = {p["alpha"]: [p["alpha"], rounded(p["test_accuracy"], 100), _tested(p), "open"] for p in (start, end, chosen)}
        ring = [
            chosen["alpha"],
            rounded(chosen["val_accuracy"], 100),
            f"chosen: α = {chosen['alpha']:g}, validation {_share(chosen['val_accuracy'])}",
            "ring",
        ]
        points = [[p["alpha"], rounded(p["val_accuracy"], 100)] for p in a.found["points"]]
        series.append({"label": name, "c": i, "points": points, "marks": [*tests.values(), ring]})
        accuracies = [chosen["val_accuracy"], start["test_accuracy"], end["test_accuracy"], chosen["test_accuracy"]]
        rows.append([name, number("{:g}", chosen["alpha"]), *map(_accuracy, accuracies), number("{:.3g}", a.found.get("norm"))])
    page.chart("lines", title, explanation, view(series, x="α", y="accuracy", unit="%", verticals=list(verticals)))
    header = ["Of", "Chosen α", "Validation there, %", "Test at α = 0, %", "Test at α = 1, %", "Test at chosen α, %", "‖τ‖"]
    page.table("α chosen on validation, and what the test set says there and at both ends; one run each (n = 1).", header, rows)
    page.listed(_notes(found, names))


def _tested(point: Mapping[str, Any]) -> str:
    return f"test accuracy at α = {point['alpha']:g}: {_share(point['test_accuracy'])}"


def _interferences(page: Page, found: Sequence[Analysis], names: Names) -> None:
    page.heading(3, "Interference between task vectors")
    pairs: list[Row] = []
    lines: list[Row] = []
    for a in found:
        called = {name: _known(str(name), names) for name in a.found["names"]}
        first, second = list(called.values())[:2]
        if a.found.get("xi"):
            values = [[rounded(v, 100) for v in row] for row in a.found["xi"]][::-1]
            alphas = [f"{alpha:g}" for alpha in a.found["alphas"]]
            axes = {"row": f"α₁ of {first}", "column": f"α₂ of {second}", "rows": alphas[::-1], "columns": alphas}
            page.chart(
                "heat",
                f"ξ: {shown(a.title)}, seed {a.seed}",
                XI,
                [{**axes, "values": values, "unit": "%", "square": True, "what": "of predictions change"}],
            )
        for p in a.found["pairs"]:
            measures = [number("{:.3f}", p[key]) for key in ("cosine", "sign_conflict", "drift_ratio")]
            pairs.append([f"{called.get(p['a'], p['a'])} and {called.get(p['b'], p['b'])}", *measures])
        for name, points in (a.found.get("linearity") or {}).items():
            lines += [[called.get(name, name), *_linearity(point)] for point in points]
    page.table(PAIRS, ["Task vectors", "Cosine", "Sign conflict", "Drift ratio"], pairs)
    if lines:
        page.table(LINEARITY, ["Task vector", "α", "Gap", "Agreement, %"], lines)
    page.listed(_notes(found, names))


def _linearity(point: Mapping[str, Any]) -> list[Cell]:
    gap = point["gap"] if finite(point["gap"]) else None  # no change at all has none
    return [number("{:g}", point["alpha"]), number("{:.3f}", gap), _accuracy(point["agreement"])]


def _overlaps(page: Page, found: Sequence[Analysis], names: Names) -> None:
    page.heading(3, "Overlap of masks")
    rows: list[Row] = [
        [f"{shown(a.title)}, seed {a.seed}", number("{:.3f}", a.found["iou"]), number("{:.3f}", a.found["chance"])] for a in found
    ]
    page.table(OVERLAP, ["Masks", "Intersection over union", "Of random masks"], rows)


def _forgotten(page: Page, found: Sequence[Analysis], names: Names) -> None:
    page.heading(3, "Forgetting clients")
    for a in found:
        clients, title = a.found["clients"], f"{shown(titled(a))}, seed {a.seed}"
        kinds = {"target": "target: the client's classes", "control": "control: all other classes"}
        moved = [
            {"label": said, "c": i, "points": [_moved(client, kind) for client in clients]} for i, (kind, said) in enumerate(kinds.items())
        ]
        page.chart("dots", f"{title}: before and after", BEFORE_AFTER, view(moved, x="test accuracy", unit="%", lanes=True))
        along = [_along(client, i, kind, dash) for i, client in enumerate(clients) for dash, kind in enumerate(kinds)]
        page.chart("lines", f"{title}: along α", ALONG, view(along, x="α subtracted", y="validation accuracy", unit="%"))
        beside = {key: said for key, said in BESIDE.items() if any(c.get(key) for c in clients)}
        header = ["Client", "Classes", "α", "Target before, %", "Target after, %", "Control before, %", "Control after, %"]
        header += [*(f"{which}, {said}, %" for said in beside.values() for which in ("Target", "Control")), "n"]
        rows: list[Row] = []
        for c in clients:
            tested = [c[when][f"test_{kind}"] for kind in kinds for when in ("before", "after")]
            rows.append(
                [
                    f"client {c['client']}",
                    ", ".join(c["classes"]),
                    number("{:g}", c["after"]["alpha"]),
                    *map(_accuracy, tested),
                    *(_beside(c, key, kind) for key in beside for kind in kinds),
                    Cell("1", "", 1),
                ]
            )
        page.table(f"{title}: test accuracy on the classes that a client holds (target) and on all others (control).", header, rows)
        page.listed([_known(f"Client {c['client']}: {note}.", names) for c in clients for note in c.get("notes") or []])


def _beside(client: Mapping[str, Any], key: str, kind: str) -> Cell:
    found = client.get(key)
    return _accuracy(found[f"test_{kind}"]) if found else NONE


def _moved(client: Mapping[str, Any], kind: str) -> dict[str, Any]:
    before, after = (rounded(client[when][f"test_{kind}"], 100) for when in ("before", "after"))
    return {"row": f"client {client['client']}", "from": before, "at": after, "n": 1}


def _along(client: Mapping[str, Any], place: int, kind: str, dash: int) -> dict[str, Any]:
    points = [[p["alpha"], rounded(p[f"val_{kind}"], 100)] for p in client["points"]]
    alpha, there = client["after"]["alpha"], client["after"][f"val_{kind}"]
    ring = [alpha, rounded(there, 100), f"chosen: α = {alpha:g}, validation {_share(there)}", "ring"]
    return {"label": f"client {client['client']}, {kind}", "c": place, "dash": dash, "points": points, "marks": [ring]}


SECTIONS: dict[str, Callable[[Page, Sequence[Analysis], Names], None]] = {
    "sweep": _sweeps,
    "interpolate": _interpolations,
    "interference": _interferences,
    "masks": _overlaps,
    "forget": _forgotten,
}


def _known(text: str, names: Names) -> str:
    for run in (run for run in names if run in text):
        text = text.replace(run, names[run])
    return text


def _notes(found: Sequence[Analysis], names: Names) -> list[str]:
    return [f"{shown(a.title)}, seed {a.seed}: {_known(str(note), names)}." for a in found for note in a.found.get("notes") or []]


def _share(value: float) -> str:
    return f"{percent(value)} %"


def _accuracy(value: float) -> Cell:
    return Cell(percent(value), "", value)


# --- searches


def search_section(page: Page, search: SearchResult) -> None:
    page.heading(2, f"Search {search.name}")
    page.text(search.question, _verdict(search))
    page.text(f"All trials share: {', '.join(search.experiment)}." if search.experiment else "", soft=True)
    rows: list[Row] = []
    for trial in search.trials:
        marks = ["best"] * (trial["number"] == search.best) + ["default"] * (trial["params"] == search.default["params"])
        parameters = [_parameter(trial["params"].get(key)) for key in search.keys]
        named = Cell(f"trial {trial['number']}", ", ".join(marks), trial["number"])
        rows.append([named, Cell(str(trial["state"]), str(trial.get("why") or "")), *parameters, _valued(trial["value"])])
    if all(trial["params"] != search.default["params"] for trial in search.trials):
        parameters = [_parameter(search.default["params"].get(key)) for key in search.keys]
        rows.append([Cell("default", "", -1), NONE, *parameters, _valued(search.default["value"])])
    page.table("Trials: validation accuracy of one run each (n = 1).", ["Trial", "State", *search.keys, "Validation accuracy, %"], rows)
    page.chart(
        "lines", f"Value by parameter: {search.name}", TRIALS, [v for key in search.keys for v in _by_parameter(search, key)], "parameter"
    )


def _verdict(search: SearchResult) -> str:
    best = next((trial for trial in search.trials if trial["number"] == search.best), None)
    if best is None or best["value"] is None:
        return "No trial was completed."
    chosen = ", ".join(f"{key} = {_parameter(value).text}" for key, value in best["params"].items())
    said = f"Best is trial {best['number']} with a validation accuracy of {_share(best['value'])}: {chosen}."
    default = search.default["value"]
    if best["params"] == search.default["params"]:
        return f"{said} That is the default."
    if default is None:
        return said
    done = sum(trial["state"] == "complete" for trial in search.trials)
    gained = f"{100 * (best['value'] - default):+z.2f} points (n = 1 run each)"
    doubt = f"The best of {done} trials is partly lucky: run it again with other seeds before believing the difference."
    return f"{said} The default came to {_share(default)}: {gained}. {doubt}"


def _parameter(value: Any) -> Cell:
    return NONE if value is None else Cell(f"{value:.4g}", "", value) if finite(value) and not isinstance(value, bool) else Cell(str(value))


def _valued(value: float | None) -> Cell:
    return NONE if value is None else _accuracy(value)


def _by_parameter(search: SearchResult, key: str) -> list[dict[str, Any]]:
    """Trials by their state, the best and the default apart."""
    named = [(f"trial {t['number']}", "best" if t["number"] == search.best else str(t["state"]), t) for t in search.trials]
    named.append(("default", "default", {"params": search.default["params"], "value": search.default["value"]}))
    drawn = [
        (name, group, t["params"][key], t["value"])
        for name, group, t in named
        if t["value"] is not None and t["params"].get(key) is not None
    ]
    values = [value for _, _, value, _ in drawn]
    numeric = all(finite(value) and not isinstance(value, bool) for value in values)
    kinds = [] if numeric else list(dict.fromkeys(map(str, values)))
    groups: dict[str, list[list[Any]]] = {}
    for name, group, value, accuracy in drawn:
        at = value if numeric else kinds.index(str(value))
        groups.setdefault(group, []).append([at, rounded(accuracy, 100), None, None, f"{name}\n{key} = {value}: {_share(accuracy)}"])
    log = numeric and bool(values) and min(values) > 0 and max(values) / min(values) >= WIDE
    series = [{"label": group, "c": i, "points": points} for i, (group, points) in enumerate(groups.items())]
    axis = {"log": log} if numeric else {"categories": kinds}
    return view(series, name=key, x=key, y="validation accuracy", unit="%", scatter=True, **axis)
