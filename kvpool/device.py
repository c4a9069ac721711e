"""Where memory comes from, and how values are stored in it and loaded from it.

`cpu` and `meta` live here; other devices join by entry point `kvpool.devices` and are imported
only when one is asked for.
"""

from __future__ import annotations

import mmap
import os
import sys
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Protocol

import torch


class DeviceUnavailable(RuntimeError):
    """The device that was asked for is not there; the message says what is missing."""


class Device(Protocol):
    """What a pool needs of a device. Tensors are torch tensors on that device."""

    name: str
    alignment: int

    def availability(self) -> str | None:
        """None if the device can be used, else the reason why not."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A zeroed uint8 tensor `[nbytes]`, its base aligned to `alignment` bytes."""

    def store(self, view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
        """Writes `values` `[N, ...]` to `locations` `[N]` of `view` `[item, entry, ...]`."""

    def load(self, view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
        """Reads entries `locations` `[N]` of `view` `[item, entry, ...]` into a new tensor `[N,
        ...]`.
        """

    def copy_items(self, view: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies items `src` `[N]` of `view` uint8 `[item, byte]` to items `dst` `[N]`."""


class CPUDevice:
    """Host memory that another process of the same user can map (a sealed memfd), where the system
    has it.
    """

    alignment = 64

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def availability(self) -> str | None:
        """Always there."""
        return None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A zeroed uint8 tensor in a mapping of its own, unmapped when its last view is gone."""
        if sys.platform != "linux":  # private memory, which `local` refuses across processes
            return torch.zeros(nbytes, dtype=torch.uint8)
        import fcntl

        handle = os.memfd_create("kvpool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(handle, nbytes)
            # of a size that cannot change: no reader can be made to touch bytes past the end
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
            # all pages now, not one by one in the first transfer
            memory = mmap.mmap(handle, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(
                f"{nbytes:,} bytes of shared memory cannot be had: {error}."
            ) from None
        finally:
            os.close(handle)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def store(self, view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
        """Writes by index."""
        entries = view.shape[1]
        _bits(view)[locations // entries, locations % entries] = _bits(values)

    def load(self, view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
        """Reads by index."""
        entries = view.shape[1]
        return _bits(view)[locations // entries, locations % entries].view(view.dtype)

    def copy_items(self, view: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies by index; sources are read before anything is written."""
        view[dst] = view[src]


class MetaDevice:
    """Sizes and strides without memory, for budgets and offline checks."""

    alignment = 64

    def __init__(self, name: str = "meta") -> None:
        self.name = name

    def availability(self) -> str | None:
        """Always there."""
        return None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor without memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def store(self, view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
        """Refused: there is no memory."""
        raise DeviceUnavailable(
            "a pool on the meta device has no memory to write to. Build it with device='cpu'."
        )

    def load(self, view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
        """Refused: there is no memory."""
        raise DeviceUnavailable(
            "a pool on the meta device has no memory to read from. Build it with device='cpu'."
        )

    def copy_items(self, view: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Refused: there is no memory."""
        raise DeviceUnavailable(
            "a pool on the meta device has no memory to copy. Build it with device='cpu'."
        )


# dtypes that torch cannot index, as some of their size that it can
_INDEXABLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INDEXABLE[tensor.element_size()])


@lru_cache
def get_device(name: str) -> Device:
    """The device that `name` (`cpu`, `cuda:0`, `npu:3`, `meta`) asks for, or DeviceUnavailable with
    the reason.
    """
    kind = name.partition(":")[0]
    found = entry_points(group="kvpool.devices", name=kind)
    if not found:
        known = ", ".join(sorted(entry.name for entry in entry_points(group="kvpool.devices")))
        raise DeviceUnavailable(
            f"device {name!r}: no installed package offers {kind!r} (installed: "
            f"{known or 'none'}). "
            "A device joins by an entry point of the group kvpool.devices."
        )
    device: Device = next(iter(found)).load()(name)
    reason = device.availability()
    if reason is not None:
        raise DeviceUnavailable(f"device {name!r}: {reason}")
    return device
