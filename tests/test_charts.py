"""Charts: what each draws of which results, what a reader can read off it, and files that are the same bytes for the same results."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_studies import ANALYSES, FORGET, GRID, HOSTILE, PLAIN, SWEEP, Cell, make_study, plain

from fedlens.lens.mask import Mask
from fedlens.report import charts, vega
from fedlens.report.blocks import Chart
from fedlens.report.over_seeds import of_seeds
from fedlens.report.vega import CONFIG, DARK, Heat, Series, Style, heat_chart, line_chart, render, save
from fedlens.study.results import Gathered, SearchResult, StudyResult, TableResult, Tuned, gather
from fedlens.study.statistics import summarise

vl_convert = pytest.importorskip("vl_convert")


def compiled(chart: Chart, config: Mapping[str, Any] = CONFIG) -> dict[str, Any]:
    """Return the Vega specification that the library makes of a chart."""
    spec: dict[str, Any] = vl_convert.vegalite_to_vega({**chart.spec, "config": config})
    return spec


def views(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(spec.get("concat", [spec]))


def rows(chart: Chart, panel: int = 0) -> list[dict[str, Any]]:
    """Return the data of a panel."""
    return list(views(chart.spec)[panel]["data"]["values"])


def points(chart: Chart, label: str | None = None, panel: int = 0) -> list[tuple[float, float]]:
    return [(row["x"], row["y"]) for row in rows(chart, panel) if label in (None, row["s"])]


def scale_of(chart: Chart, axis: str, panel: int = 0) -> list[float]:
    domain = views(chart.spec)[panel]["encoding"][axis]["scale"]["domain"]
    return [float(end) for end in domain]


def walk(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, at any depth."""
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else ():
        yield str(key), value
        yield from walk(value)


def encodings(chart: Chart, channel: str) -> list[Any]:
    return [value for key, value in walk(chart.spec) if key == channel and isinstance(value, Mapping) and "field" in value]


def table_of(tmp_path: Path, cells: Sequence[Cell] | Mapping[str, Sequence[Cell]], **options: Any) -> TableResult:
    tables = cells if isinstance(cells, Mapping) else {"t": cells}
    return gather([make_study(tmp_path / "s", tables, **options)]).studies[0].tables[0]


def with_lines(tmp_path: Path, lines: Sequence[Mapping[str, Any]], **summary: Any) -> TableResult:
    """Return a table of one cell with one run that recorded these lines."""
    folder = make_study(tmp_path / "s", {"t": [("a", "a", {}, [0.8])]})
    (file,) = folder.rglob("metrics.jsonl")
    file.write_text("".join(json.dumps({"step": i, **line}) + "\n" for i, line in enumerate(lines)))
    (file,) = folder.rglob("summary.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | summary))
    return gather([folder]).studies[0].tables[0]


def of_study(study: StudyResult, key: str = "k") -> list[Chart]:
    """Return every chart that a study has."""
    drawn: list[Chart | None] = [charts.partitions(study.runs, f"{key}-partition"), charts.masks(study, f"{key}-masks")]
    for i, table in enumerate(study.tables):
        makers = (charts.scores, charts.traffic, charts.drift, charts.lengths, charts.grid_map)
        drawn += [make(table, f"{key}-{i}-{make.__name__}") for make in makers]
        drawn += [*charts.curves(table, f"{key}-{i}"), charts.tried([t for t in study.tuned if t.table == table.name], f"{key}-{i}-tried")]
    for kind in ("sweep", "interpolate"):
        drawn.append(charts.along(of_seeds(study, kind), kind, f"{key}-{kind}"))
    drawn += [charts.disentanglement(group, f"{key}-xi-{i}") for i, group in enumerate(of_seeds(study, "interference"))]
    drawn += [charts.forgetting(group, f"{key}-forget-{i}") for i, group in enumerate(of_seeds(study, "forget"))]
    drawn.append(charts.forgotten_cost(of_seeds(study, "forget"), f"{key}-forgotten"))
    return [chart for chart in drawn if chart]


def search(**values: Any) -> SearchResult:
    trials = [
        {"number": 0, "params": {"optim.lr": 0.1, "mask.strategy": "qk_only"}, "value": 0.7, "state": "complete"},
        {"number": 1, "params": {"optim.lr": 0.001}, "value": None, "state": "pruned"},
        {"number": 2, "params": {"optim.lr": 0.01}, "value": 0.8, "state": "complete"},
    ]
    default = {"params": {"optim.lr": 0.02}, "value": 0.75}
    return replace(SearchResult("lr", "here", "", "", [], ["optim.lr", "mask.strategy"], trials, default, 2), **values)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[Chart]:
    """Charts of every kind."""
    folder = tmp_path_factory.mktemp("charts")
    long = [(f"c{i}", "sparse", {}, [0.5 + 0.01 * i, 0.52]) for i in range(4)]
    study = make_study(folder / "s", PLAIN | GRID | {"length": long}, ANALYSES)
    for i in range(4):
        for file in (study / "runs").glob(f"run-2-{i}-*/metrics.jsonl"):
            lines = [json.loads(line) | {"client_norm": 0.01 * 5**i} for line in file.read_text().splitlines()]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = gather([study]).studies
    again = [replace(a, labels=["sparse"], found=FORGET) for a in found.analyses if a.kind == "forget"]
    tuned = [Tuned("three models", "dense", "optim.lr", 0.03, [(0.01, 0.7), (0.03, 0.72), (0.09, None)], [])]
    drawn = of_study(replace(found, analyses=[*found.analyses, *again], tuned=tuned))
    return [*drawn, *([chart] if (chart := charts.trials(search(), "trials")) else [])]


# --- files


def test_there_is_a_chart_of_every_kind(every: list[Chart]) -> None:
    kinds = {"scores", "val_accuracy", "traffic", "drift", "lengths", "map", "tried", "partition", "masks", "sweep", "interpolate"}
    assert {chart.kind for chart in every} == kinds | {"xi", "forget", "forgotten", "trials"}
    assert len({chart.key for chart in every}) == len(every)


def test_every_specification_compiles_in_both_colour_schemes(every: list[Chart]) -> None:
    for chart in every:
        assert compiled(chart)["marks"] and compiled(chart, DARK)["marks"]


def test_the_same_chart_gives_the_same_bytes_twice(every: list[Chart]) -> None:
    for chart in every[:: len(every) // 6]:
        for suffix in ("svg", "png", "pdf", "svg"):
            assert render(chart, suffix) == render(json_copy(chart), suffix)
    several = line_chart("k", "T", "", [Series("α θ₀ ξ ‖Δ‖ 中", [(0, 1.0), (1, 2.0)])], "x", "θ₀ₖ")
    assert len({render(several, "pdf") for _ in range(6)}) == 1, "fonts that stand in for another must not change places"


def json_copy(chart: Chart) -> Chart:
    return replace(chart, spec=json.loads(json.dumps(chart.spec)))


def test_files_have_their_formats_and_the_widths_of_paper(tmp_path: Path, every: list[Chart]) -> None:
    column = next(chart for chart in every if not chart.wide and "concat" not in chart.spec)
    wide = line_chart("wide", "T", "", [Series(f"a {i}", [(0, 1.0), (1, i)]) for i in range(12)], "x", "y")
    assert wide.wide
    for chart, inches in ((column, 3.25), (wide, 6.9)):
        pdf = render(chart, "pdf")
        box = re.search(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)
        assert box and float(box[1]) / 72 == pytest.approx(inches, abs=0.03)
        assert b"/FontFile2" in pdf and b"/Type3" not in pdf and b"Date" not in pdf
    assert [file.name for file in save(column, tmp_path / "a.b")] == ["a.b.svg", "a.b.png"]
    assert (tmp_path / "a.b.svg").read_bytes().startswith(b"<svg") and (tmp_path / "a.b.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"\.pdf, \.svg or \.png, not \.jpg"):
        render(column, "jpg")


def test_wide_charts_of_panels_fit_the_page(every: list[Chart]) -> None:
    for chart in every:
        size = re.search(rb'width="([\d.]+)"', render(chart, "svg"))
        assert size and float(size[1]) <= (vega.WIDE if chart.wide else vega.COLUMN) + 8, chart.key


def test_nothing_refers_to_a_url(every: list[Chart]) -> None:
    for chart in every:
        spec = compiled(chart)
        assert not [key for key, _ in walk(spec) if key in ("url", "href", "src")]
        text = render(chart, "svg").decode()
        assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_dark_mode_has_its_own_colours() -> None:
    chart = line_chart("k", "T", "", [Series("a", [(0, 1.0), (1, 2.0)]), Series("b", [(0, 2.0), (1, 1.0)])], "x", "y")
    light, dark = render(chart, "svg").decode().lower(), render(chart, "svg", dark=True).decode().lower()
    assert CONFIG["range"]["category"][0].lower() in light and CONFIG["range"]["category"][0].lower() not in dark
    assert DARK["range"]["category"][0] in dark and 'fill="white"' in light and 'fill="white"' not in dark
    assert not {c.lower() for c in CONFIG["range"]["category"]} & {c.lower() for c in DARK["range"]["category"]}


def test_importing_fedlens_and_training_load_no_renderer() -> None:
    code = "import sys, fedlens, fedlens.cli, fedlens.training.run, fedlens.report.charts; assert not {'vl_convert', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- labels


@pytest.mark.parametrize(
    "label", [HOSTILE, "_hidden", "$\\frac", "x" * 90, "a.b[0]['c']", "datum.x + 1", "<script>alert(1)</script>", "a\nb\x07"]
)
def test_hostile_labels_are_drawn_as_text(tmp_path: Path, label: str) -> None:
    cells: list[Cell] = [(label, label, {"key": j}, [0.5 + j / 100, 0.6]) for j in (1, 2)] + [("b", "b", {"key": 1}, [0.7, 0.71])]
    (study,) = gather([make_study(tmp_path / "s", {label: cells}, ANALYSES, name=label)]).studies
    for chart in of_study(study):
        svg = render(chart, "svg").decode()
        assert "<script" not in svg and "\x07" not in json.dumps(chart.spec) and "\x07" not in chart.caption
        names = {row["s"] for panel in range(len(views(chart.spec))) for row in rows(chart, panel) if "s" in row and chart.kind != "masks"}
        for encoding in encodings(chart, "color"):
            assert encoding["field"] != "s" or names <= set(encoding["scale"]["domain"]), "each has its colour"


def test_paths_are_not_in_charts(tmp_path: Path) -> None:
    (study,) = gather([make_study(tmp_path / "s", {"t": [("at /home/me/x", "sparse", {}, [0.5, 0.6])]}, name="/home/me/y")]).studies
    assert not [chart.key for chart in of_study(study) if "/home" in json.dumps(chart.spec) + chart.caption]


def test_equal_names_in_one_chart_stay_apart() -> None:
    chart = heat_chart("k", "T", "", [Heat([[1.0], [2.0], [3.0]], ["a", "a", "a (2)"], ["c"])], ("", "", "v"))
    assert len({row["r"] for row in rows(chart)}) == 3


# --- scores


def test_a_cell_has_its_mean_its_interval_and_every_seed(tmp_path: Path) -> None:
    chart = charts.scores(plain(tmp_path).studies[0].tables[0], "k")
    assert chart is not None and chart.title == "Test accuracy" and "n = 3" in chart.caption and "95 % t interval" in chart.caption
    dense = {row["k"]: row for row in rows(chart) if row["s"] == "dense"}
    assert dense["mean"]["y"] == 71.667 and (dense["mean"]["l"], dense["mean"]["h"]) == (67.872, 75.461) and dense["mean"]["n"] == 3
    assert [dense[f"seed {i}"]["y"] for i in range(3)] == [70, 72, 73]
    assert [row["s"] for row in rows(chart) if row["k"] == "mean"] == ["central", "dense", "sparse one"]


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    chart = charts.scores(table_of(tmp_path, [("a", "a", {}, [0.5]), ("b", "b", {}, [0.6])]), "k")
    assert chart is not None and not [row for row in rows(chart) if "l" in row or "h" in row] and "n = 1" in chart.caption


def test_intervals_end_at_0_and_100_percent(tmp_path: Path) -> None:
    chart = charts.scores(table_of(tmp_path, [("a", "a", {}, [0.99, 1.0, 0.9]), ("b", "b", {}, [0.5, 0.9])]), "k")
    assert chart is not None
    assert max(row["h"] for row in rows(chart) if "h" in row) == 100 and min(row["l"] for row in rows(chart) if "l" in row) == 0
    low, high = scale_of(chart, "x")
    assert low > -5 and 100 <= high < 105
    curve = Series("a", [(0, summarise([0.7, 1.0, 1.0])), (1, summarise([0.0, 0.0, 0.4]))], scale=100)
    drawn = line_chart("k", "T", "", [curve], "x", "y", Style(bounds=vega.PERCENT))
    assert (rows(drawn)[0]["h"], rows(drawn)[1]["l"]) == (100, 0) and -5 < scale_of(drawn, "y")[0] <= 0
    free = line_chart("k", "T", "", [replace(curve, scale=1)], "x", "cosine")
    assert min(row["l"] for row in rows(free)) < 0, "what is no percentage may be negative"


def test_a_diverged_seed_is_marked_at_the_edge_and_kept_off_the_axis(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", {"t": [("sound", "sound", {}, [0.80, 0.81, 0.82]), ("burst", "burst", {}, [0.79, 0.78, 0.01])]})
    for file in folder.rglob("summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"ridge": {"val_accuracy": 0.7}}))
    (table,) = gather([folder]).studies[0].tables
    chart = charts.scores(table, "k")
    assert chart is not None and scale_of(chart, "x")[0] > 70 and "burst, seed 2" in chart.caption
    off = [row for row in rows(chart) if row["off"]]
    assert [(row["s"], row["k"], row["y"]) for row in off] == [("burst", "mean", 52.667), ("burst", "seed 2", 1)]
    assert all(row["x"] == scale_of(chart, "x")[0] for row in off), "at the frame's edge"
    (curve,) = (chart for chart in charts.curves(table, "k") if chart.kind == "val_accuracy")
    assert {row["n"] for row in rows(curve) if row["s"] == "burst"} == {2} == {row["n"] for row in rows(curve)} - {
        3
    } and "burst, seed 2" in curve.caption


# --- curves


LINES = [
    {
        "round": t,
        "train_loss": 2.0 - t / 10,
        "val_loss": 1.5 - t / 10,
        "val_accuracy": 0.7 + t / 100,
        "test_loss": 1.6,
        "test_accuracy": 0.69,
    }
    for t in (1, 2, 3)
]


def test_every_recorded_loss_and_accuracy_has_its_curve_with_its_title(tmp_path: Path) -> None:
    drawn = charts.curves(with_lines(tmp_path, LINES), "k")
    titles = ["Training loss", "Validation loss", "Validation accuracy", "Test loss", "Test accuracy"]
    assert [chart.title for chart in drawn] == titles
    assert [chart.kind for chart in drawn] == ["train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy"]
    assert [chart.key for chart in drawn][-2:] == ["k-test-loss-round", "k-test-accuracy-round"]
    assert points(drawn[2]) == [(1, 71), (2, 72), (3, 73)], "accuracies in percent"
    assert points(drawn[0])[0] == (1, 1.9), "losses as they are"


def test_a_curve_starts_at_the_first_model_by_its_line_or_by_the_summary(tmp_path: Path) -> None:
    start = {"round": 0, "val_accuracy": 0.6, "test_loss": 2.5}
    by_metric = {chart.kind: chart for chart in charts.curves(with_lines(tmp_path / "line", [start, *LINES]), "k")}
    assert points(by_metric["val_accuracy"])[0] == (0, 60) and points(by_metric["test_loss"])[0] == (0, 2.5)
    assert points(by_metric["val_loss"])[0] == (1, 1.4), "what was not measured at the start begins later"
    kept = with_lines(tmp_path / "kept", LINES, start={"val_accuracy": 0.65}, ridge={"val_accuracy": 0.5, "val_loss": 2.0})
    by_metric = {chart.kind: chart for chart in charts.curves(kept, "k")}
    assert points(by_metric["val_accuracy"])[0] == (0, 65) and points(by_metric["val_loss"])[0] == (0, 2)


def test_a_loss_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    lines = [{"round": t, "train_loss": loss} for t, loss in enumerate((1.0, float("nan"), float("inf"), 0.5), start=1)]
    (chart,) = charts.curves(with_lines(tmp_path, lines), "k")
    assert points(chart) == [(1, 1), (4, 0.5)]


def test_curves_by_epoch_and_by_round_are_different_charts(tmp_path: Path) -> None:
    lines = [*LINES, *({"epoch": e, "val_accuracy": 0.5 + e / 10} for e in (1, 2))]
    assert [chart.key for chart in charts.curves(with_lines(tmp_path, lines), "k") if chart.kind == "val_accuracy"] == [
        "k-val-accuracy-round",
        "k-val-accuracy-epoch",
    ]


def test_what_takes_no_step_is_a_horizontal_line(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", {"t": [("head", "central", {}, [0.71]), ("dense", "dense", {}, [0.8])]})
    (folder / "runs" / "run-0-0-0" / "metrics.jsonl").write_text("")
    (chart,) = charts.curves(gather([folder]).studies[0].tables[0], "k")
    assert points(chart, "head") == [(1, 70), (3, 70)] and len(points(chart, "dense")) == 3


def test_runs_that_were_evaluated_once_have_no_curves(tmp_path: Path) -> None:
    table = plain(tmp_path, rounds=1).studies[0].tables[0]
    assert charts.curves(table, "k") == [] and charts.traffic(table, "k") is None and charts.drift(table, "k") is None


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path) -> None:
    lines = [{"round": t, "train_loss": 1 / t} for t in range(1, 501)]
    (chart,) = charts.curves(with_lines(tmp_path, lines), "k")
    assert len(points(chart)) <= charts.POINTS + 2 and (points(chart)[0][0], points(chart)[-1][0]) == (1, 500)


def grid_of(cases: Sequence[str], values: Sequence[Any], lacking: Sequence[tuple[str, Any]] = ()) -> dict[str, Sequence[Cell]]:
    key, accuracies = "server.merge", [0.6, 0.62, 0.65]
    return {"t": [(f"{c}, merge {v}", c, {key: v}, [None] * 3 if (c, v) in lacking else accuracies) for c in cases for v in values]}


@pytest.mark.parametrize("kind", ["val_accuracy", "traffic"])
def test_a_table_in_two_dimensions_has_a_panel_per_case_where_values_look_alike(tmp_path: Path, kind: str) -> None:
    table = table_of(tmp_path, grid_of(("a", "b"), ("mean", "ties", "dare"), lacking=[("a", "mean"), ("b", "ties")]))
    (chart,) = [c for c in [*charts.curves(table, "k"), charts.traffic(table, "k")] if c and c.kind == kind]
    assert [view["title"] for view in views(chart.spec)] == ["a", "b"]
    assert [{row["s"] for row in rows(chart, i)} for i in (0, 1)] == [{"merge ties", "merge dare"}, {"merge mean", "merge dare"}]
    for channel in ("color", "shape", "strokeDash"):
        domains = [encoding["scale"]["domain"] for encoding in encodings(chart, channel) if encoding.get("field") == "s"]
        assert domains and all(domain == domains[0] for domain in domains)


def test_no_two_lines_look_the_same(tmp_path: Path) -> None:
    rules = ("mean", "ties", "dare", "fisher", "median", "trimmed_mean")
    chart = charts.drift(table_of(tmp_path, grid_of(("a", "b"), rules)), "k")
    assert chart is not None and [view["title"] for view in views(chart.spec)] == ["drift ratio", "cosine", "sign conflict"]
    names = encodings(chart, "color")[0]["scale"]["domain"]
    palette, shapes = CONFIG["range"]["category"], encodings(chart, "shape")[0]["scale"]["range"]
    assert len(names) == 12 == len({(palette[i % len(palette)], shapes[i]) for i in range(12)})


def test_several_series_have_a_legend_and_every_value_can_be_read(every: list[Chart]) -> None:
    for chart in (chart for chart in every if chart.kind in ("val_accuracy", "traffic", "drift", "forget")):
        assert [value for key, value in walk(compiled(chart)) if key == "legends"] or len({row["s"] for row in rows(chart)}) == 1
    for chart in every:
        assert [value for key, value in walk(chart.spec) if key == "tooltip" and value], chart.key


def test_values_are_shown_with_interval_and_n() -> None:
    line = Series("a", [(0, summarise([0.5, 0.52])), (1, summarise([0.6, 0.62]))], scale=100)
    chart = line_chart("k", "T", "", [line, replace(line, label="b")], "round", "accuracy (%)")
    (tip,) = (value for key, value in walk(chart.spec) if key == "tooltip")
    assert [each["title"] for each in tip] == ["of", "round", "accuracy (%)", "95 % interval", "n"]


def test_bytes_are_in_a_readable_unit_on_a_logarithmic_axis(tmp_path: Path) -> None:
    chart = charts.traffic(plain(tmp_path).studies[0].tables[0], "k")
    assert chart is not None and [x for x, _ in points(chart, "dense")] == [1, 2, 3]
    assert views(chart.spec)[0]["encoding"]["x"]["title"] == "sent by all clients (MB)"
    assert views(chart.spec)[0]["encoding"]["x"]["scale"]["type"] == "log"


def test_accuracy_is_drawn_against_the_length_of_updates_where_they_differ(tmp_path: Path, every: list[Chart]) -> None:
    (chart,) = (chart for chart in every if chart.kind == "lengths")
    assert [x for x, _ in points(chart)] == [0.01, 0.05, 0.25, 1.25]
    assert charts.lengths(plain(tmp_path).studies[0].tables[0], "k") is None


def test_a_map_has_cases_down_and_values_across_with_half_the_interval(tmp_path: Path) -> None:
    chart = charts.grid_map(table_of(tmp_path, GRID), "k")
    assert chart is not None and [row["r"] for row in rows(chart)] == ["Nc=1", "Nc=5"] and rows(chart)[0]["c"] == ["4", "8"]
    assert rows(chart)[0]["t"] == ["63.4\n± 5.0", "63.8\n± 5.0"] and rows(chart)[0]["v"] == [63.4, 63.8]
    listed = charts.grid_map(table_of(tmp_path / "lists", grid_of(("a", "b"), ("[]", "[0.5,1]"))), "k")
    assert listed is not None and rows(listed)[0]["c"] == ["none", "0.5, 1"]
    assert charts.grid_map(table_of(tmp_path / "plain", PLAIN), "k") is None


# --- tuning and searches


def tuned(label: str, value: float | None, tried: Sequence[tuple[float, float | None]]) -> Tuned:
    return Tuned("t", label, "optim.lr", value, list(tried), [])


def test_tried_values_have_a_ring_at_the_chosen_one_and_ends_are_named() -> None:
    chart = charts.tried([tuned("a", 0.3, [(0.03, 0.7), (0.3, 0.72)]), tuned("b", 0.1, [(0.03, 0.7), (0.1, 0.71), (0.3, None)])], "k")
    assert chart is not None and [(row["s"], row["x"]) for row in rows(chart) if row.get("r")] == [("a", 0.3), ("b", 0.1)]
    assert "at an end of what was tried: a." in chart.caption and "Failed: b at 0.3." in chart.caption
    assert {row["note"] for row in rows(chart) if row["s"] == "a"} == {"nothing was tried beyond the chosen value"}
    assert charts.tried([], "k") is None and charts.tried([tuned("a", None, [(0.1, None)])], "k") is None


def test_a_value_that_ruins_training_does_not_flatten_the_others() -> None:
    chart = charts.tried([tuned("a", 0.1, [(0.03, 0.78), (0.1, 0.8), (0.3, 0.01)])], "k")
    assert chart is not None and scale_of(chart, "y")[0] > 70


def test_trials_of_a_search_are_drawn_by_numeric_parameter() -> None:
    chart = charts.trials(search(), "k")
    assert chart is not None and chart.caption.count("n = 1") == 1
    assert {(row["s"], row["x"], row["y"]) for row in rows(chart)} == {("complete", 0.1, 70), ("best", 0.01, 80), ("default", 0.02, 75)}
    assert charts.trials(search(trials=[], default={"params": {}, "value": None}), "k") is None
    ruined = {"number": 3, "params": {"optim.lr": 1.0}, "value": 0.01, "state": "complete"}
    chart = charts.trials(search(trials=[*search().trials, ruined]), "k")
    assert chart is not None and scale_of(chart, "y")[0] > 65 and "Below the frame: 1 trial." in chart.caption


# --- studies


def test_partitions_show_the_samples_of_the_first_hundred_clients(tmp_path: Path) -> None:
    chart = charts.partitions(plain(tmp_path).studies[0].runs, "k")
    assert chart is not None and rows(chart) == [{"r": "0", "c": [0], "v": [5]}, {"r": "1", "c": [1], "v": [5]}, {"r": "2", "v": [3, 2]}]
    many = charts.partition_chart({"IID": np.ones((300, 2), dtype=np.int64), "Nc = 1": np.eye(300, 2, dtype=np.int64)}, "k")
    assert [len(rows(many, i)) for i in (0, 1)] == [100, 100] and "the first 100" in many.caption and many.wide
    assert charts.partitions([], "k") is None


def test_a_row_without_its_columns_is_drawn_as_one_with_them() -> None:
    full = heat_chart("k", "T", "", [Heat([[1.0, 2.0, 3.0], [4.0, None, None]])], ("", "", "v"))
    named = heat_chart("k", "T", "", [Heat([[1.0, 2.0, 3.0], [4.0, None, None]], columns=["0", "1", "2"])], ("", "", "v"))
    assert "c" not in rows(full)[0] and render(full, "svg") == render(named, "svg")


def test_masks_of_one_name_are_one_row_unless_they_lie_elsewhere(tmp_path: Path) -> None:
    cells: list[Cell] = [("a", "sparse", {}, [0.5]), ("b", "sparse", {}, [0.6])]
    folder = make_study(tmp_path / "s", {"one": cells, "two": cells[:1]})

    def named() -> list[str]:
        chart = charts.masks(gather([folder]).studies[0], "k")
        return [row["r"] for row in rows(chart)] if chart else []

    assert named() == ["a"], "the same mask under two names is one"
    for number, share in (("0-1", 0.35), ("1-0", 0.26)):
        file = folder / "runs" / f"run-{number}-0" / "summary.json"
        found = json.loads(file.read_text())
        found["mask"]["composition"] = {"query": {"eligible": 10, "share": share}, "key": {"eligible": 10, "share": 1 - share}}
        file.write_text(json.dumps(found))
    assert named() == ["a", "b"], "one point is near, ten are not"


def test_masks_in_memory_are_drawn_by_layer_and_by_kind() -> None:
    mask = Mask({f"blocks.{i}.mlp.fc1.weight": torch.full((2, 2), not i) for i in (0, 1)})
    chart = charts.mask_chart({"half": mask}, "k")
    assert rows(chart)[0]["v"] == [100, 0] and sum(row["v"] for row in rows(chart, 1)) == 100


# --- analyses


def test_sweeps_are_drawn_as_far_as_all_of_them_go(tmp_path: Path) -> None:
    far = SWEEP | {
        "points": [{**SWEEP["points"][0], "alpha": a, "val_accuracy": 0.8 - abs(a - 0.5) / 20} for a in (0.0, 0.5, 1.0, 2.0, 8.0)]
    }
    (study,) = plain(tmp_path, analyses=[("sweep", SWEEP)]).studies
    (one,) = study.analyses
    chart = charts.along([[one], [replace(one, labels=["far"], found=far)]], "sweep", "k")
    assert chart is not None and max(x for x, _ in points(chart)) == 1 and len(points(chart, "far")) == 3
    assert [row["x"] for row in rows(chart) if row.get("r")] == [0.5, 0.5] and charts.along([], "sweep", "k") is None


def test_analyses_of_several_seeds_are_means_with_intervals(tmp_path: Path) -> None:
    (study,) = plain(tmp_path, analyses=ANALYSES).studies
    both = replace(study, analyses=[*study.analyses, *(replace(a, seed=1) for a in study.analyses)])
    for chart in of_study(both):
        if chart.kind in ("sweep", "interpolate", "forget", "xi"):
            assert "n = 2" in chart.caption and "n = 1" not in chart.caption
    alone = [chart for chart in of_study(study) if chart.kind in ("sweep", "interpolate", "forget", "xi")]
    assert len(alone) == 4 and all("n = 1" in chart.caption for chart in alone)


def test_clients_that_are_forgotten_are_in_the_caption(tmp_path: Path) -> None:
    (study,) = plain(tmp_path, analyses=[("forget", FORGET)]).studies
    chart = charts.forgetting(study.analyses, "k")
    assert chart is not None and "client 0" in chart.caption
    assert [view["title"] for view in views(chart.spec)] == ["its classes", "all other classes"] and points(chart) == [(0, 90), (1, 40)]


def test_forgetting_is_drawn_as_what_it_costs_the_others(tmp_path: Path) -> None:
    (study,) = plain(tmp_path, analyses=[("forget", FORGET)]).studies
    assert charts.forgotten_cost([study.analyses], "k") is None, "of one cell there is nothing to compare"
    (of_all,) = study.analyses
    found = json.loads(json.dumps(of_all.found))
    found["clients"][0]["points"] = [
        {"alpha": 2.0, "val_target": 0.1, "val_control": 0.7},
        {"alpha": 0.0, "val_target": 0.9, "val_control": 0.8},
        {"alpha": 1.0, "val_target": 0.3, "val_control": 0.79},
    ]
    chart = charts.forgotten_cost([[of_all], [replace(of_all, labels=["sparse"], found=found)]], "k")
    assert chart is not None and points(chart, "all") == [(0, 90), (0, 40), (0, 40)], "the chosen point once more, in its ring"
    assert points(chart, "sparse") == [(0, 90), (1, 30), (10, 10), (1, 30)]
    assert len([row for row in rows(chart) if row.get("r")]) == 2, "points that cost as much have no ring"
    assert [(row["x"], row["note"]) for row in rows(chart) if row.get("r") and row["s"] == "sparse"] == [(1, "client 0, seed 0")]


def test_disentanglement_is_over_both_alphas_with_the_first_upwards(tmp_path: Path) -> None:
    (study,) = plain(tmp_path, analyses=ANALYSES).studies
    (analysis,) = (a for a in study.analyses if a.kind == "interference")
    chart = charts.disentanglement(analysis, "k")
    assert chart is not None and [row["r"] for row in rows(chart)] == ["1", "0"] and rows(chart)[0]["v"] == [10, 20]
    assert views(chart.spec)[0]["encoding"]["y"]["title"] == "α of half A"
    assert charts.disentanglement(replace(analysis, found={**analysis.found, "xi": None}), "k") is None


def test_nothing_to_draw_gives_no_chart(tmp_path: Path) -> None:
    (study,) = gather([make_study(tmp_path / "s", {"t": [("a", "a", {}, [None, None])], "u": [("b", "central", {}, [0.5])]})]).studies
    assert of_study(Gathered([replace(study, tables=study.tables[:1])]).studies[0]) == []
