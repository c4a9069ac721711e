"""Files on disk: one read within the bounds of its header, one replaced whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property

import numpy as np
import numpy.typing as npt

from disagg.digest.digest import digests
from disagg.portable.layout import block_table, live_pieces
from disagg.portable.staging import Bytes
from disagg.snapshot.header import LENGTH, SnapshotRefused, decode, header_bytes
from kvpool.layout import Buffer, Key, RequestAddress
from kvpool.layout.grid import Ints
from kvpool.layout.text import by_layers

MAX_SPAN = 4 << 20
"""Bytes that are read at once for cells that lie apart."""
_UNUSABLE = "What is in the request's items now must not be used."


class SnapshotFile:
    """An open file with a sound header. Raises OSError, and SnapshotRefused that names the path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        # a pipe would block; what is no file is refused below
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with self._named():
                self._status = os.fstat(self._descriptor)
                if not stat.S_ISREG(self._status.st_mode):
                    raise SnapshotRefused("not a regular file.")
                size = self._status.st_size
                start = np.empty(min(LENGTH.size, size), dtype=np.uint8)
                self._read(0, start)
                text = np.empty(header_bytes(start.tobytes(), size), dtype=np.uint8)
                self._read(LENGTH.size, text)
                self._start = LENGTH.size + text.size
                self.header = decode(text.tobytes(), size - self._start)
        except BaseException:
            self.close()
            raise

    @cached_property
    def address(self) -> RequestAddress:
        """Where the request lies in the file. Of millions of tokens it is large: made when used."""
        return block_table(self.header.layout, self.header.tokens)

    def read(self, offset: int, into: Bytes) -> None:
        with self._named():
            self._read(self._start + offset, into)

    def check(self, keys: Collection[Key] | None = None) -> None:
        """Compares the data of regions `keys` (default: all) with the digests of what was saved."""
        layout, tokens = self.header.layout, self.header.tokens
        pieces = [p for p in live_pieces(layout, tokens) if keys is None or p.key in keys]
        try:
            parts = [*digests(layout, self.address, pieces, read=self._read_cells)]
        except SnapshotRefused:
            raise
        except ValueError as error:  # cells without number
            raise SnapshotRefused(f"{self.path}: {error}") from None
        wrong = by_layers(
            (piece.key, "")
            for piece, value in zip(pieces, np.concatenate(parts).tolist())
            if value != self.header.digests[piece.key]
        )
        if wrong:
            raise SnapshotRefused(
                f"{self.path}: {'; '.join(wrong)}: not the bytes that were saved. The file is "
                "damaged, or the request was written to while it was saved."
            )

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Around what copies this file's bytes to a pool: an error says that items were written."""
        try:
            yield
        except (SnapshotRefused, OSError) as error:
            reason = f"{self.path}: {error}." if isinstance(error, OSError) else str(error)
            raise SnapshotRefused(f"{reason} {_UNUSABLE}") from error

    def check_unchanged(self) -> None:
        """Refuses a file that was written to since it was opened."""
        now, then = os.fstat(self._descriptor), self._status
        if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            raise SnapshotRefused(f"{self.path}: written to while it was loaded.")

    def close(self) -> None:
        os.close(self._descriptor)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except SnapshotRefused as error:
            raise SnapshotRefused(f"{self.path}: {error}") from None

    def _read(self, offset: int, into: Bytes) -> None:
        left = into.data
        while left.nbytes:
            count = os.preadv(self._descriptor, [left], offset)
            if not count:
                raise SnapshotRefused("cut off while it was loaded.")
            left, offset = left[count:], offset + count

    def _read_cells(self, buffer: Buffer, offsets: Ints, width: int) -> npt.NDArray[np.void]:
        """Reads cells of a buffer. See disagg.digest.cell_hash."""
        low, high = int(offsets.min()), int(offsets.max()) + width
        if high - low <= MAX_SPAN:
            span = np.empty(high - low, dtype=np.uint8)
            self.read(buffer.base + low, span)
            rows = np.ndarray((span.size - width + 1,), f"V{width}", span, strides=(1,))
            return np.asarray(rows[offsets - low])
        cells = np.empty((offsets.size, width), dtype=np.uint8)
        for cell, offset in zip(cells, offsets.ravel().tolist()):
            self.read(buffer.base + offset, cell)
        return cells.view(f"V{width}").reshape(offsets.shape)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[int]:
    """The descriptor of a new file, readable by its owner only, which takes the place of `path`
    once the block has ended; if it raises, or the process ends, `path` stays what it was.
    """
    target = os.path.abspath(os.fspath(path))
    folder = os.path.dirname(target)
    descriptor, temporary = tempfile.mkstemp(prefix=".kvpool-", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(descriptor, "wb"):
            yield descriptor
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)  # the name too
    finally:
        os.close(opened)


def write(descriptor: int, offset: int, data: memoryview | bytes) -> None:
    left = memoryview(data)
    while left.nbytes:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count
