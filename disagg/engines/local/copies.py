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

    def mapped(self, keep: Any, src: Ints, dst: Ints, nbytes: Ints) -> _native.Job | None:
        """Copies from memory of this process; `keep` is what keeps it mapped."""
        if not self.native:
            copy_runs(src, dst, nbytes)
            return None
        at_once = _is_small(nbytes)
        columns = (dst, nbytes) if at_once else _kept(dst, nbytes)
        return self._thread().post(src, *columns, keep=keep, at_once=at_once)

    def of_process(
        self, connection: PeerConnection, src: Ints, dst: Ints, nbytes: Ints
    ) -> _native.Job | None:
        """Reads memory of the process at the other end of a connection, which stays open until the
        job has ended.
        """
        if not self.native:
            read_process(connection.pid, connection.check_alive, src, dst, nbytes)
            return None
        pid, peer, at_once = connection.pid, connection.link.fileno(), _is_small(nbytes)
        columns = (dst, nbytes) if at_once else _kept(dst, nbytes)
        return self._thread().post(
            src, *columns, pid=pid, peer=peer, keep=connection, at_once=at_once
        )

    def close(self) -> None:
        """Ends the thread, once all jobs have ended."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._waker.close()

    def _thread(self) -> _native.Worker:
        if self._worker is None:
            self._worker = _native.Worker(self._waker.descriptor)
        return self._worker


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


def _is_small(nbytes: Ints) -> bool:
    """Whether runs are copied in less time than another thread needs to wake."""
    return nbytes.size <= SMALL_RUNS and int(nbytes.sum()) <= SMALL_BYTES


def _kept(dst: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Copies of columns that the caller may use again; one number for all runs never changes."""
    return dst.copy(), nbytes if nbytes.strides == (0,) else np.array(nbytes, dtype=np.int64)
