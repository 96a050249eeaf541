"""Messages to sites and their replies, one by one: of replies that are fetched together, one that cannot be received would take the others with it."""

import time
from collections.abc import Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedlens.deploy.wire import Failure

POLL = 0.5  # seconds between looks for answers


def exchange(grid: Grid, messages: Sequence[Message], deadline: float) -> Iterator[tuple[int, Message | Failure]]:
    """(site that was asked, its reply or why there is none), as they arrive within `deadline` seconds; an error's source is not the site that it is about."""
    until = time.monotonic() + deadline
    sites = [message.metadata.dst_node_id for message in messages]
    waiting = {message_id: site for message_id, site in zip(grid.push_messages(messages), sites, strict=True) if message_id}
    while waiting and time.monotonic() < until:
        for message_id in sorted(waiting):
            try:
                replies = [reply for reply in grid.pull_messages([message_id]) if reply.metadata.reply_to_message_id == message_id]
            except Exception as error:  # whatever a site can make Flower stumble over
                yield waiting.pop(message_id), Failure.of(f"its reply cannot be received ({type(error).__name__}: {error})")
                continue
            if replies:
                yield waiting.pop(message_id), replies[0]
        if waiting:
            time.sleep(POLL)
