"""A process that ends with the one that started it. Light to import: programs that wait for Flower and for nothing else use it."""

import os
import sys
import threading
from collections.abc import Callable


def end_with_parent(last: Callable[[], object] = lambda: None) -> None:
    """For a child whose stdin is a pipe from its parent: when that is closed, however the parent ended, so is this process. `last`: what it does then."""
    threading.Thread(target=lambda: (sys.stdin.read(), last(), os._exit(1)), daemon=True).start()
