"""TCP within this host: which hosts are this one, and whose process is at the other end."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
"""The kernel's connections, a row each; see proc_pid_net(5)."""
_TRIES = 3
_LOCAL, _REMOTE, _STATE, _UID, _INODE = 1, 2, 3, 7, 9
_LISTENING, _QUEUED = "0A", ("01", "03")


def is_loopback(host: str) -> bool:
    """Whether what is sent to a host name or IP address stays on this host. Of names only
    `localhost` does.
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    return address.is_loopback and not mapped


def peer_user(connection: socket.socket) -> int | None:
    """The user of the process at the other end of a connection over loopback that was dialled. If
    it is not accepted yet, the user of the process that listens there.

    None if the kernel names none: the other end is closed. Such an end is in the table as root's,
    without an inode: it must not count as root's. Raises OSError if the connection has ended, and,
    with a file name, if /proc is not there.
    """
    for _ in range(_TRIES):  # the table is read in pieces: a row can be missed while others go
        user, queued = _other_end(connection)
        if user is None and queued:
            listening = _listening_user(connection)
            user, queued = _other_end(connection)  # who listens has changed if it is accepted now
            if user is None and queued:
                user = listening
        if user is not None:
            return user
    return None


def accepted_users(connections: Iterable[socket.socket]) -> dict[socket.socket, int | None]:
    """`peer_user` of many connections that this process has accepted, by few looks in the table:
    reading it takes time by all connections of the host. Those that have ended are left out.
    """
    users: dict[socket.socket, int | None] = {}
    ends: dict[tuple[int, str, str], socket.socket] = {}
    for connection in connections:
        with suppress(OSError):
            here, there = connection.getsockname(), connection.getpeername()
            ends[connection.family, _in_table(there), _in_table(here)] = connection
    for _ in range(_TRIES):
        for family in {family for family, _, _ in ends}:
            for line in TABLES[socket.AddressFamily(family)].read_text().splitlines()[1:]:
                row = line.split(maxsplit=_INODE + 1)
                accepted = ends.get((family, row[_LOCAL], row[_REMOTE]))
                if accepted is not None and row[_INODE] != "0":
                    users[accepted] = int(row[_UID])
        ends = {end: connection for end, connection in ends.items() if connection not in users}
    return users | dict.fromkeys(ends.values())


def _other_end(connection: socket.socket) -> tuple[int | None, bool]:
    """The user that owns the other end, and else whether it waits to be accepted."""
    here, there = _in_table(connection.getsockname()), _in_table(connection.getpeername())
    queued = False
    for row in _rows(connection.family, there):
        if row[_REMOTE] == here:
            if row[_INODE] != "0":
                return int(row[_UID]), False
            queued |= row[_STATE] in _QUEUED
    return None, queued


def _listening_user(connection: socket.socket) -> int | None:
    host, port, *_ = connection.getpeername()
    v4 = connection.family == socket.AF_INET
    places = [(connection.family, host), (connection.family, "0.0.0.0" if v4 else "::")]
    if v4:  # a socket of IPv6 may listen for both
        places[1:1] = [(socket.AF_INET6, f"::ffff:{host}")]
        places += [(socket.AF_INET6, "::")]
    for family, place in places:  # the nearest is the one that is asked
        with suppress(FileNotFoundError):  # a host without IPv6
            for row in _rows(family, _in_table((place, port))):
                if row[_STATE] == _LISTENING:
                    return int(row[_UID])
    return None


def _rows(family: int, local: str) -> Iterator[list[str]]:
    """Fields of the sockets with a local address."""
    for row in TABLES[socket.AddressFamily(family)].read_text().splitlines():
        if f": {local} " in row:
            yield row.split()


def _in_table(end: tuple[Any, ...]) -> str:
    """An address and port as the table spells them: words of 4 bytes in this host's order."""
    host, port = end[0].partition("%")[0], end[1]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
