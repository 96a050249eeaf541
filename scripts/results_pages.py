"""The result tables of README.md and docs/results.md, and their figure, from results/: python scripts/results_pages.py [--check]

A block between <!-- results: NAME --> and <!-- end of results --> is written anew from the study of that name; the rest of a page is its author's.
--check writes nothing and fails where a page is behind the runs.
"""

import argparse
import re
import sys
from pathlib import Path

import matplotlib

from fedlens.study.figures import as_svg
from fedlens.study.report.drawing import STYLE
from fedlens.study.report.figures import length_figure
from fedlens.study.report.markdown import beside, escaped, layout, shown, with_sd
from fedlens.study.results import CellResult, StudyResult, gather

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/results.md")
FIGURE = "docs/figures/mask_rules.svg"
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def entry(cell: CellResult | None) -> str:
    """88.51 ± 0.25 (n = 3): test accuracy in percent and its standard deviation."""
    found = cell.summary("test_accuracy") if cell else None
    return f"{with_sd(found)} (n = {found.n})" if found else "not run yet"


def table(study: StudyResult) -> str:
    """Cases down, values of the grid across; or the cells of all tables side by side."""
    grid = layout(study.tables[0])
    if grid:
        head = [f"{grid.key.rsplit('.', 1)[-1]} {value}" for value in grid.values]
        rows = [[case, *(entry(grid.at(case, value)) for value in grid.values)] for case in grid.cases]
    else:
        head = [shown(each.name) for each in study.tables]
        rows = [[label, *map(entry, cells)] for label, cells in beside(study.tables)]
    lines = [["test accuracy, %", *head], ["---"] * (1 + len(head)), *([escaped(row[0]), *row[1:]] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def made() -> dict[Path, str]:
    """Every page and figure as it should be."""
    studies = {study.name: study for study in gather([ROOT / "results"]).studies}
    found = {}
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        found[ROOT / name] = BLOCK.sub(lambda block: f"{block[1]}{table(studies[block[2]])}{block[3]}", text)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "fedlens", "svg.fonttype": "path"}):
        figure = length_figure(studies["strategies"].tables[-1])
        assert figure is not None
        found[ROOT / FIGURE] = as_svg(figure)
    return found


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
