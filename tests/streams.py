"""Peers made of plain blocking sockets, which send frames, or anything else."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress


def frame(message):
    """A message as it travels: its length in 4 bytes, big-endian, and the message."""
    return struct.pack(">I", len(message)) + message


class Stream:
    """One end of a connection; `close` or `with` ends it."""

    def __init__(self, connection):
        self.socket = connection

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def hang_up(self):
        """Says that nothing more comes."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def send(self, *messages):
        """Sends messages, each as a frame."""
        self.socket.sendall(b"".join(map(frame, messages)))

    def receive(self, seconds=20.0):
        """The next message; None once the other end has closed. Raises TimeoutError."""
        self.socket.settimeout(seconds)
        try:
            head = self._exactly(4)
            return self._exactly(*struct.unpack(">I", head))
        except EOFError:
            return None
        finally:
            self.socket.settimeout(None)

    def closed(self, seconds=20.0):
        """Whether the other end closes, whatever it sends before."""
        self.socket.settimeout(seconds)
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def _exactly(self, count):
        data = b""
        while len(data) < count:
            try:
                more = self.socket.recv(count - len(data))
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError
            data += more
        return data


def dial(address):
    """A stream to an endpoint address."""
    scheme, _, place = address.partition("://")
    if scheme == "ipc":
        made = socket.socket(socket.AF_UNIX)
        made.connect(place)
    else:
        host, _, port = place.rpartition(":")
        made = socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET)
        made.connect((host.strip("[]"), int(port)))
    return Stream(made)


class Server:
    """Listens on a port of loopback; `address` is the one to dial."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def accept(self, seconds=20.0):
        """The next connection."""
        self._socket.settimeout(seconds)
        made, _ = self._socket.accept()
        made.settimeout(None)
        return Stream(made)
