"""Copies of host memory: by a thread outside Python (`kvpool._native`), or in the call where that
was not compiled.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.local.host import read_process, unreadable
from disagg.engines.local.offer import ENDED, PeerConnection
from disagg.host.waker import Waker
from kvpool import _native
from kvpool.device.host_copy import copy_runs
from kvpool.layout.grid import Ints

SMALL_RUNS, SMALL_BYTES = 1024, 64 << 10
"""Of at most so much, runs are copied in the call."""


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
            if source is None:
                copy_runs(src, dst, nbytes)
            else:
                read_process(source.pid, source.check_alive, src, dst, nbytes)
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
    raise TransferError(unreadable(pid, os.strerror(job.error)))
