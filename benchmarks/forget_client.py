"""Forgetting a client that is a class (K = 10, Nc = 1, embedded data): negation of what it added, against retraining without it.

python benchmarks/forget_client.py [--retrain 0,2,3] [--keep 0.95] [--work folder] --out record.json

Each client of a dense and of a sparse federation is forgotten by θ_T − α·τ_k, α chosen on validation; those of --retrain are also
trained without, from the head on. Accuracy on the test set: target, the client's class; control, the nine others.
"""

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import fedlens as fl
from fedlens.runs.environment import environment
from fedlens.study.forget import forget_client

FEDERATION = [
    "federated.clients=10",
    "federated.participation=1",  # every client adds in every round
    "federated.rounds=8",
    "federated.eval_every=2",
    "optim.clip_norm=1",
    "run.progress=false",
]
VARIANTS = {
    "dense": ["experiment=fedavg_noniid", "optim.lr=0.01"],
    # a mask from the clients' own images, so that retraining without one leaves it out of the mask too
    "sparse": ["experiment=fedavg_noniid_sparse", "optim.lr=0.1", "mask.scope=federated", "mask.samples=32"],
}


def train(work: Path, name: str, overrides: list[str]) -> fl.Run:
    return fl.run([*overrides, *FEDERATION, f"run.dir={work / name}", "run.if_exists=resume"])


def forgotten(run: fl.Run, client: int, keep: float, without: list[fl.Run]) -> dict[str, Any]:
    found = forget_client(run, client, keep=keep, without=without)
    before, after = found["before"], found["after"]
    return {
        "client": client,
        "class": ", ".join(found["classes"]),
        "alpha": after["alpha"],
        "validation": {
            k: round(p[f"val_{w}"], 4) for w in ("target", "control") for k, p in ((f"{w}_before", before), (f"{w}_after", after))
        },
        "before": {w: round(before[f"test_{w}"], 4) for w in ("target", "control")},
        "negated": {w: round(after[f"test_{w}"], 4) for w in ("target", "control")},
        "half_gone": after["test_target"] <= 0.5 * before["test_target"],
        "control_kept": round(after["test_control"] / before["test_control"], 4),
        "retrained": {w: round(again[f"test_{w}"], 4) for w in ("target", "control")} if (again := found.get("retrained")) else None,
    }


def reached(rows: list[dict[str, Any]]) -> dict[str, str]:
    """How many clients lost at least half of the target while at least 95 % of the control stayed, on the test set."""
    found = {}
    for variant in VARIANTS:
        these = [r["half_gone"] and r["control_kept"] >= 0.95 for r in rows if r["variant"] == variant]
        found[variant] = f"{sum(these)} of {len(these)}"
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | client's class | α | target: before | negated | retrained | control: before | negated | kept | retrained |",
        "|" + " --- |" * 10,
    ]
    for r in rows:
        again = r.get("retrained")
        cells = [r["variant"], r["class"], f"{r['alpha']:g}"]
        for w in ("target", "control"):
            cells += [f"{100 * r['before'][w]:.1f}", f"{100 * r['negated'][w]:.1f}"]
            cells += [f"{100 * r['control_kept']:.1f} %"] if w == "control" else []
            cells += [f"{100 * again[w]:.1f}" if again else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--retrain", default="0,2,3", help="clients to train without, for comparison")
    parser.add_argument("--keep", type=float, default=0.95, help="of the control on validation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", help="folder for the runs; finished ones in it are used again")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    logging.getLogger("fedlens").setLevel(logging.WARNING)
    work = Path(args.work or tempfile.mkdtemp(prefix="fedlens-forget-"))
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "federation": FEDERATION,
        "variants": VARIANTS,
        "seed": args.seed,
        "keep": args.keep,
    }
    started = time.monotonic()
    for variant, overrides in VARIANTS.items():
        options = [*overrides, f"seed={args.seed}"]
        run = train(work, variant, [*options, "federated.client_vectors=true"])
        facts = {k: run.summary[k] for k in ("test_accuracy", "val_accuracy", "best_round", "trainable_parameters")}
        record[variant] = facts | {"start_val_accuracy": run.summary["ridge"]["val_accuracy"]}
        for client in run.client_vectors():
            without = []
            if str(client) in args.retrain.split(","):
                without = [train(work, f"{variant}-without-{client}", [*options, f"federated.exclude=[{client}]"])]
            rows.append({"variant": variant, **forgotten(run, client, args.keep, without)})
            print(rows[-1], flush=True)
    record |= {"reached": reached(rows), "rows": rows, "seconds": round(time.monotonic() - started), "environment": environment()}
    Path(args.out).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(table(rows), record["reached"], sep="\n")


if __name__ == "__main__":
    main()
