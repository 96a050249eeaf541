"""The result tables of README.md and docs/results.md, and their figures, from results/: python scripts/results_pages.py [--check]

A block between <!-- results: STUDY --> and <!-- end of results --> is written anew from the study of that name, <!-- results: STUDY / TABLE --> from
one table of it, <!-- results: STUDY / KIND --> from its analyses of that kind; the rest of a page is its author's.
--check writes nothing and fails where a page is behind the runs.
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
    """88.51 ± 0.25 (n = 3): test accuracy in percent and its standard deviation."""
    found = cell.summary("test_accuracy") if cell else None
    return f"{with_sd(found)} (n = {found.n})" if found else "not run yet"


def whole(study: StudyResult) -> str:
    """Cases down, values of the grid across; or the cells of all tables side by side."""
    grid = layout(study.tables[0])
    if grid:
        head = [TEST, *(f"{grid.key.rsplit('.', 1)[-1]} {value}" for value in grid.values)]
        return lines(head, [[case, *(entry(grid.at(case, value)) for value in grid.values)] for case in grid.cases])
    return lines(
        [TEST, *(shown(each.name) for each in study.tables)], [[label, *map(entry, cells)] for label, cells in beside(study.tables)]
    )


def part(study: StudyResult, name: str) -> str:
    """One table with the rates and how far clients move, or all analyses of a kind."""
    for table in study.tables:
        if table.name == name:
            return of_table(table)
    return f"{measured_table(over_seeds(study)[name])}\n"


def of_table(table: TableResult) -> str:
    rows = []
    for cell in table.cells:
        rate, length = rate_of(cell), cell.over_rounds(LENGTH)
        moved = [f"{length.mean:.2g}" if length else ""] if table.sends else []
        rows.append([cell.label, entry(cell), f"{rate:g}" if rate else "", *moved])
    return lines(["", TEST, "learning rate", *(["length of an update"] if table.sends else [])], rows)


def lines(head: list[str], rows: list[list[str]]) -> str:
    return rows_text(head, [[escaped(row[0]), *row[1:]] for row in rows]) + "\n"


def made() -> dict[Path, str]:
    """Every page and figure as it should be."""
    studies = {study.name: study for study in gather([ROOT / "results"]).studies}

    def block(found: re.Match[str]) -> str:
        study = studies[found[2]]
        return f"{found[1]}{part(study, found[3]) if found[3] else whole(study)}{found[4]}"

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
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is behind the runs")
    check, behind = parser.parse_args().check, []
    for path, text in made().items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            behind.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text, encoding="utf-8")
    print("\n".join(f"{'behind the runs' if check else 'written'}: {name}" for name in behind) or "all as the runs are")
    return 1 if check and behind else 0


if __name__ == "__main__":
    sys.exit(main())
