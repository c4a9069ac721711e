"""The Ascend device: one of torch_npu's operators where rows are contiguous, torch's indexing
elsewhere. No NPU has run it (docs/npu.md).

Rows that are not adjacent (latent and rope in one row, heads before entries, sections of a
convolution) are indexed, which is correct everywhere and slower on an NPU.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kvpool.device import DeviceUnavailable, Event, torch_ops
from kvpool.device.cpu import CPUDevice
from kvpool.device.torch_ops import ReadRow, Views, WriteRow, bits, slots
from kvpool.extras import absent, ascend_parts
from kvpool.layout.grid import Ints

# npu_scatter_nd_update_ takes few dtypes, and only moves bytes
VIEWED_AS = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.int64}


class NPUDevice:
    """One NPU. `copy_runs` takes pointers to memory of this device, and launches a copy a run."""

    memory_kind = "npu"
    alignment = 2 << 20
    registration_limit = 256
    emulated = False

    def __init__(self, name: str = "npu:0") -> None:
        self.name = name
        self._slabs: list[weakref.ref[torch.Tensor]] = []

    def availability(self) -> str | None:
        """Everything that is missing; torch_npu is imported only if nothing else is."""
        number = self.name.partition(":")[2] or "0"
        if not number.isdecimal():
            return "an NPU is named by its number, as npu:0."
        parts, needed = ascend_parts(), torch.__version__
        with suppress(PackageNotFoundError):
            installed = version("torch-npu")
            fits = installed.split(".")[:2] == needed.split(".")[:2]
            parts[f"the torch-npu for torch {needed} ({installed} is installed)"] = fits
        if reason := absent(parts):
            return reason
        try:
            count = importlib.import_module("torch_npu").npu.device_count()
        except (ImportError, OSError, RuntimeError) as error:
            return f"torch_npu cannot be imported: {error}"
        return None if int(number) < count else f"{count} NPUs are visible, numbered from 0."

    @property
    def index(self) -> int:
        """The NPU's number."""
        return int(self.name.partition(":")[2] or 0)

    @cached_property
    def torch_npu(self) -> Any:
        """The package, which the first access imports."""
        return importlib.import_module("torch_npu")

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """See Device.allocate. Up to `alignment` bytes before it are unused."""
        step = alignment or self.alignment
        wider = self._zeros(nbytes + step)
        slab = wider[-wider.data_ptr() % step :][:nbytes]
        self._slabs = [ref for ref in self._slabs if ref() is not None]
        self._slabs.append(weakref.ref(slab))
        return slab

    def store_rows(self, rows: Sequence[WriteRow], locations: torch.Tensor) -> None:
        """See Device.store_rows. e4m3 needs an NPU that supports it (A5)."""
        torch_ops.store_rows(rows, locations, self._write)

    def load_rows(self, rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
        """See Device.load_rows."""
        return torch_ops.load_rows(rows, locations)

    def copy_items(
        self, views: Views, src: torch.Tensor, dst: torch.Tensor, disjoint: bool = False
    ) -> None:
        """See Device.copy_items."""
        for view in views:
            items = view[:, None]
            self._write(items, dst, torch_ops.read_entries(items, src))

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """See Device.copy_runs. Raises ValueError for a run outside what this device allocated."""
        slabs = [slab for ref in self._slabs if (slab := ref()) is not None]
        for start, to, size in zip(src.tolist(), dst.tolist(), nbytes.tolist()):
            _memory(slabs, to, size).copy_(_memory(slabs, start, size))

    def memory_at(self, pointer: int, nbytes: int) -> torch.Tensor:
        """See Pointing.memory_at: of memory that this device allocated."""
        slabs = [slab for ref in self._slabs if (slab := ref()) is not None]
        try:
            return _memory(slabs, pointer, nbytes)
        except ValueError as error:
            raise DeviceUnavailable(
                f"{error} Rows there are converted on prefill, or both sides keep one format."
            ) from None

    def record(self) -> Event:
        """An event in the current stream."""
        npu = self.torch_npu.npu
        event: Event = npu.Event()
        npu.current_stream(self.index).record_event(event)
        return event

    def wait(self, event: Event) -> None:
        """The current stream waits for an NPU's event; the host waits for any other event."""
        npu = self.torch_npu.npu
        if isinstance(event, npu.Event):
            npu.current_stream(self.index).wait_event(event)
        else:
            event.synchronize()

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=f"npu:{self.index}")

    def _write(self, view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
        flat, size = slots(view), view.element_size()
        if not locations.numel():
            return
        if flat is None:
            torch_ops.write_entries(view, locations, values)
        elif flat.is_contiguous():
            rows, updates = (part.flatten(1).view(VIEWED_AS[size]) for part in (flat, values))
            self.torch_npu.npu_scatter_nd_update_(rows, locations[:, None], updates)
        else:  # one index: two go to the AI CPU
            bits(flat)[locations] = bits(values)


class TorchOperators:
    """In place of the package `torch_npu`: its operator in plain torch."""

    @staticmethod
    def npu_scatter_nd_update_(
        input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
    ) -> None:
        """Writes rows `updates` `[N, D]` to rows `indices` `[N, 1]`, int64, of `input` `[S, D]`."""
        input[indices[:, 0]] = updates


class ReferenceNPU(NPUDevice):
    """The device's code over plain torch and host memory, for tests without an NPU."""

    memory_kind = "cpu"
    emulated = True
    torch_npu = TorchOperators
    _host = CPUDevice()
    availability = staticmethod(_host.availability)
    record = staticmethod(_host.record)
    wait = staticmethod(_host.wait)
    memory_at = staticmethod(_host.memory_at)
    _zeros = staticmethod(_host.allocate)


reference = ReferenceNPU


def _memory(slabs: Sequence[torch.Tensor], pointer: int, size: int) -> torch.Tensor:
    for slab in slabs:
        start = pointer - slab.data_ptr()
        if 0 <= start <= slab.numel() - size:
            return slab[start : start + size]
    raise ValueError(f"{size} bytes at {pointer:#x} are not in memory that this device allocated.")
