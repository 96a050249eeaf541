"""Seconds to select a tenth of the eligible coordinates of ViT-S/16, from scores without ties, with many, and all alike.

python benchmarks/mask_selection.py [--device cuda] [--threads 2]
"""

import argparse
import json
import statistics
import time

import torch

from fedlens.lens.mask_rules import select

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--repeat", type=int, default=5)
args = parser.parse_args()
torch.set_num_threads(args.threads)

SIZE, COUNT = 21_665_664, 2_158_502  # all of the backbone, and a tenth of what is eligible
g = torch.Generator().manual_seed(0)
among = torch.rand(SIZE, generator=g) < 0.9963  # the eligible share
cases = {
    "no ties": torch.rand(SIZE, generator=g) ** 8,
    "five values": torch.randint(5, (SIZE,), generator=g).float(),
    "all equal": torch.zeros(SIZE),
}
seconds = {}
for name, scores in cases.items():
    scores, where, times = scores.to(args.device), among.to(args.device), []
    for _ in range(args.repeat):
        at = time.perf_counter()
        assert int(select(scores, where, COUNT).sum()) == COUNT  # reading the sum waits for the device
        times.append(time.perf_counter() - at)
    seconds[name] = round(statistics.median(times), 4)
print(
    json.dumps(
        {"entries": SIZE, "kept": COUNT, "device": args.device, "threads": args.threads, "torch": torch.__version__, "seconds": seconds}
    )
)
