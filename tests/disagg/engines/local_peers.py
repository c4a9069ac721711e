"""Both sides of engine local: engines that offer and read, and a socket that says anything."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import threading
from collections.abc import Iterable
from contextlib import contextmanager

import msgspec
import numpy as np

from disagg.engines.local.host import this_host
from disagg.host.unix_sockets import new_path
from tests.disagg.engines.owners import engine_of

F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
SIZE = 1 << 16


def files():
    return len(os.listdir("/proc/self/fd"))


def blank(size=SIZE):
    return np.zeros(size, dtype=np.uint8)


def reading(memory):
    return engine_of("local", memory)


@contextmanager
def offering(memory):
    """An engine of this process that offers an array, and its metadata."""
    with reading(memory) as engine:
        yield engine, engine.metadata()


def framed(body: bytes) -> bytes:
    """With its length, as on the socket."""
    return len(body).to_bytes(4, "big") + body


def offer(segments: Iterable[Iterable[int]], devices: Iterable[list] = ()) -> bytes:
    """An offer of host segments (base, nbytes, file or -1, offset) and device segments."""
    return framed(msgspec.msgpack.encode([[list(row) for row in segments], list(devices)]))


def metadata(path: bytes | str) -> bytes:
    return msgspec.msgpack.encode({"host": this_host(), "socket": os.fsencode(path)})


def memory_file(nbytes: int, *, sealed: bool = True) -> int:
    handle = os.memfd_create("offered", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(handle, b"\1" * nbytes)
    if sealed:
        fcntl.fcntl(handle, F_ADD_SEALS, F_SEAL_SHRINK)
    return handle


class FakePeer:
    """Sends `data`, and `files` with its first byte, to whoever dials; the connections stay open,
    until `hang_up`.
    """

    def __init__(self, data: bytes = b"", files: Iterable[int] = ()) -> None:
        self.data, self.files = data, list(files)
        self.hangs_up = False
        self.path = new_path()
        self.connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.hang_up()
        self._listener.close()
        self.path.unlink()

    @property
    def metadata(self) -> bytes:
        return metadata(str(self.path))

    def hang_up(self) -> None:
        while self.connections:
            self.connections.pop().close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self.files)
            try:
                if self.data:
                    connection.sendmsg([self.data[:1]], [rights] if self.files else [])
                    connection.sendall(self.data[1:])
            except OSError:
                pass  # it was refused by then
            if self.hangs_up:
                self.hang_up()
