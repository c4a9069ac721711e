"""What devices without hardware of their own have in common, and `meta`: sizes without memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvpool.device import DeviceUnavailable, Event
from kvpool.extras import Lazy

if TYPE_CHECKING:
    import torch
else:
    torch = Lazy("torch", "device")


class CompletedEvent:
    """The event of a device whose calls finish before they return: it has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns at once."""


class HostDevice:
    """What the devices without hardware of their own have in common."""

    memory_kind: str
    alignment = 64
    registration_limit: int | None = None
    emulated = False

    def __init__(self, name: str = "") -> None:
        self.name = name or self.memory_kind

    def availability(self) -> str | None:
        return None

    def record(self) -> Event:
        return CompletedEvent()

    def memory_at(self, pointer: int, nbytes: int) -> torch.Tensor:
        """See Pointing.memory_at."""
        array: Any = (ctypes.c_ubyte * nbytes).from_address(pointer)
        return torch.from_numpy(np.frombuffer(array, dtype=np.uint8))

    def wait(self, event: Event) -> None:
        """Blocks the host until the event has ended."""
        event.synchronize()


class MetaDevice(HostDevice):
    """Sizes and strides without memory, for budgets and offline checks."""

    memory_kind = "meta"

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A uint8 tensor without memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise DeviceUnavailable(
            "a pool on the meta device has no memory to write, read or copy. Build it with "
            "device='cpu'."
        )

    memory_at = store_rows = load_rows = copy_items = copy_runs = _refuse
