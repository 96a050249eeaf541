"""How a round grows: with the number of clients K, the cohort, local steps J and the model; on this machine's CPU or GPU.

    python benchmarks/growth.py --out benchmarks/records/DATE-growth

K: the embedded images' labels, tiled so that every client has data. Partition time, a round's time and the process's memory should not
care whether K is 100 or 100,000. All rounds: the default engine, 4 steps × 16 images, 10 clients, unless it is what varies.
"""

import argparse
import json
import platform
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from fedlens.data.partition import partition
from fedlens.engine.choice import choose_engine
from fedlens.engine.local_work import plan_round
from fedlens.engine.sampling import sample_cohort
from fedlens.lens.diagnostics import RoundSums
from fedlens.lens.space import ParamSpace
from fedlens.models import SHAPES
from fedlens.models.vit import ViT, ViTShape
from fedlens.overrides import compose
from fedlens.training.algorithms import FedAvg
from fedlens.training.bench import Bench, set_up

TILES = 40  # 5,400 training images x 40: two samples a client at K = 100,000


def rounds(bench: Bench, shards: list, cohort: int, steps: int, repeat: int) -> list[float]:
    """Seconds of each round, planning included, after one to warm up."""
    space = ParamSpace.of(bench.model)
    engine = choose_engine(bench.config, bench.model, space, bench.task, bench.train, bench.precision)
    theta, rule, times = space.read(bench.model), FedAvg(bench.config).local_rule(1e-3), []
    for r in range(repeat + 1):
        at = time.perf_counter()
        chosen = sample_cohort(0, r, len(shards), cohort / len(shards))
        work = plan_round(0, r, chosen, shards, steps=steps, batch=16, draw=bench.task.draw)
        sums = RoundSums()
        for u in engine.updates(theta, work, rule):
            sums.add(u.delta, float(u.delta.norm()), float(u.samples), float(u.loss))
        theta = theta + sums.mean()
        times.append(time.perf_counter() - at)
    return times[1:]


def row(what: str, value: object, times: list[float], images: int, **more: object) -> dict[str, object]:
    seconds = statistics.median(times)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {"varies": what, "value": value, "seconds_a_round": round(seconds, 4), "images_a_second": round(images / seconds)}
    found |= {"peak_rss_gib_so_far": round(rss, 2), "n": len(times), **more}
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="without suffix: .json is added")
    args = parser.parse_args()
    torch.set_num_threads(2)
    bench = set_up(compose(["experiment=fedavg_iid", "device=auto"]))
    samples, rows = len(bench.train), []
    labels = np.tile(bench.dataset.train.labels.numpy(), TILES)
    for clients in (100, 1_000, 10_000, 100_000):
        at = time.perf_counter()
        shards = [s % samples for s in partition(labels, clients, "classes", classes_per_client=2)]
        took = time.perf_counter() - at
        rows.append(row("clients K", clients, rounds(bench, shards, 10, 4, args.repeat), 640, partition_seconds=round(took, 2)))
    shards = partition(bench.dataset.train.labels, 100, "iid")
    for cohort in (1, 2, 5, 10, 20, 50, 100):
        rows.append(row("cohort", cohort, rounds(bench, shards, cohort, 4, args.repeat), 64 * cohort))
    for steps in (1, 4, 16):
        rows.append(row("local steps J", steps, rounds(bench, shards, 10, steps, args.repeat), 160 * steps))
    for depth, dim in ((3, 64), (6, 128), (12, 192)):
        bench.model = ViT(ViTShape(SHAPES["tiny"].patch, dim, depth, dim // 32, 28), 10).to(bench.device)
        size = sum(p.numel() for p in bench.model.parameters())
        rows.append(row("model parameters", size, rounds(bench, shards, 10, 4, args.repeat), 640, depth=depth, dim=dim))
    if args.out:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
        record = {"device": where, "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}
        args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
