"""Peers made of plain blocking sockets, which send frames, or anything else."""

from __future__ import annotations

import socket
import struct
import threading
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
        self._socket.settimeout(seconds)
        made, _ = self._socket.accept()
        made.settimeout(None)
        return Stream(made)


class Relay:
    """A port of loopback that passes bytes on to another one until it is cut. `seen` is what it has
    passed on.
    """

    def __init__(self, address):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target, self._port, self._ends = (host, int(port)), 0, []
        self.seen = []
        self.mend()
        self.address = f"tcp://127.0.0.1:{self._port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cut()

    def cut(self):
        """Ends all connections, and takes no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def mend(self):
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, args=(self._listener,))
        self._accepting.start()

    def _accept(self, listener):
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair).start()

    def _pass(self, source, sink):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen.append(data)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
