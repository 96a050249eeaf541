"""The notebooks run from top to bottom on the embedded default, with the interpreter of the tests, and are kept without outputs."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from textwrap import indent

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs fedlens[notebooks]")
pytest.importorskip("nbclient", reason="needs fedlens[notebooks]")
pytest.importorskip("ipykernel", reason="needs fedlens[notebooks]")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
PAGES = Path(__file__).parents[1] / "docs" / "notebooks"  # written by scripts/docs_notebooks.py
MINUTES = 10  # for a cell: a busy machine is no error


def read(path: Path) -> "nbformat.NotebookNode":
    return nbformat.read(path, as_version=4)


def executed(path: Path, folder: Path) -> "nbformat.NotebookNode":
    """The notebook with its outputs, from a process of its own: its kernel is this interpreter on one thread, whatever kernels the user has, and
    its data are small."""
    argv = [sys.executable, str(Path(__file__).with_name("small.py")), "-f", "{connection_file}"]
    spec = folder / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": argv, "display_name": "fedlens tests", "language": "python"}))
    own = {name: str(folder / name.lower()) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    copy = folder / "work" / path.name  # a notebook runs where it lies
    copy.parent.mkdir()
    shutil.copy(path, copy)
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", str(copy), "--inplace", f"--timeout={60 * MINUTES}"]
    done = subprocess.run(
        command, env={**os.environ, **own, "JUPYTER_PATH": str(folder), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return read(copy)


def test_there_are_four_notebooks() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["00", "01", "02", "03"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    outputs = [output for cell in executed(path, tmp_path).cells for output in cell.get("outputs", [])]
    assert any("image/svg+xml" in output.get("data", {}) or "image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert list((tmp_path / "work").glob("**/summary.json"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_installs_only_what_is_missing(path: Path) -> None:
    cells = read(path).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert code[0].source == read(NOTEBOOKS[0]).cells[1].source  # the tests below are of all four
    assert not any(line.lstrip().startswith(("%", "!")) for cell in code for line in cell.source.splitlines())
    assert "GPU" in cells[0].source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_has_its_cells_and_an_output_of_each_that_draws(path: Path) -> None:
    page = (PAGES / f"{path.stem}.md").read_text()
    sources = [indent(cell.source, "    ") if number == 1 else cell.source for number, cell in enumerate(read(path).cells)]
    places = [page.find(source) for source in sources]
    assert -1 not in places and places == sorted(places)  # else run scripts/docs_notebooks.py
    figures = {file.name for file in PAGES.glob(f"{path.stem}-*")}
    assert figures and figures == set(re.findall(rf"\(({path.stem}-\d+\.\w+)\)", page))
    assert all((PAGES / name).stat().st_size < 60 * 1024 for name in figures)


# --- the first cell ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a notebook runs, with a Colab's /content beside it."""
    monkeypatch.delenv("FEDLENS_SOURCE", raising=False)
    (tmp_path / "checkout" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "checkout" / "notebooks")
    return tmp_path


def project(folder: Path, name: str = "fedlens") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    return folder


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, found: ModuleSpec | None) -> list[str]:
    """What the first cell gives to pip where an import of fedlens finds this."""
    asked: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr("subprocess.run", lambda command, check: asked.append(command[-1]))
    exec(read(NOTEBOOKS[0]).cells[1].source.replace("/content", str(folder / "content")), {})
    return asked


def test_the_first_cell_does_nothing_where_fedlens_is_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(folder / "checkout")
    assert installed(folder, monkeypatch, importlib.util.find_spec("fedlens")) == []


def test_the_first_cell_installs_the_first_checkout_that_it_finds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("content/drive/MyDrive/fedlens", "content/fedlens", "checkout", "elsewhere"):
        project(folder / place)
        if place == "elsewhere":
            monkeypatch.setenv("FEDLENS_SOURCE", str(folder / place))
        assert installed(folder, monkeypatch, None) == [str(folder / place)]


def test_the_first_cell_passes_over_other_projects(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(folder / "checkout", "another")
    project(folder / "content" / "fedlens")
    assert installed(folder, monkeypatch, None) == [str(folder / "content" / "fedlens")]


def test_a_checkout_in_the_working_directory_is_not_taken_for_an_installed_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = project(folder / "content" / "fedlens")
    only_a_folder = PathFinder.find_spec("fedlens", [str(checkout.parent)])
    assert only_a_folder is not None
    assert installed(folder, monkeypatch, only_a_folder) == [str(checkout)]


@pytest.mark.parametrize("named", [None, "nowhere"])
def test_the_first_cell_says_what_to_do_where_there_is_no_checkout(
    named: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named:
        project(folder / "checkout")  # whoever names a folder wants that one
        monkeypatch.setenv("FEDLENS_SOURCE", named)
    with pytest.raises(
        FileNotFoundError, match=rf"^no checkout of fedlens in {named or '..'}.*fedlens .git clone.*set FEDLENS_SOURCE"
    ) as raised:
        installed(folder, monkeypatch, None)
    assert "\n" not in str(raised.value)
