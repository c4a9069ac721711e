"""The CUDA device's kernels on host memory, in Triton's interpreter: slow, for tests of kernels."""

from __future__ import annotations

import torch

from kvpool.device.cpu import CPUDevice, HostDevice
from kvpool_cuda.device import KernelDevice, missing_interpreter


class InterpretedDevice(KernelDevice, HostDevice):
    """The kernels on memory of the CPU device."""

    memory_kind = "cpu"
    emulated = True
    torch_device = torch.device("cpu")
    _host = CPUDevice()

    def availability(self) -> str | None:
        """Whether triton is installed and interprets."""
        return missing_interpreter()

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """See CPUDevice.allocate."""
        return self._host.allocate(nbytes, alignment or self.alignment)
