"""The CUDA device: memory of torch's allocator, Triton kernels, events of the current stream."""

from __future__ import annotations

from functools import cached_property

import torch

from kvpool.device import Event
from kvpool.layout.grid import Ints
from kvpool_cuda import ipc, operations
from kvpool_cuda.availability import missing_cuda


class CUDADevice:
    """One GPU: `cuda:3`; `cuda` is the current one.

    Work goes to the current stream of this GPU. Where ids are tensors of the GPU, nothing waits on
    the host, and it can be captured in a CUDA graph.
    """

    memory_kind = "cuda"
    alignment = 256
    registration_limit: int | None = None

    def __init__(self, name: str = "cuda") -> None:
        self.name = name

    @cached_property
    def _device(self) -> torch.device:
        kind, _, number = self.name.partition(":")
        return torch.device(kind, int(number) if number else torch.cuda.current_device())

    def availability(self) -> str | None:
        """Whether torch, driver, GPU and triton are there."""
        _, colon, number = self.name.partition(":")
        if colon and not number.isdecimal():
            return f"{number!r} is no number of a CUDA device. Ask for cuda:0."
        return missing_cuda(int(number or 0))

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A zeroed uint8 tensor of torch's allocator."""
        step = alignment or self.alignment
        memory = torch.zeros(nbytes + step, dtype=torch.uint8, device=self._device)
        return memory[-memory.data_ptr() % step :][:nbytes]

    store = staticmethod(operations.store)
    load = staticmethod(operations.load)
    quantize_store = staticmethod(operations.quantize_store)
    store_rows = staticmethod(operations.store_rows)
    load_rows = staticmethod(operations.load_rows)
    copy_items = staticmethod(operations.copy_items)

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """See Device.copy_runs."""
        operations.copy_runs(self._device, src, dst, nbytes)

    def record(self) -> Event:
        """An event on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        """The current stream waits for an event of CUDA, the host for any other mark."""
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(event)
        else:
            event.synchronize()

    def share(self, base: int, nbytes: int) -> bytes:
        """What another process of this host needs to map memory; see kvpool_cuda.ipc."""
        return ipc.share(base, nbytes)

    def attach(self, told: bytes) -> ipc.Mapping:
        """Maps memory that another process of this host shared; see kvpool_cuda.ipc."""
        return ipc.attach(told, self._device.index)
