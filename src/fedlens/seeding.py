"""Keyed randomness: each generator is made from (seed, purpose, round, client, …); there is no shared stream.

Results are therefore the same for every engine, every order of clients and every interrupted and resumed run.
"""

import hashlib

import numpy as np
import torch


def key(seed: int, purpose: str, *ids: int) -> int:
    """Return a 63-bit number that depends on the arguments only, not on machine or Python version."""
    text = ":".join([str(seed), purpose, *map(str, ids)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_rng(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """Return a CPU generator for this purpose. Draw on the CPU and move: the numbers are then the same on every device."""
    return torch.Generator().manual_seed(key(seed, purpose, *ids))


def numpy_rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return a numpy generator for this purpose."""
    return np.random.default_rng(key(seed, purpose, *ids))
