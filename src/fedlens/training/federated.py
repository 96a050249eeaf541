"""Federated fine-tuning: the loop of McMahan et al. (2017).

    round t:  Δ_k = LocalSGD(θ_t; D_k) − θ_t;   d = merge({Δ_k});   θ_{t+1} = server_step(θ_t, d)

How the local steps are executed is up to the engine; algorithms.py has what an algorithm changes, lens/merging.py the merge rules,
optim/server.py the server optimizers. All randomness is keyed by (seed, round, client).
"""

import logging
import math
from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.config import Config
from fedlens.data.partition import Index, label_counts, partition, partition_stats
from fedlens.engine.ranks import Ranks
from fedlens.engine.sampling import cohort_size, survives, training_cohort
from fedlens.errors import UserError, bad_value
from fedlens.lens.mask import Mask
from fedlens.lens.merging import RULES, merge_rows
from fedlens.lens.space import ParamSpace
from fedlens.optim.schedules import learning_rate
from fedlens.optim.server import Server
from fedlens.runs.folder import RunFolder
from fedlens.runs.identity import origin_of
from fedlens.runs.session import Session, Summary
from fedlens.runs.store import PARTITION_FILE, to_json
from fedlens.seeding import torch_rng
from fedlens.training.algorithms import ALGORITHMS, make_algorithm
from fedlens.training.bench import Bench
from fedlens.training.clients import Clients, Site
from fedlens.training.head_and_mask import fit_head_and_mask, masked_space
from fedlens.training.privacy import Privacy
from fedlens.training.updates import Arrived, ClientTraffic, Ledger, Totals

log = logging.getLogger("fedlens")


def train(bench: Bench, clients: Clients, session: Session, ranks: Ranks) -> Summary | None:
    """Train θ over the rounds that are left; return the summary on the first process."""
    cfg, fed = bench.config, bench.config.federated
    algorithm, privacy = make_algorithm(cfg), Privacy(cfg, session.secret, session.broadcast)
    ledger, totals = Ledger(fed.client_vectors, bench.device, algorithm), Totals()

    # Before round 0: the head in closed form, then the mask. A resumed run reads both from its folder.
    mask = session.start(bench.model, lambda: fit_head_and_mask(bench, clients, session.broadcast))
    space = masked_space(bench, mask)
    server = Server(cfg.server, bench.model, space)  # θ and the optimizer's moments
    traffic = ClientTraffic(clients)
    session.restore(server=server, algorithm=algorithm, privacy=privacy, totals=totals, ledger=ledger, traffic=traffic)
    begin_clients(bench, clients, server, session, mask)
    session.begin(lambda test: evaluate(bench, server, 0, test=test))  # θ₀, round 0 of every curve

    for t in session.steps(fed.rounds):
        lr = learning_rate(cfg.optim, t / fed.rounds, 1 / fed.rounds)
        cohort = training_cohort(cfg, t)
        present = [k for k in cohort if survives(cfg.seed, t, k, fed.dropout_rate)]
        privacy.begin_round(cohort)
        totals.begin_round(clients.traffic)

        # 1. Local training. Updates arrive in client order; those that are not finite or too long are dropped and counted.
        arrived = Arrived(cfg, algorithm, privacy, lr, t, expected=len(present))
        updates = clients.updates(t, cohort, present, server.theta, algorithm.local_rule(lr), algorithm.offsets(server.theta))
        arrived.collect(updates, ranks, space.size)
        totals.add(arrived, len(cohort), clients.traffic)

        # 2. Merge: d = merge({Δ_k}). Under noise, a round without updates must look like any other.
        moved: dict[str, Any] = {"update_norm": 0.0}
        if arrived.count or (privacy.on and present):
            d = algorithm.direction(merge(bench, clients, server, arrived, t), arrived.sizes)
            d = privacy.release(d, arrived.count, len(present), t)

            # 3. Server step: θ ← θ + α·d, or an optimizer.
            alpha = session.broadcast(choose_alpha(bench, server, d)) if cfg.server.alphas else cfg.server.lr
            ledger.add(arrived, alpha)
            moved = {"update_norm": server.step(d, alpha, t)} | ({"alpha": alpha} if cfg.server.alphas else {})
        else:
            arrived.check_progress()  # stops a run whose updates are all not finite

        # 4. Validate, record, checkpoint.
        last = t + 1 == fed.rounds
        evaluated = last or (t + 1) % fed.eval_every == 0
        scores = evaluate(bench, server, t + 1, val=evaluated, test=session.tests_after(t + 1))
        line = {"round": t + 1, "lr": lr} | arrived.metrics() | moved | privacy.spent() | traffic.bytes() | scores
        session.record(t + 1, line, evaluated=evaluated, last=last)

    # The model that validation chose meets the test set, once.
    facts = {"rounds": session.last_step, "best_round": session.best_step, "engine": clients.name, "ranks": ranks.world}
    facts |= totals.state_dict() | traffic.bytes() | privacy.spent() | bench.description(space)
    return session.finish(bench.model, bench.test, facts, "server", "ledger", write=partial(write_client_vectors, bench, space, ledger))


def begin_clients(bench: Bench, clients: Clients, server: Server, session: Session, mask: Mask | None) -> None:
    """Send space and mask to the clients, which start from the restored θ. The mask's bytes count as calibration traffic."""
    cfg = bench.config
    warn_of_useless_trim(cfg)
    before = clients.traffic.down
    clients.begin(server.space, mask, fresh=session.fresh)
    facts = session.start_facts["mask"]
    if session.fresh and facts:  # a copy: runs of one process share the cached mask and its facts
        session.start_facts["mask"] = {**facts, "bytes_down": facts["bytes_down"] + clients.traffic.down - before}
    if session.folder:
        words = (cfg.federated.algorithm, clients.name, cfg.federated.clients, f"{server.space.size:,}")
        log.info("%s, %s engine, %d clients, %s trainable parameters", *words)


def warn_of_useless_trim(cfg: Config) -> None:
    """Warn if the merge rule trims a share of the cohort that is less than one client."""
    trim = {**RULES.options(cfg.server.merge), **cfg.server.merge_options}.get("trim")
    sampled = cohort_size(cfg.federated.clients, cfg.federated.participation)
    if trim is not None and trim * sampled + 1e-9 < 1:
        log.warning("server.merge_options.trim: %g of %d clients cuts no client; this is the plain mean", trim, sampled)


def merge(bench: Bench, clients: Clients, server: Server, arrived: Arrived, round_: int) -> Tensor:
    """Return d = merge({Δ_k}) by the rule that server.merge names. The mean is a running sum; other rules need every update at once."""
    c = bench.config.server
    if not arrived.count:
        return torch.zeros_like(server.theta)
    if c.merge == "mean":
        return arrived.sums.mean()
    who = [update.client for update in arrived.updates]
    wants_fishers = "fishers" in signature(RULES[c.merge]).parameters
    return merge_rows(
        c.merge,
        arrived.rows(),
        torch.tensor([float(update.samples) for update in arrived.updates]),
        c.merge_options,
        seed=bench.config.seed,
        round=round_,
        clients=who,
        sizes=server.space.active_sizes(),
        fishers=clients.fishers(who, server.theta) if wants_fishers else None,
    )


def choose_alpha(bench: Bench, server: Server, d: Tensor) -> float:
    """Return the α of server.alphas for which θ + α·d has the lowest loss on validation; of equals the first."""
    c, losses = bench.config.server, []
    some = torch.randperm(len(bench.val), generator=torch_rng(bench.config.seed, "alpha"))[: c.alpha_samples]
    for alpha in c.alphas:
        server.write(server.theta + alpha * d)
        losses.append(bench.evaluate(bench.val, samples=some)[0])
    return c.alphas[int(np.argmin(np.nan_to_num(losses, nan=np.inf)))]


def evaluate(bench: Bench, server: Server, round_: int, *, val: bool = True, test: bool = False) -> dict[str, Any]:
    """Return loss and metrics of θ after a round, on validation and on test, as far as they are wanted."""
    if val or test:
        server.write()
    scores = bench.scores(val=val, test=test)
    if not math.isfinite(scores.get("val_loss", 0.0)):
        raise UserError(f"round {round_}: the validation loss is not finite; try a lower server.lr or optim.lr. No such model was saved.")
    return scores


def write_client_vectors(bench: Bench, space: ParamSpace, ledger: Ledger, folder: RunFolder) -> None:
    """Write each client's part of the final model into the run folder, if federated.client_vectors."""
    if ledger.on:
        folder.keep_client_vectors(ledger.vectors(space), bench.model.state_dict(), origin_of(bench.config, folder.path.name))


# --- before the loop -------------------------------------------------------------------------------------------------


def make_shards(bench: Bench) -> list[Index]:
    """Return each client's sample indices. Raises before a run exists if the partition is impossible."""
    d, cfg = bench.config.data, bench.config
    labels, clients = bench.dataset.train.labels, cfg.federated.clients
    too_many = bad_value("federated.clients", clients, f"at most {len(labels)}, the number of training samples, so that each has data")
    if clients > len(labels):
        raise too_many
    shards = partition(labels, clients, d.partition, classes_per_client=d.classes_per_client, alpha=d.alpha, seed=cfg.seed)
    if any(len(shard) == 0 for shard in shards):
        raise too_many
    return shards


def simulated(bench: Bench, shards: Sequence[Index], ranks: Ranks) -> Site:
    """Return all clients in this process, or in those of torchrun; excluded clients have no data."""
    cfg = bench.config
    algorithm = ALGORITHMS[cfg.federated.algorithm]
    held = {k: shard[:0] if k in cfg.federated.exclude else shard for k, shard in enumerate(shards)}
    return Site(bench, held, ranks, vectors=(algorithm.vectors_down, algorithm.vectors_up))


def describe_partition(bench: Bench, shards: Sequence[Index], run: RunFolder) -> None:
    """Write partition.json: statistics, and the label counts of up to 100 clients for the figure."""
    shards = [shard[:0] if k in bench.config.federated.exclude else shard for k, shard in enumerate(shards)]
    labels = bench.dataset.train.labels
    counts = label_counts(labels, shards)[:100].tolist()
    run.write(PARTITION_FILE, to_json({**partition_stats(labels, shards).as_dict(), "label_counts": counts}, compact=True))
