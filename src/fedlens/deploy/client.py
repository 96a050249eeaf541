"""Flower's ClientApp: what the process does that Flower starts for a message. It hands the message to the site's worker.

torch is not imported here, nor what imports it: this process lives for one message.
"""

import logging
import shlex
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from safetensors.numpy import load

from fedlens.deploy.records import as_array, from_record, to_record
from fedlens.deploy.wire import OPERATIONS, Parcel, Place, Refused, from_setting
from fedlens.deploy.worker import MEAN, ask
from fedlens.errors import UserError, first_line

MEMORY = "memory"
log = logging.getLogger("fedlens")
client_app = ClientApp(mods=[secaggplus_mod])  # looks at messages of type `train` alone, which only secure aggregation sends


class Memory(MutableMapping[str, bytes]):
    """What a site keeps between messages: Flower's own state of a node, which lives as long as its SuperNode."""

    def __init__(self, state: RecordDict) -> None:
        self.state = state

    def _name(self, key: str) -> str:
        return f"{MEMORY}.{key}"

    def __getitem__(self, key: str) -> bytes:
        record = self.state[self._name(key)]
        assert isinstance(record, ArrayRecord)
        return bytes(record[key].data)

    def __setitem__(self, key: str, value: bytes) -> None:
        self.state[self._name(key)] = ArrayRecord({key: as_array(value)})

    def __delitem__(self, key: str) -> None:
        del self.state[self._name(key)]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(f"{MEMORY}.") for name in self.state if name.startswith(f"{MEMORY}."))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def place_of(context: Context) -> Place:
    """Flower's partition-id and num-partitions, as its simulation sets them; `own-data` and `overrides` are a site's own."""
    known = context.node_config
    try:
        number, of = int(known["partition-id"]), int(known["num-partitions"])
    except (KeyError, ValueError, TypeError):
        raise UserError("--node-config: a site needs partition-id and num-partitions, whole numbers") from None
    if not 0 <= number < of:
        raise UserError(f"--node-config: partition-id={number} given, allowed is 0 to {of - 1}")
    return Place(number, of, bool(known.get("own-data", False)), tuple(shlex.split(from_setting(known.get("overrides", "")))))


@contextmanager
def _details_stay_here(operation: str) -> Iterator[None]:
    """Of what nobody expected Flower would send the text, paths and all."""
    try:
        yield
    except Exception as error:
        log.exception("%s failed", operation)
        raise RuntimeError(f"{type(error).__name__}; the site's log has more") from None


def _answering(operation: str) -> Callable[[Message, Context], Message]:
    def reply(message: Message, context: Context) -> Message:
        with _details_stay_here(operation):
            try:
                found = ask(operation, from_record(message.content), place_of(context), Memory(context.state))
            except (Refused, UserError) as error:
                found = Parcel({"error": first_line(error)})
        return Message(to_record(found), reply_to=message)

    return reply


for _operation in OPERATIONS:
    (client_app.query if _operation == "hello" else client_app.train)(_operation)(_answering(_operation))


@client_app.train()  # type: ignore[untyped-decorator]
def train_in_secret(message: Message, context: Context) -> Message:
    """One mean by samples. What goes wrong is raised: to the others the site has then dropped out."""
    asked = compat.recorddict_to_fitins(message.content, keep_input=True)
    (blob,) = asked.parameters.tensors
    with _details_stay_here(MEAN):
        reply = ask(MEAN, Parcel.read(asked.config.get("facts"), bytes(blob)), place_of(context), Memory(context.state))
    if not reply.tensors:
        raise Refused(str(reply.facts["error"]))
    told = reply.facts
    metrics = {"loss": told["loss"], "clients": told["clients"]}
    answered = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([load(reply.tensors)["mean"]]), told["samples"], metrics)
    return Message(compat.fitres_to_recorddict(answered, keep_input=False), reply_to=message)
