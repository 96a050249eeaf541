"""Flower's two programs, tied to the process that starts them: `python -m fedlens.deploy.programs superlink|supernode OPTIONS`.

SuperLink's door is closed here. Sites and the commands that start runs come in at one port, and whoever starts a run sends code to every site. Sites prove who
they are by their keys; the rest of the port has no lock in Flower's open edition. So it is for this machine alone: from elsewhere only what sites need is let in.
"""

import ipaddress
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import import_module
from types import ModuleType
from typing import Any

from fedlens.deploy.tied import end_with_parent
from fedlens.deploy.worker import kept

Scope = MutableMapping[str, Any]
Handler = Callable[[Scope, Any, Any], Awaitable[None]]
FOR_SITES = ("/v1/fleet/", "/health")
LARGEST = 64 * 2**20  # bytes of a request: Flower sends arrays in parts of a few MB
TIED = "FEDLENS_TIED"  # in the environment of processes that end when the one that started them does
LOOK = 1.0  # seconds between a SuperNode's looks for messages; Flower's own are three
HOOK = "flwr.ee.superlink.extensions"  # where Flower looks for middleware


class SitesOnly:
    """ASGI middleware: requests from other machines reach `FOR_SITES`, all else answers 403."""

    def __init__(self, app: Handler) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or _from_here(scope) or (scope["type"] == "http" and _clean(scope["path"]).startswith(FOR_SITES)):
            await self.app(scope, _limited(receive) if scope["type"] == "http" else receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"runs are started on the server's own machine\n"})


def _limited(receive: Any) -> Any:
    """A request's body, given up as soon as it is larger than any that Flower sends."""
    taken = 0

    async def next_part() -> Any:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        return message if taken <= LARGEST else {"type": "http.disconnect"}

    return next_part


def _from_here(scope: Scope) -> bool:
    try:
        return ipaddress.ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False


def _clean(path: str) -> str:
    """Nothing that another part of the server may read as another path."""
    return "" if ".." in path or "//" in path else path


def replies_only(push: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's door for what sites send, for replies in the sender's own name: Flower itself looks at who is connected, not at whom a message says it is from, so
    one site could write to another as the server."""

    def push_messages(request: Any, state: Any) -> Any:
        for message in request.messages_list:
            if message.metadata.src_node_id != request.node.node_id or not message.metadata.reply_to_message_id:
                raise PermissionError(f"node {request.node.node_id} sent a message that is no reply of its own")
        return push(request=request, state=state)

    return push_messages


def superlink() -> None:
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.fleet import fleet_handlers
    from starlette.middleware import Middleware

    fleet_handlers.push_messages = replies_only(fleet_handlers.push_messages)

    hook = ModuleType(HOOK)
    hook.get_middleware = lambda: (Middleware(SitesOnly),)  # type: ignore[attr-defined]
    sys.modules[HOOK] = hook
    flower_superlink()


class Sooner:
    """The module `time` for a loop that sleeps longer than need be."""

    def __init__(self, longest: float) -> None:
        self.longest = longest

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, self.longest))


def supernode() -> None:
    from flwr.supernode.cli import flower_supernode

    loop = import_module("flwr.supernode.start_client_internal")  # by name: a function may hide it
    if getattr(loop, "time", None) is time:  # else Flower waits as long as it likes
        loop.time = Sooner(LOOK)  # type: ignore[attr-defined]
    with kept():
        flower_supernode()


def main() -> None:
    programs = {"superlink": superlink, "supernode": supernode}
    name = sys.argv.pop(1)
    sys.argv[0] = f"flower-{name}"
    end_with_parent()
    programs[name]()


if __name__ == "__main__":
    main()
