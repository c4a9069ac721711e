"""Reads between processes of one host; needs no installation.

Shared host memory (pools on the CPU device) is mapped read-only and copied. Other host memory is
read by `process_vm_readv`, if the kernel permits it. Device memory is mapped and copied by its
device. Anything else is refused.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.engines.base import FENCE_POLL_SECONDS, Engine, TransferError
from disagg.engines.local.device import Attached, DeviceSegment, attach, share, withdraw
from disagg.engines.local.host import (
    Files,
    Segment,
    map_segment,
    read_process,
    started,
    this_host,
)
from disagg.plan.bind import CopyBatch
from kvpool.device.host_copy import copy_runs
from kvpool.layout.grid import Ints
from kvpool.layout.types import MAX_INT, Slab

if TYPE_CHECKING:
    from kvpool.device import Event

MAX_SEGMENTS = 1 << 16
BY_MAPPING, BY_KERNEL, BY_DEVICE = range(3)
"""How a segment is read."""


class LocalMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process, identified by host, number and start time, and its memory."""

    host: str
    pid: int
    started: str
    segments: list[Segment]
    devices: list[DeviceSegment] = []


@dataclass(eq=False)
class LocalPeer:
    """A peer's segments: `pointer here = pointer there + shift`, and how each is read."""

    pid: int
    bases: Ints
    ends: Ints
    shifts: Ints
    ways: Ints
    mappings: list[object]
    attached: Attached | None


class LocalEngine(Engine):
    """`read` copies host memory before it returns; a device copies its own memory."""

    name = "local"

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._shared: list[DeviceSegment] = []
        self._memory = ""
        self._files = Files()
        self._peers: list[LocalPeer] = []

    @classmethod
    def availability(cls) -> str | None:
        """Needs Linux's /proc."""
        if sys.platform != "linux":
            return f"needs Linux (/proc), this is {sys.platform}. Use engine nixl."
        return None

    def register(self, slabs: Sequence[Slab]) -> None:
        """Finds the shared mappings of host slabs; a device shares its own slabs."""
        for slab in slabs:
            if slab.on_host:
                self._segments.extend(self._files.find(slab))
            elif self._memory in ("", slab.memory):
                self._shared.append(share(slab))
                self._memory = slab.memory
            else:
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}, others on {self._memory}: an "
                    "engine serves one device. Create an endpoint with an engine for each."
                )

    def metadata(self) -> bytes:
        """The process, its segments and its device segments."""
        pid = os.getpid()
        own = LocalMetadata(this_host(), pid, started(pid), self._segments, self._shared)
        return msgspec.msgpack.encode(own)

    def connect(self, metadata: bytes) -> LocalPeer:
        """Maps the peer's segments."""
        try:
            owner = msgspec.msgpack.decode(metadata, type=LocalMetadata)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"malformed metadata: {error}") from None
        if owner.host != this_host():
            raise TransferError(
                "the peer is on another host or in another process namespace. Use engine nixl."
            )
        if not owner.started or started(owner.pid) != owner.started:
            raise TransferError(f"the peer's process {owner.pid} has ended.")
        parts: list[Segment | DeviceSegment] = [*owner.segments, *owner.devices]
        parts.sort(key=lambda part: part.base)
        if len(parts) > MAX_SEGMENTS:
            raise TransferError(f"{len(parts)} segments, at most {MAX_SEGMENTS} are supported.")
        end = 0
        for part in parts:
            if part.base < end or part.nbytes < 1 or part.base + part.nbytes > MAX_INT:
                raise TransferError(f"malformed metadata: {part} overlaps or overflows.")
            end = part.base + part.nbytes
        rows, mappings, attached = [], [], None
        for segment in owner.segments:
            shift, kernel, memory = map_segment(owner.pid, segment)
            mappings.append(memory)
            rows.append((segment.base, segment.nbytes, shift, BY_KERNEL if kernel else BY_MAPPING))
        if owner.devices:
            attached, shifts = attach(owner.devices, self._memory)
            rows += [(d.base, d.nbytes, n, BY_DEVICE) for d, n in zip(owner.devices, shifts)]
        bases, sizes, moved, ways = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4).T
        peer = LocalPeer(owner.pid, bases, bases + sizes, moved, ways, mappings, attached)
        self._peers.append(peer)
        return peer

    def read(self, peer: LocalPeer, batch: CopyBatch) -> Event | None:
        """Copies host memory, and starts copying device memory."""
        if not batch.runs:
            return None
        if not peer.bases.size:
            raise TransferError("the peer has registered no memory.")
        at = np.maximum(np.searchsorted(peer.bases, batch.src, side="right") - 1, 0)
        inside = (batch.src >= peer.bases[at]) & (batch.src + batch.nbytes <= peer.ends[at])
        if not inside.all():
            first = int(np.flatnonzero(~inside)[0])
            raise TransferError(
                f"{int(batch.nbytes[first])} bytes at {int(batch.src[first]):#x} do not lie in "
                "memory that the peer has registered."
            )
        runs = batch.src + peer.shifts[at], batch.dst, batch.nbytes
        ways = peer.ways[at]
        if self._shared and ((ways == BY_DEVICE) != self._on_device(batch.dst)).any():
            raise TransferError(
                f"a run between host memory and {self._memory}: engine local copies "
                "from host to host and from device to device only. Use engine nixl."
            )
        event = None
        for way in np.unique(ways).tolist():
            some = runs if (ways == way).all() else tuple(column[ways == way] for column in runs)
            if way == BY_MAPPING:
                copy_runs(*some)
            elif way == BY_KERNEL:
                read_process(peer.pid, *some)
            elif peer.attached is not None:
                event = peer.attached.copy(*some)
        return event

    def poll(self, transfer: Event | None) -> bool:
        """Whether the device has finished copying; host memory is complete when `read` returns."""
        return transfer is None or transfer.query()

    def fence(self, peer: LocalPeer, timeout: float | None = None) -> bool:
        """Waits for the device's copies, then unmaps the peer's memory."""
        stop = None if timeout is None else time.monotonic() + timeout
        peer.bases, peer.ends = peer.bases[:0], peer.ends[:0]
        while peer.attached is not None and not peer.attached.quiet():
            if stop is not None and time.monotonic() >= stop:
                return False
            time.sleep(FENCE_POLL_SECONDS)
        if peer.attached is not None:
            peer.attached.close()
        peer.mappings.clear()
        if peer in self._peers:
            self._peers.remove(peer)
        return True

    def close(self) -> None:
        """Fences all peers, and closes what `register` opened."""
        for peer in list(self._peers):
            self.fence(peer)
        withdraw(self._shared)
        self._segments.clear()
        self._shared.clear()
        self._files.close()

    def _on_device(self, pointers: Ints) -> npt.NDArray[np.bool_]:
        """Which of this side's pointers point into device memory."""
        found = np.zeros(pointers.shape, dtype=bool)
        for shared in self._shared:
            found |= (pointers >= shared.base) & (pointers < shared.base + shared.nbytes)
        return found
