"""The CUDA device's kernels on host memory, in Triton's interpreter: slow, for tests of kernels."""

from __future__ import annotations

import torch

from kvpool.device.cpu import CPUDevice
from kvpool.device.host import HostDevice
from kvpool_cuda.device import KernelDevice, interpreted, missing_triton


class InterpretedDevice(KernelDevice, HostDevice):
    """The kernels on memory of the CPU device."""

    memory_kind = "cpu"
    emulated = True
    torch_device = torch.device("cpu")
    _host = CPUDevice()

    def availability(self) -> str | None:
        """None if triton is installed and interprets, else the reason why not."""
        reason = missing_triton()
        if reason is not None or interpreted():
            return reason
        return (
            "triton was imported to compile kernels for a GPU. Set TRITON_INTERPRET=1 before the "
            "process starts."
        )

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """See CPUDevice.allocate."""
        return self._host.allocate(nbytes, alignment or self.alignment)
