"""Both sides of engine local: engines that offer and read, and a socket that says anything."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from disagg.engines.shared_files import this_host
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


def offer(segments: Iterable[Iterable[int]], devices: Iterable[list] = ()) -> bytes:
    """An offer of host segments (base, nbytes, file or -1, offset) and device segments."""
    return msgspec.msgpack.encode([[list(row) for row in segments], list(devices)])


def metadata(path: bytes | str) -> bytes:
    return msgspec.msgpack.encode({"host": this_host(), "socket": os.fsencode(path)})


def memory_file(content: int | bytes, *, sealed: bool = True) -> int:
    """A file of bytes, or of as many ones."""
    handle = os.memfd_create("offered", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(handle, b"\1" * content if isinstance(content, int) else content)
    if sealed:
        fcntl.fcntl(handle, F_ADD_SEALS, F_SEAL_SHRINK)
    return handle


@contextmanager
def bound(path: Path, kind: int = socket.SOCK_STREAM):
    with socket.socket(socket.AF_UNIX, kind) as one:
        one.bind(str(path))
        yield one


class FakePeer:
    """Passes `data` in a file, and `files`, which are closed at the end, to whoever dials, unless
    it is `silent`; the connections stay open, until `hang_up`.
    """

    def __init__(
        self, data: bytes | None = None, files: Iterable[int] = (), *, silent: bool = False
    ) -> None:
        self.data, self.files, self.silent = data, list(files), silent
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
        for file in self.files:
            os.close(file)

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
            body = [] if self.data is None else [memory_file(self.data)]
            if not self.silent:
                with suppress(OSError):  # it was refused by then
                    socket.send_fds(connection, [b"\0"], [*body, *self.files])
            for file in body:
                os.close(file)
            if self.hangs_up:
                self.hang_up()
