"""A file that can be read while a list of an endpoint has something, for event loops of callers."""

from __future__ import annotations

import os


class EndedFile:
    """Can be read while it is `set`."""

    def __init__(self) -> None:
        self._file = os.eventfd(0)
        self._is_set = False

    def fileno(self) -> int:
        """The file to watch."""
        return self._file

    def set(self, holds: bool) -> None:
        """Lets it be read, or not."""
        if holds == self._is_set or self._file < 0:
            return
        self._is_set = holds
        if holds:
            os.eventfd_write(self._file, 1)
        else:
            os.eventfd_read(self._file)

    def close(self) -> None:
        """Closes it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
