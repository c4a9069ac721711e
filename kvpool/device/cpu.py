"""Device `cpu`, host memory."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import torch

from kvpool.device import host_conversion, host_rows, shared_memory, torch_ops
from kvpool.device.host import CompletedEvent as CompletedEvent, HostDevice
from kvpool.device.host_copy import copy_runs


class CPUDevice(HostDevice):
    """Host memory, in a sealed memfd that other processes of the same user can map (on Linux)."""

    memory_kind = "cpu"

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A zeroed uint8 tensor in its own mapping, which lives as long as its last view."""
        step = alignment or self.alignment
        if step > mmap.PAGESIZE:  # a mapping begins at a page
            wider = self.allocate(nbytes + step)
            return wider[-wider.data_ptr() % step :][:nbytes]
        if sys.platform != "linux":  # private memory, which `local` refuses across processes
            return torch.zeros(nbytes, dtype=torch.uint8)
        try:
            memory = shared_memory.allocate(nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"cannot allocate {nbytes:,} shared bytes: {error}.") from None
        return torch.frombuffer(memory, dtype=torch.uint8)

    store_rows = staticmethod(host_rows.store_rows)
    load_rows = staticmethod(host_rows.load_rows)
    convert_rows = staticmethod(host_conversion.convert_rows)
    copy_runs = staticmethod(copy_runs)

    def copy_items(
        self, views: torch_ops.Views, src: torch.Tensor, dst: torch.Tensor, disjoint: bool = False
    ) -> None:
        """See Device.copy_items."""
        if not disjoint:
            torch_ops.copy_items(views, src, dst)
            return
        runs = [(view.data_ptr(), view.stride(0), view.shape[1]) for view in views]
        base, stride, nbytes = np.array(runs, dtype=np.int64).reshape(-1, 3, 1).swapaxes(0, 1)
        start, to = (base + stride * ids.numpy() for ids in (src, dst))
        copy_runs(start.ravel(), to.ravel(), np.broadcast_to(nbytes, start.shape).ravel())
