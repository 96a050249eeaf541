"""Update the result tables and figures of README.md and docs/results.md from results/: python scripts/results_pages.py [--check]

A block from <!-- results: STUDY --> to <!-- end of results --> is replaced by the tables of that study, <!-- results: STUDY / TABLE --> by one
of its tables, <!-- results: STUDY / KIND --> by its analyses of that kind. --check writes nothing and fails if a page or figure is outdated.
"""

import argparse
import re
import sys
from pathlib import Path

from fedlens.report.blocks import label
from fedlens.report.charts import along, forgotten_cost, lengths, scores
from fedlens.report.markdown import escaped, rows_text
from fedlens.report.over_seeds import HEADS, LENGTH, beside, layout, of_seeds, over_seeds, rate_of
from fedlens.report.vega import render
from fedlens.study.results import CellResult, StudyResult, TableResult, gather
from fedlens.study.statistics import Summary

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/results.md")
FIGURES = ROOT / "docs" / "figures"
TEST = "test accuracy, %"
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
        head = [TEST, *(f"{grid.key.rsplit('.', 1)[-1]} {value}" for value in grid.values)]
        return lines(head, [[case, *(entry(grid.at(case, value)) for value in grid.values)] for case in grid.cases])
    rows = [[name, *map(entry, cells)] for name, cells in beside(study.tables)]
    return lines([TEST, *(label(each.name) for each in study.tables)], rows)


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
    return lines(["", TEST, "learning rate", *(["length of an update"] if table.sends else [])], rows)


def lines(head: list[str], rows: list[list[str]]) -> str:
    return rows_text(head, [[escaped(row[0]), *row[1:]] for row in rows]) + "\n"


def updated() -> dict[Path, str]:
    """Return path -> content of every page and figure."""
    studies = {study.name: study for study in gather([ROOT / "results"]).studies}

    def block(match: re.Match[str]) -> str:
        study = studies[match[2]]
        return f"{match[1]}{part(study, match[3]) if match[3] else whole(study)}{match[4]}"

    pages = {ROOT / name: BLOCK.sub(block, (ROOT / name).read_text(encoding="utf-8")) for name in PAGES}
    places = {table.name: table for table in studies["places"].tables}
    both = TableResult("places", "", [*places["score or place"].cells, *places["places"].cells])
    charts = {
        "mask_rules": lengths(studies["strategies"].tables[-1], "mask-rules"),
        "places": scores(both, "places"),
        "forgetting": forgotten_cost(of_seeds(studies["forgetting"], "forget"), "forgetting"),
        "arithmetic": along(of_seeds(studies["arithmetic"], "sweep"), "sweep", "arithmetic"),
    }
    for name, chart in charts.items():
        assert chart is not None, name
        for suffix, dark in (("", False), ("-dark", True)):
            pages[FIGURES / f"{name}{suffix}.svg"] = render(chart, "svg", dark).decode()
    return pages


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
