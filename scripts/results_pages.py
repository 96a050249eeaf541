"""Update the result tables and figures of README.md and docs/results.md from results/: python scripts/results_pages.py [--check]

A block from <!-- results: STUDY --> to <!-- end of results --> is replaced by the tables of that study, <!-- results: STUDY / TABLE --> by one
of its tables, <!-- results: STUDY / KIND --> by its analyses of that kind. --check writes nothing and fails if a page or figure is outdated.
"""

import argparse
import re
import sys
from pathlib import Path

import matplotlib

from fedlens.report.drawing import STYLE
from fedlens.report.figures import along_figure, dots_figure, forgotten_figure, length_figure
from fedlens.report.latex_across import rate_of
from fedlens.report.markdown import LENGTH, beside, escaped, layout, measured_table, rows_text, shown, with_sd
from fedlens.report.over_seeds import over_seeds
from fedlens.study.figures import as_svg
from fedlens.study.results import CellResult, StudyResult, TableResult, gather

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/results.md")
FIGURES = ROOT / "docs" / "figures"
TEST = "test accuracy, %"
BLOCK = re.compile(r"(<!-- results: (\w+)(?: / ([^\n]+?))? -->\n).*?(<!-- end of results -->)", re.DOTALL)


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
    rows = [[label, *map(entry, cells)] for label, cells in beside(study.tables)]
    return lines([TEST, *(shown(each.name) for each in study.tables)], rows)


def part(study: StudyResult, name: str) -> str:
    """Return one table of a study, or all its analyses of a kind."""
    table = next((table for table in study.tables if table.name == name), None)
    return f"{measured_table(over_seeds(study)[name])}\n" if table is None else of_table(table)


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
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "fedlens", "svg.fonttype": "path"}):
        figures = {
            "mask_rules": length_figure(studies["strategies"].tables[-1]),
            "places": dots_figure([*places["score or place"].cells, *places["places"].cells]),
            "forgetting": forgotten_figure(studies["forgetting"]),
            "arithmetic": along_figure(studies["arithmetic"]),
        }
        for name, figure in figures.items():
            assert figure is not None, name
            pages[FIGURES / f"{name}.svg"] = as_svg(figure)
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
