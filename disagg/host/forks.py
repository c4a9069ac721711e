"""What a forked child has of its parent's endpoints: closed objects that touch nothing.

Sockets, engines and the locks of threads that the child does not have are the parent's.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, NoReturn, Protocol, runtime_checkable
from weakref import WeakSet

from disagg.errors import EndpointClosed

FORKED = (
    "this endpoint belongs to another process, which forked this one. Make one here, or start "
    "processes by spawn."
)


@runtime_checkable
class Abandons(Protocol):
    """What the child gives up."""

    def abandon(self) -> None:
        """Called in the child, before anything else of it runs."""


class ForkedMachine:
    """In place of the parent's machine."""

    def __getattr__(self, name: str) -> NoReturn:
        raise EndpointClosed(FORKED)


def abandon_in_child(owner: Abandons) -> None:
    """Calls `owner.abandon()` in every child that this process forks."""
    _known.add(owner)


def keep_for_ever(owner: Any) -> None:
    """Keeps an object and all that it holds undestroyed, also while the interpreter ends: a
    destructor that runs in a child may act on what the parent uses (UCX: on its epoll sets).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def _abandon() -> None:
    for owner in list(_known):
        owner.abandon()


_known: WeakSet[Abandons] = WeakSet()
os.register_at_fork(after_in_child=_abandon)
