"""What is closed where its owner did not: when the process ends, or nothing refers to it any more.

While the interpreter ends it stops daemon threads as they come back from native code, and where
that is C++ the process aborts (SIGABRT). So the threads of what is open have to end before.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import Protocol
from weakref import WeakSet

log = logging.getLogger("disagg")

EXIT_SECONDS = 3.0
"""How long all that is open may keep the process, when it ends."""


class Droppable(Protocol):
    """What may be left open."""

    def drop(self) -> None:
        """Closes it, in a thread of which its owner knows nothing. May be called again."""


def close_at_exit(owner: Droppable) -> None:
    """Closes it when the process ends, if it is still there."""
    _open.add(owner)


def do_not_close_at_exit(owner: Droppable) -> None:
    """It was closed."""
    _open.discard(owner)


def close_aside(owner: Droppable) -> threading.Thread:
    """Closes it in a thread, since that may take time."""
    _open.add(owner)  # a destructor may run when weak references are gone already
    thread = threading.Thread(target=_close, args=(owner,), name="Closing", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread starts any more, or there are too many
        _close(owner)
    return thread


def _close_all() -> None:
    until = time.monotonic() + EXIT_SECONDS
    for thread in [close_aside(owner) for owner in list(_open)]:
        if thread.ident is not None:
            thread.join(max(0.0, until - time.monotonic()))


def _close(owner: Droppable) -> None:
    try:
        owner.drop()
    except Exception:
        log.exception("%s: it could not be closed", type(owner).__name__)


_open: WeakSet[Droppable] = WeakSet()
atexit.register(_close_all)
