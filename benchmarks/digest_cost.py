"""The share of a run's CPU time that digests take: python benchmarks/digest_cost.py"""

import functools
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import fedlens as fl
from fedlens.runs import digests, folder, store

CLIENTS = ["federated.clients=50", "federated.participation=0.2", "optim.batch_size=32", "device=cpu", "run.progress=false"]
RUNS = {
    "20 rounds, a checkpoint every other": ["experiment=fedavg_iid", "federated.rounds=20", "federated.eval_every=2"],
    "10 sparse rounds, a checkpoint each": [
        "experiment=fedavg_iid_sparse",
        "federated.rounds=10",
        "federated.eval_every=1",
        "mask.samples=100",
    ],
}
spent, inside = [0.0], threading.local()


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its CPU time counted once, whatever it calls."""

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if getattr(inside, "yes", False):
            return function(*args, **options)
        inside.yes, started = True, time.thread_time()
        try:
            return function(*args, **options)
        finally:
            spent[0] += time.thread_time() - started
            inside.yes = False

    return wrapper


def main() -> None:
    torch.set_num_threads(1)
    for name in ("sha256", "sha256_of_file", "write_all", "read", "written", "damaged", "verify", "to_text"):
        setattr(digests, name, timed(getattr(digests, name)))
    store.verify = folder.verify = digests.verify
    folder.sha256_of_file = digests.sha256_of_file
    folder.RunFolder.keep_digests = timed(folder.RunFolder.keep_digests)  # type: ignore[method-assign]
    for name, options in RUNS.items():
        spent[0], started = 0.0, time.process_time()
        with tempfile.TemporaryDirectory() as place:
            fl.run([*CLIENTS, *options, f"run.dir={place}/run"])
        total = time.process_time() - started
        print(f"{name}: {spent[0]:.3f} s of {total:.1f} s CPU, {100 * spent[0] / total:.2f} %", flush=True)


if __name__ == "__main__":
    main()
