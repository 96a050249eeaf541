"""The notebooks run from top to bottom on the embedded default, with the interpreter of the tests, and are kept without outputs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs fedlens[notebooks]")
pytest.importorskip("nbclient", reason="needs fedlens[notebooks]")
pytest.importorskip("ipykernel", reason="needs fedlens[notebooks]")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MINUTES = 10  # for a cell: a busy machine is no error


def read(path: Path) -> "nbformat.NotebookNode":
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of matplotlib's with its list of fonts: where that takes long to make, matplotlib says so in the notebook."""
    folder = tmp_path_factory.mktemp("matplotlib")
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], env={**os.environ, "MPLCONFIGDIR": str(folder)}, check=True)
    return folder


def executed(path: Path, folder: Path, fonts: Path) -> "nbformat.NotebookNode":
    """The notebook with its outputs, from a process of its own: its kernel is this interpreter on one thread, whatever kernels the user has."""
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = folder / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": argv, "display_name": "fedlens tests", "language": "python"}))
    own = {name: str(folder / name.lower()) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    own["MPLCONFIGDIR"] = str(fonts)
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
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path, fonts: Path) -> None:
    outputs = [output for cell in executed(path, tmp_path, fonts).cells for output in cell.get("outputs", [])]
    assert any("image/svg+xml" in output.get("data", {}) or "image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert list((tmp_path / "work").glob("**/summary.json"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_installs_only_what_is_missing(path: Path) -> None:
    cells = read(path).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert 'find_spec("fedlens") is None' in code[0].source
    assert not any(line.lstrip().startswith(("%pip", "!")) for cell in code[1:] for line in cell.source.splitlines())
    assert "GPU" in cells[0].source
