"""Federated fine-tuning: the loop of McMahan et al. (2017), top to bottom.

    a round:  sample a cohort;  Θ ← θ;  J local steps each;  Δ_k = Θ_k − θ;  d = merge(Δ);  θ ← server_step(θ, d)

How the local steps are executed is the engine's affair, what an algorithm changes is in algorithms.py, how updates are merged
in lens/merging.py, what the server does with the result in optim/server.py. All randomness is keyed by (seed, round, client).
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.config import Config
from fedlens.data.partition import Index, label_counts, partition, partition_stats
from fedlens.engine.local_work import Update
from fedlens.engine.ranks import Ranks
from fedlens.engine.sampling import cohort_size, survives, training_cohort
from fedlens.errors import UserError
from fedlens.lens.diagnostics import RoundSums
from fedlens.lens.mask_rules import Mask
from fedlens.lens.merging import checked
from fedlens.lens.merging import rule as merge_rule
from fedlens.lens.norms import l2
from fedlens.lens.space import ParamSpace
from fedlens.models.heads import choose_ridge
from fedlens.optim.server import server_step
from fedlens.runs.identity import origin_of
from fedlens.runs.progress import progress_bar
from fedlens.runs.store import MASK_FILE, RunFolder, fitting, write_json
from fedlens.runs.trackers import Trackers
from fedlens.seeding import torch_rng
from fedlens.training.algorithms import ALGORITHMS
from fedlens.training.bench import Bench, learning_rate, said
from fedlens.training.clients import Clients, Site
from fedlens.training.head_and_mask import make_mask, masked_space
from fedlens.training.privacy import Privacy

log = logging.getLogger("fedlens")


def make_shards(bench: Bench) -> list[Index]:
    """Who holds what. Raises before a run exists if the partition is impossible."""
    d, cfg = bench.config.data, bench.config
    shards = partition(
        bench.dataset.train.labels,
        cfg.federated.clients,
        d.partition,
        classes_per_client=d.classes_per_client,
        alpha=d.alpha,
        seed=cfg.seed,
    )
    if any(len(shard) == 0 for shard in shards):
        raise UserError(
            f"federated.clients: {len(shards)} clients for {len(bench.dataset.train)} training samples leave some without data; "
            f"allowed is at most {len(bench.dataset.train)}"
        )
    return shards


def simulated(bench: Bench, shards: Sequence[Index], ranks: Ranks) -> Site:
    """Every client in this process, or in the processes of torchrun; those that never take part have no data."""
    cfg = bench.config
    algorithm = ALGORITHMS[cfg.federated.algorithm]
    held = {k: shard[:0] if k in cfg.federated.exclude else shard for k, shard in enumerate(shards)}
    return Site(bench, held, ranks, vectors=(algorithm.vectors_down, algorithm.vectors_up))


def train(bench: Bench, clients: Clients, run: RunFolder | None, trackers: Trackers, ranks: Ranks) -> dict[str, Any]:
    """`run` is the folder on the first rank and None on the others, which hold the same server state."""
    cfg, fed, model, device = bench.config, bench.config.federated, bench.model, bench.device
    started = time.monotonic()
    algorithm = ALGORITHMS[fed.algorithm](cfg)
    needs_rows = cfg.server.merge != "mean"  # the mean is a running sum; other rules look at all updates side by side
    keeps_rows = needs_rows or fed.client_vectors
    needs_all = keeps_rows or fed.algorithm == "scaffold"  # on every rank
    traffic = clients.traffic
    asked = cohort_size(fed.clients, fed.participation)
    if cfg.server.merge == "trimmed_mean" and cfg.server.trim * asked + 1e-9 < 1:
        log.warning("server.trim: %g of %d clients cuts nobody: this is the plain mean", cfg.server.trim, asked)

    # --- where we are: at the start, or where the last sound checkpoint was written
    round_, seconds, stale, ridge, mask, facts = 0, 0.0, 0, None, None, None
    best: dict[str, Any] = {"score": None, "step": None}
    server: dict[str, Tensor] = {}
    added: dict[int, Tensor] = {}  # with federated.client_vectors: what each client has added to θ
    counts = {"dropped": 0, "nonfinite": 0, "refused": 0}
    private = Privacy(cfg, ranks.tell(run.secret() if run and cfg.privacy.noise else None), ranks.tell)
    saved = run.latest_checkpoint() if run else None
    state, tensors = ranks.tell((saved.state, saved.tensors) if saved else None) or (None, {})
    if state is not None:
        with fitting(run, state.get("step", 0)):
            model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
            server = {n.removeprefix("server."): t.to(device) for n, t in tensors.items() if n.startswith("server.")}
            added = {int(n.removeprefix("client.")): t.to(device) for n, t in tensors.items() if n.startswith("client.")}
            algorithm.load(tensors, device)
            round_, seconds, stale, ridge, facts = (state[key] for key in ("step", "seconds", "stale", "ridge", "mask"))
            best = {"score": state["best_score"], "step": state["best_step"]}
            counts = {key: state["counts"].get(key, 0) for key in counts}
        private.catch_up(round_)
        clients.recall(state.get("registry", {}))
        log.info("resuming at round %d of %d", round_, fed.rounds)
        mask = ranks.tell(Mask.load(run.path / MASK_FILE) if run and facts else None)
    else:
        if cfg.head == "ridge":  # step 0
            ridge = federated_ridge_head(bench, clients)
        if cfg.mask.strategy:  # step 1
            up, down = traffic.up, traffic.down
            mask, facts = ranks.tell(make_mask(bench, clients))
            traffic.up, traffic.down = up + facts["bytes_up"], down + facts["bytes_down"]  # also when another run has calibrated it
        if run:
            run.keep_start(model.state_dict(), mask)
    space = masked_space(bench, mask)
    down = traffic.down
    clients.begin(space, mask, fresh=state is None)
    if state is not None:
        with fitting(run, round_):
            traffic.up, traffic.down = traffic.up + state["counts"]["bytes_up"], traffic.down + state["counts"]["bytes_down"]
    elif facts is not None:
        facts = {**facts, "bytes_down": facts["bytes_down"] + traffic.down - down}
    theta = space.read(model)  # [P]
    if run:
        run.rewind_metrics(round_)
        log.info("%s, %s engine, %d clients, %s trainable parameters", fed.algorithm, clients.name, fed.clients, f"{space.size:,}")

    def save(score: float | None = None) -> None:
        if run is None:
            return
        state = {
            "seconds": seconds + time.monotonic() - started,
            "stale": stale,
            "ridge": ridge,
            "mask": facts,
            "best_score": best["score"],
            "best_step": best["step"],
            "counts": {**counts, "bytes_up": traffic.up, "bytes_down": traffic.down},
            "registry": clients.registry(),
        }
        space.write(model, theta)
        kept = {f"model.{n}": t for n, t in model.state_dict().items()} | {f"server.{n}": t for n, t in server.items()}
        kept |= {f"client.{k}": t for k, t in added.items()}
        told = state | ({} if score is None else {"score": score})
        # a round that must never be done again is on disk before the next one's model leaves: with other answers it would be another model
        run.save_checkpoint(round_, kept | algorithm.tensors(), told, wait=cfg.run.checkpoint_minutes == 0)

    last_save = time.monotonic()
    with progress_bar(cfg.experiment, fed.rounds, round_, cfg.run.progress and ranks.first) as bar:
        while round_ < fed.rounds and not enough(cfg, best, stale):
            began = time.monotonic()
            lr = learning_rate(cfg.optim, round_ / fed.rounds, 1 / fed.rounds)

            # --- a cohort, and what each of its clients will do
            cohort = training_cohort(cfg, round_)
            present = [c for c in cohort if survives(cfg.seed, round_, c, fed.dropout_rate)]
            counts["dropped"] += len(cohort) - len(present)

            # --- local training; each update is looked at, counted and added as it arrives
            sums, arrived, details, nonfinite, refused = RoundSums(), [], [], 0, 0
            private.sampled(cohort)
            counts["refused"], traffic.refused = counts["refused"] + traffic.refused, 0
            updates = clients.updates(round_, cohort, present, theta, algorithm.rule(lr), algorithm.offsets(theta))
            if needs_all:
                updates = iter(ranks.all_updates([_own(u) for u in updates], space.size, max(1, len(present))))
            for update in updates:
                norm, loss = l2(update.delta), float(update.loss)
                if not (np.isfinite(norm) and np.isfinite(loss)):
                    nonfinite += 1
                    log.warning("round %d: the update of client %d is not finite and was dropped", round_ + 1, update.client)
                    continue
                if cfg.server.norm_bound is not None and norm > cfg.server.norm_bound:
                    refused += 1
                    told = (round_ + 1, update.client, norm, cfg.server.norm_bound)
                    log.warning("round %d: the update of client %d has norm %.4g, server.norm_bound is %.4g; refused", *told)
                    continue
                algorithm.received(update, lr)
                bounded = norm * private.factor(norm)
                scale = algorithm.scale(update) * private.factor(norm)
                delta = update.delta if scale == 1.0 else update.delta * scale
                sums.add(delta, norm * scale, private.weight(update.samples), loss, went=bounded)
                kept = delta if keeps_rows else None  # in memory of its own: see needs_all
                arrived.append(Arrived(update.client, update.samples, update.steps, kept, update.clients))
                details.append({"client": update.client, "loss": loss, "norm": norm, "steps": update.steps})
            algorithm.end_round()
            if not needs_all:
                sums, arrived, nonfinite = ranks.all_sums(sums, space.size), ranks.joined(arrived), sum(ranks.joined([nonfinite]))
                details, refused = ranks.joined(details), sum(ranks.joined([refused]))
            refused += traffic.refused
            answered = sum(a.clients for a in arrived)
            counts["dropped"] += max(0, len(present) - answered - nonfinite - refused)  # of a deployment: those who did not answer
            counts["nonfinite"] += nonfinite
            counts["refused"], traffic.refused = counts["refused"] + refused, 0

            # --- d = merge(Δ); θ ← server_step(θ, d)
            moved, alpha, chose = 0.0, cfg.server.lr, False
            if sums.count or (cfg.privacy.noise and present):  # under noise a round in which nothing was accepted looks like any other
                d = torch.zeros_like(theta)
                if sums.count:
                    d = merge(bench, clients, space, theta, arrived, round_) if needs_rows else sums.mean()
                rescale = algorithm.rescale([(a.samples, a.steps) for a in arrived]) if arrived else 1.0
                d = private.noised(d if rescale == 1 else d * rescale, sums.count, len(present), round_)
                if cfg.server.alphas:
                    alpha, chose = ranks.tell(choose_alpha(bench, space, theta, d)), True
                if fed.client_vectors:
                    for a in arrived:
                        share = alpha * rescale * a.samples / sums.weight
                        added[a.client] = share * a.delta + added.get(a.client, 0.0)
                before, theta = theta, server_step(theta, d, server, replace(cfg.server, lr=alpha))
                moved = l2(theta - before)
                if not np.isfinite(moved):
                    raise UserError(
                        f"round {round_ + 1}: the server's step is not finite; a lower server.lr may help; no such model was saved"
                    )
            elif present and nonfinite == len(present):
                raise UserError(f"round {round_ + 1}: no client's update is finite; a lower optim.lr or optim.clip_norm=1 may help")
            round_ += 1

            # --- what there is to say; validation every few rounds and at the end
            line: dict[str, Any] = {
                "step": round_,
                "round": round_,
                "lr": lr,
                **(sums.metrics() if answered == len(arrived) else {"train_loss": sums.loss / sums.weight}),
                "update_norm": moved,
                **({"alpha": alpha} if chose else {}),
            }
            line |= private.spent()
            line |= {"clients": answered, "nonfinite": nonfinite, "bytes_up": traffic.up, "bytes_down": traffic.down}
            if fed.client_metrics:
                line["client_metrics"] = details
            score = None
            if round_ % fed.eval_every == 0 or round_ == fed.rounds:
                best, stale, score = evaluate(bench, space, theta, line, best, stale, round_)
            line["round_seconds"] = time.monotonic() - began
            line["seconds"] = seconds + time.monotonic() - started
            if run:
                run.append_metrics(line)
                trackers.log(line)
            if score is not None or (round_ == fed.rounds and best["step"] == round_):
                save(score)
                last_save = time.monotonic()
                shown = "" if score is None else f"validation accuracy {100 * score:.2f} %"
                if ranks.first:
                    log.info("round %d/%d: loss %.4f, %s", round_, fed.rounds, line.get("train_loss", float("nan")), shown)
                bar.advance(0, shown)
            elif time.monotonic() - last_save >= 60 * cfg.run.checkpoint_minutes:
                save()
                last_save = time.monotonic()
            bar.advance()

    # --- the model that validation chose meets the test set, once
    if run is None:
        return {}
    chosen = run.read_checkpoint(best["step"])
    if chosen is None:
        raise UserError(f"run.dir: the best checkpoint (round {best['step']}) is damaged; fedlens resume {run.path} makes it again")
    model.load_state_dict({n.removeprefix("model."): t for n, t in chosen.tensors.items() if n.startswith("model.")})
    tested = bench.test()
    elapsed = seconds + time.monotonic() - started
    summary = {
        **tested,
        "val_accuracy": best["score"],
        "seconds": elapsed,
        "rounds": round_,
        "best_round": best["step"],
        **counts,
        "bytes_up": traffic.up,
        "bytes_down": traffic.down,
        **private.spent(),
        "engine": clients.name,
        "ranks": ranks.world,
        **bench.description(space),
        "ridge": ridge,
        "mask": facts,
    }
    if fed.client_vectors:
        added = {int(n.removeprefix("client.")): t for n, t in chosen.tensors.items() if n.startswith("client.")}
        zeros = torch.zeros(space.dense_size, device=device)
        run.keep_client_vectors(
            {k: space.views(space.expand(v.to(device), zeros).cpu()) for k, v in added.items()},
            model.state_dict(),
            origin_of(cfg, run.path.name),
        )
    run.finish(summary, model.state_dict())
    trackers.finish(summary)
    log.info("%s (best round %d, %.0f s)", said(tested), best["step"], elapsed)
    return summary


@dataclass(frozen=True)
class Arrived:
    """An update that came; `delta` [P] only where it is needed once more."""

    client: int
    samples: int
    steps: int
    delta: Any
    clients: int = 1


def merge(bench: Bench, clients: Clients, space: ParamSpace, theta: Tensor, arrived: Sequence[Arrived], round_: int) -> Tensor:
    """d = merge(Δ) by the rule that server.merge names, with what each rule may want to know."""
    c, who = bench.config.server, [a.client for a in arrived]
    rows = torch.stack([a.delta for a in arrived])
    merged = merge_rule(c.merge)(
        rows,
        torch.tensor([float(a.samples) for a in arrived]),
        trim=c.trim,
        clip_norm=c.clip_norm,
        density=c.ties_density,
        drop=c.drop,
        seed=bench.config.seed,
        round=round_,
        clients=who,
        top=c.top,
        bottom=c.bottom,
        sizes=space.active_sizes(),
        fishers=clients.fishers(who, theta) if c.merge == "fisher" else None,
    )
    return checked(c.merge, merged, rows)


def choose_alpha(bench: Bench, space: ParamSpace, theta: Tensor, d: Tensor) -> float:
    """The α of server.alphas for which θ + α·d has the lowest loss on validation; of equals the first."""
    c, losses = bench.config.server, []
    some = torch.randperm(len(bench.val), generator=torch_rng(bench.config.seed, "alpha"))[: c.alpha_samples]
    for alpha in c.alphas:
        space.write(bench.model, theta + alpha * d)
        losses.append(bench.evaluate(bench.val, samples=some)[0])
    return c.alphas[int(np.argmin(np.nan_to_num(losses, nan=np.inf)))]


def _own(update: Update) -> Update:
    """An update whose vector is its own memory: an engine may use its buffers again."""
    return Update(update.client, update.samples, update.steps, update.delta.clone(), update.loss)


def enough(cfg: Config, best: Mapping[str, Any], stale: int) -> bool:
    """Patience is over or the target is reached: a function of what a checkpoint holds, so a resumed run stops where it would have."""
    target, patience = cfg.federated.target_accuracy, cfg.train.patience
    return (patience is not None and stale >= patience) or (target is not None and best["score"] is not None and best["score"] >= target)


def evaluate(
    bench: Bench, space: ParamSpace, theta: Tensor, line: dict[str, Any], best: dict[str, Any], stale: int, round_: int
) -> tuple[dict[str, Any], int, float | None]:
    """Validation of θ into the line of metrics; the best so far, how long ago, and this score. Without validation the last is best."""
    if not len(bench.val):
        return {"score": None, "step": round_ if round_ == bench.config.federated.rounds else None}, stale, None
    space.write(bench.model, theta)
    line["val_loss"], line["val_accuracy"] = bench.evaluate(bench.val)
    if not np.isfinite(line["val_loss"]):
        raise UserError(
            f"round {round_}: the validation loss is not finite; a lower server.lr or optim.lr may help; no such model was saved"
        )
    score: float = line["val_accuracy"]
    if best["score"] is None or score > best["score"]:
        return {"score": score, "step": round_}, 0, score
    return best, stale + 1, score


def federated_ridge_head(bench: Bench, clients: Clients) -> dict[str, Any]:
    """Step 0: each client sends its sums, the server adds and solves; λ and temperature from validation.

    The sums are additive, so this is the centralised head whatever the split.
    """
    A = b = None
    up, down = clients.traffic.up, clients.traffic.down
    for a_k, b_k in clients.ridge_sums():
        A, b = (a_k, b_k) if A is None or b is None else (A + a_k, b + b_k)
    if A is None or b is None:
        raise UserError("head: no client's sums for the ridge head are sound")
    choice = choose_ridge(A, b, bench.features(bench.val), bench.val.labels)
    bench.set_head(choice)
    return {
        "lambda": choice.lam,
        "temperature": choice.temperature,
        "val_accuracy": choice.val_accuracy,
        "bytes_up": clients.traffic.up - up,
        "bytes_down": clients.traffic.down - down,
    }


def describe_partition(bench: Bench, shards: Sequence[Index], run: RunFolder) -> None:
    """partition.json: statistics, and up to 100 clients' label counts for the figure."""
    if (run.path / "partition.json").exists():
        return
    shards = [shard[:0] if k in bench.config.federated.exclude else shard for k, shard in enumerate(shards)]
    labels = bench.dataset.train.labels
    shown = label_counts(labels, shards)[:100].tolist()
    write_json(run.path / "partition.json", {**partition_stats(labels, shards).as_dict(), "label_counts": shown}, compact=True)
