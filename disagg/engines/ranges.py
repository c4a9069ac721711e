"""Ranges of registered memory: checks that runs lie inside, and cuts runs at their edges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from disagg.engines.base import TransferError
from disagg.plan.bind import CopyBatch
from kvpool.layout.grid import Ints, ragged
from kvpool.layout.types import MAX_INT

MAX_REGIONS = 1 << 16
"""Registrations that a peer's metadata may name."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Starts and ends (exclusive), `[R]`, ascending; ranges that touch have the same `block`."""

    starts: Ints
    ends: Ints
    block: Ints

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Ranges:
        """From pointers and lengths in bytes. Raises ValueError if two overlap."""
        ordered = sorted(ranges)
        end = 0
        for base, size in ordered:
            if base < end or size < 1 or base + size > MAX_INT:
                raise ValueError(f"{size} bytes at {base:#x} overlap another range or are invalid.")
            end = base + size
        starts = np.array([base for base, _ in ordered], dtype=np.int64)
        ends = np.array([base + nbytes for base, nbytes in ordered], dtype=np.int64)
        gaps = np.zeros_like(starts)
        gaps[1:] = starts[1:] != ends[:-1]
        return cls(starts, ends, np.cumsum(gaps))

    def number(self, pointers: Ints) -> Ints:
        """Which range each pointer lies in, if it lies in any."""
        return np.searchsorted(self.starts, pointers, side="right") - 1

    def cut(self, batch: CopyBatch, first: Ints, whose: str) -> CopyBatch:
        """The same bytes in runs that each lie in one range; `first` is the batch's `src` or `dst`.
        Where 0-100 and 100-200 are registered, a run of 40 bytes at 80 becomes two of 20.

        Raises TransferError for the first run that lies outside.
        """
        if not self.starts.size:
            raise TransferError(f"{whose} has registered no memory.")
        last = first + batch.nbytes
        if not batch.runs:
            return batch
        lowest = int(self.number(first.min()))
        if lowest >= 0 and last.max() <= self.ends[lowest]:  # all lie in one, as most batches do
            return batch
        low = self.number(first)
        if lowest >= 0 and (last <= self.ends[low]).all():  # each lies in one
            return batch
        high = self.number(last - 1)
        inside = (low >= 0) & (high >= low) & (last <= self.ends[high])
        inside &= self.block[low] == self.block[high]
        if not inside.all():
            wrong = int(np.flatnonzero(~inside)[0])
            raise TransferError(
                f"{int(batch.nbytes[wrong])} bytes at {int(first[wrong]):#x} do not lie in memory "
                f"that {whose} has registered."
            )
        run, piece = ragged(high - low + 1)
        start = np.maximum(first[run], self.starts[low[run] + piece])
        end = np.minimum(last[run], self.ends[low[run] + piece])
        within = start - first[run]
        return CopyBatch(batch.src[run] + within, batch.dst[run] + within, end - start)


NO_RANGES = Ranges.of([])
