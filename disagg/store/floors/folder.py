"""A folder as a floor: obstore creates, lists and deletes; what is read goes to memory that is used
again, since the kernel takes longer to make pages of new memory than to copy a file to old.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from re import compile as pattern
from typing import Any

from disagg.store.floors.base import (
    BeyondEnd,
    ByteRange,
    Bytes,
    FloorError,
    NotThere,
    Spans,
    check_names,
    cut,
    spans_of,
)
from disagg.store.floors.object_store import ObjectFloor
from disagg.store.floors.staging import LentStaging
from disagg.store.floors.url import FloorURL

STAGING_BYTES = 64 << 20
USED_SECONDS = 60.0
"""How precisely a file's time says when it was last read."""
_UNFINISHED = pattern(r".*#[0-9]+")
"""Names of obstore's files that are not complete, which its lists leave out."""


class FolderFloor(ObjectFloor):
    """A floor of a folder. `Listed.modified` is when an object was last read or written, to the
    minute, so that the least recently used can be found.
    """

    def __init__(self, url: FloorURL, notes_use: bool = True) -> None:
        super().__init__(url)
        self._notes_use = notes_use
        self._root = os.fsencode(url.path)
        self._staging = LentStaging(STAGING_BYTES)

    def read(
        self, name: str, ranges: Sequence[ByteRange]
    ) -> AbstractContextManager[Sequence[memoryview]]:
        check_names([name])
        spans = spans_of(ranges)
        if not spans.spans and not self.exists([name])[0]:
            raise self._absent(name)
        return self._read(name, spans) if spans.spans else nullcontext(cut(spans, []))

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        self._check_open("exists")
        present = [os.path.isfile(self._path(name)) for name in names]
        if names and not any(present):
            self._check_folder("exists")
        return present

    def sweep(self, age: float) -> int:
        count, oldest = 0, time.time() - age
        for folder, _, files in os.walk(self._url.path):
            for path in (Path(folder, file) for file in files if _UNFINISHED.fullmatch(file)):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()
                        count += 1
        return count

    def _path(self, name: str) -> bytes:
        return self._root + b"/" + name.encode("ascii")

    @contextmanager
    def _read(self, name: str, spans: Spans) -> Iterator[Sequence[memoryview]]:
        what = f"read {name}"
        self._check_open(what)
        if spans.size > self._staging.nbytes:
            yield from self._filled(name, spans, LentStaging(spans.size))
        else:
            yield from self._filled(name, spans, self._staging)

    def _filled(
        self, name: str, spans: Spans, staging: LentStaging
    ) -> Iterator[Sequence[memoryview]]:
        with self._opened(name) as file, staging.lent(spans.size, f"{self._url}: {name}") as piece:
            try:
                buffers = _read_spans(file, spans, piece.memory)
            except IsADirectoryError:
                raise self._absent(name) from None
            except OSError as error:
                raise self._failure(f"read {name}", str(error.strerror)) from error
            if buffers is None:
                size = os.fstat(file).st_size
                last = max(stop for _, stop in spans.spans)
                raise BeyondEnd(f"{self._url}: {name} ends at byte {size}, before {last}.")
            if self._notes_use:
                _note_use(file)
            yield cut(spans, buffers)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            file = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise self._absent(name) from None
        except OSError as error:
            raise self._failure(f"read {name}", str(error.strerror)) from error
        try:
            yield file
        finally:
            os.close(file)

    def _absent(self, name: str) -> FloorError:
        try:
            self._check_folder(f"read {name}")
        except FloorError as error:
            return error
        return NotThere(f"{self._url}: no object {name}.")

    def _check_folder(self, what: str) -> None:
        """Raises FloorError: a file system that is not mounted any more is no miss."""
        if not os.path.isdir(self._root):
            raise self._failure(what, "the folder is gone")


def _read_spans(file: int, spans: Spans, memory: Bytes) -> list[memoryview] | None:
    """The spans of a file, one behind the other in `memory`; None if it ends before."""
    buffers: list[memoryview] = []
    view: Any = memory.data
    first = 0
    for start, stop in spans.spans:
        buffer = view[first : first + stop - start]
        count = 0
        while count < len(buffer):  # the kernel gives 2 GiB at once at most
            got = os.preadv(file, [buffer[count:]], start + count)
            if not got:
                return None
            count += got
        buffers.append(buffer.toreadonly())
        first += len(buffer)
    return buffers


def _note_use(file: int) -> None:
    """Makes the file's time this minute, where this process may."""
    with suppress(OSError):
        if os.fstat(file).st_mtime < time.time() - USED_SECONDS:
            os.utime(file)
