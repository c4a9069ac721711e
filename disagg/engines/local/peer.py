"""A peer of engine local: where its memory is here, how it is read, and whether it was."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from disagg.engines.base import TransferError
from disagg.engines.local.device import Attached
from disagg.engines.local.offer import ENDED
from disagg.engines.ranges import NO_RANGES, Ranges
from disagg.plan.bind import CopyBatch
from kvpool import _native
from kvpool.layout.grid import Ints

BY_MAPPING, BY_KERNEL, BY_DEVICE = range(3)
"""How a segment is read."""


@dataclass(eq=False, kw_only=True)
class LocalPeer:
    """A peer whose socket process `pid` serves over `link`, see `dial`. It has none of its `ranges`
    until its offer has come: `pointer here = pointer there + shift`, and the way each is read.
    `jobs` are copies whose bytes may still land.
    """

    link: socket.socket
    pid: int
    deadline: float
    offered: bool = False
    ranges: Ranges = NO_RANGES
    shifts: Ints = field(default_factory=NO_RANGES.starts.copy)
    ways: Ints = field(default_factory=NO_RANGES.starts.copy)
    mappings: list[object] = field(default_factory=list)
    attached: Attached | None = None
    jobs: list[_native.Job] = field(default_factory=list)

    def by_way(self, batch: CopyBatch) -> list[tuple[int, tuple[Ints, Ints, Ints]]]:
        """Runs of pointers here, by how they are read. TransferError for any outside a segment."""
        src, dst, nbytes = self.ranges.cut(batch, batch.src, "the peer")
        number = self.ranges.number(src) if self.ways.size > 1 else 0
        src, ways = src + self.shifts[number], self.ways[number]
        way = int(self.ways[0])
        if (self.ways == way).all():
            return [(way, (src, dst, nbytes))]
        masks = [(way, ways == way) for way in (BY_MAPPING, BY_KERNEL, BY_DEVICE)]
        return [(way, (src[mask], dst[mask], nbytes[mask])) for way, mask in masks if mask.any()]

    def quiet(self) -> bool:
        """Whether nothing of its memory is being copied."""
        jobs_ended = all(job.ended for job in self.jobs)
        return jobs_ended and (self.attached is None or self.attached.quiet())


def finished(job: _native.Job, pid: int) -> bool:
    """Whether a job has copied all from process `pid`. Raises TransferError if it ended before."""
    if not job.ended:
        return False
    if job.done:
        return True
    if job.error == _native.PEER_ENDED:
        raise TransferError(ENDED)
    if job.cancelled:
        raise TransferError("the peer was given up.")
    raise TransferError(
        f"the memory of process {pid} cannot be read ({os.strerror(job.error)}). Allocate the "
        "peer's pool on kvpool's CPU device, which shares its memory, or use engine nixl."
    )
