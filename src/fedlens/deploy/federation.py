"""The server's side of the conversation: clients on other machines as the loop of training/federated.py sees them. Knows nothing of Flower.

Who has which client is asked of every site that shows up. A site that does not answer in time, or with something else than was asked for, is left out of
the round and the others count; results are put in client order before anything is added.
"""

import copy
import hashlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedlens import __version__
from fedlens.config import Config, RunConfig
from fedlens.deploy.node import SETUP, backbone_digest, setup_shapes, whole_space
from fedlens.deploy.wire import Expected, Failure, Parcel, Refused, Silence, from_upper
from fedlens.engine.local_work import Offsets, Update
from fedlens.engine.sampling import local_steps
from fedlens.errors import UserError
from fedlens.lens.mask import pack_bits
from fedlens.lens.mask_rules import Mask
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import LocalRule
from fedlens.overrides import to_yaml
from fedlens.training.bench import Bench
from fedlens.training.clients import Traffic

log = logging.getLogger("fedlens")
ATTEMPTS = 3  # at a round that too few have answered
AGAIN = 60.0  # seconds until a site that was left out is asked again
FAR = 25.0  # times the longest of the server's own features, squared: no site's are beyond
GREETING = 60.0  # seconds for a new site to say who it is; one that is dead and still listed must not hold up a round


class Courier(Protocol):
    """What a network has to offer."""

    def sites(self) -> Collection[int]:
        """Numbers of the sites that are connected now."""
        ...

    def may_have(self, site: int, client: int) -> bool:
        """Whether this site is one that the client can be at, by the key that it came in with."""
        ...

    def ask(self, operation: str, parcels: Mapping[int, Parcel], deadline: float) -> dict[int, Parcel | Failure]:
        """Each site's answer, or in one line why there is none; all within `deadline` seconds."""
        ...

    def secure_mean(
        self,
        parcels: Mapping[int, Parcel],
        round_: int,
        traffic: Traffic,
        *,
        size: int,
        bound: float,
        samples: Mapping[int, int],
        fraction: float,
        deadline: float,
    ) -> tuple[Update | None, set[int]]:
        """The mean of the sites' updates by samples, and none of them (None: too few have answered), and the sites that failed."""
        ...


@dataclass(frozen=True)
class Member:
    """A client, where it is and how much it has."""

    site: int
    samples: int


@dataclass(frozen=True)
class Answer:
    """A client's row of each tensor, and who it was when it was asked."""

    member: Member
    tensors: dict[str, Tensor]


class Federation:
    """Clients behind a courier: see `Clients` in training/clients.py for what each method is."""

    name = "flower"

    def __init__(self, bench: Bench, courier: Courier) -> None:
        self.bench, self.courier, self.traffic = bench, courier, Traffic()
        self.config = bench.config.deploy
        self.members: dict[int, Member] = {}
        data = bench.dataset
        self._told = {"config": _shown(bench.config), "classes": data.class_names, "mean": list(data.mean), "std": list(data.std)}
        self._backbone = backbone_digest(bench)
        self._told["backbone"] = self._backbone  # with every message: a site may be started anew between two roll calls
        self._homes_before: dict[int, int] = {}  # client -> site, as the process before this one knew it
        self._greeted: set[int] = set()
        self._not_before: dict[int, float] = {}  # site that was left out -> when it is asked again
        self._setup: dict[str, Tensor] = {}
        self._digest = ""
        self._ready: set[int] = set()  # sites that have head and mask

    # --- who is there ------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Until every client is there, or `deploy.wait` seconds are over and enough are."""
        wanted = [k for k in range(self.bench.config.federated.clients) if k not in self.bench.config.federated.exclude]
        until, told = time.monotonic() + self.config.wait, -1
        while True:
            self.roll_call(silent_again=0.0)
            here = sum(k in self.members for k in wanted)
            if here != told:
                log.info("%d of %d clients are there, at %d sites", here, len(wanted), len({m.site for m in self.members.values()}))
            told = here
            if here == len(wanted):
                return
            if time.monotonic() >= until:
                break
            time.sleep(1.0)
        if here == 0 or here < self.config.min_fraction * len(wanted):
            raise UserError(f"deploy.wait: {here} of {len(wanted)} clients after {self.config.wait:g} s; deploy.min_fraction asks for more")
        self._not_before |= {site: time.monotonic() + AGAIN for site in self._not_before if site not in self._greeted}
        log.warning("going on without %s", _listed([k for k in wanted if k not in self.members]))

    def roll_call(self, silent_again: float = AGAIN) -> None:
        """Greet the sites that are new, forget those that are gone. A site that says nothing is greeted again after `silent_again` seconds: between rounds
        it is likely dead and must not hold up the next one; at the start it may be at its work for a server that was killed."""
        now = set(self.courier.sites())
        for site in self._greeted - now:
            self._forget(site, "is gone")
        new = [site for site in sorted(now - self._greeted) if time.monotonic() >= self._not_before.get(site, 0.0)]
        for site, found in self._ask("hello", {site: {} for site in new}).items():
            try:
                if isinstance(found, Failure):
                    raise Refused(found)
                self._enter(site, found)
            except Refused as why:
                self._not_before[site] = time.monotonic() + (silent_again if isinstance(found, Silence) else AGAIN)
                log.warning("site %s is left out: %s", site, why)

    def _enter(self, site: int, found: Parcel) -> None:
        facts = found.facts
        clients, samples = facts.get("clients"), facts.get("samples")
        most = self.bench.config.federated.clients
        if not _numbers(clients) or not _numbers(samples) or len(clients) != len(samples) or min(samples, default=1) < 1:  # type: ignore[arg-type]
            raise Refused("it does not say which clients it has and how much data they hold")
        if len(clients) > most or len(set(clients)) < len(clients):  # type: ignore[arg-type]
            raise Refused(f"it names {len(clients):,} clients, one of them twice or more than federated.clients={most}")  # type: ignore[arg-type]
        if max(samples, default=0) > self.config.max_samples:  # type: ignore[arg-type]
            raise Refused(f"it claims a client of {max(samples):,} samples, deploy.max_samples is {self.config.max_samples:,}")  # type: ignore[arg-type]
        if facts.get("backbone") != self._backbone:
            raise Refused("its pretrained weights are others than the server's")
        if facts.get("classes") != self.bench.dataset.class_names:
            raise Refused("its classes are others than the server's, or in another order")
        if (version := Failure.of(facts.get("fedlens"))[:20]) != __version__:
            log.warning("site %s runs fedlens %s, the server %s: their numbers may differ", site, version, __version__)
        self._greeted.add(site)
        for client, count in zip(clients, samples, strict=True):  # type: ignore[arg-type]
            if client >= most:
                log.warning("site %s has a client %d, but federated.clients is %d", site, client, most)
            elif not self.courier.may_have(site, client):
                log.warning("site %s claims client %d, which is not one of those that its key stands for; refused", site, client)
            elif (home := self._home(client)) not in (None, site):
                log.warning("client %d is claimed by site %s too; it stays with site %s", client, site, home)
            else:
                self.members[client] = Member(site, count)

    def _home(self, client: int) -> int | None:
        """The site that has this client, or had it before a restart and is connected."""
        if client in self.members:
            return self.members[client].site
        before = self._homes_before.get(client)
        return before if before in self.courier.sites() else None

    def registry(self) -> dict[str, Any]:
        return {str(client): {"site": member.site, "samples": member.samples} for client, member in sorted(self.members.items())}

    def recall(self, registry: Mapping[str, Any]) -> None:
        self._homes_before = {int(client): int(entry["site"]) for client, entry in registry.items()}

    def _forget(self, site: int, why: str) -> None:
        gone = [k for k, m in self.members.items() if m.site == site]
        log.warning("site %s %s, and with it %s", site, why, _listed(gone))
        self._greeted.discard(site)
        self._ready.discard(site)
        for k in gone:
            del self.members[k]

    def fingerprint(self) -> str | None:
        return None

    # --- asking ------------------------------------------------------------------------------------------------------

    def _ask(
        self, operation: str, facts: Mapping[int, Mapping[str, Any]], tensors: Mapping[int, Mapping[str, Tensor]] | None = None
    ) -> dict[int, Parcel | Failure]:
        parcels = {site: Parcel.of({**self._told, **own}, tensors[site] if tensors is not None else None) for site, own in facts.items()}
        self.traffic.down += sum(parcel.size for parcel in parcels.values())
        deadline = self.config.deadline if operation != "hello" else min(GREETING, self.config.deadline)
        replies = self.courier.ask(operation, parcels, deadline)
        found: dict[int, Parcel | Failure] = {}
        for site in facts:
            reply = replies.get(site) or Silence.of(f"no answer within {deadline:g} s")
            self.traffic.up += reply.size
            if isinstance(reply, Parcel) and "error" in reply.facts:
                reply = Failure.of(reply.facts["error"])
            found[site] = reply
        return found

    def _homes(self, clients: Sequence[int]) -> dict[int, list[int]]:
        """site -> those of the clients that are there."""
        homes: dict[int, list[int]] = {}
        for k in sorted(clients):
            if k in self.members:
                homes.setdefault(self.members[k].site, []).append(k)
        return homes

    def _collect(self, operation: str, clients: Sequence[int], ask: "Question", what: str) -> dict[int, "Answer"]:
        """client -> its row of each tensor that the question expects; asked again of those who are missing while too few have answered.

        Where a site answers for its clients together, the row is with the first of them.
        """
        rows: dict[int, Answer] = {}
        for attempt in range(1, ATTEMPTS + 1):
            missing = [k for k in clients if k not in rows]
            self.roll_call()
            homes, asked = self._homes(missing), dict(self.members)  # as they are now: a site may be gone when its answer is read
            replies = self._ask(
                operation, {s: ask.facts(s, own) for s, own in homes.items()}, {s: ask.tensors(s, own) for s, own in homes.items()}
            )
            lacking = {
                site: homes[site] for site, reply in replies.items() if isinstance(reply, Parcel) and reply.facts.get("lacks") == SETUP
            }
            if lacking:  # a site that was started anew
                self._ready -= set(lacking)
                again = {s: ask.facts(s, own) for s, own in lacking.items()}
                replies |= self._ask(operation, again, {s: ask.tensors(s, own) for s, own in lacking.items()})
            for site, reply in replies.items():
                own = homes[site]
                try:
                    if isinstance(reply, Failure):
                        raise Refused(reply)
                    found = reply.unpack(ask.expected(len(own)))
                except Refused as why:
                    self.traffic.refused += len(own) * (isinstance(reply, Parcel) or reply.size > 0)
                    log.warning("%s: nothing from site %s (%s): %s", what, site, _listed(own), why)
                    self._ready.discard(site)
                    continue
                self._ready.add(site)
                for i, k in enumerate(own):
                    rows[k] = Answer(asked[k], {name: tensor[i] for name, tensor in found.items() if i < len(tensor)})
            if len(rows) >= max(1, self.config.min_fraction * len(clients)):
                return {k: rows[k] for k in sorted(rows) if rows[k].tensors}
            log.warning("%s: %d of %d clients have answered (attempt %d of %d)", what, len(rows), len(clients), attempt, ATTEMPTS)
            time.sleep(min(5.0, self.config.deadline) if attempt < ATTEMPTS else 0.0)
        raise UserError(
            f"{what}: {len(rows)} of {len(clients)} clients have answered, deploy.min_fraction={self.config.min_fraction:g} asks for more; "
            "the rounds before are kept, the same command goes on from there"
        )

    def _everyone(self) -> list[int]:
        if not self.members:
            self.gather()
        return [k for k in sorted(self.members) if k not in self.bench.config.federated.exclude]

    # --- what the loop asks ------------------------------------------------------------------------------------------

    def ridge_sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        dim, classes = self.bench.model.head.in_features + 1, self.bench.dataset.num_classes  # type: ignore[union-attr, operator]
        assert isinstance(dim, int)
        expected = {"A": (torch.float64, (dim * (dim + 1) // 2,)), "b": (torch.float64, (dim, classes))}
        question = Question(self, expected)
        question.together = True
        asked = self._everyone()
        samples = {site: sum(self.members[k].samples for k in own) for site, own in self._homes(asked).items()}
        longest = FAR * float(self.bench.features(self.bench.val).double().square().sum(1).max())
        for client, found in self._collect("ridge", asked, question, "ridge head").items():
            A, b = from_upper(found.tensors["A"], dim), found.tensors["b"]
            if not _are_sums(A, b, samples.get(found.member.site, found.member.samples), longest):
                self.traffic.refused += 1
                log.warning("ridge head: the sums of client %d's site are not those of any features; left out", client)
                continue
            yield A.to(self.bench.device), b.to(self.bench.device)

    def sensitivities(self, names: Collection[str], active: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        space = whole_space(self.bench)
        inside = space.flatten(active).cpu()
        count = int(inside.sum())
        question = Question(self, {"sums": (torch.float32, (count,))}, {"active": pack_bits(inside), **self._head()})
        for client, found in self._collect("sensitivity", self._everyone(), question, "mask calibration").items():
            sums = found.tensors["sums"]
            if not bool(sums.isfinite().all()) or bool((sums < 0).any()):
                self.traffic.refused += 1
                log.warning("mask calibration: sums of client %d that are negative or not finite were left out", client)
                continue
            whole = torch.zeros(space.size)
            whole[inside] = sums
            yield {name: view.to(self.bench.device) for name, view in space.views(whole).items() if name in names}

    def _head(self) -> dict[str, Tensor]:
        return {f"head.{name}": param.detach() for name, param in self.bench.model.head.named_parameters()}  # type: ignore[union-attr]

    def begin(self, space: ParamSpace, mask: Mask | None, fresh: bool = True) -> None:
        kept = self._head()
        if mask is not None:
            kept["mask"] = pack_bits(whole_space(self.bench).flatten(mask.as_dict()))
        assert set(kept) == set(setup_shapes(self.bench))
        self._setup = kept
        self._digest = hashlib.sha256(Parcel.of({}, kept).tensors).hexdigest()
        self._ready.clear()
        self._everyone()

    def _question(self, expected: Expected, theta: Tensor, facts: Mapping[str, Any] | None = None) -> "Question":
        known = {SETUP: self._digest, "size": len(theta), **(facts or {})}
        return Question(self, expected, {"theta": theta}, known, self._setup)

    def updates(
        self, round_: int, cohort: Sequence[int], present: Sequence[int], theta: Tensor, rule: LocalRule, offsets: Offsets | None
    ) -> Iterator[Update]:
        if not present:
            return
        size, fed = len(theta), self.bench.config.federated
        expected: Expected = {"deltas": (torch.float32, (size,)), "notes": (torch.float64, (4,))}
        question = self._question(expected, theta, {"round": round_, "lr": rule.lr})
        question.offsets = offsets
        if self.bench.config.privacy.secure_aggregation:
            yield self._secure(round_, present, question)
            return
        for client, found in self._collect("update", present, question, f"round {round_ + 1}").items():
            told, samples, done, loss = found.tensors["notes"].tolist()
            steps = local_steps(self.bench.config.seed, round_, client, fed.local_steps, fed.straggler_rate)
            if told != client or samples != found.member.samples or done != steps:
                self.traffic.refused += 1
                log.warning(
                    "round %d: client %d says that it is %g with %g samples and %g steps; refused", round_ + 1, client, told, samples, done
                )
                if told == client and found.member.site in self._greeted and samples != found.member.samples:
                    self._forget(found.member.site, "has other data than it said")  # and is greeted anew
                continue
            yield Update(client, int(samples), int(done), found.tensors["deltas"].to(theta.device), torch.tensor(loss))

    def _secure(self, round_: int, present: Sequence[int], question: "Question") -> Update:
        """One update that stands for all who answered. Tried again only while there is no sum: two sums of one round would show a difference."""
        privacy, failed = self.bench.config.privacy, set[int]()
        for attempt in range(1, ATTEMPTS + 1):
            self.roll_call()
            self._ready.clear()  # head and mask go along: a site that lacks them could not say so
            homes = {site: own for site, own in self._homes(present).items() if site not in failed}
            if len(homes) >= 2 and sum(map(len, homes.values())) >= self.config.min_fraction * len(present):
                parcels = {s: Parcel.of({**self._told, **question.facts(s, k)}, question.tensors(s, k)) for s, k in homes.items()}
                samples = {site: sum(self.members[k].samples for k in own) for site, own in homes.items()}
                options = {"bound": privacy.range, "fraction": self.config.min_fraction, "deadline": self.config.deadline}
                found, gone = self.courier.secure_mean(parcels, round_, self.traffic, size=question.size, samples=samples, **options)
                failed |= gone
                if found is not None:
                    return sound_sum(found, question.size, privacy.range, samples.values(), round_)
            log.warning("round %d: no sum from %d sites (attempt %d of %d)", round_ + 1, len(homes), attempt, ATTEMPTS)
        raise UserError(
            f"round {round_ + 1}: secure aggregation needs two sites or more and deploy.min_fraction={self.config.min_fraction:g} of the clients asked; "
            "the rounds before are kept, the same command goes on from there"
        )

    def fishers(self, clients: Sequence[int], theta: Tensor) -> Tensor:
        found = self._collect("fisher", clients, self._question({"fishers": (torch.float32, (len(theta),))}, theta), "Fisher merging")
        rows = []
        for k in clients:
            row = found[k].tensors["fishers"] if k in found else None
            sound = row is not None and bool(row.isfinite().all()) and bool((row >= 0).all())
            if not sound:
                log.warning("Fisher merging: client %d counts for nothing: its sensitivities did not come, are negative or not finite", k)
            rows.append(row if row is not None and sound else torch.zeros(len(theta)))
        return torch.stack(rows).to(theta.device)


class Question:
    """What is asked of each site, and the row of a client that it expects back."""

    def __init__(
        self,
        federation: Federation,
        rows: Expected,
        tensors: Mapping[str, Tensor] | None = None,
        facts: Mapping[str, Any] | None = None,
        setup: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._federation, self._rows, self._tensors, self._facts, self._setup = federation, rows, tensors or {}, facts or {}, setup
        self.offsets: Offsets | None = None
        self.together = False  # a site answers for all its clients in one row
        self.size = int(self._facts.get("size", 0))

    def _first(self, site: int) -> bool:
        return self._setup is not None and site not in self._federation._ready

    def facts(self, site: int, clients: Sequence[int]) -> dict[str, Any]:
        return {**self._facts, "clients": list(clients), "sent": self._first(site), "offsets": self.offsets is not None}

    def tensors(self, site: int, clients: Sequence[int]) -> dict[str, Tensor]:
        found = dict(self._tensors)
        if self.offsets is not None:
            found["offsets"] = torch.stack([self.offsets(k).cpu() for k in clients])
        return found | (dict(self._setup) if self._first(site) and self._setup else {})

    def expected(self, clients: int) -> Expected:
        return {name: (dtype, (1 if self.together else clients, *shape)) for name, (dtype, shape) in self._rows.items()}


def _are_sums(A: Tensor, b: Tensor, samples: int, longest: float) -> bool:
    """Whether A can be ZᵀZ and b ZᵀY of so many samples: Z's last column is ones, Y is one-hot, no row's square is above `longest`, and Cauchy and Schwarz
    bound the rest. So what a site may do to the head is bounded by its samples."""
    if not (bool(A.isfinite().all()) and bool(b.isfinite().all())) or float(A.diagonal()[:-1].sum()) > samples * longest:
        return False
    counts, loose = b[-1], 1 + 1e-6
    told = abs(float(A[-1, -1]) - samples) + abs(float(counts.sum()) - samples)
    bounded = bool((b.square() <= loose * A.diagonal().unsqueeze(1) * counts + 1e-6).all())
    return told <= 1e-6 * samples and bool((counts >= 0).all()) and bounded and _is_gram(A)


def _is_gram(A: Tensor) -> bool:
    """Symmetric by its form, and positive semidefinite but for rounding."""
    slack = 1e-9 * float(A.diagonal().abs().max()) + 1e-12
    return bool(torch.linalg.cholesky_ex(A + slack * torch.eye(len(A), dtype=A.dtype)).info == 0)


def _shown(config: Config) -> str:
    """What sites are told: all but where things lie on the server."""
    told = copy.deepcopy(config)
    told.run, told.data.root, told.device = RunConfig(), None, "auto"
    told.mask.path = told.mask.like = None
    if told.model.weights is not None:
        told.model.weights = Path(told.model.weights).name
    return to_yaml(told)


def _numbers(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in given)


def _listed(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:10])) + (", …" if len(clients) > 10 else "")
    return f"client {shown}" if len(clients) == 1 else f"clients {shown or 'none'}"


__all__ = ["Courier", "Federation"]


def sound_sum(found: Update, size: int, bound: float, samples: Collection[int], round_: int) -> Update:
    """What nobody could look at one by one is at least a mean of vectors within the range. `samples`: of the sites that were asked; each site's
    rounding is up to a step of 2⁻²² of the range times the samples of the largest, and those who answered may be the two smallest."""
    coarse = 4 * len(samples) * max(samples) / (2**22 * sum(sorted(samples)[:2]))
    if len(found.delta) != size or not bool(found.delta.isfinite().all()) or float(found.delta.abs().max()) > (1.001 + coarse) * bound:
        raise UserError(
            f"round {round_ + 1}: the sum is not one of updates within privacy.range; a site sent nonsense, and nobody can tell which"
        )
    return found
