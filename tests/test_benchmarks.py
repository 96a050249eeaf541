"""Benchmarks and scripts are run by hand: what they take from the package must still be there."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
OPTIONAL = ("fedlens.deploy",)  # needs the environment of its extra


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_it_imports_is_there(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "fedlens"
            and not str(node.module).startswith(OPTIONAL)
        ):
            module = import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or import_module(f"{node.module}.{name.name}"), f"{node.module} has no {name.name}"


def test_there_are_benchmarks() -> None:
    assert len(FILES) > 5
