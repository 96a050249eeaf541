"""Benchmarks and scripts are run by hand: what they take from the package must still be there."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
from conftest import FAST

from fedlens.data.partition import partition
from fedlens.overrides import compose
from fedlens.training.bench import set_up

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


def test_a_round_of_each_contender_of_the_gpu_benchmark_trains_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu_round = import_module("gpu_round")
    bench = set_up(compose([*FAST, "experiment=fedavg_iid", "federated.clients=20", "device=cpu", "optim.batch_size=2"]))
    contenders = gpu_round.contenders(bench)
    for name in ("plain", "sequential", "cohort"):  # the others compile, or need a GPU
        assert contenders[name]()(0) == 2 * 4 * 2, name


def test_the_growth_benchmark_times_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = set_up(compose([*FAST, "experiment=fedavg_iid", "device=cpu"]))
    shards = partition(bench.dataset.train.labels, 20, "iid")
    assert len(import_module("growth").rounds(bench, shards, cohort=2, steps=1, repeat=1)) == 1
