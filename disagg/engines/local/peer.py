"""A peer of engine local: where its memory is here, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.local.device import Attached
from disagg.engines.local.offer import IncomingOffer, PeerConnection
from disagg.plan.bind import CopyBatch
from kvpool.layout.grid import Ints

if TYPE_CHECKING:
    from kvpool._native import Job

BY_MAPPING, BY_KERNEL, BY_DEVICE = range(3)
"""How a segment is read."""


def _none() -> Ints:
    return np.empty(0, dtype=np.int64)


@dataclass(eq=False, kw_only=True)
class LocalPeer:
    """A peer's segments: `pointer here = pointer there + shift`, and how each is read. There are
    none while its offer is `incoming`. `jobs` are copies whose bytes may still land.
    """

    connection: PeerConnection
    incoming: IncomingOffer | None
    bases: Ints = field(default_factory=_none)
    ends: Ints = field(default_factory=_none)
    shifts: Ints = field(default_factory=_none)
    ways: Ints = field(default_factory=_none)
    mappings: list[object] = field(default_factory=list)
    attached: Attached | None = None
    jobs: list[Job] = field(default_factory=list)

    def by_way(self, batch: CopyBatch) -> list[tuple[int, tuple[Ints, Ints, Ints]]]:
        """Runs of pointers here, by how they are read. Raises TransferError for a run that does not
        lie in one of the peer's segments.
        """
        src, dst, nbytes = batch
        if not self.bases.size:
            raise TransferError("the peer has registered no memory.")
        ends = src + nbytes
        first = int(self.bases.searchsorted(src.min(), side="right")) - 1
        if first >= 0 and ends.max() <= self.ends[first]:  # all in one, as most are
            return [(int(self.ways[first]), (src + self.shifts[first], dst, nbytes))]
        number = np.maximum(self.bases.searchsorted(src, side="right") - 1, 0)
        inside = (src >= self.bases[number]) & (ends <= self.ends[number])
        if not inside.all():
            wrong = int(np.flatnonzero(~inside)[0])
            raise TransferError(
                f"{int(nbytes[wrong])} bytes at {int(src[wrong]):#x} do not lie in memory that the "
                "peer has registered."
            )
        src, ways = src + self.shifts[number], self.ways[number]
        masks = [(way, ways == way) for way in np.unique(ways).tolist()]
        return [(way, (src[mask], dst[mask], nbytes[mask])) for way, mask in masks]

    def quiet(self) -> bool:
        """Whether nothing of its memory is being copied."""
        jobs_ended = all(job.ended for job in self.jobs)
        return jobs_ended and (self.attached is None or self.attached.quiet())

    def hang_up(self) -> None:
        """Closes the connection."""
        if self.incoming is not None:
            self.incoming.close()
            self.incoming = None
        self.connection.close()
