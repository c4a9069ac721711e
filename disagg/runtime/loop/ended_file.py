"""A file that can be read while a list of an endpoint has something, for event loops of callers."""

from __future__ import annotations

import os


class EndedFile:
    """A pipe that holds a byte while it is `set`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._is_set = False

    def fileno(self) -> int:
        """The end to watch."""
        return self._read

    def set(self, holds: bool) -> None:
        """Lets it be read, or not."""
        if holds == self._is_set or self._read < 0:
            return
        self._is_set = holds
        if holds:
            os.write(self._write, b"\0")
        else:
            os.read(self._read, 1)

    def close(self) -> None:
        """Closes both ends."""
        if self._read >= 0:
            os.close(self._read)
            os.close(self._write)
            self._read = self._write = -1
