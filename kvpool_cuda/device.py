"""The CUDA device: memory of torch's allocator, Triton kernels, events of the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from kvpool.device import Event, IpcHandle
from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool.layout.grid import Ints
from kvpool_cuda import ipc
from kvpool_cuda.availability import missing_cuda


class KernelDevice:
    """What Triton kernels do, on a GPU or interpreted. The first call imports triton."""

    alignment = 256
    registration_limit: int | None = None
    emulated = False

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def torch_device(self) -> torch.device:
        """Where the memory is."""
        kind, _, number = self.name.partition(":")
        return torch.device(kind, int(number) if number else torch.cuda.current_device())

    def store_rows(self, rows: Sequence[WriteRow], locations: torch.Tensor) -> None:
        """See Device.store_rows."""
        from kvpool_cuda.access import store_rows

        store_rows(rows, locations)

    def load_rows(self, rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
        """See Device.load_rows."""
        from kvpool_cuda.access import load_rows

        return load_rows(rows, locations)

    def copy_items(
        self,
        views: Sequence[torch.Tensor],
        src: torch.Tensor,
        dst: torch.Tensor,
        disjoint: bool = False,
    ) -> None:
        """See Device.copy_items."""
        from kvpool_cuda.move import copy_items

        copy_items(views, src, dst, disjoint)

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """See Device.copy_runs."""
        from kvpool_cuda.runs import copy_runs

        copy_runs(self.torch_device, src, dst, nbytes)


class CUDADevice(KernelDevice):
    """One GPU: `cuda:3`; `cuda` is the current one.

    Work runs on this GPU's current stream. Where ids are tensors on the GPU, no call waits for it,
    and a CUDA graph can capture the call.
    """

    memory_kind = "cuda"

    def availability(self) -> str | None:
        """Whether torch, driver, GPU and triton can be used."""
        _, colon, number = self.name.partition(":")
        if colon and not number.isdecimal():
            return f"{number!r} is not a device number. Ask for cuda:0."
        return missing_cuda(int(number or 0))

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A zeroed uint8 tensor of torch's allocator."""
        step = alignment or self.alignment
        memory = torch.zeros(nbytes + step, dtype=torch.uint8, device=self.torch_device)
        return memory[-memory.data_ptr() % step :][:nbytes]

    def record(self) -> Event:
        """An event on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, event: Event) -> None:
        """The current stream waits for a CUDA event; the host waits for any other event."""
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self.torch_device).wait_event(event)
        else:
            event.synchronize()

    def share(self, base: int, nbytes: int) -> IpcHandle:
        """See kvpool_cuda.ipc.share."""
        return ipc.share(base, nbytes)

    def attach(self, handle: IpcHandle) -> ipc.MappedAllocation:
        """See kvpool_cuda.ipc.attach."""
        return ipc.attach(handle, self.torch_device.index)
