"""`verify="checksum"`: what was read, digested on both sides and compared.

First one digest for each region and range; where these differ, one for each of its entries, so that
the positions that differ can be named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from disagg.digest.cell_hash import Hashes
from disagg.digest.digest import Piece, differing, digests, to_wire
from kvpool.layout import PoolLayout, RequestAddress

MAX_ENTRIES = 1 << 20
"""Entries of which one comparison asks for digests one by one."""


@dataclass(eq=False, slots=True, kw_only=True)
class Verification:
    """What a room has read from one source rank, to be digested on both sides: little-endian
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
        return to_wire(self.pieces)


def differences(check: Verification, who: str) -> tuple[Verification | None, str]:
    """Of digests that are not equal: a finer check, or a sentence that names what differs."""
    counts = [piece.numbers().size if check.each else 1 for piece in check.pieces]
    sizes = [len(side or b"") for side in (check.own, check.theirs)]
    if sizes != 2 * [8 * sum(counts)]:
        return None, f"{who} gave {sizes[1]} bytes of digests, here they are {sizes[0]}."
    own, theirs = (np.frombuffer(side or b"", dtype="<u8") for side in (check.own, check.theirs))
    if check.each:
        edges = np.cumsum(counts)[:-1]
        named = differing(check.pieces, np.split(own, edges), np.split(theirs, edges), check.layout)
        what = "\n".join(named) or "not by entry: its pages changed while they were compared."
        return None, f"what was read differs from what {who} holds: {what}"
    wrong = [check.pieces[number] for number in np.flatnonzero(own != theirs)]
    entries = np.cumsum([len(piece.entries) for piece in wrong])
    most = max(1, int(np.searchsorted(entries, MAX_ENTRIES, side="right")))
    return replace(check, pieces=wrong[:most], each=True, own=None, theirs=None), ""


class Digester:
    """Makes digests in small steps, between which its thread serves others."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Hashable, Iterator[Hashes | None]]] = deque()
        self._parts: list[Hashes] = []
        """Of the first job."""

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def add(
        self,
        key: Hashable,
        layout: PoolLayout,
        address: RequestAddress,
        pieces: list[Piece],
        each: bool,
    ) -> None:
        """Takes a job over; `step` returns its digests with `key`."""
        self._jobs.append((key, digests(layout, address, pieces, each)))

    def step(self) -> tuple[Hashable, bytes | None, str] | None:
        """Goes one step on; where that ends a job, its key, and digests or the reason for none."""
        if not self._jobs:
            return None
        key, steps = self._jobs[0]
        try:
            part = next(steps)
        except StopIteration:
            values, reason = np.concatenate([*self._parts, np.empty(0, dtype="<u8")]).tobytes(), ""
        except Exception as error:  # what goes wrong in one job fails that room and no other
            values, reason = None, str(error) or type(error).__name__
        else:
            if part is not None:
                self._parts.append(part)
            return None
        self._jobs.popleft()
        self._parts = []
        return key, values, reason
