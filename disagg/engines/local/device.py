"""Device memory between processes of one host: its device says what another process needs to map
it, and copies there and here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from disagg.engines.base import TransferError
from kvpool.layout import Slab
from kvpool.layout.grid import Ints

if TYPE_CHECKING:  # torch comes with it, which host memory has no need of
    from kvpool.device import Event, MappedMemory, Sharing


class Shared(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`nbytes` at `base` of the owner's `memory`, and what its device tells other processes."""

    base: int
    nbytes: int
    memory: str
    told: bytes


@dataclass
class Own:
    """Memory of this process, which needs no mapping."""

    base: int
    nbytes: int

    def close(self) -> None:
        """Nothing was mapped."""


offered: Counter[Shared] = Counter()
"""What engines of this process offer."""


@dataclass(eq=False)
class Attached:
    """A peer's device memory that is mapped here, and the last copy out of it."""

    memory: str
    device: Sharing
    mappings: list[MappedMemory] = field(default_factory=list)
    event: Event | None = None

    def add(self, shared: Shared) -> int:
        """Maps what a peer shares; by how much it is shifted here."""
        from kvpool.device import DeviceUnavailable

        mapping: MappedMemory = Own(shared.base, shared.nbytes)
        # a driver may map no memory of the process's own
        if not offered[shared] or shared.memory != self.memory:
            try:
                mapping = self.device.attach(shared.told)
            except DeviceUnavailable as reason:
                where = shared.memory[:100]
                raise TransferError(f"the peer's memory on {where}: {reason}") from None
        self.mappings.append(mapping)
        if mapping.nbytes != shared.nbytes:
            raise TransferError(
                f"malformed metadata: {shared.nbytes} bytes, mapped are {mapping.nbytes}."
            )
        return mapping.base - shared.base

    def copy(self, src: Ints, dst: Ints, nbytes: Ints) -> Event:
        """Starts to copy runs; addresses are this process's."""
        self.device.copy_runs(src, dst, nbytes)
        self.event = self.device.record()
        return self.event

    def quiet(self) -> bool:
        """Whether no copy is in flight."""
        return self.event is None or self.event.query()

    def close(self) -> None:
        """Unmaps what was mapped."""
        while self.mappings:
            self.mappings.pop().close()


def share(slab: Slab) -> Shared:
    """What peers are told of a slab of device memory."""
    from kvpool.device import DeviceUnavailable

    try:
        told = _sharing(slab.memory).share(slab.base, slab.nbytes)
    except DeviceUnavailable as reason:
        raise TransferError(f"slab of {slab.nbytes} bytes on {slab.memory}: {reason}") from None
    shared = Shared(slab.base, slab.nbytes, slab.memory, told)
    offered[shared] += 1
    return shared


def withdraw(shared: Sequence[Shared]) -> None:
    """Takes `share` back."""
    for part in shared:
        offered[part] -= 1
        if not offered[part]:
            del offered[part]


def attach(shared: Sequence[Shared], memory: str) -> tuple[Attached, list[int]]:
    """Maps all that a peer shares (untrusted) for the device of one's own `memory`, and by how much
    each is shifted here.
    """
    here = memory or "cpu"
    for part in shared:
        if not memory or part.memory.partition(":")[0] != here.partition(":")[0]:
            raise TransferError(
                f"the peer's memory is on {part.memory[:100]}, ours on {here}: engine local moves "
                "between devices of one kind. Use engine nixl or mooncake, of an NPU ascend."
            )
    attached = Attached(memory, _sharing(memory))
    try:
        return attached, [attached.add(part) for part in shared]
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
            f"device {memory!r} shares no memory between processes, so that engine local cannot "
            "move it. Use engine nixl or mooncake, of an NPU ascend."
        )
    return device
