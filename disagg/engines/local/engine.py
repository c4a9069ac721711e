"""Reads between processes of one host; needs no installation.

A peer offers its memory over a unix socket (`offer`). Shared host memory (pools on the CPU device)
comes as open files, is mapped read-only and copied. Other host memory is read by
`process_vm_readv`, if kvpool's C code is here and the kernel permits it, from the process that
serves the socket. Device memory is mapped and copied by its device. Anything else is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.engines.base import Engine, TransferError, wait_until
from disagg.engines.local.device import DeviceSegment, attach, share
from disagg.engines.local.host import PRIVATE, Files, Segment, map_files, this_host
from disagg.engines.local.offer import IncomingOffer, Offer, OfferServer, dial
from disagg.engines.local.peer import (
    BY_DEVICE,
    BY_KERNEL,
    BY_MAPPING,
    HostCopies,
    LocalPeer,
    finished,
)
from disagg.plan.bind import CopyBatch
from kvpool.layout.grid import Ints
from kvpool.layout.types import Slab

if TYPE_CHECKING:
    from kvpool._native import Job
    from kvpool.device import Event

NATIVE_BYTES, NATIVE_RUNS = 256 << 20, 1 << 20
"""Most of a part that is copied outside Python."""
CONNECT_SECONDS = 0.1
"""How long `connect` waits for an offer. If it takes longer, reads wait, and other peers do not."""


class LocalMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a process of this host offers its memory."""

    host: str
    socket: bytes


@dataclass(eq=False)
class LocalTransfer:
    """A read; with a batch, if it starts when its peer's offer is here. `jobs` and `event` are the
    copies that go on.
    """

    peer: LocalPeer
    batch: CopyBatch | None = None
    jobs: list[Job] = field(default_factory=list)
    event: Event | None = None


class LocalEngine(Engine[LocalPeer, LocalTransfer]):
    """A thread outside Python copies host memory, a device its own. Where kvpool was installed
    without a compiler, `read` copies host memory before it returns.
    """

    name = "local"
    progress_seconds = 0.05  # whoever reads does all of it

    def __init__(self) -> None:
        self._copies = HostCopies()
        if self._copies.native:  # which needs no turn of the reader's thread, nor holds it up
            self.max_bytes, self.max_runs, self.parts_in_flight = NATIVE_BYTES, NATIVE_RUNS, 4
            self.background = True
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
        """Finds the shared mappings of host slabs; a device shares its own slabs."""
        if self._server is not None:
            raise TransferError("peers have been offered memory: register all of it before.")
        for slab in slabs:
            if slab.on_host:
                self._segments.extend(self._files.find(slab))
            elif self._memory in ("", slab.memory):
                self._shared.append(share(slab))
                self.background = False  # events of a device are polled
                self._memory = slab.memory
            else:
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}, others on {self._memory}: an "
                    "engine serves one device. Create an endpoint with an engine for each."
                )

    def metadata(self) -> bytes:
        """This host, and the socket where the registered memory is offered from now on."""
        if self._server is None:
            self._server = OfferServer(Offer(self._segments, self._shared), self._files.handles)
        return msgspec.msgpack.encode(LocalMetadata(this_host(), self._server.path))

    def connect(self, metadata: bytes) -> LocalPeer:
        """Asks a peer for its memory, and maps it."""
        try:
            owner = msgspec.msgpack.decode(metadata, type=LocalMetadata)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"malformed metadata: {error}") from None
        if owner.host != this_host():
            raise TransferError("the peer is on another host. Use engine nixl.")
        connection = dial(owner.socket)
        peer = LocalPeer(connection=connection, incoming=IncomingOffer(connection))
        self._peers.append(peer)
        try:
            self._is_here(peer, CONNECT_SECONDS)
        except BaseException:
            self.fence(peer)
            raise
        return peer

    def notify(self, descriptor: int) -> None:
        """See Engine."""
        self._copies.notify(descriptor)

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
            source = peer.connection if way == BY_KERNEL else None
            job = self._copies.start(runs, tuple(peer.mappings), source)
            if job is not None:
                transfer.jobs.append(job)
                peer.jobs.append(job)

    def poll(self, transfer: LocalTransfer) -> bool:
        """Whether every copy has finished."""
        if transfer.batch is not None:
            if not self._is_here(transfer.peer):
                return False
            batch, transfer.batch = transfer.batch, None
            self._copy(transfer, batch)
        pid = transfer.peer.connection.pid
        if not all(finished(job, pid) for job in transfer.jobs):
            return False
        return transfer.event is None or transfer.event.query()

    def fence(self, peer: LocalPeer, timeout: float | None = None) -> bool:
        """Ends copies of host memory, waits for the device's, then unmaps the peer's memory and
        hangs up.
        """
        peer.bases, peer.ends = peer.bases[:0], peer.ends[:0]
        for job in peer.jobs:
            job.cancel()
        if not wait_until(peer.quiet, timeout):
            return False
        peer.hang_up()
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
        self._copies.close()
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
            peer.hang_up()

    def _is_here(self, peer: LocalPeer, wait: float = 0.0) -> bool:
        """Whether the peer's offer has come; then its memory is mapped. Waits `wait` seconds."""
        if peer.incoming is None:
            return True
        offer = peer.incoming.receive(wait)
        if offer is None:
            return False
        incoming, peer.incoming = peer.incoming, None
        try:
            self._map(peer, offer, incoming.files)
        finally:
            incoming.close()
        return True

    def _map(self, peer: LocalPeer, offer: Offer, files: Sequence[int]) -> None:
        shifts, peer.mappings = map_files(offer.segments, files)
        rows = [
            (part.base, part.nbytes, shift, BY_KERNEL if part.file == PRIVATE else BY_MAPPING)
            for part, shift in zip(offer.segments, shifts)
        ]
        if not peer.connection.pid and any(part.file == PRIVATE for part in offer.segments):
            raise TransferError(
                "the peer's private memory cannot be read: its process is in a process namespace "
                "that is out of sight from here. Allocate its pool on kvpool's CPU device, which "
                "shares its memory, or use engine nixl."
            )
        if offer.devices:
            # what this process offers was registered in it
            own = peer.connection.pid == os.getpid()
            peer.attached, moved = attach(offer.devices, self._memory, own=own)
            rows += [(d.base, d.nbytes, n, BY_DEVICE) for d, n in zip(offer.devices, moved)]
        table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
        bases, sizes, peer.shifts, peer.ways = table.T
        peer.bases, peer.ends = bases, bases + sizes

    def _on_device(self, pointers: Ints) -> npt.NDArray[np.bool_]:
        """Which of this side's pointers point into device memory."""
        on_device = np.zeros(pointers.shape, dtype=bool)
        for shared in self._shared:
            on_device |= (pointers >= shared.base) & (pointers < shared.base + shared.nbytes)
        return on_device
