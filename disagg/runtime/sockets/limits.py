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


def excesses(connections: Collection[Connection]) -> Iterator[Excess]:
    """Connections whose message, or first message, takes too long, and the one for which the most
    waits if that is too much for all; to be called once a second.
    """
    if sum(connection.unsent_bytes for connection in connections) > MAX_UNSENT_BY_ALL:
        most = max(connections, key=lambda connection: connection.unsent_bytes)
        yield most, f"{most.unsent_bytes:,} bytes wait for it, the most of all peers."
    for connection in connections:
        if connection.unread or (connection.dial is None and not connection.heard):
            connection.age += 1
            if connection.age > MAX_UNFINISHED:
                yield connection, f"a message was not finished within {MAX_UNFINISHED} s."
            elif connection.age > MAX_SILENT and not connection.unread:
                silent = "said nothing" if connection.up else "did not finish its TLS handshake"
                yield connection, f"it {silent} within {MAX_SILENT} s."


def longest_silent(connections: Iterable[Connection]) -> Connection | None:
    """Of connections by age, the oldest of a peer that has dialled in and not said a word."""
    return next((c for c in connections if c.dial is None and not c.heard), None)


def too_much_unread(connections: Collection[Connection]) -> Excess | None:
    """The connection that holds the most, if all together hold too much of unfinished messages."""
    if sum(len(connection.unread) for connection in connections) <= MAX_UNREAD:
        return None
    most = max(connections, key=lambda connection: len(connection.unread))
    return most, f"{len(most.unread):,} bytes of an unfinished message, the most of all peers."
