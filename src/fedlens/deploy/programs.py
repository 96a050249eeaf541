"""Flower's SuperLink and SuperNode as child processes: `python -m fedlens.deploy.programs superlink|supernode OPTIONS`.

Sites and the commands that start runs share SuperLink's port, and starting a run sends code to every site. Sites authenticate by key, but Flower's open edition
does not protect the rest. `SitesOnly` therefore answers other machines only on the paths that sites need.
"""

import gc
import hashlib
import ipaddress
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

from fedlens.deploy.worker import SOCKET, end_with_parent, supervised_worker

Scope = MutableMapping[str, Any]
Handler = Callable[[Scope, Any, Any], Awaitable[None]]
SITE_PATHS = ("/v1/fleet/", "/health")
MAX_BODY = 64 * 2**20  # bytes of a request; Flower sends arrays in parts of a few MB
TIED = "FEDLENS_TIED"  # set in the environment of processes that end with their parent
MAX_RETRY_DELAY = 5  # seconds until a SuperNode without a server tries again; Flower's default is 20
HEARTBEAT = "FEDLENS_HEARTBEAT"  # environment variable: seconds between a SuperNode's heartbeats, for tests; Flower's default is 30
SITE_KEYS = "FEDLENS_SITE_KEYS"  # environment variable: folder of the public keys of sites that may join
PINNED_APP = "FEDLENS_APP"  # environment variable: SHA-256 of the only app that a site runs
EXTENSIONS = "flwr.ee.superlink.extensions"  # the module in which Flower looks for middleware


class SitesOnly:
    """ASGI middleware: other machines reach `SITE_PATHS`, everything else answers 403."""

    def __init__(self, app: Handler) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or _is_local(scope) or (scope["type"] == "http" and _plain(scope["path"]).startswith(SITE_PATHS)):
            await self.app(scope, _limited(receive) if scope["type"] == "http" else receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"Runs are started on the server's own machine.\n"})


def _limited(receive: Any) -> Any:
    """Return a `receive` that disconnects as soon as the body exceeds `MAX_BODY`."""
    received = 0

    async def receive_part() -> Any:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        return message if received <= MAX_BODY else {"type": "http.disconnect"}

    return receive_part


def _is_local(scope: Scope) -> bool:
    try:
        return ipaddress.ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False


def _plain(path: str) -> str:
    """Return the path, or nothing if another part of the server might resolve it to a different one."""
    return "" if ".." in path or "//" in path else path


def replies_only(push: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict Flower's handler of sites' messages to replies in the sender's own name.

    Flower checks who is connected but not the sender that a message names, so one site could write to another as the server.
    """

    def push_messages(request: Any, state: Any) -> Any:
        for message in request.messages_list:
            if message.metadata.src_node_id != request.node.node_id or not message.metadata.reply_to_message_id:
                raise PermissionError(f"node {request.node.node_id} sent a message that is not its own reply")
        return push(request=request, state=state)

    return push_messages


def register_sites(database: str, keys: Path) -> None:
    """Register the sites' public keys (K.pub), as `flwr supernode register` does. A site with an unknown key would give up."""
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories

    from fedlens.deploy.keys import read_public_key

    state = get_objectstore_linkstate_factories(database, get_federation_manager())[1].state()
    for file in sorted(keys.glob("*.pub")):
        public_key = public_key_to_bytes(read_public_key(file))
        with suppress(ValueError):  # it is registered already
            state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key, HEARTBEAT_DEFAULT_INTERVAL)


def superlink() -> None:
    end_with_parent()
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.fleet import fleet_handlers
    from sqlalchemy import Engine, event
    from starlette.middleware import Middleware

    event.listen(
        Engine, "connect", lambda connection, record: connection.execute("PRAGMA secure_delete = ON")
    )  # what a site sent is overwritten
    fleet_handlers.push_messages = replies_only(fleet_handlers.push_messages)
    extensions = ModuleType(EXTENSIONS)
    extensions.get_middleware = lambda: (Middleware(SitesOnly),)  # type: ignore[attr-defined]
    sys.modules[EXTENSIONS] = extensions
    if folder := os.environ.get(SITE_KEYS):
        register_sites(sys.argv[sys.argv.index("--database") + 1], Path(folder))
    flower_superlink()


class ShortSleep:
    """The module `time` with a `sleep` of a sixth, for Flower's loop: it looks for messages every half second, for a reply more often."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / 6)


def fork_server(main: Callable[[], object]) -> Callable[[Sequence[str]], None]:
    """Start a process that runs `main` in a fork per command, and return a function that sends it a command.

    The fork has Flower and fedlens imported, which takes more CPU time than most messages. Call this before any thread starts: a fork copies only one.
    """
    reader, writer = os.pipe()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # numpy's OpenBLAS, which supports forks
    if os.fork():
        os.close(reader)
        return lambda command: _send(writer, command)
    os.close(writer)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended forks
    gc.freeze()  # imported modules are never garbage, and forks share their memory
    with open(reader) as commands:
        for line in commands:  # until the parent ends
            with suppress(OSError):  # for example out of memory: a later fork may succeed
                if os.fork() == 0:
                    _run_fork(main, line, reader)
    os._exit(0)


def _send(writer: int, command: Sequence[str]) -> None:
    os.write(writer, (json.dumps([command, os.environ.get(SOCKET, "")]) + "\n").encode())


def _run_fork(main: Callable[[], object], line: str, reader: int) -> None:
    """Run `main` with the arguments of a command and end this process, whatever happens."""
    try:
        os.close(reader)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        numpy.random.seed()  # noqa: NPY002 - Flower uses this generator, and its state is a copy, unlike that of `random` and of the system
        sys.argv, os.environ[SOCKET] = json.loads(line)
        with suppress(SystemExit):
            main()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def pinned(pull: Callable[..., Any], digest: str) -> Callable[..., Any]:
    """Restrict Flower's function that receives a message to the app with this SHA-256: for any other, the site answers that it cannot be verified."""

    def pull_message(**options: Any) -> Any:
        trusted, get_fab = dict(options["trusted_entities"] or {}), options["get_fab"]

        def get_checked_fab(fab_hash: str, run_id: int) -> Any:
            fab = get_fab(fab_hash, run_id)
            if (sent := hashlib.sha256(fab.content).hexdigest()) != digest:
                print(f"error: the server's app has SHA-256 {sent}, site.json allows {digest} only", file=sys.stderr, flush=True)
                trusted["fedlens"], fab.verifications = "", {}
            return fab

        return pull(**{**options, "trusted_entities": trusted, "get_fab": get_checked_fab})

    return pull_message


def answered(pull: Callable[..., Any], run_client_app: Callable[[Sequence[str]], None], address: str) -> Callable[..., Any]:
    """Extend Flower's function that receives a message: start the process that answers it, as Flower's SuperExec would."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supernode.servicer.runtime.runtime_handlers import acquire_task

    def pull_message(**options: Any) -> Any:
        run_id = pull(**options)
        task = acquire_task(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]), options["state"])
        if task.token:
            parent = str(os.getpid())
            run_client_app(
                ["flwr-clientapp", "--runtime-api-address", address, "--token", task.token, "--insecure", "--parent-pid", parent]
            )
        return run_id

    return pull_message


def supernode() -> None:
    from flwr.supernode.cli import flower_supernode, flwr_clientapp

    import fedlens.deploy.flower  # noqa: F401 - for the forks

    def client_app() -> None:
        end_with_parent()  # Flower's own check does not interrupt a reply that waits for a SuperNode that was killed
        flwr_clientapp()

    run_client_app = fork_server(client_app)
    end_with_parent()
    loop: Any = import_module("flwr.supernode.start_client_internal")  # by name: a function of the same name may hide it
    if getattr(loop, "time", None) is time:  # a future Flower may wait in another way: then its own interval holds
        loop.time = ShortSleep()
    loop._pull_and_store_message = answered(
        loop._pull_and_store_message, run_client_app, f"127.0.0.1:{sys.argv[sys.argv.index('--port') + 1]}"
    )
    sys.argv += ["--host", "127.0.0.1", "--isolation", "process"]  # without SuperExec, see `answered`
    if digest := os.environ.get(PINNED_APP):
        loop._pull_and_store_message = pinned(loop._pull_and_store_message, digest)
    vars(import_module("flwr.supercore.retry.http_retry"))["MAX_RETRY_DELAY"] = MAX_RETRY_DELAY
    if interval := os.environ.get(HEARTBEAT):  # of the node only: flwr.common.constant would shorten the time that a task may take, too
        for name in ("flwr.supernode.fleet_http_connection", "flwr.supercore.heartbeat"):
            vars(import_module(name))["HEARTBEAT_DEFAULT_INTERVAL"] = float(interval)
    with supervised_worker():
        flower_supernode()
    os._exit(1)  # Flower returns when it has lost the connection, and its HTTP server would keep the process


if __name__ == "__main__":
    program = sys.argv.pop(1)
    sys.argv[0] = f"flower-{program}"
    {"superlink": superlink, "supernode": supernode}[program]()
