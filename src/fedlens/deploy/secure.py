"""Secure aggregation with Flower's SecAgg+ (Bell et al. 2020): the server learns the mean of the updates and no single one.

Sites agree on masks that cancel in the sum, so a single upload looks like noise. Secret shares of the masks' keys replace a site that drops out. A vector holds
the k active coordinates, eight bytes each, and a site first averages its own clients (`mean_update` in site.py). Sites clamp entries to `privacy.range`:
no other bound can hold for updates that the server never sees.

This is the server's half. The masks of both halves come from `aes_masks`, which importing this module installs in Flower.
"""

import hashlib
import io
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import Grid

from fedlens.deploy.protocol import Failure, Payload

if TYPE_CHECKING:
    from fedlens.engine.local_work import Update

TENSOR_TYPE = "safetensors"
MAX_SHARE = 4096  # bytes; an encrypted share has 612, a share 324
CURVE = "secp384r1"  # of the protocol's keys
MAX_LOSS = 1e6  # a larger loss is left out of the mean loss
POLL = 0.25  # seconds between looks for replies
log = logging.getLogger("fedlens")


# --- masks -----------------------------------------------------------------------------------------------------------


def aes_masks(seed: bytes, num_range: int, dimensions_list: list[tuple[int, ...]]) -> list[np.ndarray[Any, Any]]:
    """Return integers in [0, num_range), a power of two, from AES-256 in counter mode.

    Flower's own generator has 32 bits of state, so its masks could be found by search.
    """
    counts = [int(np.prod(dimensions, dtype=np.int64)) for dimensions in dimensions_list]
    key = hashlib.sha256(b"fedlens masks" + seed).digest()
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(4 * sum(counts)))
    numbers = np.frombuffer(stream, dtype="<u4").astype(np.int64) & (num_range - 1)
    parts = np.split(numbers, np.cumsum(counts)[:-1])
    return [part.reshape(dimensions) for part, dimensions in zip(parts, dimensions_list, strict=True)]


MASKED = ("flwr.client.mod.secure_aggregation.secaggplus_mod", "flwr.server.workflow.secure_aggregation.secaggplus_workflow")
for _name in MASKED:
    _module = import_module(_name)  # by name: a function of the same name hides one of them
    assert callable(_module.pseudo_rand_gen)
    _module.pseudo_rand_gen = aes_masks  # type: ignore[attr-defined]


# --- messages --------------------------------------------------------------------------------------------------------


def exchange(grid: Grid, messages: Sequence[Message], deadline: float) -> Iterator[tuple[int, Message | Failure]]:
    """Yield (site, reply or failure) as replies arrive within `deadline` seconds.

    Fetch replies one at a time, so that an unreadable reply cannot lose the others. The site is that of the request: an error reply may name another source.
    """
    end = time.monotonic() + deadline
    sites = [message.metadata.dst_node_id for message in messages]
    waiting = {message_id: site for message_id, site in zip(grid.push_messages(messages), sites, strict=True) if message_id}
    while waiting and time.monotonic() < end:
        for message_id in sorted(waiting):
            try:
                replies = [reply for reply in grid.pull_messages([message_id]) if reply.metadata.reply_to_message_id == message_id]
            except Exception as error:  # a site may send anything that Flower fails to read
                yield waiting.pop(message_id), Failure.of(f"its reply cannot be received ({type(error).__name__}: {error})")
                continue
            if replies:
                yield waiting.pop(message_id), replies[0]
        if waiting:
            time.sleep(POLL)


def content_size(message: Message) -> int:
    """Return the size of a message's content on the wire, in bytes."""
    return sum(
        sum(len(array.data) for array in record.values()) if isinstance(record, ArrayRecord) else len(record.deflate())
        for record in message.content.values()
    )


class CountedGrid:
    """A grid that counts bytes and passes on only replies of the form that their stage requires."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.up, self.down = grid, 0, 0
        self.size = 0  # coordinates of an update
        self.samples: Mapping[int, int] = {}  # per site, as reported in its hello
        self.answers: str | None = None  # digest of run, round and θ that a site must repeat
        self.failed: set[int] = set()  # sites without a sound reply in the first stage where any failed

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        self.down += sum(content_size(message) for message in sent)
        assert timeout is not None  # `secure_mean` sets it for every stage
        replies = [reply for _, reply in exchange(self.grid, sent, timeout)]
        requests = {message.metadata.dst_node_id: message.content.config_records[RECORD_KEY_CONFIGS] for message in sent}
        sound = [reply for reply in replies if isinstance(reply, Message) and not reply.has_error() and self._is_sound(reply, requests)]
        self.up += sum(content_size(message) for message in sound)
        if not self.failed:  # failures of later stages follow from these
            self.failed = set(requests) - {message.metadata.src_node_id for message in sound}
        return sound

    def _is_sound(self, message: Message, requests: Mapping[int, Any]) -> bool:
        """Return whether a reply has the form of its stage. Flower would fail on any other, without naming the site."""
        site = message.metadata.src_node_id
        try:
            record: Any = message.content.config_records[RECORD_KEY_CONFIGS]
            stage = requests[site][Key.STAGE]
            if stage == Stage.SETUP:
                keys = [load_pem_public_key(record[name]) for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)]
                sound = all(isinstance(key, EllipticCurvePublicKey) and key.curve.name == CURVE for key in keys)
                return sound and record[Key.PUBLIC_KEY_1] != record[Key.PUBLIC_KEY_2]  # equal keys make all other sites drop out
            if stage == Stage.SHARE_KEYS:  # one encrypted share for each of the other sites
                return _has_parts(record, Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST, set(requests) - {site})
            if stage == Stage.UNMASK:
                others = {*requests[site][Key.ACTIVE_NODE_ID_LIST], *requests[site][Key.DEAD_NODE_ID_LIST]}
                return _has_parts(record, Key.NODE_ID_LIST, Key.SHARE_LIST, others)
            result = compat.recorddict_to_fitres(message.content, keep_input=True)
            if type(result.num_examples) is not int or result.num_examples != self.samples[site]:
                return False  # not the data that the site reported
            if self.answers and result.metrics.get("answers") != self.answers:
                return False  # the answer to another request
            # exact shapes: numpy would broadcast a column and a row to a matrix
            return [_npy_form(blob) for blob in record[Key.MASKED_PARAMETERS]] == [((1,), "<i8"), ((self.size,), "<i8")]
        except Exception:  # keys and array headers can be malformed in many ways
            return False


def _has_parts(record: Any, names: str, parts: str, expected: set[int]) -> bool:
    """Return whether a record lists one part of bytes for each expected site."""
    matches = len(record[names]) == len(record[parts]) == len(expected) and set(record[names]) == expected
    return matches and all(isinstance(part, bytes) and len(part) <= MAX_SHARE for part in record[parts])


def _npy_form(blob: bytes) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype from an array's header in numpy's file format."""
    file = io.BytesIO(blob)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if len(blob) - file.tell() != dtype.itemsize * int(np.prod(shape)):
        raise ValueError
    return shape, dtype.str


# --- one round -------------------------------------------------------------------------------------------------------


class _Strategy:
    """A Flower strategy for one round: sends the payloads and records the mean."""

    def __init__(self, payloads: Mapping[int, Payload]) -> None:
        self.payloads = payloads
        self.mean: np.ndarray[Any, Any] | None = None
        self.samples, self.loss, self.clients = 0, 0.0, 0

    def configure_fit(self, round_: int, parameters: object, manager: object) -> list[tuple[Any, FitIns]]:
        return [
            (
                SimpleNamespace(node_id=site, cid=str(site)),
                FitIns(Parameters([payload.tensors], TENSOR_TYPE), {"facts": payload.metadata_json}),
            )
            for site, payload in sorted(self.payloads.items())
        ]

    def aggregate_fit(self, round_: int, results: Sequence[tuple[Any, FitRes]], failures: object) -> tuple[None, dict[str, Any]]:
        """Record the mean, which every result carries. A site's other metrics must not stop the round: see `_secure_update` in server.py."""
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        reports = {site.node_id: (result.num_examples, result.metrics.get("loss")) for site, result in results}
        losses = [(n, float(loss)) for n, loss in reports.values() if isinstance(loss, int | float) and 0 <= loss <= MAX_LOSS and n > 0]
        self.samples = max(1, sum(n for n, _ in reports.values()))
        self.loss = sum(n * loss for n, loss in losses) / max(1, sum(n for n, _ in losses))
        self.clients = sum(len(self.payloads[site].metadata["clients"]) for site in reports if site in self.payloads)
        return None, {}


def secure_mean(
    grid: CountedGrid,
    context: Context,
    payloads: Mapping[int, Payload],
    round_: int,
    *,
    size: int,
    bound: float,
    samples: Mapping[int, int],
    fraction: float,
    deadline: float,
    answers: str | None = None,
) -> "Update | None":
    """Return the mean of the sites' updates, weighted by `samples` per site, as one update; None if too few sites answered."""
    import torch

    from fedlens.engine.local_work import Update

    grid.size, grid.samples, grid.answers = size, samples, answers
    strategy = _Strategy(payloads)
    legacy = LegacyContext(context, strategy=strategy)
    legacy.state = RecordDict()
    legacy.state["config"] = ConfigRecord({"current_round": round_ + 1})
    legacy.state["parameters"] = compat.parameters_to_arrayrecord(ndarrays_to_parameters([np.zeros(1, np.float32)]), keep_input=False)
    workflow = SecAggPlusWorkflow(
        num_shares=1.0,
        reconstruction_threshold=max(0.51, fraction),
        max_weight=float(max(samples.values())),
        clipping_range=bound,
        timeout=deadline,
    )
    try:
        workflow(grid, legacy)
    except Exception as error:  # a site may send anything that Flower fails on
        log.warning("secure aggregation: %s", Failure.of(f"{type(error).__name__}: {error}"))
    if strategy.mean is None:
        return None
    delta = torch.from_numpy(np.ascontiguousarray(strategy.mean, dtype=np.float32))
    return Update(-1, strategy.samples, 1, delta, torch.tensor(strategy.loss), strategy.clients)
