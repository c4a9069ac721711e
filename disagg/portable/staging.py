"""Copies between a staging buffer in host memory and the memory that a layout describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.plan import CopyBatch
from kvpool.device.host_copy import copy_runs
from kvpool.layout import PoolLayout
from kvpool.layout.grid import Ints
from kvpool.layout.types import HOST

Bytes = npt.NDArray[np.uint8]


class Staging:
    """A staging buffer in host memory, and copies between it and the memory of a layout; a device
    copies its own part. Raises DeviceUnavailable, and ValueError for two kinds of memory.
    """

    def __init__(self, layout: PoolLayout, nbytes: int) -> None:
        memories = sorted({buffer.memory for buffer in layout.buffers}) or [HOST]
        if len(memories) > 1:
            raise ValueError(
                f"buffers in {' and '.join(memories)}: save and load the layout of one memory at a "
                "time."
            )
        self.device: Any = None
        """None: host memory."""
        if memories == [HOST]:
            self.bytes: Bytes = np.empty(nbytes, dtype=np.uint8)
            self._base = self.bytes.ctypes.data
            return
        from kvpool.device import DeviceUnavailable, get_device  # imports torch

        self.device = get_device(memories[0])
        self._there = self.device.allocate(nbytes)
        if self._there.is_meta:
            raise DeviceUnavailable(
                "a pool on the meta device has no memory to save or load. Build it with "
                "device='cpu'."
            )
        self._here = self._there.cpu()
        self.bytes = self._here.numpy()
        self._base = self._there.data_ptr()

    @property
    def pointer(self) -> int:
        """Where it lies in the memory of the layout."""
        return self._base

    def clear(self) -> None:
        """Sets all bytes to 0."""
        self.bytes[:] = 0
        if self.device is not None:
            self._there.zero_()

    def gather(self, pointers: Ints, offsets: Ints, nbytes: Ints, size: int) -> None:
        """Copies runs of memory to offsets in the first `size` bytes of the buffer."""
        self._runs(pointers, self._base + offsets, nbytes)
        if self.device is not None:
            self._here[:size].copy_(self._there[:size])

    def push(self, size: int) -> None:
        """Lets `pointer` lead to the first `size` bytes of the buffer."""
        if self.device is not None:
            self._there[:size].copy_(self._here[:size])

    def scatter(self, offsets: Ints, pointers: Ints, nbytes: Ints, size: int) -> None:
        self.push(size)
        self._runs(self._base + offsets, pointers, nbytes)

    def _runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        if self.device is None:
            copy_runs(src, dst, nbytes)
        else:
            self.device.copy_runs(src, dst, nbytes)
            self.device.record().synchronize()


def windows(
    file: Ints, memory: Ints, nbytes: Ints, *, most: int, max_gap: int = 0
) -> Iterator[tuple[Ints, ...]]:
    """Runs between offsets and pointers, sorted by offset and cut, in groups of at most `most`
    bytes from first to last, with gaps of at most `max_gap` bytes: of runs of 100 bytes at offsets
    0, 100 and 300, those at 0 and 100, and that at 300.
    """
    order = np.argsort(file, kind="stable")
    whole = CopyBatch(file[order], memory[order], nbytes[order])
    starts, pointers, lengths = whole.cut(most)
    ends = starts + lengths
    breaks = np.append(np.flatnonzero(starts[1:] - ends[:-1] > max_gap) + 1, starts.size)
    first = 0
    while first < starts.size:
        end = int(np.searchsorted(ends, starts[first] + most, side="right"))
        end = min(end, int(breaks[np.searchsorted(breaks, first, side="right")]))
        yield starts[first:end], pointers[first:end], lengths[first:end]
        first = end
