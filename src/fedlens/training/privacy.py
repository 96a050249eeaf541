"""Differential privacy for clients: bounded updates, Gaussian noise on their sum, and the resulting (ε, δ).

Two federations are neighbours if one client's updates are zero in one of them. An update is at most `clip` long and all have equal weight,
so the sum of a round moves by at most `clip`, and noise of standard deviation noise·clip makes each round a Gaussian mechanism for the
clients in it. Cohorts follow from the seed, which clients know, so there is no amplification by sampling. A client pays for the rounds that
sampled it; ε is that of the client that was sampled most often, composed by a maintained accountant (dp-accounting, Rényi).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.config import Config
from fedlens.engine.sampling import training_cohort
from fedlens.errors import UserError
from fedlens.runs.cache import content_digest

BLOCK = 2**20  # pairs of draws per block


class Privacy:
    """The effect of `privacy.*` on a round; without clip and noise it changes nothing.

    `secret` returns the key of the noise, which never leaves the server. `broadcast` gives every process the first one's value.
    """

    def __init__(self, config: Config, secret: Callable[[], int], broadcast: Callable[[Any], Any] = lambda value: value) -> None:
        self.config, self.settings, self.broadcast = config, config.privacy, broadcast
        self.on = config.privacy.noise > 0
        self._secret = secret() if self.on else None
        self._rounds = 0
        self._sampled: Counter[int] = Counter()  # client -> rounds that sampled it
        if self.on:
            epsilon(self.settings.noise, 1, self.settings.delta)  # reports a missing library before the first round

    def begin_round(self, cohort: Sequence[int]) -> None:
        """Count the clients that a round samples."""
        self._rounds += 1
        if self.on:
            self._sampled.update(cohort)

    def factor(self, norm: float) -> float:
        """Return the factor that bounds an update of this norm."""
        clip = self.settings.clip
        return 1.0 if clip is None or norm <= clip else clip / norm

    def weight(self, samples: int) -> float:
        """Return an update's weight: under noise all are equal, because sample counts would add to an update's length."""
        return 1.0 if self.on else float(samples)

    def release(self, mean: Tensor, count: int, expected: int, round_: int) -> Tensor:
        """Return the sum of `count` updates with its noise, divided by the number of clients expected.

        A client that did not answer counts as zero, so that its absence reveals no more than an update would. The noise is keyed by the
        round and by the sum: a repeated round has the same noise for the same updates, so that a resumed run has the same bits, and
        different noise for different updates, whose difference equal noise would reveal.
        """
        if not self.on:
            return mean
        assert self.settings.clip is not None
        total = mean * count
        answers = self.broadcast(content_digest(total))
        draw = gaussian(len(mean), f"privacy:{self._secret}:{round_}:{answers}").to(mean.device)
        return (total + draw * (self.settings.noise * self.settings.clip)) / expected

    def spent(self) -> dict[str, float]:
        """Return ε so far at the configured δ, for a line of metrics."""
        if not self.on:
            return {}
        most, delta = max(self._sampled.values(), default=0), self.settings.delta
        return {"epsilon": epsilon(self.settings.noise, most, delta), "delta": delta}

    def state_dict(self) -> dict[str, Any]:
        """The number of rounds, from which the sampled clients follow."""
        return {"rounds": self._rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count the cohorts of the rounds before this process."""
        self._rounds, self._sampled = 0, Counter()
        for round_ in range(int(state["rounds"])):
            self.begin_round(training_cohort(self.config, round_) if self.on else [])


def gaussian(count: int, key: str) -> Tensor:
    """Return standard normal numbers that cannot be distinguished from random ones without the key.

    SHAKE-256 in blocks, then Box and Muller: torch's own generator starts from 32 bits, which can be searched exhaustively.
    """
    root, pairs = hashlib.sha256(key.encode()).digest(), (count + 1) // 2
    numbers = np.empty((2, pairs), np.float32)
    for start in range(0, pairs, BLOCK):
        size = min(BLOCK, pairs - start)
        bits = np.frombuffer(hashlib.shake_256(root + start.to_bytes(8, "big")).digest(16 * size), "<u8").reshape(2, size)
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53  # in (0, 1]
        radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
        numbers[0, start : start + size], numbers[1, start : start + size] = radius * np.cos(angle), radius * np.sin(angle)
    return torch.from_numpy(numbers.reshape(-1)[:count])


@cache
def epsilon(noise: float, rounds: int, delta: float) -> float:
    """Return ε at δ of consecutive Gaussian mechanisms of this noise multiplier, one per round."""
    try:
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise UserError("privacy.noise needs dp-accounting: pip install 'fedlens[privacy]'") from None
    if rounds == 0:
        return 0.0
    return float(RdpAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(noise), rounds)).get_epsilon(delta))
