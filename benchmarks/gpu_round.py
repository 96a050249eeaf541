"""Seconds a federated round, images a second, MFU and memory on one GPU: plain loop, sequential and cohort engines, the same work.

    python benchmarks/gpu_round.py --root DATA --weights dino_vits16.pth --out record.json

Work: ViT-S/16 at 224 px on CIFAR-100 in bf16, 10 clients × 4 steps × 64 images, SGD with momentum and clipping, augmentation on the
device. `one_model` is a single network at batch 640: clients side by side can hardly be faster than that. `masked_…`: the cohort engine under a
mask of density 0.1; `qk_only` leaves most tensors without an active entry.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from fedlens.engine.cohort import Cohort
from fedlens.engine.local_work import plan_round
from fedlens.engine.sampling import sample_cohort
from fedlens.engine.sequential import Sequential
from fedlens.lens.diagnostics import RoundSums
from fedlens.lens.mask_rules import build_mask
from fedlens.lens.space import ParamSpace
from fedlens.overrides import compose
from fedlens.tasks import select
from fedlens.training.algorithms import FedAvg
from fedlens.training.bench import Bench, set_up
from fedlens.training.federated import make_shards
from fedlens.training.head_and_mask import masked_space

FORWARD_FLOPS = 9.2e9  # an image through ViT-S/16 at 224 px: 12 blocks of 24·N·D² + 4·N²·D, N = 197, D = 384, and the patches
Round = Callable[[int], int]  # a round's number -> images trained on


def plain_loop(bench: Bench, shards: list) -> Round:
    """What one writes first: a copy of the model a client, torch.optim.SGD, an average of state dicts."""
    cfg = bench.config

    def round_(r: int) -> int:
        cohort = sample_cohort(cfg.seed, r, cfg.federated.clients, cfg.federated.participation)
        work = plan_round(cfg.seed, r, cohort, shards, steps=cfg.federated.local_steps, batch=cfg.optim.batch_size, draw=bench.task.draw)
        states, weights = [], []
        for k in range(len(cohort)):
            model = copy.deepcopy(bench.model).train()
            params = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(params, lr=cfg.optim.lr, momentum=cfg.optim.momentum)
            for j in range(cfg.federated.local_steps):
                inputs, labels = bench.task.batch(bench.train, work.index[k, j], select(work.draws, (k, j)))
                with bench.precision.autocast():
                    loss = F.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(params, cfg.optim.clip_norm)
                optimizer.step()
            states.append(model.state_dict())
            weights.append(float(work.samples[k]))
        total = sum(weights)
        mean = {n: sum(s[n] * (w / total) for s, w in zip(states, weights, strict=True)) for n in states[0]}
        bench.model.load_state_dict(mean)
        return work.index.numel()

    return round_


def engine_round(bench: Bench, shards: list, engine: Sequential | Cohort) -> Round:
    cfg, space, algorithm = bench.config, engine.space, FedAvg(bench.config)
    theta = space.read(bench.model)

    def round_(r: int) -> int:
        nonlocal theta
        cohort = sample_cohort(cfg.seed, r, cfg.federated.clients, cfg.federated.participation)
        work = plan_round(cfg.seed, r, cohort, shards, steps=cfg.federated.local_steps, batch=cfg.optim.batch_size, draw=bench.task.draw)
        sums = RoundSums()
        for u in engine.updates(theta, work, algorithm.local_rule(cfg.optim.lr)):
            sums.add(u.delta, float(u.delta.norm()), float(u.samples), float(u.loss))
        theta = theta + sums.mean()
        return work.index.numel()

    return round_


def one_model(bench: Bench) -> Round:
    """A single network at the cohort's whole batch: the ceiling of this model code."""
    model = torch.compile(copy.deepcopy(bench.model).train(), dynamic=False)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=1e-6, momentum=0.9)

    def round_(r: int) -> int:
        index = torch.randint(len(bench.train), (4, 640))
        draws = bench.task.draw((4, 640), torch.Generator().manual_seed(r))
        for j in range(4):
            inputs, labels = bench.task.batch(bench.train, index[j], select(draws, j))
            with bench.precision.autocast():
                loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return index.numel()

    return round_


def masked_round(bench: Bench, strategy: str) -> Round:
    """The cohort engine where a mask of density 0.1 says what may move."""
    own = replace(bench, config=copy.deepcopy(bench.config), model=copy.deepcopy(bench.model))
    own.config.train.compile = True
    space = masked_space(own, build_mask(own.model, strategy, 0.1))
    engine = Cohort(own.model, space, own.task, own.train, own.precision, compile=True)
    return engine_round(own, make_shards(own), engine)


def contenders(bench: Bench) -> dict[str, Callable[[], Round]]:
    shards, space = make_shards(bench), ParamSpace.of(bench.model)
    parts = (bench.model, space, bench.task, bench.train, bench.precision)
    return {
        "plain": lambda: plain_loop(bench, shards),
        "sequential": lambda: engine_round(bench, shards, Sequential(*parts)),
        "sequential_compiled": lambda: engine_round(bench, shards, Sequential(*parts, compile=True)),
        "cohort": lambda: engine_round(bench, shards, Cohort(*parts)),
        "cohort_compiled": lambda: engine_round(bench, shards, Cohort(*parts, compile=True)),
        "one_model": lambda: one_model(bench),
        "masked_random": lambda: masked_round(bench, "random"),
        "masked_highest_magnitude": lambda: masked_round(bench, "highest_magnitude"),
        "masked_qk_only": lambda: masked_round(bench, "qk_only"),
    }


def measure(name: str, make: Callable[[], Round], rounds: int, peak_flops: float) -> dict[str, object]:
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    round_ = make()
    round_(0)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    round_(1)
    torch.cuda.synchronize()
    times, images = [], 0
    for r in range(2, 2 + rounds):
        at = time.perf_counter()
        images = round_(r)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - at)
    seconds = statistics.median(times)
    return {
        "contender": name,
        "seconds_a_round": round(seconds, 4),
        "spread": [round(min(times), 4), round(max(times), 4)],
        "images_a_second": round(images / seconds),
        "mfu": round(3 * FORWARD_FLOPS * images / seconds / peak_flops, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_round_s": round(first, 1),
    }


def matmul_peak() -> float:
    """The rate of a large bf16 product on random data, FLOP/s: what MFU is measured against."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    at = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - at)


def profile(round_: Round, path: Path) -> None:
    """Where a round's GPU time goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    round_(90)
    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        round_(91)
        torch.cuda.synchronize()
    path.write_text(recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with cifar-100-binary")
    parser.add_argument("--weights", required=True, help="ViT-S/16 checkpoint")
    parser.add_argument("--only", help="contenders, comma-separated")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", type=Path, help="write the cohort engine's kernels here")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = ["experiment=fedavg_iid", "model=dino_vits16", "data=cifar100", f"data.root={args.root}", f"model.weights={args.weights}"]
    bench = set_up(compose([*options, "device=cuda"]))
    known, peak = contenders(bench), matmul_peak()
    rows = []
    for name in args.only.split(",") if args.only else known:
        rows.append(measure(name, known[name], args.rounds, peak))
        print(json.dumps(rows[-1]), flush=True)
    if args.profile:
        torch.compiler.reset()
        profile(known["cohort_compiled"](), args.profile)
    record = {
        "work": "ViT-S/16, 224 px, bf16, 10 clients x 4 steps x 64 images of CIFAR-100",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matmul_peak_tflops": round(peak / 1e12),
        "n": args.rounds,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
