"""Secure aggregation: the server learns the mean of the updates and none of them. Flower's SecAgg+ (Bell et al. 2020) does it; this hands it our work.

Sites agree on masks that cancel in the sum, so what a site uploads is noise to the server; shares of the masks' keys let the others make good
for a site that drops out. The vectors are the k active coordinates: sparsity makes them short, the protocol makes every number eight bytes of an
integer. A site adds its own clients up first. Entries beyond `privacy.range` are cut off by the site, the only bound that can hold for what nobody sees.
This is the server's half; a site's is `mean_update` in node.py, and both stretch keys into masks as stretching.py does.
"""

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import Grid

from fedlens.deploy.exchange import exchange
from fedlens.deploy.wire import Parcel
from fedlens.engine.local_work import Update

FORM = "safetensors"
LONGEST = 4096  # bytes of an encrypted share (612) or of a share (324)
CURVE = "secp384r1"  # of the protocol's keys
WORST = 1e6  # a loss above it is nonsense, and must not spoil the mean of the others
log = logging.getLogger("fedlens")


class _Site:
    """What the workflow wants to know of a client."""

    def __init__(self, number: int) -> None:
        self.node_id, self.cid = number, str(number)


class _Round:
    """A strategy for one round: says what is asked, keeps what the sum was."""

    def __init__(self, parcels: Mapping[int, Parcel]) -> None:
        self.parcels = parcels
        self.mean: np.ndarray[Any, Any] | None = None
        self.samples, self.loss, self.clients = 0, 0.0, 0

    def configure_fit(self, round_: int, parameters: object, manager: object) -> list[tuple[_Site, FitIns]]:
        return [
            (_Site(site), FitIns(Parameters([parcel.tensors], FORM), {"facts": parcel.told}))
            for site, parcel in sorted(self.parcels.items())
        ]

    def aggregate_fit(self, round_: int, results: Sequence[tuple[_Site, FitRes]], failures: object) -> tuple[None, dict[str, Any]]:
        """All results carry the same vector, the mean over those who answered. It is there now, whatever else a site says: see `_secure`."""
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        said = {site.node_id: (found.num_examples, found.metrics.get("loss")) for site, found in results}
        losses = [(n, float(loss)) for n, loss in said.values() if isinstance(loss, int | float) and 0 <= loss <= WORST and n > 0]
        self.samples = max(1, sum(n for n, _ in said.values()))
        self.loss = sum(n * loss for n, loss in losses) / max(1, sum(n for n, _ in losses))
        self.clients = sum(len(self.parcels[site].facts["clients"]) for site in said if site in self.parcels)
        return None, {}


class Counted:
    """A grid whose messages are weighed."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.up, self.down = grid, 0, 0
        self.size = 0  # coordinates of an update
        self.samples: Mapping[int, int] = {}  # of each site, as it said when it was greeted
        self.failed: set[int] = set()  # sites that left a message without a good answer, in the first stage that any did

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        self.down += sum(content_size(message) for message in sent)
        assert timeout is not None  # `secure_mean` gives every stage its deadline
        replies = [reply for _, reply in exchange(self.grid, sent, timeout)]
        asked = {message.metadata.dst_node_id: message.content.config_records[RECORD_KEY_CONFIGS] for message in sent}
        good = [reply for reply in replies if isinstance(reply, Message) and not reply.has_error() and self._in_form(reply, asked)]
        self.up += sum(content_size(message) for message in good)
        if not self.failed:  # in later stages others fail because of those
            self.failed = set(asked) - {message.metadata.src_node_id for message in good}
        return good

    def _in_form(self, message: Message, asked: Mapping[int, Any]) -> bool:
        """Whether an answer is what its stage asks for: with another Flower would stumble, and nobody could say over whom."""
        site = message.metadata.src_node_id
        try:
            record: Any = message.content.config_records[RECORD_KEY_CONFIGS]
            stage = asked[site][Key.STAGE]
            if stage == Stage.SETUP:
                keys = [load_pem_public_key(record[name]) for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)]
                good = all(isinstance(key, EllipticCurvePublicKey) and key.curve.name == CURVE for key in keys)
                return good and record[Key.PUBLIC_KEY_1] != record[Key.PUBLIC_KEY_2]  # else all the others would drop out
            if stage == Stage.SHARE_KEYS:  # for each of the others, encrypted
                return _for_each(record, Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST, set(asked) - {site})
            if stage == Stage.UNMASK:
                return _for_each(
                    record, Key.NODE_ID_LIST, Key.SHARE_LIST, {*asked[site][Key.ACTIVE_NODE_ID_LIST], *asked[site][Key.DEAD_NODE_ID_LIST]}
                )
            said: Any = compat.recorddict_to_fitres(message.content, keep_input=True).num_examples
            if type(said) is not int or said != self.samples[site]:
                return False  # it has other data than it said, or lies
            # numpy would stretch a column and a row into a matrix
            return [_form(blob) for blob in record[Key.MASKED_PARAMETERS]] == [((1,), "<i8"), ((self.size,), "<i8")]
        except Exception:  # there are as many ways to break a key or a header, which is a piece of Python
            return False


def _for_each(record: Any, names: str, parts: str, expected: set[int]) -> bool:
    """Whether a record lists one part of bytes for each of the sites expected."""
    same = len(record[names]) == len(record[parts]) == len(expected) and set(record[names]) == expected
    return same and all(isinstance(part, bytes) and len(part) <= LONGEST for part in record[parts])


def _form(blob: bytes) -> tuple[tuple[int, ...], str]:
    """Shape and type that an array in numpy's format says it has."""
    file = io.BytesIO(blob)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if len(blob) - file.tell() != dtype.itemsize * int(np.prod(shape)):
        raise ValueError
    return shape, dtype.str


def content_size(message: Message) -> int:
    """Of its content, as it travels."""
    return sum(
        sum(len(array.data) for array in record.values()) if isinstance(record, ArrayRecord) else len(record.deflate())
        for record in message.content.values()
    )


def secure_mean(
    grid: Counted,
    context: Context,
    parcels: Mapping[int, Parcel],
    round_: int,
    *,
    size: int,
    bound: float,
    samples: Mapping[int, int],
    fraction: float,
    deadline: float,
) -> Update | None:
    """One update that stands for all: the mean by samples. `samples`: of each site. None: too few have answered."""
    grid.size, grid.samples = size, samples
    strategy = _Round(parcels)
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
    except Exception as error:  # whatever a site can make Flower stumble over
        log.warning("secure aggregation: %s", " ".join(f"{type(error).__name__}: {error}".split())[:300])
    if strategy.mean is None:
        return None
    delta = torch.from_numpy(np.ascontiguousarray(strategy.mean, dtype=np.float32))
    return Update(-1, strategy.samples, 1, delta, torch.tensor(strategy.loss), strategy.clients)
