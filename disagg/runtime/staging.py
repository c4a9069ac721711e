"""Reads of small runs as long ones. Where runs lie close together at the source they come as one,
with what lies between them, into memory of this side, and are scattered from there to where they
belong.

That costs a copy more here, and pays where an engine's cost is by the run: heads of other numbers
of ranks, other orders of axes, other sizes of pages.
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

BUFFERS = 4
"""A read's two parts in flight, and those of another rank."""
MIN_STAGING = 1 << 20
"""Bytes; with less, reads are cut into parts that are too small."""
MAX_READ_AMPLIFICATION = 8
"""No more than so many times the bytes that are wanted are read."""

Copy = Callable[[Ints, Ints, Ints], "Event | None"]


class Part(NamedTuple):
    """What is read at once. With `scatter`, `read` goes to a buffer and `scatter` comes from it:
    destinations of the one and sources of the other are offsets there.
    """

    read: CopyBatch
    scatter: CopyBatch | None = None

    @property
    def wanted(self) -> int:
        """Bytes that belong somewhere."""
        return (self.read if self.scatter is None else self.scatter).total


class Joined(NamedTuple):
    """A batch as long runs that are read, and what is scattered from there; destinations of the one
    and sources of the other are offsets in the whole of what is read.
    """

    read: CopyBatch
    scatter: CopyBatch


class Stage:
    """Buffers in one's own memory, and what copies from them: it returns a mark if it goes on after
    the call. Without `slabs` there are none.
    """

    def __init__(
        self, slabs: Sequence[Slab] = (), copy: Copy = copy_runs, memory: Any = None
    ) -> None:
        self.slabs, self._copy, self._memory = slabs, copy, memory
        self.buffer_bytes = min((slab.nbytes // BUFFERS for slab in slabs), default=0)
        self._free = [s.base + n * self.buffer_bytes for s in slabs for n in range(BUFFERS)]
        self._usable = len(self._free)

    def parts(self, batch: CopyBatch, source: PoolLayout, engine: Engine) -> Iterator[Part]:
        """A batch in parts for an engine; by way of a buffer where that pays."""
        found = joined(batch, source, engine.run_overhead_bytes) if self._usable else None
        if found is None:
            return map(Part, batch.split(engine.max_bytes, engine.max_runs))
        return cut(found, min(self.buffer_bytes, engine.max_bytes), engine.max_runs)

    def take(self) -> int | None:
        """The address of a buffer, or None while all are in use. Raises TransferError where none
        will be free again.
        """
        if not self._usable:
            raise TransferError("all staging memory is held by peers that cannot be fenced.")
        return self._free.pop() if self._free else None

    def give(self, *buffers: int) -> None:
        """Takes buffers back that nothing writes to any more."""
        self._free.extend(buffers)

    def mark_lost(self, count: int) -> None:
        """So many buffers may be written to for ever."""
        self._usable -= count

    def scatter(self, part: CopyBatch, buffer: int) -> Event | None:
        """Copies what has arrived in a buffer to where it belongs."""
        return self._copy(part.src + buffer, part.dst, part.nbytes)


def joined(batch: CopyBatch, source: PoolLayout, run_overhead_bytes: int) -> Joined | None:
    """Runs that lie close together at the source as one, with what lies between them; None where
    that takes more than half as long, a run taking as long as `run_bytes` bytes.
    """
    total = batch.total
    if total >= batch.runs * run_overhead_bytes:
        return None
    order = np.argsort(batch.src, kind="stable")
    src, dst, nbytes = (column[order] for column in batch)
    ends: Ints = src + nbytes
    slabs = np.searchsorted(sorted(slab.base for slab in source.slabs()), src, "right")
    gaps: Ints = src[1:] - ends[:-1]
    near = (gaps >= 0) & (slabs[1:] == slabs[:-1])  # what lies between slabs cannot be read
    found = None
    least = (batch.runs * run_overhead_bytes + total) // 2
    for most in (0, run_overhead_bytes):
        follows = near & (gaps <= most)
        read = total + int(gaps[follows].sum())
        runs = batch.runs - int(follows.sum())
        cost = runs * run_overhead_bytes + read + total  # which is copied once more
        if cost <= least and read <= MAX_READ_AMPLIFICATION * total:
            found, least = follows, cost
    if found is None:
        return None
    firsts = np.flatnonzero(np.concatenate([[True], ~found]))
    lasts = np.concatenate([firsts[1:], [src.size]]) - 1
    lengths: Ints = ends[lasts] - src[firsts]
    starts: Ints = np.cumsum(lengths) - lengths
    offsets: Ints = src + np.repeat(starts - src[firsts], lasts - firsts + 1)
    return Joined(CopyBatch(src[firsts], starts, lengths), CopyBatch(offsets, dst, nbytes))


def cut(joined: Joined, max_bytes: int, max_runs: int) -> Iterator[Part]:
    """Parts of at most `max_bytes` bytes in at most `max_runs` runs."""
    offsets, dst, nbytes = joined.scatter
    ends: Ints = offsets + nbytes
    for read in joined.read.split(max_bytes, max_runs):
        start = int(read.dst[0])
        stop = start + read.total
        low, high = np.searchsorted(ends, start, "right"), np.searchsorted(offsets, stop, "left")
        first: Ints = np.maximum(offsets[low:high], start)
        last: Ints = np.minimum(ends[low:high], stop)
        yield Part(
            CopyBatch(read.src, read.dst - start, read.nbytes),
            CopyBatch(first - start, dst[low:high] + (first - offsets[low:high]), last - first),
        )


def stage_for(layout: PoolLayout, engine: Engine, nbytes: int) -> Stage:
    """A stage of `nbytes` bytes beside a layout's memory; an empty one where engine or device have
    no use for it.
    """
    memories = {buffer.memory for buffer in layout.buffers}
    if not (nbytes and engine.run_overhead_bytes and len(memories) == 1):
        return Stage()
    (memory,) = memories
    if layout.buffers[0].on_host:
        held = np.empty(nbytes, dtype=np.uint8)
        return Stage([Slab(held.ctypes.data, nbytes, memory)], copy_runs, held)
    from kvpool.device import DeviceUnavailable, Sharing, get_device  # torch comes with it

    try:
        device = get_device(memory)
    except DeviceUnavailable:
        return Stage()  # memory that kvpool cannot touch
    if not isinstance(device, Sharing):  # its copies may know memory of its own only
        return Stage()

    def copy(src: Ints, dst: Ints, lengths: Ints) -> Event:
        device.copy_runs(src, dst, lengths)
        return device.record()

    tensor = device.allocate(nbytes)
    return Stage([Slab(tensor.data_ptr(), nbytes, memory)], copy, tensor)
