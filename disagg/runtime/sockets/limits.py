"""What peers can make a process hold, and for how long."""

from __future__ import annotations

import resource
from collections.abc import Collection, Iterable, Iterator

from disagg.runtime.sockets.connection import Connection

MAX_UNREAD = 256 << 20
"""Bytes of unfinished messages, of all connections together."""
MAX_UNFINISHED = 30
"""Looks, a second apart, in which a message may be unfinished. Time would not do: a process that
was stopped did not look.
"""
MAX_SILENT = 5
"""Looks in which nothing at all has come of a peer that has dialled in: it says hello at once."""
MAX_UNSENT_BY_ALL = 1 << 30
"""Bytes that wait for all peers together."""
MAX_CONNECTIONS = 4096
"""At once; at most half of the files that this process may open."""

Excess = tuple[Connection, str]
"""A connection to be closed, and why."""


def max_connections() -> int:
    """How many connections a transport holds at once."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    return MAX_CONNECTIONS if unlimited else min(MAX_CONNECTIONS, files // 2)


def unfinished(connections: Collection[Connection]) -> Iterator[Excess]:
    """Connections whose message, or first message, takes too long; to be called once a second."""
    for each in connections:
        if each.unread or (each.dial is None and not each.heard):
            each.age += 1
            if each.age > MAX_UNFINISHED:
                yield each, f"a message was not finished within {MAX_UNFINISHED} s."
            elif each.age > MAX_SILENT and not each.unread:
                yield each, f"it said nothing within {MAX_SILENT} s."


def longest_silent(connections: Iterable[Connection]) -> Connection | None:
    """Of connections by age, the oldest of a peer that has dialled in and not said a word."""
    return next((each for each in connections if each.dial is None and not each.heard), None)


def too_much_unread(connections: Collection[Connection]) -> Excess | None:
    """The connection that holds the most, if all together hold too much of unfinished messages."""
    if sum(len(each.unread) for each in connections) <= MAX_UNREAD:
        return None
    most = max(connections, key=lambda each: len(each.unread))
    return most, f"{len(most.unread):,} bytes of an unfinished message, the most of all peers."


def too_much_unsent(connections: Collection[Connection]) -> Excess | None:
    """The connection for which the most waits, if too much waits for all."""
    if sum(each.unsent_bytes for each in connections) <= MAX_UNSENT_BY_ALL:
        return None
    most = max(connections, key=lambda each: each.unsent_bytes)
    return most, f"{most.unsent_bytes:,} bytes wait for it, the most of all peers."
