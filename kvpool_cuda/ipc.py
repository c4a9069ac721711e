"""Device memory that another process of the same host maps.

The owner keeps the memory until every process that attached has closed its mapping. The processes
order their reads and writes themselves.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvpool.device import DeviceUnavailable, IpcHandle
from kvpool_cuda import driver

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_DriverHandle = Annotated[
    bytes, msgspec.Meta(min_length=driver.HANDLE_BYTES, max_length=driver.HANDLE_BYTES)
]
_UUID = Annotated[bytes, msgspec.Meta(min_length=driver.UUID_BYTES, max_length=driver.UUID_BYTES)]


class CUDAIpcHandle(msgspec.Struct, frozen=True, array_like=True, tag="kvpool-cuda-ipc-1"):
    """`nbytes` bytes at `offset` of an allocation; `handle` is the driver's, `uuid` the GPU's."""

    handle: _DriverHandle
    offset: _Size
    nbytes: _Size
    uuid: _UUID


_decoder = msgspec.msgpack.Decoder(CUDAIpcHandle)


class MappedAllocation:
    """`nbytes` bytes of another process's memory, at pointer `base` until `close()`."""

    def __init__(
        self, allocation: int, shared: CUDAIpcHandle, ordinal: int, context: driver.Context
    ) -> None:
        self.base, self.nbytes = allocation + shared.offset, shared.nbytes
        self._allocation, self._ordinal, self._context = allocation, ordinal, context
        self._open = True

    def close(self) -> None:
        """Unmaps it. No work that uses it may be queued. A second call does nothing."""
        if self._open:
            self._open = False
            try:
                with driver.current(self._context):
                    driver.close_allocation(self._allocation)
            finally:
                driver.release(self._ordinal)


def share(base: int, nbytes: int) -> IpcHandle:
    """A handle with which another process of this host maps `nbytes` bytes at pointer `base`.

    Raises DeviceUnavailable for memory that cannot be shared, and DriverError where the driver
    refuses.
    """
    ordinal = driver.ordinal_of(base)
    if not driver.can_be_shared(base):
        raise DeviceUnavailable(
            f"cuda:{ordinal}: memory at {base:#x} cannot be shared, because CUDA IPC does not "
            "support its allocator (expandable segments, cudaMallocAsync). Remove "
            "expandable_segments:True and backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF."
        )
    context = driver.retain(ordinal)
    try:
        with driver.current(context):
            start, size = driver.allocation_of(base)
            if base + nbytes > start + size:
                raise DeviceUnavailable(
                    f"cuda:{ordinal}: {nbytes:,} bytes at {base:#x} are not inside one allocation "
                    f"({size:,} bytes at {start:#x}). Share each allocation separately."
                )
            handle = driver.share_allocation(start)
    finally:
        driver.release(ordinal)
    return msgspec.msgpack.encode(
        CUDAIpcHandle(handle, base - start, nbytes, driver.uuid_of(ordinal))
    )


def decode(handle: IpcHandle) -> CUDAIpcHandle:
    """Decodes a handle from `share`. Raises DeviceUnavailable for other bytes."""
    try:
        return _decoder.decode(handle)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise DeviceUnavailable(f"not a handle of CUDA memory: {error}.") from None


def attach(handle: IpcHandle, ordinal: int) -> MappedAllocation:
    """Maps memory of another process of this host for device `ordinal`.

    Raises DeviceUnavailable for malformed bytes, and DriverError where the driver refuses (memory
    that is freed, of this process, or of a GPU without peer access).
    """
    shared = decode(handle)
    context = driver.retain(ordinal)
    try:
        with driver.current(context):
            allocation = driver.open_allocation(shared.handle)
            _, size = driver.allocation_of(allocation)
    except driver.DriverError as error:
        driver.release(ordinal)
        if shared.uuid in map(driver.uuid_of, range(driver.device_count())):
            raise
        raise DeviceUnavailable(
            f"{error} The memory is on GPU {shared.uuid.hex()}, which this process does not see. "
            "Both processes must be on one host, and CUDA_VISIBLE_DEVICES must include that GPU."
        ) from None
    mapping = MappedAllocation(allocation, shared, ordinal, context)
    if shared.offset + shared.nbytes > size:
        mapping.close()
        raise DeviceUnavailable(
            f"the handle is of {shared.nbytes:,} bytes at offset {shared.offset:,}, the allocation "
            f"has {size:,} bytes."
        )
    return mapping
