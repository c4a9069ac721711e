"""A peer of engine local: where its memory is here, how it is read, and copies of host memory: by a
thread outside Python (`kvpool._native`), or in the call where that was not compiled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.local.device import Attached
from disagg.engines.local.offer import ENDED, IncomingOffer, PeerConnection
from disagg.host.brief import Waker
from disagg.plan.bind import CopyBatch
from kvpool import _native
from kvpool.device.host_copy import copy_runs
from kvpool.layout.grid import Ints

BY_MAPPING, BY_KERNEL, BY_DEVICE = range(3)
"""How a segment is read."""
SMALL_RUNS, SMALL_BYTES = 1024, 64 << 10
"""Of at most so much, runs are copied in the call."""


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
    jobs: list[_native.Job] = field(default_factory=list)

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


class HostCopies:
    """Copies runs in order; used by one thread. A copy that goes on after the call is a job."""

    def __init__(self) -> None:
        self.native = _native.availability() is None
        self._worker: _native.Worker | None = None
        self._waker = Waker()

    def notify(self, descriptor: int) -> None:
        """See Engine.notify."""
        if self.native and self._worker is None:
            self._waker.set(descriptor)

    def start(
        self, runs: tuple[Ints, Ints, Ints], keep: Any, source: PeerConnection | None = None
    ) -> _native.Job | None:
        """Copies runs from memory of this process that `keep` keeps mapped, or of the process at
        the other end of a connection, which stays open until the job has ended.
        """
        src, dst, nbytes = runs
        if not self.native:
            if source is not None:
                raise TransferError(
                    f"the private memory of process {source.pid} cannot be read: kvpool's C code "
                    f"{_native.availability()} Or allocate its pool on kvpool's CPU device."
                )
            copy_runs(src, dst, nbytes)
            return None
        if self._worker is None:
            self._worker = _native.Worker(self._waker.descriptor)
        small = nbytes.size <= SMALL_RUNS and int(nbytes.sum()) <= SMALL_BYTES
        if not small:  # the caller may use its columns again; one number for all never changes
            dst = dst.copy()
            nbytes = nbytes if nbytes.strides == (0,) else np.array(nbytes, dtype=np.int64)
        pid, peer = (0, -1) if source is None else (source.pid, source.link.fileno())
        return self._worker.post(
            src, dst, nbytes, pid=pid, peer=peer, keep=(keep, source), at_once=small
        )

    def close(self) -> None:
        """Ends the thread, once all jobs have ended."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._waker.close()


def finished(job: _native.Job, pid: int) -> bool:
    """Whether a job has copied everything. Raises TransferError if it ended before; `pid` is the
    process that it read.
    """
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
