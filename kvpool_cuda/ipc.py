"""Device memory that another process of the same host maps, by the handles of the CUDA driver.

The owner keeps the memory until every process that attached has closed its mapping. The processes
order their reads and writes themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from kvpool.device import DeviceUnavailable, IpcHandle

LIBRARY = "libcuda.so.1"
HANDLE_BYTES, UUID_BYTES = 64, 16
# of CUpointer_attribute
_DEVICE_ORDINAL, _IS_LEGACY_CUDA_IPC_CAPABLE = 9, 10
_LAZY_ENABLE_PEER_ACCESS = 1

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_DriverHandle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
_UUID = Annotated[bytes, msgspec.Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]


class CUDAIpcHandle(msgspec.Struct, frozen=True, array_like=True, tag="kvpool-cuda-ipc-1"):
    """`nbytes` bytes at `offset` of an allocation; `handle` is the driver's, `uuid` the GPU's."""

    handle: _DriverHandle
    offset: _Size
    nbytes: _Size
    uuid: _UUID


class DriverError(DeviceUnavailable):
    """The CUDA driver refused a call; `name` is the driver's, as `CUDA_ERROR_INVALID_VALUE`."""

    def __init__(self, call: str, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({text}).")
        self.name = name


class MappedAllocation:
    """`nbytes` bytes of another process's memory, at pointer `base` until `close()`."""

    def __init__(self, allocation: int, shared: CUDAIpcHandle, ordinal: int, context: Any) -> None:
        self.base, self.nbytes = allocation + shared.offset, shared.nbytes
        self._allocation, self._ordinal, self._context = allocation, ordinal, context
        self._open = True

    def close(self) -> None:
        """Unmaps it. No work that uses it may be queued. A second call does nothing."""
        if self._open:
            self._open = False
            try:
                with _current(self._context):
                    _call("cuIpcCloseMemHandle", ctypes.c_uint64(self._allocation))
            finally:
                _release(self._ordinal)


def share(base: int, nbytes: int) -> IpcHandle:
    """A handle with which another process of this host maps `nbytes` bytes at pointer `base`.

    Raises DeviceUnavailable for memory that cannot be shared, and DriverError where the driver
    refuses.
    """
    ordinal = _attribute(base, _DEVICE_ORDINAL)
    if not _attribute(base, _IS_LEGACY_CUDA_IPC_CAPABLE):
        raise DeviceUnavailable(
            f"cuda:{ordinal}: memory at {base:#x} cannot be shared, because CUDA IPC does not "
            "support its allocator (expandable segments, cudaMallocAsync). Remove "
            "expandable_segments:True and backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF."
        )
    handle, context = _DriverHandleBytes(), _retain(ordinal)
    try:
        with _current(context):
            start, size = _allocation_of(base)
            if base + nbytes > start + size:
                raise DeviceUnavailable(
                    f"cuda:{ordinal}: {nbytes:,} bytes at {base:#x} are not inside one allocation "
                    f"({size:,} bytes at {start:#x}). Share each allocation separately."
                )
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(start))
    finally:
        _release(ordinal)
    shared = CUDAIpcHandle(bytes(handle), base - start, nbytes, _uuid_of(ordinal))
    return msgspec.msgpack.encode(shared)


def decode(handle: IpcHandle) -> CUDAIpcHandle:
    """Decodes a handle from `share`. Raises DeviceUnavailable for other bytes."""
    try:
        return msgspec.msgpack.decode(handle, type=CUDAIpcHandle)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise DeviceUnavailable(f"not a handle of CUDA memory: {error}.") from None


def attach(handle: IpcHandle, ordinal: int) -> MappedAllocation:
    """Maps memory of another process of this host for device `ordinal`.

    Raises DeviceUnavailable for malformed bytes, and DriverError where the driver refuses (memory
    that is freed, of this process, or of a GPU without peer access).
    """
    shared = decode(handle)
    allocation, theirs = ctypes.c_uint64(), _DriverHandleBytes.from_buffer_copy(shared.handle)
    context = _retain(ordinal)
    try:
        with _current(context):
            arguments = ctypes.byref(allocation), theirs, _LAZY_ENABLE_PEER_ACCESS
            _call("cuIpcOpenMemHandle_v2", *arguments)
            _, size = _allocation_of(allocation.value)
    except DriverError as error:
        _release(ordinal)
        if shared.uuid in _visible():
            raise
        raise DeviceUnavailable(
            f"{error} The memory is on GPU {shared.uuid.hex()}, which this process does not see. "
            "Both processes must be on one host, and CUDA_VISIBLE_DEVICES must include that GPU."
        ) from None
    mapping = MappedAllocation(allocation.value, shared, ordinal, context)
    if shared.offset + shared.nbytes > size:
        mapping.close()
        raise DeviceUnavailable(
            f"the handle is of {shared.nbytes:,} bytes at offset {shared.offset:,}, the allocation "
            f"has {size:,} bytes."
        )
    return mapping


class _DriverHandleBytes(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


@lru_cache
def _library() -> Any:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceUnavailable(
            f"the CUDA driver cannot be loaded ({error}). Install NVIDIA's driver; in a "
            "container, give it access to the GPUs."
        ) from None
    library.cuIpcOpenMemHandle_v2.argtypes = ctypes.c_void_p, _DriverHandleBytes, ctypes.c_uint
    _checked(library, "cuInit", 0)
    return library


def _call(name: str, *arguments: Any) -> None:
    _checked(_library(), name, *arguments)


def _checked(library: Any, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code:
        error, text = ctypes.c_char_p(), ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(error))
        library.cuGetErrorString(code, ctypes.byref(text))
        error_name, sentence = (str((t.value or b"").decode() or code) for t in (error, text))
        raise DriverError(name, error_name, sentence)


def _device(ordinal: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), ordinal)
    return device


def _attribute(pointer: int, attribute: int) -> int:
    value = ctypes.c_int()
    _call("cuPointerGetAttribute", ctypes.byref(value), attribute, ctypes.c_uint64(pointer))
    return value.value


def _uuid_of(ordinal: int) -> bytes:
    """The identity of a GPU, the same in every process."""
    uuid = (ctypes.c_ubyte * UUID_BYTES)()
    _call("cuDeviceGetUuid_v2", ctypes.byref(uuid), _device(ordinal))
    return bytes(uuid)


def _visible() -> list[bytes]:
    """The identities of the GPUs that this process sees."""
    count = ctypes.c_int()
    _call("cuDeviceGetCount", ctypes.byref(count))
    return [_uuid_of(ordinal) for ordinal in range(count.value)]


def _allocation_of(pointer: int) -> tuple[int, int]:
    """Base and size of the allocation around a pointer."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    arguments = ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)
    _call("cuMemGetAddressRange_v2", *arguments)
    return base.value, size.value


def _retain(ordinal: int) -> ctypes.c_void_p:
    """Retains the primary context of a GPU until `_release`."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(ordinal))
    return context


def _release(ordinal: int) -> None:
    _call("cuDevicePrimaryCtxRelease_v2", _device(ordinal))


@contextmanager
def _current(context: ctypes.c_void_p) -> Iterator[None]:
    """Makes a context current."""
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
