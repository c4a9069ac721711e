"""The CUDA device's kernels on host memory, by Triton's interpreter: slow, for tests and for those
who write kernels.
"""

from __future__ import annotations

import torch

from kvpool.device import Event
from kvpool.device.cpu import CPUDevice
from kvpool.layout.grid import Ints
from kvpool_cuda import operations
from kvpool_cuda.availability import missing_interpreter


class InterpretedDevice:
    """Host memory, and all of a CUDA device's operations."""

    memory_kind = "cpu"
    alignment = 256
    registration_limit: int | None = None

    def __init__(self, name: str = "interpret") -> None:
        self.name = name
        self._host = CPUDevice()

    def availability(self) -> str | None:
        """Whether triton is there and interprets."""
        return missing_interpreter()

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A zeroed uint8 tensor of host memory; see CPUDevice.allocate."""
        return self._host.allocate(nbytes, alignment or self.alignment)

    store = staticmethod(operations.store)
    load = staticmethod(operations.load)
    quantize_store = staticmethod(operations.quantize_store)
    store_rows = staticmethod(operations.store_rows)
    load_rows = staticmethod(operations.load_rows)
    copy_items = staticmethod(operations.copy_items)

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """See Device.copy_runs."""
        operations.copy_runs(torch.device("cpu"), src, dst, nbytes)

    def record(self) -> Event:
        """All work has ended."""
        return self._host.record()

    def wait(self, event: Event) -> None:
        """Waits for another device's work."""
        self._host.wait(event)
