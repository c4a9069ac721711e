"""Endpoint addresses to dial, `ipc://PATH` and `tcp://HOST:PORT`, where they lead, a socket that
listens, and which process may be at the other end within this host.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.host.unix_sockets import peer_credentials
from disagg.runtime.sockets.hosts import check_dialled, host_of, host_text
from disagg.runtime.sockets.listen_address import MAX_PORT, ListenAddress, Place, check_path

_TCP = re.compile(r"tcp://(\[[^\[\]]*\]|[^\[\]:/]+):(\*|[0-9]{1,5})")
LOOKUP_SECONDS = 1.0
"""Between two look-ups of a name that leads nowhere."""
BACKLOG = 1024
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Why an address cannot be bound that this host does not have."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
KEEPALIVE_SECONDS = 60
"""A peer's host that has gone is noticed after some minutes, so that its connection is closed."""


@dataclass(frozen=True, slots=True)
class Address:
    """A unix socket's `path`, or `host` and `port` of TCP, to dial."""

    text: str
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError for an address that cannot be dialled."""
        if text.startswith("ipc://"):
            path = text.removeprefix("ipc://")
            check_path(path)
            return cls(text, path=path)
        match = _TCP.fullmatch(text)
        if match is None:
            raise ValueError("an address is ipc://PATH or tcp://HOST:PORT")
        host = host_of(match[1])
        check_dialled(host)
        port = 0 if match[2] == "*" else int(match[2])
        if port > MAX_PORT:
            raise ValueError(f"a port is at most {MAX_PORT}")
        if port == 0:
            raise ValueError("it names no port to dial")
        return cls(text, host=host, port=port)

    def resolve(self, flags: int = 0) -> list[Place]:
        """Where it leads, the preferred place first. Raises OSError or UnicodeError for no name."""
        if self.path:
            return [(socket.AF_UNIX, self.path)]
        places = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, place) for family, _, _, _, place in places]


class DialledAddress:
    """An address that is dialled until a peer answers: one place after the other."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._places: Iterator[Place] | None = None
        self._look_up_at = 0.0
        self._thread: threading.Thread | None = None

    def next_place(self, now: float) -> Place | None:
        """Where to try; None while that is not known. Names are looked up by a thread."""
        if self._thread is not None and self._thread.is_alive():
            return None
        if self._places is None and now >= self._look_up_at:
            self._look_up_at = now + LOOKUP_SECONDS
            self._look_up(socket.AI_NUMERICHOST)
            if self._places is None:  # to look up a name may take long
                self._thread = threading.Thread(target=self._look_up, daemon=True)
                self._thread.start()
        return None if self._places is None else next(self._places)

    def _look_up(self, flags: int = 0) -> None:
        with suppress(OSError, UnicodeError):
            self._places = itertools.cycle(self.address.resolve(flags))


class Listener:
    """A bound, non-blocking socket; `address` is where. Raises OSError or UnicodeError if it cannot
    be bound, and ValueError if another process listens there, or for no address of this host.
    """

    def __init__(self, address: ListenAddress) -> None:
        self._file: os.stat_result | None = None
        self._path = Path(address.path)
        if address.path:
            _remove_if_left(self._path)
            self.socket = _listening(socket.AF_UNIX, address.path)
            self._file = self._path.lstat()
            self.address = str(address)
        else:
            self.socket = _first_free(address)
            self.address = tcp_text(self.socket.getsockname())

    def close(self) -> None:
        """Closes the socket, and removes its path unless another socket has it now."""
        self.socket.close()
        if self._file is not None:
            with suppress(OSError):
                if os.path.samestat(self._path.lstat(), self._file):
                    self._path.unlink()


def tcp_text(place: tuple[Any, ...]) -> str:
    """The endpoint address of a bound TCP socket."""
    return f"tcp://{host_text(place[0])}:{place[1]}"


def tune(stream: socket.socket) -> None:
    """Sets a connected stream up for small messages that are sent at once."""
    stream.setblocking(False)
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 4)


def distrust(stream: socket.socket) -> str | None:
    """Why the user at the other end of a unix socket is not served: only ours and root are."""
    credentials, user = peer_credentials(stream), os.geteuid()
    if credentials.trusted:
        return None
    return (
        f"it is user {credentials.uid}'s, and this process is user {user}'s: over a unix socket an "
        "endpoint works with processes of its own user and of root only. Use TCP, with keys on "
        "both sides (kvpool keys)."
    )


def origin(stream: socket.socket) -> str:
    """Where the other end of a connection is: its process within this host, or its TCP address."""
    with suppress(OSError):
        if stream.family == socket.AF_UNIX:
            return f"process {peer_credentials(stream).pid} of this host"
        return tcp_text(stream.getpeername())
    return ""


def _first_free(address: ListenAddress) -> socket.socket:
    """Listens at the first port that is free of the first place that this host has."""
    ports = address.ports()
    problem: OSError | None = None
    for family, place in address.places():
        for port in ports:
            try:
                return _listening(family, (place[0], port, *place[2:]))
            except OSError as error:
                problem = error
                if error.errno != errno.EADDRINUSE:
                    break
        # a name may have addresses of IPv6 too, on a host that has none
        if problem is not None and problem.errno not in ABSENT:
            break
    if problem is not None and problem.errno == errno.EADDRINUSE and len(ports) > 1:
        raise ValueError(f"no port of {ports[0]}-{ports[-1]} is free")
    raise problem or ValueError("it leads nowhere")


def _listening(family: socket.AddressFamily, place: Any) -> socket.socket:
    """Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and place[0] == "::":
            # all addresses, IPv4 among them: the host's default may differ
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(place)
        if family == socket.AF_UNIX:
            os.chmod(place, 0o600)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_if_left(path: Path) -> None:
    """Removes a socket without a listener. Raises ValueError for any other file."""
    try:
        status = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ValueError("a file that is no socket lies there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as trial:
        if trial.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise ValueError("another process listens there")
    path.unlink(missing_ok=True)
