"""Flower's ServerApp, and by the name that older federations know it the ClientApp. Simulation and deployment runtime see the same apps."""

import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key, load_ssh_public_key
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedlens.deploy.client import client_app
from fedlens.deploy.exchange import exchange
from fedlens.deploy.federation import Federation
from fedlens.deploy.programs import TIED
from fedlens.deploy.records import from_record, to_record
from fedlens.deploy.secure import Counted, content_size, secure_mean
from fedlens.deploy.wire import Failure, Parcel, Refused, from_setting
from fedlens.engine.local_work import Update
from fedlens.errors import UserError
from fedlens.overrides import compose
from fedlens.runs.store import take_lock
from fedlens.training.clients import Traffic
from fedlens.training.run import execute

PATIENCE = 60.0  # seconds for a predecessor to end
log = logging.getLogger("fedlens")


class GridCourier:
    """The sites that a Flower grid knows. `keys`: the public keys of a federation's sites, K.pub; None where sites have none, as in a simulation."""

    def __init__(self, grid: Grid, context: Context, keys: Path | None = None) -> None:
        self.grid, self.context = grid, context
        files = [] if keys is None else [file for file in keys.glob("*.pub") if file.stem.isdecimal()]
        if keys is not None and not files:
            raise UserError(f"federate server: {keys} has no key of a site (K.pub), so nobody could be known")
        self.numbers = {_canonical(file.read_bytes()): int(file.stem) for file in files}
        # sites: a key that is taken away leaves the others' clients as they are; of a folder made before there was a count, the last key says it
        told = int((keys / "count").read_text()) if keys is not None and (keys / "count").is_file() else 0
        self.count = max([told, *(k + 1 for k in self.numbers.values())])
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
        return client % self.count == self._known.get(site, -1)

    def ask(self, operation: str, parcels: Mapping[int, Parcel], deadline: float) -> dict[int, Parcel | Failure]:
        if not parcels:
            return {}
        sites = sorted(parcels)
        kind = "query" if operation == "hello" else "train"
        messages = [Message(to_record(parcels[site]), dst_node_id=site, message_type=f"{kind}.{operation}", ttl=deadline) for site in sites]
        replies = exchange(self.grid, messages, deadline)
        return {site: reply if isinstance(reply, Failure) else _read(reply) for site, reply in replies}

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
        config = compose(shlex.split(from_setting(given.get("overrides", ""))))
        config.run.if_exists, config.run.progress = "resume", False
        config.run.checkpoint_minutes = 0.0  # rounds are dear here: each is kept
        config.run.dir = config.run.dir or from_setting(given.get("run-dir", "")) or str(Path.cwd() / "run")
        _wait_for_lock(Path(config.run.dir))
        keys = Path(from_setting(given["keys"])) if given.get("keys") else None
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


__all__ = ["GridCourier", "client_app", "server_app"]
