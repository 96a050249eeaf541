"""fedlens as a Flower app: the ServerApp, the ClientApp, and the server's transport over Flower's grid. Simulation and deployment run the same apps.

Importing this module must not import torch: a SuperNode runs a process per message, which only forwards it to the site's worker.
"""

import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key, load_ssh_public_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flwr.serverapp import Grid, ServerApp
from safetensors.numpy import load

from fedlens.deploy.programs import TIED
from fedlens.deploy.protocol import OPERATIONS, Failure, Payload, Rejected, SiteOptions, from_setting
from fedlens.deploy.secure import CountedGrid, content_size, exchange, secure_mean
from fedlens.deploy.worker import MEAN, request
from fedlens.errors import UserError, bad_value, first_line

if TYPE_CHECKING:
    from fedlens.engine.local_work import Update
    from fedlens.training.clients import Traffic

METADATA, TENSORS = "facts", "tensors"  # names of Flower's records
STATE = "memory."  # prefix of a site's state among the records of a Flower context
LOCK_WAIT = 60.0  # seconds for the process of a killed server to release the run's folder
PARENT_POLL = 0.5  # seconds between looks for the parent process
log = logging.getLogger("fedlens")


# --- payloads as Flower's records ------------------------------------------------------------------------------------


def to_record(payload: Payload) -> RecordDict:
    """Return a payload as the content of a Flower message."""
    record = RecordDict({METADATA: ConfigRecord({METADATA: payload.metadata_json})})
    if payload.tensors:
        record[TENSORS] = _array_record(TENSORS, payload.tensors)
    return record


def from_record(record: RecordDict) -> Payload:
    """Return the content of a received message as a payload; raise Rejected for any other form."""
    config = record.get(METADATA)
    metadata = config.get(METADATA) if isinstance(config, ConfigRecord) else None
    tensors = record.get(TENSORS)
    if tensors is None:
        return Payload.parse(metadata, b"")
    array = tensors.get(TENSORS) if isinstance(tensors, ArrayRecord) else None
    return Payload.parse(metadata, array.data if array is not None else None)


def _array_record(name: str, data: bytes) -> ArrayRecord:
    return ArrayRecord({name: Array("uint8", (len(data),), "safetensors", data)})


# --- the server ------------------------------------------------------------------------------------------------------


class GridTransport:
    """The sites that a Flower grid knows. `keys`: folder of the sites' public keys (K.pub); None in a simulation, where sites have none."""

    def __init__(self, grid: Grid, context: Context, keys: Path | None = None) -> None:
        self.grid, self.context = grid, context
        files = [] if keys is None else [file for file in keys.glob("*.pub") if file.stem.isdecimal()]
        if keys is not None and not files:
            raise UserError(
                f"federate server: {keys} holds no key of a site (K.pub), so no site could join; fedlens federate join makes one."
            )
        self.numbers = {_canonical(file.read_bytes()): int(file.stem) for file in files}
        # The number of sites must not change when a key is removed. Folders of old versions have no count file.
        count = int((keys / "count").read_text()) if keys is not None and (keys / "count").is_file() else 0
        self.count = max([count, *(k + 1 for k in self.numbers.values())])
        self._site_numbers: dict[int, int] = {}  # node -> K of its key

    def sites(self) -> Collection[int]:
        return list(self.grid.get_node_ids())

    def may_have(self, site: int, client: int) -> bool:
        """Return whether the site may have this client: site K of N has clients K, K + N, …"""
        if not self.numbers:
            return True
        if site not in self._site_numbers:
            for node in self.grid.get_nodes():
                self._site_numbers[node.node_id] = self.numbers.get(_canonical(node.public_key), -1)
        return client % self.count == self._site_numbers.get(site, -1)

    def send(self, operation: str, payloads: Mapping[int, Payload], deadline: float) -> dict[int, Payload | Failure]:
        if not payloads:
            return {}
        kind = "query" if operation == "hello" else "train"
        messages = [
            Message(to_record(payload), dst_node_id=site, message_type=f"{kind}.{operation}", ttl=deadline)
            for site, payload in sorted(payloads.items())
        ]
        replies = exchange(self.grid, messages, deadline)
        return {site: reply if isinstance(reply, Failure) else _read(reply) for site, reply in replies}

    def secure_mean(
        self, payloads: Mapping[int, Payload], round_: int, traffic: "Traffic", **options: Any
    ) -> "tuple[Update | None, set[int]]":
        grid = CountedGrid(self.grid)
        mean = secure_mean(grid, self.context, payloads, round_, **options)
        traffic.up, traffic.down = traffic.up + grid.up, traffic.down + grid.down
        return mean, grid.failed


def _canonical(key: bytes) -> bytes:
    """Return a public key in one format, whether it came as OpenSSH or PEM."""
    try:
        loaded = load_ssh_public_key(key) if key.startswith(b"ecdsa") else load_pem_public_key(key)
        return loaded.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except ValueError:
        return key


def _read(reply: Message) -> Payload | Failure:
    if reply.has_error():
        return Failure.of(f"Flower reports {reply.error.reason or reply.error.code}")
    try:
        return from_record(reply.content)
    except Rejected as reason:
        return Failure.of(reason, size=content_size(reply))


server_app = ServerApp()


@server_app.main()  # type: ignore[untyped-decorator]
def serve(grid: Grid, context: Context) -> None:
    """Run federated training whose clients are the grid's nodes; resume if the run's folder already holds a run."""
    from fedlens.deploy.server import RemoteClients
    from fedlens.overrides import compose
    from fedlens.training.run import execute

    _log_to_screen()
    if os.environ.get(TIED):
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    settings = context.run_config
    try:
        config = compose(shlex.split(from_setting(settings.get("overrides", ""))))
        config.run.if_exists, config.run.progress = "resume", False
        config.run.checkpoint_minutes = 0.0  # rounds are expensive here: checkpoint each
        config.run.dir = config.run.dir or from_setting(settings.get("run-dir", "")) or str(Path.cwd() / "run")
        _wait_for_lock(Path(config.run.dir))
        keys = Path(from_setting(settings["keys"])) if settings.get("keys") else None
        run = execute(config, clients=lambda bench: RemoteClients(bench, GridTransport(grid, context, keys)))
    except UserError as error:
        log.error("error: %s", error)
        raise RuntimeError(str(error)) from None  # Flower then reports a failed run; an exit of the process would look like a crash
    log.info("finished: %s", run.path)


def _wait_for_lock(folder: Path) -> None:
    """Wait until the process of a killed server has released the run's folder."""
    from fedlens.runs.store import take_lock

    end = time.monotonic() + LOCK_WAIT
    while (folder / "lock").exists() and time.monotonic() < end:
        try:
            take_lock(folder).close()
            return
        except UserError:
            time.sleep(PARENT_POLL)


def _end_with_parent(parent: int) -> None:
    """End this process with its parent: the process of a killed server must not hold the run's folder when the next server starts."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL)
    os._exit(1)


def _log_to_screen() -> None:
    if not any(type(handler) is logging.StreamHandler for handler in log.handlers):
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)


# --- a site ----------------------------------------------------------------------------------------------------------


@contextmanager
def _site_state(context: Context) -> Iterator[dict[str, bytes]]:
    """Yield what the site remembers between messages, and store its changes in Flower's context, which lives as long as the SuperNode."""
    names = [name for name in context.state if name.startswith(STATE)]
    state = {name.removeprefix(STATE): bytes(context.state[name][name.removeprefix(STATE)].data) for name in names}
    try:
        yield state
    finally:
        for name in names:
            del context.state[name]
        for name, value in state.items():
            context.state[STATE + name] = _array_record(name, value)


def site_options(context: Context) -> SiteOptions:
    """Read a site's options from Flower's node configuration, which names a site partition-id of num-partitions."""
    node = context.node_config
    try:
        number, sites = int(node["partition-id"]), int(node["num-partitions"])
    except (KeyError, ValueError, TypeError):
        raise UserError("--node-config must set partition-id and num-partitions to whole numbers.") from None
    if not 0 <= number < sites:
        raise bad_value("--node-config: partition-id", number, f"0 to {sites - 1}")
    return SiteOptions(number, sites, bool(node.get("own-data", False)), tuple(shlex.split(from_setting(node.get("overrides", "")))))


@contextmanager
def _private_errors(operation: str) -> Iterator[None]:
    """Keep unexpected exceptions local: Flower would send their text, including paths, to the server."""
    try:
        yield
    except Exception as error:
        log.exception("%s failed", operation)
        raise RuntimeError(f"{type(error).__name__}; see the site's log") from None


def _handler(operation: str) -> Callable[[Message, Context], Message]:
    def reply(message: Message, context: Context) -> Message:
        with _private_errors(operation):
            try:
                with _site_state(context) as state:
                    payload = request(operation, from_record(message.content), site_options(context), state)
            except (Rejected, UserError) as error:
                payload = Payload({"error": first_line(error)})
        return Message(to_record(payload), reply_to=message)

    return reply


client_app = ClientApp(mods=[secaggplus_mod])  # the mod acts on messages of type `train` alone, which only secure aggregation sends
for _operation in OPERATIONS:
    (client_app.query if _operation == "hello" else client_app.train)(_operation)(_handler(_operation))


@client_app.train()  # type: ignore[untyped-decorator]
def train_securely(message: Message, context: Context) -> Message:
    """Return this site's mean for secure aggregation. A failure is raised: the other sites then treat this one as dropped out."""
    fit = compat.recorddict_to_fitins(message.content, keep_input=True)
    (tensors,) = fit.parameters.tensors
    with _private_errors(MEAN), _site_state(context) as state:
        reply = request(MEAN, Payload.parse(fit.config.get(METADATA), bytes(tensors)), site_options(context), state)
    if not reply.tensors:
        raise Rejected(str(reply.metadata["error"]))
    metrics = {name: reply.metadata[name] for name in ("loss", "clients", "answers")}
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([load(reply.tensors)["mean"]]), reply.metadata["samples"], metrics)
    return Message(compat.fitres_to_recorddict(result, keep_input=False), reply_to=message)
