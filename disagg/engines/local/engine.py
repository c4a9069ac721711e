"""Reads between processes of one host; needs no installation.

A peer offers its memory over a unix socket (`offer`). Host memory of kvpool's CPU device comes as
open files, is mapped read-only and copied. Other host memory is read by `process_vm_readv`, if
kvpool's C code is here and the kernel permits it, from the process that serves the socket. Device
memory is mapped and copied by its device. Anything else is refused.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.engines.base import Engine, TransferError, decode_metadata, one_memory, wait_until
from disagg.engines.local.device import DeviceSegment, attach, share
from disagg.engines.local.offer import Offer, OfferServer, dial, read_offer, receive_files
from disagg.engines.local.peer import BY_DEVICE, BY_KERNEL, BY_MAPPING, LocalPeer, finished
from disagg.engines.ranges import NO_RANGES
from disagg.engines.shared_files import PRIVATE, Files, Segment, map_files, this_host
from disagg.host.system_calls import Waker
from disagg.plan.bind import CopyBatch
from kvpool import _native
from kvpool.device.host_copy import copy_runs
from kvpool.layout.grid import Ints
from kvpool.layout.types import Slab

if TYPE_CHECKING:
    from kvpool.device import Event

NATIVE_BYTES, NATIVE_RUNS = 256 << 20, 1 << 20
"""Most of a part that is copied outside Python."""
SMALL_RUNS, SMALL_BYTES = 1024, 64 << 10
"""Of at most so much, runs are copied in the call."""
CONNECT_SECONDS = 0.1
"""How long `connect` waits for an offer. If it takes longer, reads wait, and other peers do not."""
OFFER_SECONDS = 30.0
"""How long reads wait for it."""


class LocalMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a process of this host offers its memory."""

    host: str
    socket: bytes


@dataclass(eq=False)
class LocalTransfer:
    """A read; with a batch, if it awaits its peer's offer. `jobs` and `event`: copies going on."""

    peer: LocalPeer
    batch: CopyBatch | None = None
    jobs: list[_native.Job] = field(default_factory=list)
    event: Event | None = None


class LocalEngine(Engine[LocalPeer, LocalTransfer]):
    """A thread outside Python copies host memory, a device its own. Where kvpool was installed
    without a compiler, `read` copies host memory before it returns.
    """

    name = "local"
    progress_seconds = 0.05  # the reading side does all of it

    def __init__(self) -> None:
        self._native = _native.availability() is None
        if self._native:  # which needs no turn of the reader's thread, nor holds it up
            self.max_bytes, self.max_runs, self.parts_in_flight = NATIVE_BYTES, NATIVE_RUNS, 4
            self.background = True
        self._worker: _native.Worker | None = None
        self._waker = Waker()
        self._segments: list[Segment] = []
        self._shared: list[DeviceSegment] = []
        self._memory = ""
        self._files = Files()
        self._server: OfferServer | None = None
        self._peers: list[LocalPeer] = []

    @classmethod
    def availability(cls) -> str | None:
        """Needs Linux."""
        if sys.platform != "linux":
            return f"needs Linux, this is {sys.platform}. Use engine nixl."
        return None

    def register(self, slabs: Sequence[Slab]) -> None:
        """Finds the files behind host slabs; a device shares its own slabs."""
        if self._server is not None:
            raise TransferError("peers have been offered memory: register all of it before.")
        for slab in slabs:
            if slab.on_host:
                self._segments.extend(self._files.find(slab))
            else:
                memory = one_memory([slab], self._memory)
                self._shared.append(share(slab))
                self.background = False  # events of a device are polled
                self._memory = memory

    def metadata(self) -> bytes:
        """This host, and the socket where the registered memory is offered from now on."""
        if self._server is None:
            self._server = OfferServer(Offer(self._segments, self._shared), self._files.handles)
        return msgspec.msgpack.encode(LocalMetadata(this_host(), self._server.path))

    def connect(self, metadata: bytes) -> LocalPeer:
        """Asks a peer for its memory, and maps it."""
        owner = decode_metadata(metadata, LocalMetadata)
        if owner.host != this_host():
            raise TransferError("the peer is on another host. Use engine nixl.")
        link, pid = dial(owner.socket)
        peer = LocalPeer(link=link, pid=pid, deadline=time.monotonic() + OFFER_SECONDS)
        self._peers.append(peer)
        try:
            self._is_here(peer, CONNECT_SECONDS)
        except BaseException:
            self.fence(peer)
            raise
        return peer

    def notify(self, descriptor: int) -> None:
        if self._native and self._worker is None:
            self._waker.set(descriptor)

    def read(self, peer: LocalPeer, batch: CopyBatch) -> LocalTransfer:
        """Starts copying."""
        transfer = LocalTransfer(peer)
        if not batch.runs:
            return transfer
        if self._is_here(peer):
            self._copy(transfer, batch)
        else:
            transfer.batch = CopyBatch(batch.src.copy(), batch.dst.copy(), batch.nbytes.copy())
        return transfer

    def _copy(self, transfer: LocalTransfer, batch: CopyBatch) -> None:
        peer = transfer.peer
        groups = peer.by_way(batch)
        for way, (_, dst, _) in groups if self._shared else ():
            if (self._on_device(dst) != (way == BY_DEVICE)).any():
                raise TransferError(
                    f"a run between host memory and {self._memory}: engine local copies "
                    "from host to host and from device to device only. Use engine nixl."
                )
        peer.jobs = [job for job in peer.jobs if not job.ended]
        for way, runs in groups:
            if way == BY_DEVICE and peer.attached is not None:
                transfer.event = peer.attached.copy(*runs)
                continue
            job = self._copy_host(peer, runs, by_kernel=way == BY_KERNEL)
            if job is not None:
                transfer.jobs.append(job)
                peer.jobs.append(job)

    def _copy_host(
        self, peer: LocalPeer, runs: tuple[Ints, Ints, Ints], *, by_kernel: bool
    ) -> _native.Job | None:
        """Copies runs from a peer's mapped memory, or its process; returns the job that goes on."""
        src, dst, nbytes = runs
        if not self._native:
            if by_kernel:
                raise TransferError(
                    f"the private memory of process {peer.pid} cannot be read: kvpool's C code "
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
        pid, link = (peer.pid, peer.link.fileno()) if by_kernel else (0, -1)
        keep = (*peer.mappings, peer.link)
        return self._worker.post(src, dst, nbytes, pid=pid, peer=link, keep=keep, at_once=small)

    def poll(self, transfer: LocalTransfer) -> bool:
        """Whether every copy has finished."""
        if transfer.batch is not None:
            if not self._is_here(transfer.peer):
                return False
            batch, transfer.batch = transfer.batch, None
            self._copy(transfer, batch)
        if not all(finished(job, transfer.peer.pid) for job in transfer.jobs):
            return False
        return transfer.event is None or transfer.event.query()

    def fence(self, peer: LocalPeer, timeout: float | None = None) -> bool:
        """Ends copies of host memory, awaits the device's, unmaps the peer's memory, hangs up."""
        peer.offered, peer.ranges = True, NO_RANGES
        for job in peer.jobs:
            job.cancel()
        if not wait_until(peer.quiet, timeout):
            return False
        peer.link.close()
        if peer.attached is not None:
            peer.attached.close()
        peer.mappings.clear()
        if peer in self._peers:
            self._peers.remove(peer)
        return True

    def close(self) -> None:
        """Fences all peers, and offers nothing any more."""
        for peer in list(self._peers):
            self.fence(peer)
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._waker.close()
        self._segments.clear()
        self._shared.clear()
        self._files.close()

    def abandon(self) -> None:
        """Closes the child's copies of descriptors, so that a peer sees when the parent ends."""
        super().abandon()
        if self._server is not None:
            self._server.abandon()
        self._files.close()
        for peer in self._peers:
            peer.link.close()

    def _is_here(self, peer: LocalPeer, wait: float = 0.0) -> bool:
        """Whether the peer's offer has come; then its memory is mapped. Waits `wait` seconds."""
        if peer.offered:
            return True
        files = receive_files(peer.link, wait)
        if files is None:
            if time.monotonic() < peer.deadline:
                return False
            raise TransferError(
                f"the peer has not offered its memory within {OFFER_SECONDS:g} s: its process "
                "is stopped, busy, or no peer."
            )
        peer.offered = True
        try:
            self._map(peer, read_offer(files[0]), files[1:])
        finally:
            for file in files:
                os.close(file)
        return True

    def _map(self, peer: LocalPeer, offer: Offer, files: Sequence[int]) -> None:
        ranges = offer.ranges()
        shifts, peer.mappings = map_files(offer.segments, files)
        ways = [BY_KERNEL if part.file == PRIVATE else BY_MAPPING for part in offer.segments]
        if not peer.pid and BY_KERNEL in ways:
            raise TransferError(
                "the peer's private memory cannot be read: its process is in a process namespace "
                "that is out of sight from here. Allocate its pool on kvpool's CPU device, which "
                "shares its memory, or use engine nixl."
            )
        if offer.devices:
            # what this process offers was registered in it
            own = peer.pid == os.getpid()
            peer.attached, moved = attach(offer.devices, self._memory, own=own)
            shifts, ways = [*shifts, *moved], [*ways, *[BY_DEVICE] * len(moved)]
        bases = [part.base for part in offer.segments] + [part.base for part in offer.devices]
        order = np.argsort(np.array(bases, dtype=np.int64))
        peer.shifts, peer.ways = np.array([shifts, ways], dtype=np.int64)[:, order]
        peer.ranges = ranges

    def _on_device(self, pointers: Ints) -> npt.NDArray[np.bool_]:
        """Which of this side's pointers point into device memory."""
        on_device = np.zeros(pointers.shape, dtype=bool)
        for shared in self._shared:
            on_device |= (pointers >= shared.base) & (pointers < shared.base + shared.nbytes)
        return on_device
