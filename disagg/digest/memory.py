"""Reads bytes of a buffer from the host: directly, or through the buffer's device."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.digest.cell_hash import ReadCells
from kvpool.layout import Buffer
from kvpool.layout.grid import Ints


def reader(buffer: Buffer) -> ReadCells:
    """A function that reads a buffer by offset. Raises ValueError, as it does, if the buffer's
    device is not available.
    """
    return _of_host(buffer) if buffer.on_host else _of_device(buffer)


def _of_host(buffer: Buffer) -> ReadCells:
    memory: Any = (ctypes.c_ubyte * (buffer.end - buffer.base)).from_address(buffer.base)

    def read(offsets: Ints, width: int) -> npt.NDArray[np.void]:
        shape = (len(memory) - width + 1,)
        rows: Any = np.ndarray(shape, f"V{width}", memory, strides=(1,))
        return np.asarray(rows[offsets])

    return read


def _of_device(buffer: Buffer) -> ReadCells:
    from kvpool.device import DeviceUnavailable, get_device  # imports torch

    subject = f"buffer {buffer.name} on {buffer.memory}"
    try:
        device = get_device(buffer.memory)
    except DeviceUnavailable as reason:
        raise ValueError(f"{subject}: {reason}") from None

    def read(offsets: Ints, width: int) -> npt.NDArray[np.void]:
        stage = device.allocate(offsets.size * width)
        packed = stage.data_ptr() + np.arange(offsets.size, dtype=np.int64) * width
        lengths = np.full(offsets.size, width, dtype=np.int64)
        try:
            device.copy_runs(buffer.base + offsets.ravel(), packed, lengths)
            device.record().synchronize()
        except DeviceUnavailable as reason:
            raise ValueError(f"{subject}: {reason}") from None
        return stage.cpu().numpy().view(f"V{width}").reshape(offsets.shape)

    return read
