"""An engine whose reads take virtual time and move nothing. It checks what they would move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from disagg.engines.base import Engine, TransferError
from disagg.plan.bind import CopyBatch
from kvpool.layout import PoolLayout, Slab
from kvpool.layout.grid import Ints, ragged

if TYPE_CHECKING:
    from tests.fleet.ranks import Rank


@dataclass(eq=False, slots=True)
class Transfer:
    """A read from pages of one rank to pages of another."""

    source: Rank
    source_pages: Ints
    pages: Ints
    nbytes: int
    arrives: float


class TimedEngine(Engine):
    """Reads for one rank. Ports are shared: a read waits until both are free, and takes the time of
    its bytes; a message's time later it has arrived.
    """

    name = "timed"
    max_bytes = max_runs = 1 << 40
    background = True

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @classmethod
    def availability(cls) -> None:
        return

    def register(self, slabs: Sequence[Slab]) -> None:
        """Memory is not there."""

    def metadata(self) -> bytes:
        return self._rank.name.encode()

    def connect(self, metadata: bytes) -> Rank:
        rank = self._rank.fleet.alive.get(metadata.decode())
        if rank is None:
            raise TransferError("the peer's process is gone.")
        return rank

    def read(self, peer: Rank, batch: CopyBatch) -> Transfer:
        fleet, here = self._rank.fleet, self._rank
        start = max(fleet.timeline.now, peer.port_free, here.port_free)
        peer.port_free = here.port_free = end = start + batch.total / fleet.spec.rate
        arrives = end + fleet.network.delay()
        fleet.timeline.at(arrives, here.wake)
        pages = pages_of(here.layout, batch.dst, batch.nbytes)
        there = pages_of(peer.layout, batch.src, batch.nbytes)
        return Transfer(peer, there, pages, batch.total, arrives)

    def poll(self, transfer: Transfer) -> bool:
        here, source = self._rank, transfer.source
        if here.fleet.timeline.now < transfer.arrives:
            return False
        if not source.alive:
            raise TransferError("the peer's process is gone.")
        rooms = here.owners[transfer.pages]
        room = int(rooms[0])
        here.fleet.check(room >= 0 and (rooms == room).all(), "bytes land in pages of other rooms")
        # pages have one room from the first chunk to its end, so they had it all the time
        owned = bool((source.owners[transfer.source_pages] == room).all())
        here.landed(room, transfer.nbytes, owned)
        return True

    def fence(self, peer: Rank, timeout: float | None = None) -> bool:
        """Nothing lands that is not polled."""
        return True

    def close(self) -> None:
        """Nothing is open."""


def pages_of(layout: PoolLayout, starts: Ints, nbytes: Ints) -> Ints:
    """The pages that runs touch, each in one buffer."""
    buffers = sorted((buffer.base, buffer.item_stride) for buffer in layout.buffers)
    bases, sizes = np.array(buffers, dtype=np.int64).T
    which = np.searchsorted(bases, starts, side="right") - 1
    offsets, size = starts - bases[which], sizes[which]
    first, last = offsets // size, (offsets + nbytes - 1) // size
    if (first == last).all():
        return np.asarray(first)
    run, step = ragged(last - first + 1)
    return np.asarray(first[run] + step)
