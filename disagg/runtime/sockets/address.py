"""Endpoint addresses of stream sockets, `ipc://PATH` and `tcp://HOST:PORT`, where they lead, a
socket that listens at one, and who may be at the other end within this host.
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

from disagg.host.unix_sockets import MAX_PATH, peer_credentials

_TCP = re.compile(r"tcp://(\[[^\[\]]+\]|[^\[\]:/]+):(\*|[0-9]{1,5})")
LOOKUP_SECONDS = 1.0
"""Between two look-ups of a name that leads nowhere."""
BACKLOG = 1024
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
KEEPALIVE_SECONDS = 60
"""A peer's host that has gone is noticed after some minutes, so that its connection is closed."""


Place = tuple[socket.AddressFamily, Any]
"""A family, and a socket address of it."""


@dataclass(frozen=True, slots=True)
class Address:
    """A unix socket's `path`, or `host` and `port` of TCP; port 0 is any."""

    text: str
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError for what is no address."""
        if text.startswith("ipc://"):
            path = text.removeprefix("ipc://")
            if not path or "\0" in path:
                raise ValueError("a unix socket is ipc://PATH")
            if len(os.fsencode(path)) > MAX_PATH:
                raise ValueError(f"a unix socket's path has at most {MAX_PATH} bytes")
            return cls(text, path=path)
        match = _TCP.fullmatch(text)
        if match is None:
            raise ValueError("an address is ipc://PATH or tcp://HOST:PORT")
        host, port = match[1].removeprefix("[").removesuffix("]"), match[2]
        number = 0 if port == "*" else int(port)
        if number > 65535:
            raise ValueError("a port is at most 65535")
        return cls(text, host="0.0.0.0" if host == "*" else host, port=number)

    def resolve(self, flags: int = 0) -> list[Place]:
        """Where it leads, the preferred place first. Raises OSError or UnicodeError for no name."""
        if self.path:
            return [(socket.AF_UNIX, self.path)]
        places = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, place) for family, _, _, _, place in places]


class DialledAddress:
    """An address that is dialled until somebody answers: one place after the other."""

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
    """A bound, non-blocking socket. `address` is the one to dial. Raises OSError or UnicodeError if
    it cannot be bound, and ValueError if somebody else listens there.
    """

    def __init__(self, address: Address) -> None:
        family, place = address.resolve()[0]
        self._file: os.stat_result | None = None
        self._path = Path(address.path)
        self.socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if address.path:
                _remove_if_left(self._path)
                self.socket.bind(place)
                self._path.chmod(0o600)
                self._file = self._path.lstat()
            else:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(place)
            self.socket.listen(BACKLOG)
        except (OSError, ValueError):
            self.close()
            raise
        self.address = address.text if address.path else tcp_text(self.socket.getsockname())

    def close(self) -> None:
        """Closes the socket, and removes its path unless another socket has it now."""
        self.socket.close()
        if self._file is not None:
            with suppress(OSError):
                if os.path.samestat(self._path.lstat(), self._file):
                    self._path.unlink()


def tcp_text(place: tuple[Any, ...]) -> str:
    """The endpoint address of a bound TCP socket."""
    host, port = place[0], place[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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


def _remove_if_left(path: Path) -> None:
    """Removes a socket on which nobody listens any more. Raises ValueError for any other file."""
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
