"""`fedlens report`: everything into one folder. Made from numbers alone, so that it can be made again anywhere."""

from pathlib import Path

from fedlens.files import write_atomic
from fedlens.report.html import html_report
from fedlens.report.latex import write_files
from fedlens.study.processes import make_folder
from fedlens.study.results import Gathered


def write_report(gathered: Gathered, out: Path, title: str | None = None) -> Path:
    """index.html, results.md, results.csv, tables/, figures/, paper.tex and, where a TeX engine is found, paper.pdf; returns the page."""
    make_folder(out)
    write_atomic(out / "index.html", html_report(gathered, title))
    write_files(gathered, out)
    return out / "index.html"
