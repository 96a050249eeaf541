"""Update the result tables and figures of README.md and docs/results.md from results/: python scripts/results_pages.py [--check]

A block from <!-- results: STUDY --> to <!-- end of results --> is replaced by the tables of that study, <!-- results: STUDY / TABLE --> by one
of its tables, <!-- results: STUDY / KIND --> by its analyses of that kind. --check writes nothing and fails if a page or figure is outdated.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedlens.report.blocks import Chart, label
from fedlens.report.charts import ACCURACY, TEST, along, forgotten_cost, grid_map, lengths, scores
from fedlens.report.markdown import escaped, rows_text
from fedlens.report.over_seeds import HEADS, LENGTH, beside, layout, of_seeds, over_seeds, rate_of
from fedlens.report.vega import Series, Style, line_chart, render
from fedlens.study.results import CellResult, StudyResult, TableResult, gather
from fedlens.study.statistics import Summary

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/results.md")
FIGURES = ROOT / "docs" / "figures"
WIDTH = 520  # pixels of a figure: as wide as the page on a screen, still readable on a phone
NAMES = 110  # pixels beside a map for the names of its rows
HEAD = "test accuracy, %"
PARTS = {"train": "training images", "val": "validation images", "test": "test images"}
PLACES = {  # label of a cell -> name in the figure of the main finding
    "least_sensitive, no value": "least sensitive",
    "its place at random": "random, same tensors",
    "least_sensitive, no Q or K": "least sensitive, no Q or K",
    "its place at random, no Q or K": "random, same tensors, no Q or K",
    "anywhere": "random anywhere",
    "anywhere but in the patch embedding": "random, no patch embedding",
}
SEEDS = re.compile(r" \(n = \d+\)")
COLOUR = re.compile(r"rgb\((\d+), (\d+), (\d+)\)")
INVISIBLE = re.compile(r'<path[^>]* opacity="0"/>')
DIGITS = re.compile(r"(?<![#\w.])-?\d+\.\d{2,}")
BLOCK = re.compile(r"(<!-- results: (\w+)(?: / ([^\n]+?))? -->\n).*?(<!-- end of results -->)", re.DOTALL)


def with_sd(summary: Summary | None, scale: float = 100) -> str:
    """Return 86.10 ± 0.21; one run has no deviation."""
    if summary is None:
        return "—"
    return f"{scale * summary.mean:z.2f}" + ("" if summary.sd is None else f" ± {scale * summary.sd:z.2f}")


def entry(cell: CellResult | None) -> str:
    """Return test accuracy in percent and its standard deviation, such as 88.51 ± 0.25 (n = 3)."""
    accuracy = cell.summary("test_accuracy") if cell else None
    return f"{with_sd(accuracy)} (n = {accuracy.n})" if accuracy else "not run yet"


def whole(study: StudyResult) -> str:
    """Return the table of a study: cases by values of the grid, or the cells of all tables side by side."""
    grid = layout(study.tables[0])
    if grid:
        head = [HEAD, *(f"{grid.key.rsplit('.', 1)[-1]} {value}" for value in grid.values)]
        return lines(head, [[case, *(entry(grid.at(case, value)) for value in grid.values)] for case in grid.cases])
    rows = [[name, *map(entry, cells)] for name, cells in beside(study.tables)]
    return lines([HEAD, *(label(each.name) for each in study.tables)], rows)


def part(study: StudyResult, name: str) -> str:
    """Return one table of a study, or all its analyses of a kind."""
    table = next((table for table in study.tables if table.name == name), None)
    return of_analyses(study, name) if table is None else of_table(table)


def of_analyses(study: StudyResult, kind: str) -> str:
    """Return the means of all analyses of a kind, a row for the cells of each."""
    measured = over_seeds(study)[kind]
    heads = {key: head for key, head in HEADS[kind].items() if any(key in row.numbers for row in measured)}
    rows = [[label(row.label), *(with_sd(row.numbers.get(key), row.scale(key)) for key in heads), str(row.n)] for row in measured]
    return lines(["", *heads.values(), "n"], rows)


def of_table(table: TableResult) -> str:
    """Return test accuracy, learning rate and, for federated runs, the length of updates by case."""
    rows = []
    for cell in table.cells:
        rate, length = rate_of(cell), cell.over_rounds(LENGTH)
        lengths = [f"{length.mean:.2g}" if length else ""] if table.sends else []
        rows.append([cell.label, entry(cell), f"{rate:g}" if rate else "", *lengths])
    return lines(["", HEAD, "learning rate", *(["length of an update"] if table.sends else [])], rows)


def lines(head: list[str], rows: list[list[str]]) -> str:
    """Return a table; a number of seeds that all entries share stands in the header."""
    seeds = {n for row in rows for entry in row for n in SEEDS.findall(entry)}
    if len(seeds) == 1:
        head = [f"{title}{min(seeds)}" if title == HEAD else title for title in head]
        rows = [[SEEDS.sub("", entry) for entry in row] for row in rows]
    return rows_text(head, [[escaped(row[0]), *row[1:]] for row in rows]) + "\n"


def updated() -> dict[Path, str]:
    """Return path -> content of every page and figure."""
    studies = {study.name: study for study in gather([ROOT / "results"]).studies}

    def block(match: re.Match[str]) -> str:
        study = studies[match[2]]
        return f"{match[1]}{part(study, match[3]) if match[3] else whole(study)}{match[4]}"

    pages = {ROOT / name: BLOCK.sub(block, (ROOT / name).read_text(encoding="utf-8")) for name in PAGES}
    for name, chart in figures(studies).items():
        pages |= {FIGURES / file: text for file, text in written(chart, name).items()}
    return pages


# --- figures


def written(chart: Chart, name: str) -> dict[Path, str]:
    """Return NAME.svg for light pages and NAME-dark.svg for dark ones."""
    looks, wide = {"": False, "-dark": True}, widened(chart)
    return {Path(f"{name}{suffix}.svg"): smaller(render(wide, "svg", dark).decode()) for suffix, dark in looks.items()}


def smaller(svg: str) -> str:
    """Leave out invisible marks and digits of coordinates beyond the second; write colours in hexadecimal."""
    svg = COLOUR.sub(lambda match: "#" + bytes(map(int, match.groups())).hex(), INVISIBLE.sub("", svg))
    return DIGITS.sub(lambda match: f"{round(float(match[0]), 2):g}", svg)


def figures(studies: Mapping[str, StudyResult]) -> dict[str, Chart]:
    """Return the figures by the names of their files."""
    one_place, six = tables(studies["baselines"]), studies["six_models"].tables[0]
    sparsity, calibration = studies["sparsity"].tables[0], tables(studies["calibration"])["rounds of calibration"]
    dense = {"dense training": 100 * mean(tables(studies["forgetting"])["with and without a client"], "dense")}
    charts = {
        "mask_rules": lengths(studies["strategies"].tables[-1], "mask-rules"),
        "places": scores(finding(studies["places"]), "places"),
        "layerscale": scores(studies["layerscale"].tables[0], "layerscale"),
        "six_models": scores(six, "six-models"),
        "six_models_rounds": loss_and_accuracy([(cell.label, cell, "test") for cell in six.cells], "round", "six-models-rounds"),
        "six_models_epochs": loss_and_accuracy([(cell.label, cell, "test") for cell in six.cells], "epoch", "six-models-epochs"),
        "curves": loss_and_accuracy(
            [(name, studies["curves"].tables[0].cells[0], part) for part, name in PARTS.items()], "epoch", "curves"
        ),
        "heterogeneity": grid_map(studies["heterogeneity"].tables[0], "heterogeneity"),
        "sparsity": by_density(sparsity, dense),
        "calibration": scores(calibration, "calibration"),
        "schedules": scores(one_place["schedules"], "schedules"),
        "forgetting": forgotten_cost(of_seeds(studies["forgetting"], "forget"), "forgetting"),
        "arithmetic": along(of_seeds(studies["arithmetic"], "sweep"), "sweep", "arithmetic"),
    }
    drawn = {name: chart for name, chart in charts.items() if chart}
    assert drawn.keys() == charts.keys(), charts.keys() - drawn.keys()
    return drawn


def widened(chart: Chart) -> Chart:
    """Return the chart in the width of a page, with room for names in a wider font than the one it is laid out with."""
    spec = {**chart.spec, "padding": {"left": 22, "right": 12, "top": 3, "bottom": 3}}
    if "concat" in spec:
        columns = spec["columns"]
        width = WIDTH // columns - (46 if columns > 1 else NAMES)
        spec["concat"] = [{**view, "width": width} for view in spec["concat"]]
    else:
        spec["width"] = WIDTH
    return replace(chart, spec=spec)


def finding(study: StudyResult) -> TableResult:
    """Return the masks by score, their places at random, and random masks in one kind of weight, under names that explain themselves."""
    cells = [cell for name in ("score or place", "places") for cell in tables(study)[name].cells]
    return TableResult("places", "", [replace(cell, label=PLACES.get(cell.label, f"random in {cell.label}")) for cell in cells])


def tables(study: StudyResult) -> dict[str, TableResult]:
    return {table.name: table for table in study.tables}


def mean(table: TableResult, label: str) -> float:
    accuracy = next(cell for cell in table.cells if cell.label == label).summary("test_accuracy")
    assert accuracy is not None
    return accuracy.mean


def loss_and_accuracy(lines: list[tuple[str, CellResult, str]], unit: str, key: str) -> Chart:
    panels = {"loss": 1, "accuracy (%)": 100}
    series = [
        Series(name, points, panel=panel, scale=scale)
        for panel, scale in panels.items()
        for name, cell, part in lines
        if (points := cell.mean_curve(unit, f"{part}_{panel.split()[0]}"))
    ]
    return line_chart(key, "Loss and accuracy", "", series, unit, "", Style(share=False))


def by_density(table: TableResult, levels: dict[str, float]) -> Chart:
    points = [(float(cell.values["mask.density"]), accuracy) for cell in table.cells if (accuracy := cell.summary("test_accuracy"))]
    series, style = [Series("least_sensitive", sorted(points), scale=100)], replace(ACCURACY, log=True)
    return line_chart("sparsity", "Density", "", series, "density of the mask", TEST, style, levels=levels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page or figure is outdated")
    check, pages = parser.parse_args().check, updated()
    outdated = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in outdated:
        print(f"{'outdated' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(pages[path], encoding="utf-8")
    if not outdated:
        print("all pages and figures are up to date")
    return 1 if check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
