"""The six experiments, shortened, give the numbers that they gave when golden.json was recorded: a redesign changes none of them.

python tests/test_same_results.py --write    # record anew, after a change that is meant to change numbers
python tests/test_same_results.py --bits     # SHA-256 of each run's model: equal for two checkouts on one machine, thread and torch
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlens as fl

GOLDEN = Path(__file__).with_name("golden.json")
EXPERIMENTS = ["centralized", "fedavg_iid", "fedavg_noniid", "centralized_sparse", "fedavg_iid_sparse", "fedavg_noniid_sparse"]
SHORT = [  # images of half the size, half of them for validation
    "data=fashion_mini",
    "data.val_fraction=0.5",
    "model.image_size=14",
    "train.epochs=2",
    "federated.clients=10",
    "federated.participation=0.4",
    "federated.local_steps=2",
    "federated.rounds=4",
    "federated.eval_every=2",
    "mask.rounds=2",
    "mask.samples=100",
    "run.progress=false",
    "device=cpu",
]
TIMES = ("seconds", "round_seconds", "images_per_second")
CLOSE = 1e-5  # relative and absolute: what another processor may do to the last bits


def run(experiment: str, folder: Path) -> fl.Run:
    return fl.run([*SHORT, f"experiment={experiment}", f"run.dir={folder / experiment}"])


def leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings and lists but times, by where it is."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if key not in TIMES:
                yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list):
        for place, value in enumerate(content):
            yield from leaves(value, f"{path}.{place}")
    else:
        yield path, float(f"{content:.10g}") if isinstance(content, float) else content


def few_numbers(tensor: Tensor) -> list[float]:
    """Norm, mean, and the first, the middle and the last entry."""
    flat = tensor.double().flatten()
    return [float(f"{float(x):.10g}") for x in (flat.norm(), flat.mean(), flat[0], flat[len(flat) // 2], flat[-1])]


def numbers(found: fl.Run) -> dict[str, Any]:
    return {
        "metrics": [dict(leaves(line)) for line in found.metrics],
        "summary": dict(leaves(found.summary)),
        "model": {name: few_numbers(tensor) for name, tensor in sorted(found.state.items())},
    }


def bits(found: fl.Run) -> str:
    content = hashlib.sha256()
    for name, tensor in sorted(found.state.items()):
        content.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        content.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()


def assert_close(found: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    assert found.keys() == known.keys(), where
    for name, value in known.items():
        wanted = value if isinstance(value, str) or value is None else pytest.approx(value, rel=CLOSE, abs=CLOSE)
        assert found[name] == wanted, f"{where}: {name}"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_gives_the_numbers_that_were_recorded(experiment: str, tmp_path: Path) -> None:
    found, known = numbers(run(experiment, tmp_path)), json.loads(GOLDEN.read_text())[experiment]
    assert len(found["metrics"]) == len(known["metrics"])
    for number, (line, wanted) in enumerate(zip(found["metrics"], known["metrics"], strict=True), 1):
        assert_close(line, wanted, f"line {number} of metrics")
    assert_close(found["summary"], known["summary"], "summary")
    assert_close(found["model"], known["model"], "model")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="record golden.json anew")
    parser.add_argument("--bits", action="store_true", help="print the SHA-256 of each run's model")
    arguments = parser.parse_args()
    if not (arguments.write or arguments.bits):
        parser.error("--write or --bits")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDLENS_DATA"], os.environ["FEDLENS_WEIGHTS"] = f"{folder}/no-data", f"{folder}/no-weights"
        found = {experiment: run(experiment, Path(folder)) for experiment in EXPERIMENTS}
        if arguments.bits:
            for experiment, one in found.items():
                print(f"{bits(one)}  {experiment}")
        if arguments.write:
            lines = (f"{json.dumps(experiment)}: {json.dumps(numbers(one))}" for experiment, one in found.items())
            GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
