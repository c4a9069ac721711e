"""Copies between a file and the memory of a layout, in windows of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from disagg.plan import TransferPlan
from disagg.plan.bind import CopyBatch
from disagg.snapshot.files import Bytes
from kvpool.device.host_copy import copy_runs
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.layout.grid import Ints
from kvpool.layout.types import HOST

STAGING_BYTES = 8 << 20
"""Size of the staging buffer, and so of a window."""
CHUNK_TOKENS = 2048
"""Tokens of one layer that are bound at once: bounds the memory for runs."""
MAX_GAP = 64 << 10
"""Bytes that nobody needs which are rather read than skipped."""


class Staging:
    """A staging buffer in host memory, and copies between it and the memory of a layout, of which
    a device does its part. Raises DeviceUnavailable, and ValueError for two kinds of memory.
    """

    def __init__(self, layout: PoolLayout) -> None:
        memories = sorted({buffer.memory for buffer in layout.buffers}) or [HOST]
        if len(memories) > 1:
            raise ValueError(
                f"buffers in {' and '.join(memories)}: save and load the layout of one memory at a "
                "time."
            )
        self._device: Any = None
        if memories == [HOST]:
            self.bytes: Bytes = np.empty(STAGING_BYTES, dtype=np.uint8)
            self._base = self.bytes.ctypes.data
            return
        from kvpool.device import DeviceUnavailable, get_device  # imports torch

        self._device = get_device(memories[0])
        self._there = self._device.allocate(STAGING_BYTES)
        if self._there.is_meta:
            raise DeviceUnavailable(
                "a pool on the meta device has no memory to save or load. Build it with "
                "device='cpu'."
            )
        self._here = self._there.cpu()
        self.bytes = self._here.numpy()
        self._base = self._there.data_ptr()

    def gather(self, pointers: Ints, offsets: Ints, nbytes: Ints, size: int) -> None:
        """Copies runs of memory to offsets `at` of the first `size` bytes of the buffer."""
        self._runs(pointers, self._base + offsets, nbytes)
        if self._device is not None:
            self._here[:size].copy_(self._there[:size])

    def scatter(self, offsets: Ints, pointers: Ints, nbytes: Ints, size: int) -> None:
        if self._device is not None:
            self._there[:size].copy_(self._here[:size])
        self._runs(self._base + offsets, pointers, nbytes)

    def _runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        if self._device is None:
            copy_runs(src, dst, nbytes)
        else:
            self._device.copy_runs(src, dst, nbytes)
            self._device.record().synchronize()


def batches(
    plan: TransferPlan,
    source: int,
    source_address: RequestAddress,
    dest_address: RequestAddress,
    tokens: range,
) -> Iterator[CopyBatch]:
    """What `plan.bind` moves of `tokens`, layer by layer and chunk by chunk."""
    moved_keys = (part.keys for part in plan.parts if part.source == source)
    layers = sorted({key[:2] for keys in moved_keys for key in keys})
    starts = range(tokens.start, tokens.stop, CHUNK_TOKENS) or [tokens.start]
    for owner, layer in layers:
        for start in starts:
            yield plan.bind(
                source,
                source_address,
                dest_address,
                tokens=range(start, min(start + CHUNK_TOKENS, tokens.stop)),
                layers=range(layer, layer + 1),
                owner=owner,
            )


def windows(file: Ints, memory: Ints, nbytes: Ints, max_gap: int) -> Iterator[tuple[Ints, ...]]:
    """Runs between offsets in a file and pointers, sorted by offset and cut, in groups of at most
    `STAGING_BYTES` from first to last byte, with gaps of at most `max_gap` bytes.
    """
    order = np.argsort(file, kind="stable")
    every = CopyBatch(file[order], memory[order], nbytes[order])
    for part in every.split(STAGING_BYTES, max(1, every.runs)):
        starts, pointers, lengths = part
        ends = starts + lengths
        breaks = np.append(np.flatnonzero(starts[1:] - ends[:-1] > max_gap) + 1, starts.size)
        first = 0
        while first < starts.size:
            end = int(np.searchsorted(ends, starts[first] + STAGING_BYTES, side="right"))
            end = min(end, int(breaks[np.searchsorted(breaks, first, side="right")]))
            yield starts[first:end], pointers[first:end], lengths[first:end]
            first = end
