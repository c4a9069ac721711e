"""Checks of device memory that another process maps: engine `local` and staging buffers use it."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from kvpool.device import Device, DeviceUnavailable, IpcHandle, Sharing, get_device
from kvpool.process import OtherProcess
from kvpool.testing.case import fail, random_of
from kvpool.testing.memory import settle

NBYTES = 1 << 20
PART = 4096, 100_003


def no_sharing(device: Device) -> str | None:
    """Why these checks are not for a device, or None."""
    if not isinstance(device, Sharing):
        return "not for this device: it has no `share` and no `attach`."
    return None


def another_process_maps_an_allocation(device: Device) -> None:
    """Another process reads all bytes of an allocation, and unmaps them."""
    _mapped(device, 0, NBYTES)


def another_process_maps_a_part(device: Device) -> None:
    """Another process reads a part of an allocation, and unmaps it."""
    _mapped(device, *PART)


def what_is_no_handle_is_refused(device: Device) -> None:
    """`attach` raises DeviceUnavailable."""
    try:
        cast("Sharing", device).attach(b"no handle")
    except DeviceUnavailable:
        return
    fail("attach took bytes that are no handle.")


SHARING_CHECKS = (
    another_process_maps_an_allocation,
    another_process_maps_a_part,
    what_is_no_handle_is_refused,
)


def _mapped(device: Device, start: int, nbytes: int) -> None:
    contents = random_of("shared").integers(0, 256, NBYTES, dtype=np.uint8)
    memory = device.allocate(NBYTES)
    memory.copy_(torch.from_numpy(contents))
    settle(device)
    handle = cast("Sharing", device).share(memory.data_ptr() + start, nbytes)
    with OtherProcess(Mapper, device.name) as process:
        mapped = np.frombuffer(process.call("read", handle, nbytes), dtype=np.uint8)
    wrong = np.flatnonzero(mapped != contents[start : start + nbytes])
    if wrong.size:
        fail(f"byte {wrong[0]:,} of {nbytes:,} is another ({wrong.size:,} differ).")


class Mapper:
    """The other process."""

    def __init__(self, device: str) -> None:
        self._device = get_device(device)

    def read(self, handle: IpcHandle, nbytes: int) -> bytes:
        """Maps memory, copies it to memory of its own, and returns the bytes."""
        copy = self._device.allocate(nbytes)
        mapped = cast("Sharing", self._device).attach(handle)
        src, dst = np.array([mapped.base]), np.array([copy.data_ptr()])
        self._device.copy_runs(src, dst, np.array([nbytes]))
        settle(self._device)
        contents = copy.cpu().numpy().tobytes()
        mapped.close()
        mapped.close()  # a second call does nothing
        return contents
