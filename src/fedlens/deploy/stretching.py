"""From keys to the masks of secure aggregation, for server and sites: importing this changes Flower's both halves of SecAgg+.

Flower stretches keys with a generator of 32 bits of state, which can be searched through; here AES-256 in counter mode does it.
"""

import hashlib
from importlib import import_module
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


def masks_from(seed: bytes, num_range: int, dimensions_list: list[tuple[int, ...]]) -> list[np.ndarray[Any, Any]]:
    """Integers in [0, num_range), a power of two, that only who has the seed can tell from noise."""
    counts = [int(np.prod(dimensions, dtype=np.int64)) for dimensions in dimensions_list]
    key = hashlib.sha256(b"fedlens masks" + seed).digest()
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(4 * sum(counts)))
    numbers = np.frombuffer(stream, dtype="<u4").astype(np.int64) & (num_range - 1)
    parts = np.split(numbers, np.cumsum(counts)[:-1])
    return [part.reshape(dimensions) for part, dimensions in zip(parts, dimensions_list, strict=True)]


for _place in ("flwr.client.mod.secure_aggregation.secaggplus_mod", "flwr.server.workflow.secure_aggregation.secaggplus_workflow"):
    _module = import_module(_place)  # by name: one of them is hidden behind a function of the same name
    assert callable(_module.pseudo_rand_gen)
    _module.pseudo_rand_gen = masks_from  # type: ignore[attr-defined]
