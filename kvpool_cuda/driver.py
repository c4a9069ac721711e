"""The functions of the CUDA driver that sharing memory between processes needs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from kvpool.device import DeviceUnavailable

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
UUID_BYTES = 16
_DEVICE_ORDINAL = 9  # of CUpointer_attribute
_IS_LEGACY_CUDA_IPC_CAPABLE = 10
_LAZY_ENABLE_PEER_ACCESS = 1

Context = ctypes.c_void_p


class DriverError(DeviceUnavailable):
    """The CUDA driver refused a call; `name` is the driver's, as `CUDA_ERROR_INVALID_VALUE`."""

    def __init__(self, call: str, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({text}).")
        self.name = name


class _IpcMemHandle(ctypes.Structure):
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
    library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _IpcMemHandle, ctypes.c_uint)
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


def _pointer(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def _attribute(pointer: int, attribute: int) -> int:
    value = ctypes.c_int()
    _call("cuPointerGetAttribute", ctypes.byref(value), attribute, _pointer(pointer))
    return value.value


def ordinal_of(pointer: int) -> int:
    """The device that holds the memory at a pointer."""
    return _attribute(pointer, _DEVICE_ORDINAL)


def can_be_shared(pointer: int) -> bool:
    """Whether `share_allocation` takes the memory at a pointer."""
    return bool(_attribute(pointer, _IS_LEGACY_CUDA_IPC_CAPABLE))


def uuid_of(ordinal: int) -> bytes:
    """The identity of a GPU, the same in every process."""
    uuid = (ctypes.c_ubyte * UUID_BYTES)()
    _call("cuDeviceGetUuid_v2", ctypes.byref(uuid), _device(ordinal))
    return bytes(uuid)


def device_count() -> int:
    """How many GPUs this process sees."""
    count = ctypes.c_int()
    _call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def retain(ordinal: int) -> Context:
    """Retains the primary context of a device until `release`."""
    context = Context()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(ordinal))
    return context


def release(ordinal: int) -> None:
    """Releases the context from `retain`."""
    _call("cuDevicePrimaryCtxRelease_v2", _device(ordinal))


@contextmanager
def current(context: Context) -> Iterator[None]:
    """Makes a context current."""
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def allocation_of(pointer: int) -> tuple[int, int]:
    """Base and size of the allocation around a pointer."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _pointer(pointer))
    return base.value, size.value


def share_allocation(base: int) -> bytes:
    """The driver's handle of the allocation at `base`."""
    handle = _IpcMemHandle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), _pointer(base))
    return bytes(handle.bytes)


def open_allocation(handle: bytes) -> int:
    """Maps another process's allocation; returns its base in this process."""
    base = ctypes.c_uint64()
    opened = _IpcMemHandle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), opened, _LAZY_ENABLE_PEER_ACCESS)
    return base.value


def close_allocation(base: int) -> None:
    """Unmaps an allocation that `open_allocation` mapped."""
    _call("cuIpcCloseMemHandle", _pointer(base))
