"""Device memory of another process of this host, mapped and copied by the device."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass
class OwnMapping:
    """Memory of this process, which is not mapped again."""

    base: int
    nbytes: int

    def close(self) -> None:
        """Nothing was mapped."""


@dataclass(eq=False)
class Attached:
    """A peer's mapped device memory, and the event of the last copy from it."""

    memory: str
    device: Sharing
    own: bool
    """Whether the peer is this process."""
    mappings: list[MappedMemory] = field(default_factory=list)
    event: Event | None = None

    def map_segment(self, shared: DeviceSegment) -> int:
        """Maps a segment; returns its shift here."""
        from kvpool.device import DeviceUnavailable

        mapping: MappedMemory = OwnMapping(shared.base, shared.nbytes)
        # a driver may refuse to map memory of the same process
        if not self.own or shared.memory != self.memory:
            try:
                mapping = self.device.attach(shared.handle)
            except DeviceUnavailable as reason:
                raise TransferError(
                    f"the peer's memory on {shared.memory[:100]}: {reason}"
                ) from None
        self.mappings.append(mapping)
        if mapping.nbytes != shared.nbytes:
            raise TransferError(
                f"malformed offer: a segment of {shared.nbytes} bytes, mapped {mapping.nbytes}."
            )
        return mapping.base - shared.base

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
    from kvpool.device import DeviceUnavailable

    try:
        handle = _sharing(slab.memory).share(slab.base, slab.nbytes)
    except DeviceUnavailable as reason:
        raise TransferError(f"slab of {slab.nbytes} bytes on {slab.memory}: {reason}") from None
    return DeviceSegment(slab.base, slab.nbytes, slab.memory, handle)


def attach(
    shared: Sequence[DeviceSegment], memory: str, *, own: bool
) -> tuple[Attached, list[int]]:
    """Maps a peer's segments (untrusted) for the device of this side's `memory`; with the shift of
    each. `own`: they are of this process.
    """
    own_memory = memory or HOST
    for part in shared:
        if not memory or part.memory.partition(":")[0] != own_memory.partition(":")[0]:
            raise TransferError(
                f"the peer's memory is on {part.memory[:100]}, this side's on {own_memory}: engine "
                "local moves between devices of one kind. Use nixl or mooncake, for an NPU ascend."
            )
    attached = Attached(memory, _sharing(memory), own)
    try:
        return attached, [attached.map_segment(part) for part in shared]
    except TransferError:
        attached.close()
        raise


def _sharing(memory: str) -> Sharing:
    from kvpool.device import DeviceUnavailable, Sharing, get_device

    try:
        device = get_device(memory)
    except DeviceUnavailable as reason:
        raise TransferError(str(reason)) from None
    if not isinstance(device, Sharing):
        raise TransferError(
            f"device {memory!r} cannot share memory between processes, which engine local needs. "
            "Use engine nixl or mooncake, for an NPU ascend."
        )
    return device
