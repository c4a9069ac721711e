"""What a floor is: objects by name, created whole, read by ranges of bytes. A floor that was away
answers again when it is back, without being opened again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

BytesLike = Any
"""What has bytes: bytes, memoryview, a contiguous array. Python has no type for it below 3.12."""
Bytes = npt.NDArray[np.uint8]
ByteRange = tuple[int, int]
"""First byte, and the byte behind the last."""

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,199}"
_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,7}}", re.ASCII)


class FloorError(OSError):
    """The floor does not answer, or cannot do what it was asked; the message has its reason."""


class FloorFull(FloorError):
    """There is no room for the object: the file system is full, or the cluster's memory."""


class NotThere(FloorError):
    """No object has that name."""


class BeyondEnd(FloorError):
    """A range goes beyond the object's end: the object is shorter than the caller believes."""


@dataclass(frozen=True)
class Listed:
    """An object of a list: its size in bytes, and when it was written, in seconds since 1970 by
    the floor's clock; in a folder, when it was last read or written; None where the floor does not
    know.
    """

    name: str
    size: int
    modified: float | None


class Floor(Protocol):
    """Where objects lie, by name. Every call may be made by several threads, and raises FloorError
    where the floor does not answer, and ValueError for a name that `valid_name` does not know. What
    failed because the floor did not answer may still be done when it is back.
    """

    def create(self, name: str, parts: Sequence[BytesLike]) -> bool:
        """The parts, one behind the other, as an object: all of it becomes visible, or nothing.
        False if that name is there, or is being created by another. An object has one byte or more.
        """

    def put(self, name: str, parts: Sequence[BytesLike]) -> None:
        """As `create`, in place of what is there."""

    def read(
        self, name: str, ranges: Sequence[ByteRange]
    ) -> AbstractContextManager[Sequence[memoryview]]:
        """A buffer for each range, valid within the context. Raises NotThere and BeyondEnd.

        Replacing or deleting the object meanwhile may change what is read: check digests.
        """

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of them can be read."""

    def list(self, prefix: str) -> Iterator[Listed]:
        """Objects whose names begin with the whole parts of `prefix`; all, if that is empty. What
        has other names, because someone else put it there, is left out.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Removes those that are there."""

    def sweep(self, age: float) -> int:
        """Removes what killed writers have left behind more than `age` seconds ago, which no other
        call shows; how many.
        """

    def close(self) -> None:
        """Waits for calls that run, as long as those are bounded. May be called again."""


def valid_name(name: str) -> bool:
    """Whether an object may be called so: one to eight parts, joined by `/`, that begin with a
    letter, digit or `_` and go on with these, `.`, `=` and `-`; 200 characters each at most.
    """
    return _NAME.fullmatch(name) is not None


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a name that leads elsewhere, or that some floor could not keep."""
    for name in names:
        if not valid_name(name):
            raise ValueError(
                f"object name {name[:80]!r}: one to eight parts joined by '/', each of at most 200 "
                "letters, digits, '_', '.', '=' and '-', and none that begins with '.', '=' or '-'."
            )


def under(prefix: str, name: str) -> bool:
    """Whether a name begins with the whole parts of a prefix."""
    return not prefix or name.startswith(f"{prefix}/")


def prefix_of(prefix: str) -> str:
    """A prefix without the `/` at its end. Raises ValueError as `check_names`."""
    stripped = prefix.removesuffix("/")
    if stripped:
        check_names([stripped])
    return stripped


def byte_views(parts: Sequence[BytesLike]) -> list[Bytes]:
    """Parts as flat bytes, without a copy. Raises ValueError if there are none."""
    views = [np.frombuffer(part, np.uint8) for part in parts if memoryview(part).nbytes]
    if not views:
        raise ValueError("an object has one byte or more: not every floor keeps an empty one.")
    return views


@dataclass(frozen=True)
class Spans:
    """Ranges of one object as a floor reads them: `spans` are not empty, and those that follow one
    another in the caller's order are one; `places` says where each range lies: number of the span,
    and its first byte and the one behind its last within that.
    """

    spans: tuple[ByteRange, ...]
    places: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.spans)


def spans_of(ranges: Sequence[ByteRange]) -> Spans:
    """Joins ranges. Raises ValueError for what is no range."""
    spans: list[ByteRange] = []
    places: list[tuple[int, int, int]] = []
    for start, stop in ranges:
        if not 0 <= start <= stop:
            raise ValueError(f"range {start} to {stop}: 0 or more, and no end before its start.")
        if start == stop:
            places.append((-1, 0, 0))
            continue
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], stop
        else:
            spans.append((start, stop))
        first = spans[-1][0]
        places.append((len(spans) - 1, start - first, stop - first))
    return Spans(tuple(spans), tuple(places))


def cut(spans: Spans, buffers: Sequence[memoryview]) -> list[memoryview]:
    """The caller's ranges of the spans' bytes."""
    return [
        buffers[number][start:stop] if number >= 0 else memoryview(b"")
        for number, start, stop in spans.places
    ]


def nothing_of(
    floor: Floor, absent: str, name: str, spans: Spans
) -> AbstractContextManager[Sequence[memoryview]]:
    """What `read` gives for ranges that are all empty. Raises NotThere, which says `absent`."""
    if not floor.exists([name])[0]:
        raise NotThere(absent)
    return nullcontext(cut(spans, []))
