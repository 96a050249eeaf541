"""Mask rules compared, each at its own learning rate: CIFAR-100, ViT-S/16, 224 px, density 0.1, one seed, one GPU.

    python benchmarks/mask_rules.py --root DATA --weights dino_vits16.pth --out record.jsonl
    python benchmarks/mask_rules.py --table record.jsonl        # the table again, without a GPU

Two settings: Nc=1 with J=16 and 25 rounds, IID with J=4 and 60 rounds (K=100, C=0.1, B=64, momentum 0.9). Rules want rates that differ by a
factor of 100, so each gets a search on validation: short runs (a fifth of the rounds) at three rates a factor of 3 apart, and up to
three more beyond an end while that end is the best; then one whole run at the winner, whose test accuracy is the table's. Lines are appended as they
come and what is there is not run again.
"""

import argparse
import functools
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import fedlens as fl
import fedlens.training.bench as setup
from fedlens.errors import UserError
from fedlens.lens.mask_rules import STRATEGIES

SETTINGS = {
    "nc1": ["experiment=fedavg_noniid", "data.classes_per_client=1", "federated.local_steps=16"],
    "iid": ["experiment=fedavg_iid", "federated.local_steps=4"],
}
ROUNDS = {"nc1": 25, "iid": 60}
RATES = {  # where the search starts: (Nc=1 J=16, IID J=4); dense first
    None: (1e-4, 4e-4),
    "least_sensitive": (2e-3, 5e-3),
    "qk_only": (6e-4, 1.5e-3),
    "random_layerwise": (6e-4, 1.5e-3),
    "highest_magnitude": (3e-4, 8e-4),
    "random": (3e-4, 8e-4),
    "lowest_magnitude": (3e-4, 8e-4),
    "most_sensitive": (1e-4, 4e-4),
}
FACTOR, EXTRA = 3.0, 3  # of the search; how often it may go beyond an end


def share_work() -> None:
    """All runs have one data set: read it once (features and masks are shared anyway)."""
    setup.load_dataset = functools.lru_cache(setup.load_dataset)


class Table:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.lines = args, []
        if args.out.exists():
            self.lines = [json.loads(line) for line in args.out.read_text().splitlines()]
        self.scratch = args.out.parent / "scratch"
        self.scratch.mkdir(parents=True, exist_ok=True)

    def run(self, setting: str, strategy: str | None, lr: float, rounds: int, kind: str) -> dict[str, Any]:
        for line in self.lines:
            if (line["setting"], line["strategy"], line["kind"]) == (setting, strategy, kind) and abs(line["lr"] / lr - 1) < 1e-6:
                return line
        began, folder = time.monotonic(), self.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        options = [
            *SETTINGS[setting],
            "model=dino_vits16",
            "data=cifar100",
            f"data.root={self.args.root}",
            f"model.weights={self.args.weights}",
        ]
        options += [
            f"optim.lr={lr}",
            f"federated.rounds={rounds}",
            f"federated.eval_every={rounds}",
            "train.compile=true",
            "train.eval_batch_size=500",
        ]
        options += [f"run.dir={folder}", "run.progress=false", "run.keep_last=1", *self.args.options]
        options += ["train.test=false"] * (kind == "search")
        kept = self.scratch / f"{strategy}.safetensors"
        if strategy:
            options += [f"mask.strategy={strategy}", "mask.density=0.1"]
            options += [f"mask.path={kept}"] if kept.exists() else []
            like = self.scratch / "least_sensitive.safetensors"
            options += [f"mask.like={like}"] if strategy == "random_layerwise" and not kept.exists() else []
        torch.cuda.reset_peak_memory_stats()
        try:
            found = fl.run(options)
        except UserError as error:  # no finite update: a rate that is too high
            line = {"val_accuracy": 0.0, "error": str(error)}
        else:
            s = found.summary
            if strategy and not kept.exists():
                shutil.copy(found.path / "mask.safetensors", kept)
            line = {key: s[key] for key in ("val_accuracy", "test_accuracy", "bytes_up", "bytes_down")}
            line |= {"ridge_val_accuracy": s["ridge"]["val_accuracy"], "mask": s["mask"]}
            line |= {key: found.metrics[-1][key] for key in ("drift_ratio", "cosine", "sign_conflict", "train_loss")}
            seconds = [m["round_seconds"] for m in found.metrics[1:-1]]  # the first one compiles, the last one evaluates
            line |= {"round_seconds": statistics.median(seconds or [0.0]), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        line = {
            "setting": setting,
            "strategy": strategy,
            "kind": kind,
            "lr": lr,
            "rounds": rounds,
            **line,
            "seconds": time.monotonic() - began,
        }
        with self.args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        print(setting, strategy, kind, f"lr {lr:.2e}: val {100 * line['val_accuracy']:.2f} ({line['seconds']:.1f} s)", flush=True)
        return line

    def search(self, setting: str, strategy: str | None) -> float:
        rounds, centre = max(1, ROUNDS[setting] // 5), RATES[strategy][list(SETTINGS).index(setting)]
        tried = {lr: self.run(setting, strategy, lr, rounds, "search")["val_accuracy"] for lr in (centre, centre * FACTOR, centre / FACTOR)}
        for _ in range(EXTRA):
            best = max(tried, key=lambda lr: tried[lr])
            if best not in (min(tried), max(tried)):
                break
            lr = best * FACTOR if best == max(tried) else best / FACTOR
            tried[lr] = self.run(setting, strategy, lr, rounds, "search")["val_accuracy"]
        return max(tried, key=lambda lr: tried[lr])

    def ridge(self) -> None:
        """The head alone: a round at a rate that moves nothing."""
        self.run("nc1", None, 1e-30, 1, "ridge")

    def everything(self) -> None:
        share_work()
        self.ridge()
        for setting in SETTINGS:
            for strategy in RATES:
                self.run(setting, strategy, self.search(setting, strategy), ROUNDS[setting], "final")


def markdown(lines: list[dict[str, Any]]) -> str:
    """Test accuracy by rule and setting, the rate that validation chose, and where the mask lies."""
    kinds = ("query", "key", "value", "attention output", "mlp in", "mlp out", "norm", "patch embedding")
    head = ["rule", *(f"{s}: test %, n = 1 | val % | lr of tried | sign conflict" for s in SETTINGS), *(f"{k} %" for k in kinds)]
    rows = ["| " + " | ".join(head) + " |"]
    rows.append("| --- |" + " ---: |" * (rows[0].count("|") - 2))
    for line in (x for x in lines if x["kind"] == "ridge"):
        cell = f"{100 * line['test_accuracy']:.2f} | {100 * line['val_accuracy']:.2f} | - | -"
        rows.append(f"| ridge only | {cell} | {cell} |" + " - |" * len(kinds))
    for strategy in RATES:
        cells, mask = [], None
        for setting in SETTINGS:
            mine = [x for x in lines if (x["setting"], x["strategy"]) == (setting, strategy)]
            final = [x for x in mine if x["kind"] == "final"]
            if not final:
                cells.append("- | - | - | -")
                continue
            tried = sorted({x["lr"] for x in mine if x["kind"] == "search"})
            mask = final[-1]["mask"]
            cells.append(
                f"{100 * final[-1]['test_accuracy']:.2f} | {100 * final[-1]['val_accuracy']:.2f} | {final[-1]['lr']:.1e} of "
                + ", ".join(f"{lr:.0e}" for lr in tried)
                + f" | {final[-1]['sign_conflict']:.3f}"
            )
        shares = [f"{100 * mask['composition'][k]['share']:.1f}" if mask else "-" for k in kinds]
        rows.append(f"| {strategy or 'dense'} | " + " | ".join(cells + shares) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    assert set(RATES) == {None, *STRATEGIES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with cifar-100-binary")
    parser.add_argument("--weights", help="ViT-S/16 checkpoint")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("options", nargs="*", help="further overrides, for a trial")
    args = parser.parse_args()
    if args.table:
        print(markdown([json.loads(line) for line in args.table.read_text().splitlines()]))
    else:
        table = Table(args)
        table.everything()
        print(markdown(table.lines))
