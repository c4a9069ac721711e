"""Memory of the host, and sizes without memory: devices `cpu` and `meta`."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from kvpool.device import DeviceUnavailable, Event, torch_ops
from kvpool.device.host_copy import copy_runs


class CompletedEvent:
    """The mark of a device that does its work while it is called."""

    def query(self) -> bool:
        """Always."""
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class CPUDevice:
    """Host memory that another process of the same user can map (a sealed memfd), where the system
    has it.
    """

    memory_kind = "cpu"
    alignment = 64
    registration_limit = None

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def availability(self) -> str | None:
        """Always there."""
        return None

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A zeroed uint8 tensor in a mapping of its own, unmapped when its last view is gone."""
        step = alignment or self.alignment
        if step > mmap.PAGESIZE:  # a mapping begins at a page
            wider = self.allocate(nbytes + step)
            return wider[-wider.data_ptr() % step :][:nbytes]
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

    store = staticmethod(torch_ops.store)
    load = staticmethod(torch_ops.load)
    quantize_store = staticmethod(torch_ops.quantize_store)
    store_rows = staticmethod(torch_ops.store_rows)
    load_rows = staticmethod(torch_ops.load_rows)
    copy_runs = staticmethod(copy_runs)

    def copy_items(
        self,
        views: Sequence[torch.Tensor],
        src: torch.Tensor,
        dst: torch.Tensor,
        disjoint: bool = False,
    ) -> None:
        """See Device.copy_items."""
        if not disjoint:
            torch_ops.copy_items(views, src, dst)
            return
        for view in views:
            base, stride, nbytes = view.data_ptr(), view.stride(0), view.shape[1]
            start, to = (base + ids.numpy() * stride for ids in (src, dst))
            copy_runs(start, to, np.full(start.size, nbytes, dtype=np.int64))

    def record(self) -> Event:
        """All work has ended."""
        return CompletedEvent()

    def wait(self, event: Event) -> None:
        """Waits for another device's work."""
        event.synchronize()


class MetaDevice:
    """Sizes and strides without memory, for budgets and offline checks."""

    memory_kind = "meta"
    alignment = 64
    registration_limit = None

    def __init__(self, name: str = "meta") -> None:
        self.name = name

    def availability(self) -> str | None:
        """Always there."""
        return None

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A uint8 tensor without memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise DeviceUnavailable(
            "a pool on the meta device has no memory to write, read or copy. Build it with "
            "device='cpu'."
        )

    store = load = quantize_store = _refuse
    store_rows = load_rows = copy_items = copy_runs = _refuse

    def record(self) -> Event:
        """There is no work."""
        return CompletedEvent()

    def wait(self, event: Event) -> None:
        """There is no work."""
