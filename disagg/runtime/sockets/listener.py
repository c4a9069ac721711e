"""A socket that listens, and who may be at the other end of a connection within this host."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from disagg.host.unix_sockets import peer_credentials
from disagg.runtime.sockets.address import Address, tcp_text

BACKLOG = 1024
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
KEEPALIVE_SECONDS = 60
"""A peer's host that has gone is noticed after some minutes, so that its connection is closed."""


class Listener:
    """A bound, non-blocking socket. `address` is the one to dial. Raises OSError or UnicodeError if
    it cannot be bound, and ValueError if somebody else listens there.
    """

    def __init__(self, address: Address) -> None:
        family, place = address.resolve()[0]
        self._file: tuple[int, int] | None = None
        self._path = Path(address.path)
        self.socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if address.path:
                _remove_if_left(self._path)
                self.socket.bind(place)
                self._path.chmod(0o600)
                status = self._path.lstat()
                self._file = status.st_dev, status.st_ino
            else:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(place)
            self.socket.listen(BACKLOG)
        except (OSError, ValueError):
            self.close()
            raise
        self.address = address.text if address.path else tcp_text(self.socket.getsockname())

    def accept(self) -> socket.socket:
        """The next connection. Raises BlockingIOError if there is none."""
        return self.socket.accept()[0]

    def close(self) -> None:
        """Closes the socket, and removes its path unless another socket has it now."""
        self.socket.close()
        if self._file is not None:
            with suppress(OSError):
                status = self._path.lstat()
                if (status.st_dev, status.st_ino) == self._file:
                    self._path.unlink()


def tune(stream: socket.socket) -> None:
    """Sets a connected stream up for small messages that are sent at once."""
    stream.setblocking(False)
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 4)


def distrust(stream: socket.socket) -> str | None:
    """Why the user at the other end of a unix socket is not served; None for this process's user
    and for root.
    """
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
