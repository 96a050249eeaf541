"""`fedlens report`: write all files of a report. They are made from numbers alone, so any machine can make them again."""

import logging
from pathlib import Path

from fedlens.errors import UserError
from fedlens.files import write_atomic
from fedlens.report.blocks import Chart, Table
from fedlens.report.content import report
from fedlens.report.html import page
from fedlens.report.latex import compile_pdf, numbers, table_float
from fedlens.report.markdown import csv_rows, markdown
from fedlens.report.paper import write_paper
from fedlens.report.vega import save
from fedlens.study.processes import make_folder
from fedlens.study.results import Gathered

log = logging.getLogger("fedlens")


def write_report(gathered: Gathered, out: Path, title: str | None = None, figures: bool = False, paper: str | None = None) -> Path:
    """Write index.html, results.md, results.csv and tables/; return the page. `figures`: also figures/ as PDF and PNG.

    `paper`: also a paper of this document class ("": the default) with its figures, and its PDF if TeX is installed.
    """
    contents = report(gathered, title)
    texts = {"index.html": page(contents), "results.md": markdown(contents), "results.csv": csv_rows(gathered)}
    texts["tables/numbers.tex"] = numbers(gathered)
    texts |= {f"tables/{block.key}.tex": table_float(block) for block in contents.walk() if isinstance(block, Table)}
    for folder in ("tables", *(["figures"] if figures else [])):
        make_folder(out / folder)
    for name, text in texts.items():
        write_atomic(out / name, text)
    for block in contents.walk() if figures else ():
        if isinstance(block, Chart):
            save(block, out / "figures" / block.key, ("pdf", "png"))
    if paper is not None:
        write_paper(gathered, contents, out, paper)
        try:
            compile_pdf(out)
        except UserError as error:  # an edited paper, or a TeX that lacks a package: the other files are complete
            log.warning("no paper.pdf: %s", error)
    return out / "index.html"
