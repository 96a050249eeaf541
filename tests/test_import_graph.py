"""The rooms of the house: each imports only what stands to its right in ORDER."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedlens"
ORDER = [  # rooms of one entry do not import each other
    {"__init__", "__main__"},
    {"cli"},
    {"demo"},
    {"report"},
    {"study", "deploy"},
    {"training"},
    {"engine"},
    {"runs"},
    {"tasks"},
    {"models"},
    {"data"},
    {"optim"},
    {"lens"},
    {"overrides"},
    {"config"},
    {"precision"},
    {"registry", "files"},
    {"errors", "seeding"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}


def rooms_imported(code: str) -> Iterator[str]:
    """Every room that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedlens":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name if alias.name in RANK else "__init__" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fedlens."))


def wrong_arrows(modules: dict[str, str]) -> list[str]:
    """The imports of `modules` (path below src/fedlens -> code) that point to the left. The version is free for all."""
    wrong = []
    for path, code in modules.items():
        room = path.split("/")[0].removesuffix(".py")
        for target in rooms_imported(code):
            if target not in (room, "__init__") and RANK[target] <= RANK[room]:
                wrong.append(f"{path} imports {target}")
    return wrong


def modules() -> dict[str, str]:
    return {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}


def test_no_import_points_back() -> None:
    assert wrong_arrows(modules()) == []


def test_every_room_is_in_the_order() -> None:
    rooms = {path.split("/")[0].removesuffix(".py") for path in modules()} - {"conf"}
    assert rooms == set(RANK)


@pytest.mark.parametrize(
    ("path", "line", "arrow"),
    [
        ("lens/mask.py", "from fedlens.training.bench import Bench", "lens/mask.py imports training"),
        ("runs/session.py", "def f():\n    import fedlens.training.run", "runs/session.py imports training"),
        ("study/plan.py", "from fedlens.deploy.launch import server", "study/plan.py imports deploy"),
        ("config.py", "from fedlens import lens", "config.py imports lens"),
    ],
)
def test_an_arrow_that_points_back_fails(path: str, line: str, arrow: str) -> None:
    assert wrong_arrows(modules() | {path: line}) == [arrow]
