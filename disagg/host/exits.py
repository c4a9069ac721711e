"""What is closed where its owner did not: when the process ends, or nothing refers to it any more.
And what a forked child has of its parent's endpoints: closed objects that touch nothing, since
sockets, engines and the locks of threads that a child does not have are the parent's.

While the interpreter ends it stops daemon threads as they come back from native code, and where
that is C++ the process aborts (SIGABRT). So the threads of what is open have to end before.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from typing import Any, NoReturn, Protocol, runtime_checkable
from weakref import WeakSet

from disagg.errors import EndpointClosed
from disagg.log import log

# a call of Mooncake whose peer is silent ends after 3 s, and its thread must not come back later
EXIT_SECONDS = 5.0
"""How long all that is open may keep the process, when it ends."""
FORKED = (
    "this endpoint belongs to another process, which forked this one. Make one here, or start "
    "processes by spawn."
)


class Droppable(Protocol):
    """What may be left open."""

    def drop(self) -> None:
        """Closes it, in a thread that its owner does not know. May be called again."""


CLOSED_AT_EXIT: WeakSet[Droppable] = WeakSet()
"""What is closed when the process ends, if it is still there."""


def close_aside(owner: Droppable) -> threading.Thread:
    """Closes it in a thread, since that may take time."""
    # a destructor may run when weak references are gone already
    CLOSED_AT_EXIT.add(owner)
    thread = threading.Thread(target=_close, args=(owner,), name="Closing", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread starts any more, or there are too many
        _close(owner)
    return thread


def _close_all() -> None:
    until = time.monotonic() + EXIT_SECONDS
    for thread in [close_aside(owner) for owner in list(CLOSED_AT_EXIT)]:
        if thread.ident is not None:
            thread.join(max(0.0, until - time.monotonic()))


def _close(owner: Droppable) -> None:
    try:
        owner.drop()
    except Exception:
        log.exception("%s could not be closed", type(owner).__name__)


atexit.register(_close_all)


@runtime_checkable
class Abandons(Protocol):
    """What a forked child gives up."""

    def abandon(self) -> None:
        """Called in the child, before anything else of it runs."""


class ForkedMachine:
    """In place of the parent's machine."""

    def __getattr__(self, name: str) -> NoReturn:
        raise EndpointClosed(FORKED)


ABANDONED_IN_CHILD: WeakSet[Abandons] = WeakSet()
"""What is abandoned in every child that this process forks."""


def keep_for_ever(owner: Any) -> None:
    """Keeps an object and all that it holds undestroyed, also while the interpreter ends: a
    destructor that runs in a child may act on what the parent uses (UCX: on its epoll sets).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def _abandon() -> None:
    for owner in list(ABANDONED_IN_CHILD):
        owner.abandon()


os.register_at_fork(after_in_child=_abandon)
