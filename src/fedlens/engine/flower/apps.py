"""Flower's two apps. All that is Flower's is here: messages, nodes, contexts. Simulation and deployment runtime see the same apps.

A message carries facts (JSON) and tensors (safetensors bytes, as one uint8 array); its type names the operation.
"""

import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key, load_ssh_public_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedlens.composing import compose
from fedlens.engine.flower.federation import Federation
from fedlens.engine.flower.node import OPERATIONS, Place, answer
from fedlens.engine.flower.programs import TIED
from fedlens.engine.flower.secure import Counted, content_size, secure_mean, site_answer
from fedlens.engine.flower.wire import Failure, Parcel, Refused
from fedlens.engine.work import Update
from fedlens.errors import UserError, first_line
from fedlens.runs.store import take_lock
from fedlens.training.execute import execute
from fedlens.training.site import Traffic

POLL = 0.5  # seconds between looks for answers
PATIENCE = 60.0  # seconds for a predecessor to end
FACTS, TENSORS, MEMORY = "facts", "tensors", "memory"
log = logging.getLogger("fedlens")


def to_record(parcel: Parcel) -> RecordDict:
    found = RecordDict({FACTS: ConfigRecord({FACTS: parcel.told})})
    if parcel.tensors:
        found[TENSORS] = ArrayRecord({TENSORS: _array(parcel.tensors)})
    return found


def from_record(record: RecordDict) -> Parcel:
    """A message's content as a parcel; anything of another form is refused."""
    facts = record.get(FACTS)
    told = facts.get(FACTS) if isinstance(facts, ConfigRecord) else None
    tensors = record.get(TENSORS)
    if tensors is None:
        return Parcel.read(told, b"")
    array = tensors.get(TENSORS) if isinstance(tensors, ArrayRecord) else None
    return Parcel.read(told, array.data if array is not None else None)


def _array(data: bytes) -> Array:
    return Array("uint8", (len(data),), "safetensors", data)


class GridCourier:
    """The sites that a Flower grid knows. `keys`: the public keys of a federation's sites, K.pub; None where sites have none, as in a simulation."""

    def __init__(self, grid: Grid, context: Context, keys: Path | None = None) -> None:
        self.grid, self.context = grid, context
        self.numbers = {} if keys is None else {_canonical(file.read_bytes()): int(file.stem) for file in keys.glob("*.pub")}
        self._known: dict[int, int] = {}  # node -> the K of its key

    def sites(self) -> Collection[int]:
        return list(self.grid.get_node_ids())

    def may_have(self, site: int, client: int) -> bool:
        """Site K of N has the clients K, K + N, …"""
        if not self.numbers:
            return True
        if site not in self._known:
            for node in self.grid.get_nodes():
                self._known[node.node_id] = self.numbers.get(_canonical(node.public_key), -1)
        return client % len(self.numbers) == self._known.get(site, -1)

    def ask(self, operation: str, parcels: Mapping[int, Parcel], deadline: float) -> dict[int, Parcel | Failure]:
        if not parcels:
            return {}
        sites = sorted(parcels)
        kind = "query" if operation == "hello" else "train"
        messages = [Message(to_record(parcels[site]), dst_node_id=site, message_type=f"{kind}.{operation}", ttl=deadline) for site in sites]
        until = time.monotonic() + deadline
        sent = {message_id: site for message_id, site in zip(self.grid.push_messages(messages), sites, strict=True) if message_id}
        found: dict[int, Parcel | Failure] = {}
        waiting = set(sent)
        while waiting and time.monotonic() < until:
            for asked, reply in self._pull(sorted(waiting)):
                waiting.discard(asked)
                found[sent[asked]] = reply
            if waiting:
                time.sleep(POLL)
        return found

    def _pull(self, waiting: Sequence[str]) -> Iterator[tuple[str, Parcel | Failure]]:
        """(message that was answered, answer): an error's source is not the site that it is about. One by one: of replies that are fetched together, one
        that cannot be received would take the others with it."""
        for message_id in waiting:
            try:
                replies = list(self.grid.pull_messages([message_id]))
            except Exception as error:  # whatever a site can make Flower stumble over
                yield message_id, Failure.of(f"its reply cannot be received ({type(error).__name__}: {error})")
                continue
            for reply in replies:
                if reply.metadata.reply_to_message_id == message_id:
                    yield message_id, _read(reply)

    def secure_mean(self, parcels: Mapping[int, Parcel], round_: int, traffic: Traffic, **options: Any) -> tuple[Update | None, set[int]]:
        grid = Counted(self.grid)
        found = secure_mean(grid, self.context, parcels, round_, **options)
        traffic.up, traffic.down = traffic.up + grid.up, traffic.down + grid.down
        return found, grid.failed


def _canonical(key: bytes) -> bytes:
    """A public key in one form, whichever it came in."""
    try:
        loaded = load_ssh_public_key(key) if key.startswith(b"ecdsa") else load_pem_public_key(key)
        return loaded.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except ValueError:
        return key


def _read(reply: Message) -> Parcel | Failure:
    if reply.has_error():
        return Failure.of(f"Flower says {reply.error.reason or reply.error.code}")
    try:
        return from_record(reply.content)
    except Refused as why:
        return Failure.of(why, size=content_size(reply))


# --- the server ------------------------------------------------------------------------------------------------------

server_app = ServerApp()


@server_app.main()  # type: ignore[untyped-decorator]
def serve(grid: Grid, context: Context) -> None:
    """A run whose clients are the grid's nodes; if its folder holds one already, it goes on from the last checkpoint."""
    _log_to_screen()
    if os.environ.get(TIED):
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    given = context.run_config
    try:
        config = compose(shlex.split(str(given.get("overrides", ""))))
        config.run.if_exists, config.run.progress = "resume", False
        config.run.checkpoint_minutes = 0.0  # rounds are dear here: each is kept
        config.run.dir = config.run.dir or str(given.get("run-dir") or Path.cwd() / "run")
        _wait_for_lock(Path(config.run.dir))
        keys = Path(str(given["keys"])) if given.get("keys") else None
        run = execute(config, clients=lambda bench: Federation(bench, GridCourier(grid, context, keys)))
    except UserError as error:
        log.error("error: %s", error)
        raise RuntimeError(str(error)) from None  # Flower ends the run as failed; leaving the process would look like a crash
    log.info("finished: %s", run.path)


def _wait_for_lock(folder: Path) -> None:
    """The folder may still be held for some seconds by the process of a server that was killed."""
    until = time.monotonic() + PATIENCE
    while (folder / "lock").exists() and time.monotonic() < until:
        try:
            take_lock(folder).close()
            return
        except UserError:
            time.sleep(0.5)


def _end_with_parent(parent: int) -> None:
    """The process of a server that was killed would still hold the run's folder when its successor wants it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _log_to_screen() -> None:
    if not any(type(handler) is logging.StreamHandler for handler in log.handlers):
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)


# --- a site ----------------------------------------------------------------------------------------------------------

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
        self.state[self._name(key)] = ArrayRecord({key: _array(value)})

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
    return Place(number, of, bool(known.get("own-data", False)), tuple(shlex.split(str(known.get("overrides", "")))))


def _answering(operation: str) -> Callable[[Message, Context], Message]:
    def reply(message: Message, context: Context) -> Message:
        try:
            found = answer(operation, from_record(message.content), place_of(context), Memory(context.state))
        except (Refused, UserError) as error:
            found = Parcel({"error": first_line(error)})
        return Message(to_record(found), reply_to=message)

    return reply


for _operation in OPERATIONS:
    (client_app.query if _operation == "hello" else client_app.train)(_operation)(_answering(_operation))


@client_app.train()  # type: ignore[untyped-decorator]
def train_in_secret(message: Message, context: Context) -> Message:
    return site_answer(message, place_of(context), Memory(context.state))
