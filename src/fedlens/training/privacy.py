"""Differential privacy for clients: bounded updates, Gaussian noise on their sum, and what that amounts to (ε, δ).

Two federations are neighbours if one client's updates are zero in one of them. An update is at most `clip` long and all count alike, so the sum
of a round moves by at most `clip`, and noise of standard deviation noise·clip makes each round a Gaussian mechanism for the clients in it. Cohorts
follow from the seed, which clients know: there is no amplification by sampling to be had. A client pays for the rounds that it was sampled in;
ε is that of the client who was sampled most often, composed by a maintained accountant (dp-accounting, Rényi).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedlens.config import Config
from fedlens.engine.sampling import training_cohort
from fedlens.errors import UserError
from fedlens.runs.cache import content_digest

BLOCK = 2**20  # pairs of draws that are made at once


class Privacy:
    """What `privacy.*` asks for; without clip and noise it changes nothing. `secret`: the noise is keyed by it, and it never leaves the server.
    `tell`: what the first of several processes says, all hear."""

    def __init__(self, config: Config, secret: int | None, tell: Callable[[str], str] = lambda text: text) -> None:
        self.config, self.secret, self.known, self.tell = config, secret, config.privacy, tell
        self._taken: Counter[int] = Counter()
        self._epsilons: dict[int, float] = {}
        if self.known.noise:
            epsilon(self.known.noise, 1, self.known.delta)  # a missing library is told before the first round

    def catch_up(self, rounds: int) -> None:
        """Count the cohorts of the rounds before this process."""
        for r in range(rounds if self.known.noise else 0):
            self.sampled(training_cohort(self.config, r))

    def sampled(self, cohort: Sequence[int]) -> None:
        if self.known.noise:
            self._taken.update(cohort)

    def factor(self, norm: float) -> float:
        """What an update of this norm is multiplied by."""
        clip = self.known.clip
        return 1.0 if clip is None or norm <= clip else clip / norm

    def weight(self, samples: int) -> float:
        """Under noise all clients count alike: a weight would be a part of the update's length."""
        return 1.0 if self.known.noise else float(samples)

    def noised(self, mean: Tensor, count: int, asked: int, round_: int) -> Tensor:
        """The sum of `count` updates with its noise, divided by the clients asked: who was refused or did not answer counts as zero, so that this shows no
        more than an update would have.

        The noise is keyed by the round and by the sum itself. A round that is done again (a server that lost its disk's last minute) has the same noise
        for the same answers, so that a resumed run has the same bits, and another noise for others: under one noise, two models of a round would
        tell the difference of their sums."""
        if not self.known.noise:
            return mean
        assert self.secret is not None and self.known.clip is not None
        total = mean * count
        answers = self.tell(content_digest(total))
        draw = gaussian(len(mean), f"privacy:{self.secret}:{round_}:{answers}").to(mean.device)
        return (total + draw * (self.known.noise * self.known.clip)) / asked

    def spent(self) -> dict[str, float]:
        """ε so far at the configured δ, as a line of metrics."""
        if not self.known.noise:
            return {}
        most = max(self._taken.values(), default=0)
        if most not in self._epsilons:
            self._epsilons[most] = epsilon(self.known.noise, most, self.known.delta)
        return {"epsilon": self._epsilons[most], "delta": self.known.delta}


def gaussian(count: int, key: str) -> Tensor:
    """Standard normal numbers that nobody without the key can tell from fresh ones: SHAKE-256 in blocks, then Box and Muller. torch's own generator starts
    from 32 bits, which can be searched through."""
    root, pairs = hashlib.sha256(key.encode()).digest(), (count + 1) // 2
    found = np.empty((2, pairs), np.float32)
    for start in range(0, pairs, BLOCK):
        size = min(BLOCK, pairs - start)
        bits = np.frombuffer(hashlib.shake_256(root + start.to_bytes(8, "big")).digest(16 * size), "<u8").reshape(2, size)
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53  # in (0, 1]
        radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
        found[0, start : start + size], found[1, start : start + size] = radius * np.cos(angle), radius * np.sin(angle)
    return torch.from_numpy(found.reshape(-1)[:count])


def epsilon(noise: float, rounds: int, delta: float) -> float:
    """ε at δ of so many Gaussian mechanisms of this noise multiplier, one after the other."""
    try:
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise UserError("privacy.noise: its accounting needs dp-accounting; pip install 'fedlens[privacy]'") from None
    if rounds == 0:
        return 0.0
    return float(RdpAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(noise), rounds)).get_epsilon(delta))
