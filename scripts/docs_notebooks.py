"""Execute the notebooks and write them as pages of the documentation: python scripts/docs_notebooks.py (five minutes on one core).

The notebooks themselves are kept without outputs; `make docs` only renders the pages, so that it needs no training. Run this after a change of a notebook.
"""

import argparse
import base64
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import indent

import nbformat
from nbclient import NotebookClient
from results_pages import smaller

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "notebooks"
INSTALLATION = '??? note "First cell: install fedlens where it is missing"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted((ROOT / "notebooks").glob("*.ipynb")))
    PAGES.mkdir(exist_ok=True)
    for path in parser.parse_args().notebooks:
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as work:
            NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": work}}).execute()
        for old in PAGES.glob(f"{path.stem}-*"):
            old.unlink()
        (PAGES / f"{path.stem}.md").write_text("\n\n".join(page(notebook, path.stem)) + "\n", encoding="utf-8")


def page(notebook: nbformat.NotebookNode, name: str) -> Iterator[str]:
    """Yield the parts of a page, and write its figures beside it."""
    figures = 0
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            yield cell.source
            if number == 0:
                yield f"*Executed on CPU cores. Download [{name}.ipynb]({name}.ipynb).*"
            continue
        code = f"```python\n{cell.source}\n```"
        yield f"{INSTALLATION}\n\n{indent(code, '    ')}" if number == 1 else code
        for printed, outputs in groupby(cell.outputs, lambda output: output.output_type == "stream"):
            if printed and (text := "".join(output.text for output in outputs).strip()):
                yield f"```text\n{text}\n```"
            for data in [] if printed else [output.data for output in outputs]:
                if "image/svg+xml" in data or "image/png" in data:
                    figures += 1
                    yield figure(data, f"{name}-{figures}")
                else:
                    yield f"```text\n{data['text/plain']}\n```"


def figure(data: dict[str, str], name: str) -> str:
    if "image/svg+xml" in data:
        (PAGES / f"{name}.svg").write_text(smaller(data["image/svg+xml"]), encoding="utf-8")
        return f"![Output of the cell]({name}.svg)"
    (PAGES / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
    return f"![Output of the cell]({name}.png)"


if __name__ == "__main__":
    main()
