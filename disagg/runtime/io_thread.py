"""The thread that runs an endpoint, where the caller does not."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress

_libc = ctypes.PyDLL(None)
"""It keeps the GIL, which a busy host gives back late: the read of a pipe does not wait."""
_libc.read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_libc.read.restype = ctypes.c_ssize_t


class IOThread:
    """Calls `turn(wake)` until that is False. `wake` can be read once `wake_up` was called."""

    def __init__(self, turn: Callable[[int], bool], name: str) -> None:
        self._turn = turn
        self._read, self._write = os.pipe()
        self._taken = ctypes.create_string_buffer(4096)
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def waker(self) -> int:
        """A byte that is written to this descriptor wakes the thread too."""
        return self._write

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def wake_up(self) -> None:
        """Ends the wait of the current turn, or of the next."""
        with suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Takes note of all wake-ups; the turn looks at what they are about after this."""
        _libc.read(self._read, self._taken, len(self._taken))

    def join(self) -> None:
        """Waits until the last turn is over."""
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        while self._turn(self._read):
            pass
