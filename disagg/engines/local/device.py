"""Device memory of another process of this host, mapped and copied by the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from disagg.engines.base import TransferError
from kvpool.layout import Slab
from kvpool.layout.grid import Ints
from kvpool.layout.types import HOST

if TYPE_CHECKING:  # imports torch, which host memory does not need
    from kvpool.device import Event, MappedMemory, Sharing


class DeviceSegment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`nbytes` at `base` of the owner's `memory`, and the device's handle for other processes."""

    base: int
    nbytes: int
    memory: str
    handle: bytes


@dataclass(eq=False)
class Attached:
    """A peer's mapped device memory, and the event of the last copy from it."""

    device: Sharing
    mappings: list[MappedMemory] = field(default_factory=list)
    event: Event | None = None

    def map_segment(self, segment: DeviceSegment) -> int:
        """Maps a segment; returns its shift here."""
        with _refusals(f"the peer's memory on {segment.memory[:100]}"):
            mapping = self.device.attach(segment.handle)
        self.mappings.append(mapping)
        if mapping.nbytes != segment.nbytes:
            raise TransferError(
                f"malformed offer: a segment of {segment.nbytes} bytes, mapped {mapping.nbytes}."
            )
        return mapping.base - segment.base

    def copy(self, src: Ints, dst: Ints, nbytes: Ints) -> Event:
        """Starts copying runs; pointers are this process's."""
        self.device.copy_runs(src, dst, nbytes)
        self.event = self.device.record()
        return self.event

    def quiet(self) -> bool:
        """Whether no copy is in flight."""
        return self.event is None or self.event.query()

    def close(self) -> None:
        """Unmaps the memory."""
        while self.mappings:
            self.mappings.pop().close()


def share(slab: Slab) -> DeviceSegment:
    """Shares a slab of device memory with peers."""
    with _refusals(f"slab of {slab.nbytes} bytes on {slab.memory}"):
        handle = _sharing(slab.memory).share(slab.base, slab.nbytes)
    return DeviceSegment(slab.base, slab.nbytes, slab.memory, handle)


def attach(segments: list[DeviceSegment], memory: str, *, own: bool) -> tuple[Attached, list[int]]:
    """Maps a peer's segments (untrusted) for the device of this side's `memory`; with the shift of
    each. `own`: they are of this process.
    """
    own_memory = memory or HOST
    for segment in segments:
        if not memory or segment.memory.partition(":")[0] != own_memory.partition(":")[0]:
            raise TransferError(
                f"the peer's memory is on {segment.memory[:100]}, this side's on {own_memory}: "
                "engine local moves between devices of one kind. Use nixl or mooncake, for an NPU "
                "ascend."
            )
    attached = Attached(_sharing(memory))
    try:
        # a driver may refuse to map memory of the same process, which needs no mapping
        return attached, [
            0 if own and segment.memory == memory else attached.map_segment(segment)
            for segment in segments
        ]
    except TransferError:
        attached.close()
        raise


def _sharing(memory: str) -> Sharing:
    from kvpool.device import Sharing, get_device

    with _refusals(f"memory {memory!r}"):
        device = get_device(memory)
    if not isinstance(device, Sharing):
        raise TransferError(
            f"device {memory!r} cannot share memory between processes, which engine local needs. "
            "Use engine nixl or mooncake, for an NPU ascend."
        )
    return device


@contextmanager
def _refusals(subject: str) -> Iterator[None]:
    """A device's refusals as TransferErrors about `subject`."""
    from kvpool.device import DeviceUnavailable

    try:
        yield
    except DeviceUnavailable as reason:
        raise TransferError(f"{subject}: {reason}") from None
