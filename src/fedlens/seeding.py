"""Keyed randomness: a generator is made from (seed, purpose, round, client, …), never drawn from a shared stream.

So a result depends neither on the engine, nor on the order of clients, nor on where a run was interrupted.
"""

import hashlib

import numpy as np
import torch


def key(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit number that is a fixed function of its arguments, on every machine and Python version."""
    text = ":".join([str(seed), purpose, *map(str, ids)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_rng(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """A CPU generator for this purpose. Draw there and move: the numbers are then the same on every device."""
    return torch.Generator().manual_seed(key(seed, purpose, *ids))


def numpy_rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    return np.random.default_rng(key(seed, purpose, *ids))
