"""Reads of small runs as long ones. Runs that lie close together at the source are read as one,
with the bytes between them, into a staging buffer, and scattered from there: one more copy, which
pays if an engine's cost is per run. Foreign bytes, which no region describes, are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from disagg.engines.base import Engine, TransferError
from disagg.plan.bind import CopyBatch
from kvpool.device.host_copy import copy_runs
from kvpool.layout import PoolLayout, Slab
from kvpool.layout.grid import Ints

if TYPE_CHECKING:
    from kvpool.device import Event

NUM_BUFFERS = 4
"""Two parts in flight of one read, and two of another rank's."""
MIN_STAGING = 1 << 20
"""Bytes; with less, the parts of a read are too small."""
MAX_READ_AMPLIFICATION = 8
"""Bytes read for each byte that is needed, at most."""

CopyRuns = Callable[[Ints, Ints, Ints], "Event | None"]


class ReadPart(NamedTuple):
    """What is read at once. With `scatter`, `read` goes to a buffer and `scatter` comes from it:
    destinations of `read` and sources of `scatter` are offsets in the buffer, which for a whole
    batch (`coalesce`) is as large as that, until it is `cut`.
    """

    read: CopyBatch
    scatter: CopyBatch | None = None
    store: Callable[[int], Event | None] | None = None
    """Stores rows that have arrived in a buffer, at the given pointer, in another format."""

    @property
    def staged(self) -> bool:
        """Whether it is read into a buffer: destinations of `read` are offsets there."""
        return self.scatter is not None or self.store is not None

    @property
    def payload(self) -> int:
        """Bytes that are needed."""
        return (self.read if self.scatter is None else self.scatter).total


class StagingBuffers:
    """Buffers in this side's memory, and the copy out of them, which returns an event if it goes on
    after the call; None: only conversions use them. Without `slabs` there are none.
    """

    def __init__(
        self, slabs: Sequence[Slab] = (), copy: CopyRuns | None = copy_runs, memory: Any = None
    ) -> None:
        self.slabs, self._copy, self._memory = slabs, copy, memory
        self.buffer_bytes = min((slab.nbytes // NUM_BUFFERS for slab in slabs), default=0)
        self._free = [s.base + n * self.buffer_bytes for s in slabs for n in range(NUM_BUFFERS)]
        self._usable = len(self._free)

    def parts(self, batch: CopyBatch, source: PoolLayout, engine: Engine) -> Iterator[ReadPart]:
        """A batch in parts for an engine; through a buffer if that pays."""
        longer = None
        if self._usable and self._copy is not None:
            longer = coalesce(batch, source, engine.run_overhead_bytes)
        if longer is None:
            return map(ReadPart, batch.split(engine.max_bytes, engine.max_runs))
        return cut(longer, min(self.buffer_bytes, engine.max_bytes), engine.max_runs)

    def take_buffer(self) -> int | None:
        """Pointer to a buffer; None while all are in use. TransferError if that cannot end."""
        if not self._usable:
            raise TransferError("all staging memory is held by peers that cannot be fenced.")
        return self._free.pop() if self._free else None

    def give(self, *buffers: int) -> None:
        """Takes back buffers that nothing writes to any more."""
        self._free.extend(buffers)

    def mark_lost(self, count: int) -> None:
        """`count` buffers may be written to at any time, and are not used again."""
        self._usable -= count

    def finish(self, part: ReadPart, buffer: int) -> Event | None:
        """Copies what has arrived in a buffer to its destination, or stores it there."""
        if part.store is not None:
            return part.store(buffer)
        assert part.scatter is not None and self._copy is not None
        src, dst, nbytes = part.scatter
        return self._copy(src + buffer, dst, nbytes)


def coalesce(batch: CopyBatch, source: PoolLayout, run_overhead_bytes: int) -> ReadPart | None:
    """Runs that lie close together at the source as one, with the bytes between them where the
    buffers have no foreign bytes; None if that takes more than half as long, where a run costs as
    much as `run_overhead_bytes` bytes.
    """
    total = batch.total
    if total >= batch.runs * run_overhead_bytes:
        return None
    order = np.argsort(batch.src, kind="stable")
    src, dst, nbytes = (column[order] for column in batch)
    ends: Ints = src + nbytes
    gaps: Ints = src[1:] - ends[:-1]
    near = (gaps == 0) | (gaps > 0) & source.covers(ends[:-1], src[1:])
    joined = None
    least = (batch.runs * run_overhead_bytes + total) // 2
    for most in (0, run_overhead_bytes):
        follows = near & (gaps <= most)
        read = total + int(gaps[follows].sum())
        runs = batch.runs - int(follows.sum())
        cost = runs * run_overhead_bytes + read + total  # the payload is copied once more
        if cost <= least and read <= MAX_READ_AMPLIFICATION * total:
            joined, least = follows, cost
    if joined is None:
        return None
    firsts = np.flatnonzero(np.concatenate([[True], ~joined]))
    lasts = np.concatenate([firsts[1:], [src.size]]) - 1
    lengths: Ints = ends[lasts] - src[firsts]
    starts: Ints = np.cumsum(lengths) - lengths
    offsets: Ints = src + np.repeat(starts - src[firsts], lasts - firsts + 1)
    return ReadPart(CopyBatch(src[firsts], starts, lengths), CopyBatch(offsets, dst, nbytes))


def cut(whole: ReadPart, max_bytes: int, max_runs: int) -> Iterator[ReadPart]:
    """A part with a scatter, in parts of at most `max_bytes` bytes in at most `max_runs` runs."""
    assert whole.scatter is not None
    offsets, dst, nbytes = whole.scatter
    ends: Ints = offsets + nbytes
    for read in whole.read.split(max_bytes, max_runs):
        start = int(read.dst[0])
        stop = start + read.total
        low, high = np.searchsorted(ends, start, "right"), np.searchsorted(offsets, stop, "left")
        first: Ints = np.maximum(offsets[low:high], start)
        last: Ints = np.minimum(ends[low:high], stop)
        yield ReadPart(
            CopyBatch(read.src, read.dst - start, read.nbytes),
            CopyBatch(first - start, dst[low:high] + (first - offsets[low:high]), last - first),
        )


def staging_buffers(
    layout: PoolLayout, engine: Engine, nbytes: int, always: bool = False
) -> StagingBuffers:
    """Buffers of `nbytes` bytes in all; none if engine or device have no use for them, unless they
    are needed `always`.
    """
    memories = {buffer.memory for buffer in layout.buffers}
    if not (nbytes and (always or engine.run_overhead_bytes) and len(memories) == 1):
        return StagingBuffers()
    (memory,) = memories
    if layout.buffers[0].on_host:
        buffer = np.empty(nbytes, dtype=np.uint8)
        return StagingBuffers([Slab(buffer.ctypes.data, nbytes, memory)], copy_runs, buffer)
    from kvpool.device import DeviceUnavailable, Sharing, get_device  # imports torch

    try:
        device = get_device(memory)
    except DeviceUnavailable:
        return StagingBuffers()  # memory that kvpool cannot copy
    copies = isinstance(device, Sharing)  # another may copy its own memory only
    if not (copies or always):
        return StagingBuffers()

    def copy(src: Ints, dst: Ints, lengths: Ints) -> Event:
        device.copy_runs(src, dst, lengths)
        return device.record()

    tensor = device.allocate(nbytes)
    return StagingBuffers(
        [Slab(tensor.data_ptr(), nbytes, memory)], copy if copies else None, tensor
    )
