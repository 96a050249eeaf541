"""Client shards: every scheme assigns each training sample to exactly one client.

iid: stratified. classes: exactly Nc classes per client. dirichlet: class proportions drawn per client (Hsu et al. 2019), in turns or balanced.
A scheme takes (labels, clients, rng) and, if it names them, classes_per_client and alpha; it returns the owner of each sample.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedlens.errors import UserError, bad_value
from fedlens.registry import Registry, accepted
from fedlens.seeding import numpy_rng

CHAINS, CHAINED = 1000, 10_000  # limits of samples moved along chains, and of clients for which chains are tried
TRIES = 8  # assignments of classes to clients to try while client sizes differ by more than one sample
Index = NDArray[np.int64]
Labels = NDArray[np.int64] | torch.Tensor | Sequence[int]


def partition(
    labels: Labels, clients: int, scheme: str = "iid", *, classes_per_client: int | None = None, alpha: float | None = None, seed: int = 0
) -> list[Index]:
    """Return the sorted indices of each client's samples: disjoint, and together all samples."""
    y, assign = _as_array(labels), SCHEMES.choose(scheme, "data.partition")
    if clients < 1:
        raise bad_value("federated.clients", clients, ">= 1")
    options = accepted(assign, {"classes_per_client": classes_per_client, "alpha": alpha})
    owner = np.asarray(assign(y, clients, numpy_rng(seed, "partition"), **options))
    if owner.shape != y.shape or not np.issubdtype(owner.dtype, np.integer) or owner.min() < 0 or owner.max() >= clients:
        raise UserError(f"data.partition: {scheme!r} must return a client in 0..{clients - 1} for each of {len(y)} samples.")
    order = np.argsort(owner, kind="stable")  # stable: indices stay sorted within a client
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _as_array(labels: Labels) -> Index:
    y = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if y.ndim != 1 or len(y) == 0 or not np.issubdtype(y.dtype, np.integer) or (y < 0).any():
        raise UserError(f"partition: labels must be a non-empty vector of integers >= 0, got {y.dtype} of shape {y.shape}.")
    return y.astype(np.int64)


def iid(y: Index, clients: int, rng: np.random.Generator) -> Index:
    """Stratify: client sizes differ by at most 1, and so do the counts of each class."""
    order = np.lexsort((rng.random(len(y)), y))  # by class, at random within a class
    owner = np.empty(len(y), np.int64)
    owner[order] = rng.permutation(clients)[np.arange(len(y)) % clients]
    return owner


def by_classes(y: Index, clients: int, rng: np.random.Generator, *, classes_per_client: int | None = None) -> Index:
    """Give each client exactly Nc distinct classes and each class some client, with sizes as equal as the class counts allow."""
    y = np.unique(y, return_inverse=True)[1]
    counts, nc = np.bincount(y), classes_per_client
    if nc is None or nc < 1:
        raise bad_value("data.classes_per_client", nc, ">= 1 for data.partition=classes")
    if nc > len(counts):
        raise bad_value("data.classes_per_client", nc, f"at most the number of classes, {len(counts)}")
    if clients * nc < len(counts):
        expected = f">= {-(-len(counts) // clients)} for {clients} clients (else some of {len(counts)} classes are without a client)"
        raise bad_value("data.classes_per_client", nc, expected)
    if np.minimum(counts, clients).sum() < clients * nc:
        raise UserError(f"data.classes_per_client: {clients} clients x {nc} classes need more samples than the data's {len(y)}.")
    holders = _slots(counts, clients, clients * nc)
    # How equal sizes get depends on which classes share a client: take the best of a few assignments.
    plans: list[tuple[int, Index, Index]] = []
    while len(plans) < TRIES and not (plans and plans[-1][0] <= 1):
        held = _mix(_assign(holders, clients, nc, counts, rng), rng)  # [clients, nc]
        sizes = _level(held, counts, rng)  # [clients, nc]: samples of each held class
        plans.append((int(np.ptp(sizes.sum(1))), held, sizes))
    _, held, sizes = min(plans, key=lambda plan: plan[0])
    owner = np.empty(len(y), np.int64)
    order = np.lexsort((rng.random(len(y)), y))
    by_class = np.lexsort((rng.random(held.size), held.ravel()))  # every (client, class) slot, classes in order
    owner[order] = np.repeat(np.repeat(np.arange(clients), nc)[by_class], sizes.ravel()[by_class])
    return owner


def _slots(counts: Index, clients: int, total: int) -> Index:
    """Return how many clients hold each class: proportional to its count, at least 1, at most all clients or its samples."""
    cap = np.minimum(counts, clients)
    slots = np.ones_like(counts)
    while (left := total - slots.sum()) > 0:
        open_ = slots < cap
        want = np.where(open_, np.maximum(counts * (total / counts.sum()) - slots, 1e-9), 0.0)
        share = want * left / want.sum()
        step = np.minimum(np.floor(share).astype(np.int64), cap - slots)
        if step.sum() == 0:  # the last slots go to the largest remainders
            best = np.argsort(-np.where(open_, share, -1.0), kind="stable")[: min(int(left), int(open_.sum()))]
            step[best] = 1
        slots += step
    return slots


def _assign(slots: Index, clients: int, nc: int, counts: Index, rng: np.random.Generator) -> Index:
    """Return the classes of each client [clients, nc], with these margins: each class goes to the clients with most room (Gale-Ryser)."""
    room, load = np.full(clients, nc), np.zeros(clients)
    held = np.full((clients, nc), -1)
    # Large shares first, so that the smaller ones can even out the loads.
    for c in np.lexsort((rng.random(len(slots)), -counts / slots)):
        chosen = np.lexsort((rng.random(clients), load, -room))[: slots[c]]
        held[chosen, nc - room[chosen]] = c
        room[chosen] -= 1
        load[chosen] += counts[c] / slots[c]
    return held


def _mix(held: Index, rng: np.random.Generator, sweeps: int = 20) -> Index:
    """Swap classes of equal share between random pairs of clients, in place, to undo the order of the greedy assignment."""
    clients, nc = held.shape
    if nc == 1 or clients < 2:
        return held
    share = 1.0 / np.bincount(held.ravel())  # classes with the same number of holders are interchangeable
    for _ in range(sweeps):
        pairs = rng.permutation(clients)[: clients // 2 * 2].reshape(-1, 2)
        left, right = pairs[:, 0], pairs[:, 1]
        i, j = rng.integers(nc, size=len(left)), rng.integers(nc, size=len(left))
        a, b = held[left, i], held[right, j]
        valid = (share[a] == share[b]) & ~(held[left] == b[:, None]).any(1) & ~(held[right] == a[:, None]).any(1)
        held[left[valid], i[valid]], held[right[valid], j[valid]] = b[valid], a[valid]
    return held


def _level(held: Index, counts: Index, rng: np.random.Generator, sweeps: int = 200) -> Index:
    """Return samples per held class [clients, nc] that make client sizes as equal as possible.

    Coordinate descent on the sum of squared sizes, one class at a time: a convex problem with separable constraints, so it finds the best.
    """
    sizes = np.zeros(held.shape, np.int64)
    slots = [np.nonzero(held == c) for c in range(len(counts))]
    for c, (holders, where) in enumerate(slots):  # start from an even split
        even = np.full(len(holders), counts[c] // len(holders))
        even[rng.permutation(len(holders))[: counts[c] % len(holders)]] += 1
        sizes[holders, where] = even
    total = sizes.sum(1)
    for _ in range(sweeps):
        if total.max() - total.min() <= 1:
            break
        before = sizes.copy()
        for c, (holders, where) in enumerate(slots):
            rest = total[holders] - sizes[holders, where]
            poured = _pour(rest, int(counts[c]))
            total[holders], sizes[holders, where] = rest + poured, poured
        if (sizes == before).all():
            break
    for _ in range(CHAINS if len(held) <= CHAINED else 0):  # integer descent can stop one short: move the rest along chains
        if total.max() - total.min() <= 1 or not _shift(held, sizes, total, slots):
            break
    return sizes


def _shift(held: Index, sizes: Index, total: Index, slots: list[tuple[Index, ...]]) -> bool:
    """Move one sample along a chain of shared classes from a largest client to one smaller by two; return False if no chain exists."""
    most = total.max()
    queue = deque(np.flatnonzero(total == most).tolist())
    previous: dict[int, tuple[int, int, int] | None] = dict.fromkeys(queue)  # client -> (giver, giver's slot, own slot)
    poured: set[int] = set()
    while queue:
        giver = queue.popleft()
        for i, c in enumerate(held[giver].tolist()):
            if c in poured or sizes[giver, i] < 2:
                continue
            poured.add(c)
            for taker, j in zip(*(where.tolist() for where in slots[c]), strict=True):
                if taker in previous:
                    continue
                previous[taker] = (giver, i, j)
                queue.append(taker)
                if total[taker] <= most - 2:
                    total[taker] += 1
                    while (step := previous[taker]) is not None:
                        sizes[taker, step[2]] += 1
                        sizes[step[0], step[1]] -= 1
                        taker = step[0]
                    total[taker] -= 1
                    return True
    return False


def _pour(rest: Index, amount: int) -> Index:
    """Return integers x >= 1 summing to `amount` that make rest + x as level as possible."""
    floor = np.sort(rest + 1)
    spare = amount - len(rest)
    filled = np.arange(1, len(floor) + 1) * floor - np.cumsum(floor)  # water needed to reach the k-th floor
    k = int(np.searchsorted(filled, spare, side="right"))
    level, extra = divmod(int(spare + np.cumsum(floor)[k - 1]), k)
    x = np.maximum(level - rest, 1)
    wet = np.nonzero(level - rest >= 1)[0]
    x[wet[:extra]] += 1
    return x


def dirichlet(y: Index, clients: int, rng: np.random.Generator, *, alpha: float | None = None) -> Index:
    """Make equal sizes, with class proportions per client from Dir(alpha x prior), renormalised as classes run out.

    As in pfl-research, clients draw in turn: the last ones get what is left, whatever their proportions. `dirichlet_balanced` has no turns.
    """
    counts, prior, wanted = _dirichlet_sizes(y, clients, rng, alpha)
    left, taken = counts.copy(), np.zeros((clients, len(counts)), np.int64)
    for client in rng.permutation(clients):
        law = _log_dirichlet(rng, prior)
        while (missing := wanted[client] - taken[client].sum()) > 0:
            still = np.where(left > 0, law, -np.inf)
            share = np.exp(still - still.max())  # renormalised over the classes that are left
            drawn = np.minimum(rng.multinomial(missing, share / share.sum()), left)
            taken[client] += drawn
            left -= drawn
    return _owners(y, taken, rng)


def dirichlet_balanced(y: Index, clients: int, rng: np.random.Generator, *, alpha: float | None = None) -> Index:
    """Make equal sizes, with class proportions per client from Dir(alpha x prior), all fitted at once to the class counts."""
    y = np.unique(y, return_inverse=True)[1]
    counts, prior, wanted = _dirichlet_sizes(y, clients, rng, alpha)
    share = np.stack([_log_dirichlet(rng, prior) for _ in range(clients)])  # [clients, classes], logarithms
    for _ in range(100):  # Sinkhorn: scale rows to the clients' sizes, then columns to the class counts
        for axis, target in ((1, np.maximum(wanted, 1e-9)[:, None]), (0, counts)):
            share -= share.max(axis, keepdims=True)
            share += np.log(target / np.exp(share).sum(axis, keepdims=True))
    edges = np.rint(np.cumsum(np.exp(share), 0)).astype(np.int64)
    edges[-1] = counts
    taken = np.diff(edges, axis=0, prepend=0)  # exact per class; client sizes are still a few samples off
    over = taken.sum(1) - wanted
    givers, takers = (np.repeat(np.arange(clients), excess.clip(0)) for excess in (over, -over))
    for giver, taker in zip(rng.permutation(givers), takers, strict=True):
        c = np.where(taken[giver] > 0, share[taker], -np.inf).argmax()  # the class that suits the taker best
        taken[giver, c] -= 1
        taken[taker, c] += 1
    return _owners(y, taken, rng)


def _dirichlet_sizes(y: Index, clients: int, rng: np.random.Generator, alpha: float | None) -> tuple[Index, NDArray[np.float64], Index]:
    """Return samples per class, alpha x prior, and samples per client."""
    if alpha is None or not alpha > 0 or not np.isfinite(alpha):
        raise bad_value("data.alpha", alpha, "> 0 for data.partition=dirichlet")
    counts = np.bincount(y)
    wanted = np.full(clients, len(y) // clients)
    wanted[rng.permutation(clients)[: len(y) % clients]] += 1
    return counts, alpha * (counts / counts.sum()), wanted


def _owners(y: Index, taken: Index, rng: np.random.Generator) -> Index:
    """Return the owner of each sample, drawn so that each client has `taken` [clients, classes] samples."""
    owner = np.empty(len(y), np.int64)
    order = np.lexsort((rng.random(len(y)), y))
    owner[order] = np.repeat(np.tile(np.arange(len(taken)), taken.shape[1]), taken.T.ravel())
    return owner


def _log_dirichlet(rng: np.random.Generator, concentration: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of a draw from Dir(concentration), up to a constant: for a small alpha the shares themselves underflow."""
    law = np.full(len(concentration), -np.inf)
    seen = concentration > 0
    a = np.maximum(concentration[seen], 1e-300)  # so that the division below stays finite
    law[seen] = np.log(rng.standard_gamma(a + 1)) + np.log1p(-rng.random(len(a))) / a  # Gamma(a) = Gamma(a + 1) · U^(1/a)
    return law


SCHEMES: Registry[Callable[..., Index]] = Registry("partition", iid, dirichlet, supplied=("classes_per_client", "alpha"))
SCHEMES.register(dirichlet_balanced)
SCHEMES.register(by_classes, "classes")


@dataclass(frozen=True)
class PartitionStats:
    """Statistics of a partition, saved with the run."""

    clients: int
    samples: int
    size_min: int
    size_max: int
    size_mean: float
    classes_min: int
    classes_max: int
    classes_mean: float
    label_entropy: float  # mean over clients, in nats
    tv_distance: float  # mean over clients of the total-variation distance to the global label distribution

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def label_counts(labels: Labels, shards: Sequence[Index]) -> NDArray[np.int64]:
    """Return sample counts [clients, classes]."""
    y = _as_array(labels)
    return np.stack([np.bincount(y[shard], minlength=int(y.max()) + 1) for shard in shards])


def partition_stats(labels: Labels, shards: Sequence[Index]) -> PartitionStats:
    """Return the sizes, classes and label distributions of shards."""
    counts = label_counts(labels, shards)
    sizes, classes = counts.sum(1), (counts > 0).sum(1)
    law = counts / np.maximum(sizes, 1)[:, None]
    whole = counts.sum(0) / counts.sum()
    entropy = -(law * np.log(np.where(law > 0, law, 1.0))).sum(1)
    held = sizes > 0  # a client without samples has no label distribution
    rows = {"size": sizes, "classes": classes}
    return PartitionStats(
        clients=len(shards),
        samples=int(sizes.sum()),
        **{f"{name}_{how}": getattr(values, how)().item() for name, values in rows.items() for how in ("min", "max", "mean")},
        label_entropy=float(entropy[held].mean()),
        tv_distance=float((np.abs(law - whole).sum(1) / 2)[held].mean()),
    )
