"""`verify="checksum"`: what was read, digested on both sides and compared.

First one digest for each region and range; where these differ, one for each of its entries, so that
the positions that differ can be named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from disagg.digest.digest import Piece, differing, digests, to_wire
from kvpool.layout import PoolLayout, RequestAddress

MAX_ENTRIES = 1 << 20
"""Entries that one check asks for one by one."""


@dataclass(eq=False, slots=True)
class Verification:
    """What one source rank has given to a room, to be digested on both sides: little-endian
    uint64, one for each piece, or with `each` one for each of its entries.
    """

    room: int | str
    attempt: str
    source: int
    layout: PoolLayout
    address: RequestAddress
    pieces: list[Piece]
    begun: float
    each: bool = False
    own: bytes | None = None
    theirs: bytes | None = None

    def wire(self) -> bytes:
        """The pieces, as they travel."""
        return to_wire(self.pieces)


def differences(check: Verification, who: str) -> tuple[Verification | None, str]:
    """Of digests that are not equal: a finer check, or a sentence that names what differs."""
    counts = [len(piece.entries) if check.each else 1 for piece in check.pieces]
    sizes = [len(side or b"") for side in (check.own, check.theirs)]
    if sizes != 2 * [8 * sum(counts)]:
        return None, f"{who} gave {sizes[1]} bytes of digests, here they are {sizes[0]}."
    own, theirs = (np.frombuffer(side or b"", dtype="<u8") for side in (check.own, check.theirs))
    if check.each:
        edges = np.cumsum(counts)[:-1]
        named = differing(check.pieces, np.split(own, edges), np.split(theirs, edges), check.layout)
        where = "\n".join(named) or "not by entry: its pages changed while they were compared."
        return None, f"what was read differs from what {who} holds: {where}"
    wrong = [check.pieces[at] for at in np.flatnonzero(own != theirs)]
    entries = np.cumsum([len(piece.entries) for piece in wrong])
    most = max(1, int(np.searchsorted(entries, MAX_ENTRIES, side="right")))
    return replace(check, pieces=wrong[:most], each=True, own=None, theirs=None), ""


@dataclass(eq=False, slots=True)
class Job:
    """Digests being made, and who gets them: `(values, problem)`."""

    steps: Iterator[npt.NDArray[np.uint64] | None]
    then: Callable[[bytes | None, str], None]
    parts: list[npt.NDArray[np.uint64]]


class Digester:
    """Makes digests in small steps, between which its thread serves others."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def add(
        self,
        layout: PoolLayout,
        address: RequestAddress,
        pieces: list[Piece],
        each: bool,
        then: Callable[[bytes | None, str], None],
    ) -> None:
        """`then` is called with the digests, or with None and the reason."""
        self._jobs.append(Job(digests(layout, address, pieces, each), then, []))

    def step(self) -> bool:
        """Goes one step on; whether there is more to do."""
        if not self._jobs:
            return False
        job = self._jobs[0]
        try:
            part = next(job.steps)
        except StopIteration:
            self._jobs.popleft()
            values = np.concatenate(job.parts) if job.parts else np.empty(0, dtype=np.uint64)
            job.then(values.astype("<u8").tobytes(), "")
        except ValueError as error:
            self._jobs.popleft()
            job.then(None, str(error))
        else:
            if part is not None:
                job.parts.append(part)
        return True
