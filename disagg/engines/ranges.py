"""Stretches of registered memory: whether runs lie in them, and where a run must be cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from disagg.engines.base import TransferError
from disagg.plan.bind import CopyBatch
from kvpool.layout.grid import Ints, ragged
from kvpool.layout.types import MAX_INT


@dataclass(frozen=True, slots=True)
class Ranges:
    """Where each begins and ends (exclusive), `[R]`, ascending; `block` is equal for those that
    touch.
    """

    starts: Ints
    ends: Ints
    block: Ints

    @classmethod
    def of(cls, stretches: Iterable[tuple[int, int]]) -> Ranges:
        """From addresses and lengths in bytes. Raises ValueError where two overlap."""
        ordered = sorted(stretches)
        end = 0
        for base, nbytes in ordered:
            if base < end or nbytes < 1 or base + nbytes > MAX_INT:
                raise ValueError(f"{nbytes} bytes at {base:#x} overlap others, or no addresses.")
            end = base + nbytes
        starts = np.array([base for base, _ in ordered], dtype=np.int64)
        ends = np.array([base + nbytes for base, nbytes in ordered], dtype=np.int64)
        gaps = np.zeros_like(starts)
        gaps[1:] = starts[1:] != ends[:-1]
        return cls(starts, ends, np.cumsum(gaps))

    def cut(self, batch: CopyBatch, first: Ints, whose: str) -> CopyBatch:
        """The same bytes in runs that lie in one range each; `first` is the batch's `src` or `dst`.

        Raises TransferError for the first run that leaves them.
        """
        if not self.starts.size:
            raise TransferError(f"no memory was registered by {whose}.")
        last = first + batch.nbytes
        at = np.searchsorted(self.starts, first, side="right") - 1
        to = np.searchsorted(self.starts, last - 1, side="right") - 1
        inside = (at >= 0) & (to >= at) & (last <= self.ends[to])
        inside &= self.block[at] == self.block[to]
        if not inside.all():
            wrong = int(np.flatnonzero(~inside)[0])
            raise TransferError(
                f"{int(batch.nbytes[wrong])} bytes at {int(first[wrong]):#x} do not lie in memory "
                f"that was registered by {whose}."
            )
        pieces = to - at + 1
        if (pieces == 1).all():
            return batch
        run, piece = ragged(pieces)
        low = np.maximum(first[run], self.starts[at[run] + piece])
        high = np.minimum(last[run], self.ends[at[run] + piece])
        within = low - first[run]
        return CopyBatch(batch.src[run] + within, batch.dst[run] + within, high - low)
