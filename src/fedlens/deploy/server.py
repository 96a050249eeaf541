"""The server's side of the conversation, without Flower: clients on other machines, as the loop in training/federated.py sees them.

Every new site reports its clients. A site that misses the deadline, or whose reply is rejected, is left out of the round. Replies are put in client order
before anything is added, so the result does not depend on who answers first.
"""

import copy
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any, Protocol

import torch
from torch import Tensor

from fedlens import __version__
from fedlens.config import Config, RunConfig
from fedlens.deploy.protocol import Expected, Failure, NoReply, Payload, Rejected
from fedlens.deploy.site import SETUP, backbone_digest, from_upper_triangle, setup_shapes, whole_space
from fedlens.engine.local_work import Offsets, Update
from fedlens.engine.sampling import local_steps
from fedlens.errors import UserError
from fedlens.lens.mask import pack_bits
from fedlens.lens.mask_rules import Mask
from fedlens.lens.norms import l2
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import LocalRule
from fedlens.overrides import to_yaml
from fedlens.runs.cache import content_digest
from fedlens.training.bench import Bench
from fedlens.training.clients import Traffic

log = logging.getLogger("fedlens")
ATTEMPTS = 3  # per request, while fewer than deploy.min_fraction of the clients have answered
RETRY_SITE = 60.0  # seconds until a site that was left out is greeted again
GATHER_POLL = 1.0  # seconds between looks for new sites at the start
MAX_FEATURE_RATIO = 25.0  # a site's squared feature norms, relative to the largest of the server's validation images
RECENT_ROUNDS = 10  # whose median norms bound the length of an update
HELLO_DEADLINE = 60.0  # seconds: a dead site that Flower still lists must not hold up a round
RESUME_HINT = "the rounds before are saved; the same command resumes the run."


class Transport(Protocol):
    """The network between server and sites."""

    def sites(self) -> Collection[int]:
        """Return the numbers of the connected sites."""

    def may_have(self, site: int, client: int) -> bool:
        """Return whether the key of this site entitles it to this client."""

    def send(self, operation: str, payloads: Mapping[int, Payload], deadline: float) -> dict[int, Payload | Failure]:
        """Return each site's reply within `deadline` seconds, or why there is none."""

    def secure_mean(self, payloads: Mapping[int, Payload], round_: int, traffic: Traffic, **options: Any) -> tuple[Update | None, set[int]]:
        """Return the mean of the sites' updates (None: too few answered) and the sites that failed. Options: see `secure_mean` in secure.py."""


@dataclass(frozen=True)
class RemoteClient:
    """Where a client is, and how many samples it has."""

    site: int
    samples: int


Reply = tuple[RemoteClient, dict[str, Tensor]]  # a client, as known when the request was sent, and its row of each tensor


@dataclass(frozen=True)
class Request:
    """One request to all sites: what it sends, and the tensors that it expects back per client."""

    operation: str
    label: str  # for the log
    expected: Expected
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    offsets: Offsets | None = None
    needs_setup: bool = False  # head and mask must be at the site
    answers: str | None = None  # digest of run, round and θ that the reply must repeat: an older reply does not count
    per_site: bool = False  # a site answers for all its clients in one row, which counts as its first client's

    def rows(self, clients: int) -> Expected:
        """Return the expected tensors of a site with this many clients."""
        return {name: (dtype, (1 if self.per_site else clients, *shape)) for name, (dtype, shape) in self.expected.items()}


class RemoteClients:
    """Clients behind a network. `Clients` in training/clients.py describes the methods."""

    name = "flower"

    def __init__(self, bench: Bench, transport: Transport) -> None:
        self.bench, self.transport, self.traffic = bench, transport, Traffic()
        self.config = bench.config.deploy
        self.clients: dict[int, RemoteClient] = {}
        data = bench.dataset
        self._backbone = backbone_digest(bench)
        # With every message: a site may restart with other weights between two roll calls.
        self._common = {"config": _public_config(bench.config), "classes": data.class_names, "mean": list(data.mean), "std": list(data.std)}
        self._common["backbone"] = self._backbone
        self._previous_sites: dict[int, int] = {}  # client -> site, before this process resumed the run
        self._greeted: set[int] = set()
        self._not_before: dict[int, float] = {}  # site that was left out -> when to greet it again
        self._setup: dict[str, Tensor] = {}  # head and mask
        self._digest = ""
        self._ready: set[int] = set()  # sites that have the setup
        self._run = secrets.token_hex(16)  # of this process: a resumed run requests its rounds anew
        self._norms: list[float] = []  # the sites' median norm in each of the recent rounds

    # --- which sites are there ---------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Wait until all clients are there, or for `deploy.wait` seconds if enough are."""
        wanted = [k for k in range(self.bench.config.federated.clients) if k not in self.bench.config.federated.exclude]
        end, shown, here = time.monotonic() + self.config.wait, -1, 0
        while True:
            self.roll_call(retry_silent=0.0)
            here = sum(k in self.clients for k in wanted)
            if here != shown:
                log.info("%d of %d clients are there, at %d sites", here, len(wanted), len({c.site for c in self.clients.values()}))
                shown = here
            if here == len(wanted):
                return
            if time.monotonic() >= end:
                break
            time.sleep(GATHER_POLL)
        if here == 0 or here < self.config.min_fraction * len(wanted):
            raise UserError(
                f"deploy.wait: {here} of {len(wanted)} clients came within {self.config.wait:g} s, fewer than deploy.min_fraction; "
                "start more sites or wait longer."
            )
        self._not_before |= {site: time.monotonic() + RETRY_SITE for site in self._not_before if site not in self._greeted}
        log.warning("going on without %s", _listed([k for k in wanted if k not in self.clients]))

    def roll_call(self, retry_silent: float = RETRY_SITE) -> None:
        """Greet new sites and forget those that left. A site that does not answer is greeted again after `retry_silent` seconds.

        At the start it may still work for a server that was killed; between rounds it is probably dead and must not hold up the next round as well.
        """
        now = set(self.transport.sites())
        for site in self._greeted - now:
            self._forget(site, "is gone")
        new = [site for site in sorted(now - self._greeted) if time.monotonic() >= self._not_before.get(site, 0.0)]
        for site, reply in self._send("hello", {site: Payload.pack(self._common) for site in new}).items():
            try:
                if isinstance(reply, Failure):
                    raise Rejected(reply)
                self._admit(site, reply.metadata)
            except Rejected as reason:
                self._not_before[site] = time.monotonic() + (retry_silent if isinstance(reply, NoReply) else RETRY_SITE)
                log.warning("site %s is left out: %s", site, reason)

    def _admit(self, site: int, metadata: Mapping[str, Any]) -> None:
        """Check a site's hello and record its clients."""
        limit = self.bench.config.federated.clients
        clients, samples = _whole_numbers(metadata.get("clients")), _whole_numbers(metadata.get("samples"))
        if clients is None or samples is None or len(clients) != len(samples) or min(samples, default=1) < 1:
            raise Rejected("it does not report its clients and their numbers of samples")
        if len(clients) > limit or len(set(clients)) < len(clients):
            raise Rejected(f"it names {len(clients):,} clients, one of them twice or more than federated.clients={limit}")
        if max(samples, default=0) > self.config.max_samples:
            raise Rejected(f"it claims a client of {max(samples):,} samples, deploy.max_samples is {self.config.max_samples:,}")
        if metadata.get("backbone") != self._backbone:
            raise Rejected("its pretrained weights differ from the server's")
        if metadata.get("classes") != self.bench.dataset.class_names:
            raise Rejected("its classes, or their order, differ from the server's")
        if (version := Failure.of(metadata.get("fedlens"))[:20]) != __version__:
            log.warning("site %s runs fedlens %s, the server %s: results may differ", site, version, __version__)
        self._greeted.add(site)
        for client, count in zip(clients, samples, strict=True):
            if client >= limit:
                log.warning("site %s has a client %d, but federated.clients is %d", site, client, limit)
            elif not self.transport.may_have(site, client):
                log.warning("site %s claims client %d, which its key does not stand for; rejected", site, client)
            elif (owner := self._owner(client)) not in (None, site):
                log.warning("site %s claims client %d too; it stays with site %s", site, client, owner)
            else:
                self.clients[client] = RemoteClient(site, count)

    def _owner(self, client: int) -> int | None:
        """Return the site that has this client, or that had it before a restart and is connected."""
        if client in self.clients:
            return self.clients[client].site
        before = self._previous_sites.get(client)
        return before if before in self.transport.sites() else None

    def _forget(self, site: int, reason: str) -> None:
        gone = [k for k, client in self.clients.items() if client.site == site]
        log.warning("site %s %s, and with it %s", site, reason, _listed(gone))
        self._greeted.discard(site)
        self._ready.discard(site)
        for k in gone:
            del self.clients[k]

    def state_dict(self) -> dict[str, Any]:
        registry = {str(k): {"site": client.site, "samples": client.samples} for k, client in sorted(self.clients.items())}
        return {"registry": registry, "norms": self._norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._previous_sites = {int(client): int(entry["site"]) for client, entry in state["registry"].items()}
        self._norms = [float(norm) for norm in state.get("norms", [])]

    def fingerprint(self) -> str | None:
        return None

    # --- requests ----------------------------------------------------------------------------------------------------

    def _send(self, operation: str, payloads: Mapping[int, Payload]) -> dict[int, Payload | Failure]:
        """Return a reply or a failure per site, and count the bytes."""
        self.traffic.down += sum(payload.size for payload in payloads.values())
        deadline = self.config.deadline if operation != "hello" else min(HELLO_DEADLINE, self.config.deadline)
        received = self.transport.send(operation, payloads, deadline)
        replies: dict[int, Payload | Failure] = {}
        for site in payloads:
            reply = received.get(site) or NoReply.of(f"no reply within {deadline:g} s")
            self.traffic.up += reply.size
            failed = isinstance(reply, Payload) and "error" in reply.metadata
            replies[site] = Failure.of(reply.metadata["error"]) if failed else reply  # type: ignore[union-attr]
        return replies

    def _payloads(self, request: Request, by_site: Mapping[int, list[int]]) -> dict[int, Payload]:
        """Return the message to each site, with head and mask where the site lacks them."""
        payloads = {}
        for site, clients in by_site.items():
            sent = request.needs_setup and site not in self._ready
            own = {"clients": clients, "sent": sent, "offsets": request.offsets is not None}
            tensors = dict(request.tensors)
            if request.offsets is not None:
                tensors["offsets"] = torch.stack([request.offsets(k).cpu() for k in clients])
            payloads[site] = Payload.pack({**self._common, **request.metadata, **own}, tensors | (self._setup if sent else {}))
        return payloads

    def _by_site(self, clients: Sequence[int]) -> dict[int, list[int]]:
        """Return site -> those of the clients that are there, ascending."""
        by_site: dict[int, list[int]] = {}
        for k in sorted(clients):
            if k in self.clients:
                by_site.setdefault(self.clients[k].site, []).append(k)
        return by_site

    def _collect(self, request: Request, clients: Sequence[int]) -> dict[int, Reply]:
        """Return client -> reply, in client order. While too few have answered, the request is repeated to the missing ones."""
        rows: dict[int, Reply] = {}
        for attempt in range(1, ATTEMPTS + 1):
            self.roll_call()
            rows |= self._exchange(request, self._by_site([k for k in clients if k not in rows]))
            if len(rows) >= max(1, self.config.min_fraction * len(clients)):
                return {k: rows[k] for k in sorted(rows) if rows[k][1]}
            log.warning("%s: %d of %d clients answered (attempt %d of %d)", request.label, len(rows), len(clients), attempt, ATTEMPTS)
            time.sleep(min(5.0, self.config.deadline) if attempt < ATTEMPTS else 0.0)
        raise UserError(
            f"{request.label}: {len(rows)} of {len(clients)} clients answered, "
            f"fewer than deploy.min_fraction={self.config.min_fraction:g}; {RESUME_HINT}"
        )

    def _exchange(self, request: Request, by_site: Mapping[int, list[int]]) -> dict[int, Reply]:
        """Send a request once and return the sound replies. A site that lacks head and mask gets them at once."""
        known, rows = dict(self.clients), dict[int, Reply]()  # as of now: a site may be gone when its reply is read
        replies = self._send(request.operation, self._payloads(request, by_site))
        lacking = {s for s, reply in replies.items() if isinstance(reply, Payload) and reply.metadata.get("lacks") == SETUP}
        if lacking:  # restarted sites
            self._ready -= lacking
            replies |= self._send(request.operation, self._payloads(request, {s: own for s, own in by_site.items() if s in lacking}))
        for site, reply in replies.items():
            own = by_site[site]
            try:
                if isinstance(reply, Failure):
                    raise Rejected(reply)
                tensors = reply.unpack(request.rows(len(own)))
                if request.answers and reply.metadata.get("answers") != request.answers:
                    raise Rejected("it answers another request: the run, the round or θ differs")
            except Rejected as reason:
                self.traffic.refused += len(own) * (isinstance(reply, Payload) or reply.size > 0)
                log.warning("%s: no usable reply from site %s (%s): %s", request.label, site, _listed(own), reason)
                self._ready.discard(site)
                continue
            self._ready.add(site)
            for i, k in enumerate(own):
                rows[k] = known[k], {name: tensor[i] for name, tensor in tensors.items() if i < len(tensor)}
        return rows

    def _everyone(self) -> list[int]:
        if not self.clients:
            self.gather()
        return [k for k in sorted(self.clients) if k not in self.bench.config.federated.exclude]

    def ridge_sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        dim, classes = self.bench.model.head.in_features + 1, self.bench.dataset.num_classes  # type: ignore[union-attr, operator]
        assert isinstance(dim, int)
        expected = {"A": (torch.float64, (dim * (dim + 1) // 2,)), "b": (torch.float64, (dim, classes))}
        everyone = self._everyone()
        samples = {site: sum(self.clients[k].samples for k in own) for site, own in self._by_site(everyone).items()}
        largest = MAX_FEATURE_RATIO * float(self.bench.features(self.bench.val).double().square().sum(1).max())
        for client, (known, tensors) in self._collect(Request("ridge", "ridge head", expected, per_site=True), everyone).items():
            A, b = from_upper_triangle(tensors["A"], dim), tensors["b"]
            if not _are_ridge_sums(A, b, samples.get(known.site, known.samples), largest):
                self.traffic.refused += 1
                log.warning("ridge head: the sums of client %d's site cannot come from features; left out", client)
                continue
            yield A.to(self.bench.device), b.to(self.bench.device)

    def sensitivities(self, names: Collection[str], active: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        space = whole_space(self.bench)
        where = space.flatten(active).cpu()
        expected = {"sums": (torch.float32, (int(where.sum()),))}
        request = Request("sensitivity", "mask calibration", expected, {"active": pack_bits(where), **self._head()})
        for client, (_, tensors) in self._collect(request, self._everyone()).items():
            if not _is_sensitivity(tensors["sums"]):
                self.traffic.refused += 1
                log.warning("mask calibration: the sums of client %d are negative or not finite; left out", client)
                continue
            whole = torch.zeros(space.size)
            whole[where] = tensors["sums"]
            yield {name: view.to(self.bench.device) for name, view in space.views(whole).items() if name in names}

    def _head(self) -> dict[str, Tensor]:
        return {f"head.{name}": param.detach() for name, param in self.bench.model.head.named_parameters()}  # type: ignore[union-attr]

    def begin(self, space: ParamSpace, mask: Mask | None, fresh: bool = True) -> None:
        self._setup = self._head()
        if mask is not None:
            self._setup["mask"] = pack_bits(whole_space(self.bench).flatten(mask.as_dict()))
        assert set(self._setup) == set(setup_shapes(self.bench))
        self._digest = hashlib.sha256(Payload.pack({}, self._setup).tensors).hexdigest()
        self._ready.clear()
        self._everyone()

    def updates(
        self, round_: int, cohort: Sequence[int], present: Sequence[int], theta: Tensor, rule: LocalRule, offsets: Offsets | None
    ) -> Iterator[Update]:
        if not present:
            return
        seed, fed, label = self.bench.config.seed, self.bench.config.federated, f"round {round_ + 1}"
        expected: Expected = {"deltas": (torch.float32, (len(theta),)), "notes": (torch.float64, (4,))}
        metadata = {SETUP: self._digest, "size": len(theta), "run": self._run, "round": round_, "lr": rule.lr}
        answers = content_digest(self._run, round_, theta)
        request = Request("update", label, expected, {"theta": theta}, metadata, offsets, needs_setup=True, answers=answers)
        if self.bench.config.privacy.secure_aggregation:
            yield self._secure_update(round_, present, request)
            return
        replies: dict[int, Reply] = {}
        for client, (known, tensors) in self._collect(request, present).items():
            number, samples, steps, _ = tensors["notes"].tolist()
            if (number, samples, steps) != (client, known.samples, local_steps(seed, round_, client, fed.local_steps, fed.straggler_rate)):
                self.traffic.refused += 1
                log.warning("%s: client %d reports number %g, %g samples, %g steps; rejected", label, client, number, samples, steps)
                if number == client and known.site in self._greeted and samples != known.samples:
                    self._forget(known.site, "has other data than it reported")  # and is greeted again
                continue
            replies[client] = known, tensors
        for client, (known, tensors) in self._of_usual_length(label, replies).items():
            notes = tensors["notes"]
            yield Update(client, known.samples, int(notes[2]), tensors["deltas"].to(theta.device), notes[3].float())

    def _of_usual_length(self, label: str, replies: Mapping[int, Reply]) -> dict[int, Reply]:
        """Return the updates whose norm is at most `deploy.norm_ratio` times the median of recent rounds, this one included.

        Each site has one vote per round, so that the bound holds while more than half of a round's sites are honest. An update that is not
        finite is left to the loop, which drops and counts it, unless one site alone could then end the run.
        """
        norms, by_site = dict[int, float](), dict[int, list[float]]()
        for client, (known, tensors) in replies.items():
            norms[client] = l2(tensors["deltas"]) if bool(tensors["notes"][3].isfinite()) else math.nan
            by_site.setdefault(known.site, []).append(norms[client])
        votes = [median_low(own) for own in (list(filter(math.isfinite, each)) for each in by_site.values()) if own]
        self._norms = [*self._norms, *([median_low(votes)] if votes else [])][-RECENT_ROUNDS:]
        usual = median_low(self._norms or [0.0])
        bound = (self.config.norm_ratio or math.inf) * (usual or math.inf)  # a median of zero bounds nothing
        for_the_loop = bool(votes) or len(self._greeted) == 1
        usable = {client for client, norm in norms.items() if (norm <= bound if math.isfinite(norm) else for_the_loop)}
        for client in sorted(norms.keys() - usable):
            self.traffic.refused += 1
            facts = (label, client, replies[client][0].site, norms[client], f"{bound:.4g} (deploy.norm_ratio times the usual norm)")
            log.warning("%s: the update of client %d (site %d) has norm %.4g, expected at most %s; rejected", *facts)
        return {client: reply for client, reply in replies.items() if client in usable}

    def _secure_update(self, round_: int, present: Sequence[int], request: Request) -> Update:
        """Return one update for all who answered. Retry only while there is no sum: the difference of two sums of a round would reveal updates."""
        bound, fraction, failed = self.bench.config.privacy.range, self.config.min_fraction, set[int]()
        size = int(request.metadata["size"])
        for attempt in range(1, ATTEMPTS + 1):
            self.roll_call()
            self._ready.clear()  # always send head and mask: a site that lacks them could not say so
            by_site = {site: own for site, own in self._by_site(present).items() if site not in failed}
            if len(by_site) >= 2 and sum(map(len, by_site.values())) >= fraction * len(present):
                samples = {site: sum(self.clients[k].samples for k in own) for site, own in by_site.items()}
                options = {"size": size, "bound": bound, "samples": samples, "fraction": fraction, "deadline": self.config.deadline}
                options["answers"] = request.answers
                payloads = self._payloads(request, by_site)
                mean, gone = self.transport.secure_mean(payloads, round_, self.traffic, **options)
                failed |= gone
                if mean is not None:
                    return checked_mean(mean, size, bound, samples.values(), round_)
            log.warning("%s: no sum from %d sites (attempt %d of %d)", request.label, len(by_site), attempt, ATTEMPTS)
        raise UserError(
            f"{request.label}: secure aggregation needs at least two sites and deploy.min_fraction={fraction:g} of the clients; {RESUME_HINT}"
        )

    def fishers(self, clients: Sequence[int], theta: Tensor) -> Tensor:
        expected, metadata = {"fishers": (torch.float32, (len(theta),))}, {SETUP: self._digest, "size": len(theta)}
        replies = self._collect(Request("fisher", "Fisher merging", expected, {"theta": theta}, metadata, needs_setup=True), clients)
        rows = torch.zeros(len(clients), len(theta))
        for i, k in enumerate(clients):
            if k in replies and _is_sensitivity(row := replies[k][1]["fishers"]):
                rows[i] = row
            else:
                log.warning("Fisher merging: client %d has no weight: its sensitivities are missing, negative or not finite", k)
        return rows.to(theta.device)


# --- checks ----------------------------------------------------------------------------------------------------------


def checked_mean(mean: Update, size: int, bound: float, samples: Collection[int], round_: int) -> Update:
    """Return a securely aggregated mean if all its entries are within privacy.range. `samples`: per site of the request.

    Each site rounds to steps of 2⁻²² of the range times the samples of the largest site, and the two smallest sites may be all that answered.
    """
    rounding = 4 * len(samples) * max(samples) / (2**22 * sum(sorted(samples)[:2]))
    if len(mean.delta) != size or not bool(mean.delta.isfinite().all()) or float(mean.delta.abs().max()) > (1.001 + rounding) * bound:
        raise UserError(f"round {round_ + 1}: the mean exceeds privacy.range, so a site sent an invalid update; it cannot be identified.")
    return mean


def _are_ridge_sums(A: Tensor, b: Tensor, samples: int, largest: float) -> bool:
    """Return whether A = ZᵀZ and b = ZᵀY are possible for this many samples, which bounds a site's influence on the head.

    Z has a last column of ones and rows of squared norm up to `largest`, Y is one-hot, and the Cauchy-Schwarz inequality bounds the rest.
    """
    if not (bool(A.isfinite().all()) and bool(b.isfinite().all())) or float(A.diagonal()[:-1].sum()) > samples * largest:
        return False
    counts, slack = b[-1], 1 + 1e-6
    error = abs(float(A[-1, -1]) - samples) + abs(float(counts.sum()) - samples)
    bounded = bool((b.square() <= slack * A.diagonal().unsqueeze(1) * counts + 1e-6).all())
    return error <= 1e-6 * samples and bool((counts >= 0).all()) and bounded and _is_positive_semidefinite(A)


def _is_positive_semidefinite(A: Tensor) -> bool:
    """Return whether a symmetric matrix is positive semidefinite up to rounding."""
    slack = 1e-9 * float(A.diagonal().abs().max()) + 1e-12
    return bool(torch.linalg.cholesky_ex(A + slack * torch.eye(len(A), dtype=A.dtype)).info == 0)


def _is_sensitivity(row: Tensor) -> bool:
    return bool(row.isfinite().all()) and bool((row >= 0).all())


def _whole_numbers(value: Any) -> list[int] | None:
    """Return a received list of numbers ≥ 0; None for anything else."""
    sound = isinstance(value, list) and all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in value)
    return value if sound else None


def _public_config(config: Config) -> str:
    """Return the configuration for sites, without the server's paths."""
    public = copy.deepcopy(config)
    public.run, public.data.root, public.device = RunConfig(), None, "auto"
    public.mask.path = public.mask.like = None
    if public.model.weights is not None:
        public.model.weights = Path(public.model.weights).name
    return to_yaml(public)


def _listed(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:10])) + (", …" if len(clients) > 10 else "")
    return f"client {shown}" if len(clients) == 1 else f"clients {shown or 'none'}"
