"""Device memory that another process of the same host maps.

Who shares keeps the memory until all who attached have closed. Who attaches reads it in place; that
what he reads has been written is for the two to agree.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvpool.device import DeviceUnavailable
from kvpool_cuda import driver

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Handle = Annotated[
    bytes, msgspec.Meta(min_length=driver.HANDLE_BYTES, max_length=driver.HANDLE_BYTES)
]
_UUID = Annotated[bytes, msgspec.Meta(min_length=driver.UUID_BYTES, max_length=driver.UUID_BYTES)]


class Shared(msgspec.Struct, frozen=True, array_like=True, tag="kvpool-cuda-ipc-1"):
    """`nbytes` bytes at `offset` of the allocation that the driver's `handle` names, on the GPU
    `uuid`.
    """

    handle: _Handle
    offset: _Size
    nbytes: _Size
    uuid: _UUID


_decoder = msgspec.msgpack.Decoder(Shared)


class Mapping:
    """`nbytes` bytes of another process's memory, at `base` here until `close()`."""

    def __init__(
        self, allocation: int, shared: Shared, ordinal: int, context: driver.Context
    ) -> None:
        self.base, self.nbytes = allocation + shared.offset, shared.nbytes
        self._allocation, self._ordinal, self._context = allocation, ordinal, context
        self._open = True

    def close(self) -> None:
        """Unmaps it. No work that reads it may be queued. Closing again does nothing."""
        if self._open:
            self._open = False
            try:
                with driver.current(self._context):
                    driver.close_allocation(self._allocation)
            finally:
                driver.release(self._ordinal)


def share(base: int, nbytes: int) -> bytes:
    """What another process of this host needs to attach `nbytes` bytes at `base`.

    Raises DeviceUnavailable for memory that cannot be shared; what the driver itself refuses is a
    DriverError.
    """
    ordinal = driver.ordinal_of(base)
    if not driver.can_be_shared(base):
        raise DeviceUnavailable(
            f"cuda:{ordinal} memory at {base:#x} cannot be shared: its allocator is not of a kind "
            "that CUDA IPC knows (expandable segments, cudaMallocAsync). Build the pool with "
            "neither expandable_segments:True nor backend:cudaMallocAsync in "
            "PYTORCH_CUDA_ALLOC_CONF."
        )
    context = driver.retain(ordinal)
    try:
        with driver.current(context):
            start, size = driver.allocation_of(base)
            if base + nbytes > start + size:
                raise DeviceUnavailable(
                    f"cuda:{ordinal}: {nbytes:,} bytes at {base:#x}, their allocation is "
                    f"{size:,} bytes at {start:#x}. Share allocations one by one."
                )
            handle = driver.share_allocation(start)
    finally:
        driver.release(ordinal)
    return msgspec.msgpack.encode(Shared(handle, base - start, nbytes, driver.uuid_of(ordinal)))


def decode(shared: bytes) -> Shared:
    """What `share` gave; raises DeviceUnavailable for other bytes."""
    try:
        return _decoder.decode(shared)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise DeviceUnavailable(f"not what shares CUDA memory: {error}.") from None


def attach(shared: bytes, ordinal: int) -> Mapping:
    """Maps what another process of this host shared, for device `ordinal` to read.

    Raises DeviceUnavailable for malformed bytes; what the driver itself refuses (memory that is
    gone, one's own, or of a GPU out of reach) is a DriverError.
    """
    given = decode(shared)
    context = driver.retain(ordinal)
    try:
        with driver.current(context):
            allocation = driver.open_allocation(given.handle)
            _, size = driver.allocation_of(allocation)
    except driver.DriverError as error:
        driver.release(ordinal)
        if given.uuid in map(driver.uuid_of, range(driver.device_count())):
            raise
        raise DeviceUnavailable(
            f"{error} The memory is of GPU {given.uuid.hex()}, which this process does not see: "
            "CUDA_VISIBLE_DEVICES must show it, on the same host."
        ) from None
    mapping = Mapping(allocation, given, ordinal, context)
    if given.offset + given.nbytes > size:
        mapping.close()
        raise DeviceUnavailable(
            f"{given.nbytes:,} bytes at {given.offset:,} of an allocation of {size:,} bytes."
        )
    return mapping
