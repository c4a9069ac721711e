"""The CUDA device: memory of torch's allocator, Triton kernels, events of the current stream; and
what is missing to use it. Importing this imports no triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module

import torch

from kvpool.device import Event, IpcHandle
from kvpool.device.torch_ops import ReadRow, Views, WriteRow
from kvpool.extras import install
from kvpool.layout.grid import Ints
from kvpool_cuda import ipc

MIN_TRITON = (3, 6)
"""Before this version Triton's division flushes subnormal numbers, and quantised bytes differ."""


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
        from kvpool_cuda.rows import store_rows

        store_rows(rows, locations)

    def load_rows(self, rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
        """See Device.load_rows."""
        from kvpool_cuda.rows import load_rows

        return load_rows(rows, locations)

    def copy_items(
        self, views: Views, src: torch.Tensor, dst: torch.Tensor, disjoint: bool = False
    ) -> None:
        """See Device.copy_items."""
        from kvpool_cuda.copies import copy_items

        copy_items(views, src, dst, disjoint)

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """See Device.copy_runs."""
        from kvpool_cuda.copies import copy_runs

        copy_runs(self.torch_device, src, dst, nbytes)


class CUDADevice(KernelDevice):
    """One GPU: `cuda:3`; `cuda` is the current one.

    Work runs on this GPU's current stream. Where ids are tensors on the GPU, no call waits for it,
    and a CUDA graph can capture the call.
    """

    memory_kind = "cuda"

    def availability(self) -> str | None:
        """None if torch, driver, GPU and triton can be used, else what is missing."""
        _, colon, number = self.name.partition(":")
        if colon and not number.isdecimal():
            return f"{number!r} is not a device number. Ask for cuda:0."
        if torch.version.cuda is None:
            return (
                f"torch {torch.__version__} is built without CUDA. Install a build of torch for "
                "CUDA (https://pytorch.org/get-started/locally)."
            )
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or count == 0:
            return (
                f"no usable GPU: torch {torch.__version__} (CUDA {torch.version.cuda}) finds no "
                "driver or no device. `nvidia-smi` must list a GPU, CUDA_VISIBLE_DEVICES must not "
                f"hide it, and the driver must support CUDA {torch.version.cuda}."
            )
        if int(number or 0) >= count:
            return f"there are {count} CUDA devices: cuda:0 to cuda:{count - 1}."
        reason = missing_triton()
        if reason is None and interpreted():
            return (
                "TRITON_INTERPRET=1 was set when triton was imported: kernels would run on the "
                "host, which cannot reach this memory. Unset it, or ask for device 'interpret'."
            )
        return reason

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A zeroed uint8 tensor of torch's allocator."""
        step = alignment or self.alignment
        memory = torch.zeros(nbytes + step, dtype=torch.uint8, device=self.torch_device)
        return memory[-memory.data_ptr() % step :][:nbytes]

    def memory_at(self, pointer: int, nbytes: int) -> torch.Tensor:
        """See Pointing.memory_at."""
        return torch.as_tensor(_DeviceBytes(pointer, nbytes), device=self.torch_device)

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

    share = staticmethod(ipc.share)

    def attach(self, handle: IpcHandle) -> ipc.MappedAllocation:
        """See kvpool_cuda.ipc.attach."""
        return ipc.attach(handle, self.torch_device.index)


class _DeviceBytes:
    """Bytes at a pointer, as numba's CUDA array interface (version 3) describes them."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def missing_triton() -> str | None:
    """Why the installed triton cannot be used, or None."""
    try:
        triton = import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}): {install('cuda')}"
    version: str = triton.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TRITON:
        oldest = ".".join(map(str, MIN_TRITON))
        return (
            f"triton {version} is too old, the kernels need {oldest} or newer, which PyTorch 2.10 "
            "and newer bring. Update torch."
        )
    return None


def interpreted() -> bool:
    """Whether triton interprets kernels on the host. Triton must be installed."""
    language = import_module("triton.language")
    interpreter = import_module("triton.runtime.interpreter")
    return isinstance(language.cdiv, interpreter.InterpretedFunction)
