"""Reads objects into a rank's pool: fetched by whole blocks, checked, then copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from disagg.plan import CopyBatch
from disagg.portable.conversion import ConvertedPart, Converter, WantedRows
from disagg.portable.staging import Bytes, Staging, windows
from disagg.protocol.messages import Convention
from disagg.store.chunks import ChunkLayout
from disagg.store.floors.base import BeyondEnd, Floor
from disagg.store.geometry import Geometry, Readable, readable
from disagg.store.jobs import ReadJob
from disagg.store.objects import Damaged, ObjectId, check_blocks, decode_head, head_bytes
from disagg.store.transfer.binding import ChunkBinder
from kvpool.device.host_copy import copy_runs
from kvpool.layout import PoolLayout
from kvpool.layout.grid import Ints

if TYPE_CHECKING:
    from kvpool.device import Event

MAX_GAP = 64 << 10
"""The longest gap between needed bytes of a block that is read instead of skipped."""
STAGING_BYTES = 8 << 20


class ObjectReader:
    """Reads objects for one rank. Any thread may ask."""

    def __init__(
        self,
        floor: Floor,
        layout: PoolLayout,
        conventions: Mapping[str, Convention],
        cast: bool | Collection[str],
    ) -> None:
        self._floor, self._layout = floor, layout
        self._conventions, self._cast = conventions, cast
        self._readable: dict[bytes, Readable] = {}
        self._binders: dict[tuple[bytes, str, int], ChunkBinder] = {}
        self._lock = threading.Lock()
        self._plan_lock = threading.Lock()
        """Plans are not for several threads."""
        self._staging = threading.local()
        self._on_host = all(buffer.on_host for buffer in layout.buffers)

    def readable(self, geometry: Geometry) -> Readable:
        """How this rank reads a geometry. Raises ValueError."""
        with self._lock:
            cached = self._readable.get(geometry.digest)
            if cached is None:
                cached = readable(geometry, self._layout, self._conventions, cast=self._cast)
                self._readable[geometry.digest] = cached
            return cached

    def read(self, job: ReadJob, kind: str, chunk: int, key: bytes, geometry: Geometry) -> int:
        """Reads what this rank needs of one chunk's objects of a kind; returns how many bytes were
        fetched. Raises NotThere, FloorError, Damaged and ValueError.
        """
        way = self.readable(geometry)
        if kind not in way.plans:  # another stage of the pipeline has such layers
            return 0
        fetched = 0
        for source, part in enumerate(way.sources[kind]):
            layout = geometry.parts[part][kind]
            identity = ObjectId(
                kind=kind, key=key, geometry=geometry.digest, part=part, chunk=chunk
            )
            name = identity.name(geometry.namespace)
            batch = self._binder(way, kind, source).bind_chunk(chunk, job.address, job.tokens.start)
            try:
                if batch.runs:
                    fetched += self._fetch(job, name, identity, layout, batch)
                for piece in self._conversions(way, kind, source, chunk, job):
                    read, store = piece.read, piece.store
                    fetched += self._fetch(job, name, identity, layout, read, store=store)
            except Damaged as error:
                error.name = name
                raise
            except BeyondEnd as error:
                damaged = Damaged(str(error))
                damaged.name = name
                raise damaged from None
        return fetched

    def _binder(self, way: Readable, kind: str, source: int) -> ChunkBinder:
        name = way.geometry.digest, kind, source
        with self._lock:
            binder = self._binders.get(name)
            if binder is None:
                part = way.geometry.parts[way.sources[kind][source]][kind]
                plan, lock = way.plans[kind], self._plan_lock
                binder = ChunkBinder(plan, part, "dst", lock=lock, source=source)
                self._binders[name] = binder
        return binder

    def _conversions(
        self, way: Readable, kind: str, source: int, chunk: int, job: ReadJob
    ) -> list[ConvertedPart]:
        """What is read of a chunk's rows of other formats."""
        plan, part = way.plans[kind], way.geometry.parts[way.sources[kind][source]][kind]
        if plan.cast is None:
            return []
        start, stop = chunk * part.tokens, (chunk + 1) * part.tokens
        wanted = WantedRows(
            source=source,
            source_address=part.address(chunk),
            dest_address=job.address,
            tokens=range(max(start, job.tokens.start), stop),
        )
        with self._plan_lock:
            return [*Converter(plan.cast, self._layout).parts(wanted, STAGING_BYTES)]

    def _fetch(
        self,
        job: ReadJob,
        name: str,
        identity: ObjectId,
        layout: ChunkLayout,
        batch: CopyBatch,
        store: Callable[[int], Event] | None = None,
    ) -> int:
        """Fetches blocks of an object and copies runs of them, which `store` then stores from
        where they were copied to. Returns how many bytes were fetched.
        """
        blocks = _stretches(layout, batch)
        head = head_bytes(layout)
        edges = layout.blocks
        ranges = [(head + int(edges[b.start]), head + int(edges[b.stop])) for b in blocks]
        with self._floor.read(name, [(0, head), *ranges]) as data:
            views = [memoryview(block).cast("B") for block in data]
            digests = decode_head(views[0], identity, layout)
            check_blocks(list(zip(blocks, views[1:])), digests, layout)
            starts = np.array([int(edges[b.start]) for b in blocks], dtype=np.int64)
            with job.lock:
                if job.ended:
                    pass
                elif store is None:
                    self._scatter(starts, views[1:], batch)
                else:
                    self._stage_runs(starts, views[1:], batch)
                    store(self._stage().pointer).synchronize()
        return sum(stop - start for start, stop in ranges)

    def _scatter(self, starts: Ints, views: Sequence[memoryview], batch: CopyBatch) -> None:
        """Copies runs from offsets in an object, whose stretches from `starts` on were read."""
        arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
        if self._on_host and len(arrays) == 1:
            copy_runs(batch.src + (arrays[0].ctypes.data - int(starts[0])), batch.dst, batch.nbytes)
            return
        if self._on_host:
            copy_runs(_pointers(starts, arrays, batch.src), batch.dst, batch.nbytes)
            return
        which = np.searchsorted(starts, batch.src, side="right") - 1
        staging = self._stage()
        for number, array in enumerate(arrays):
            runs = np.flatnonzero(which == number)
            part = CopyBatch(batch.src[runs] - starts[number], batch.dst[runs], batch.nbytes[runs])
            for offsets, pointers, nbytes in windows(*part, most=STAGING_BYTES):
                low, high = int(offsets[0]), int(offsets[-1] + nbytes[-1])
                staging.bytes[: high - low] = array[low:high]
                staging.scatter(offsets - low, pointers, nbytes, high - low)

    def _stage_runs(self, starts: Ints, views: Sequence[memoryview], batch: CopyBatch) -> None:
        """As `_scatter`, to offsets in the staging buffer."""
        staging, arrays = self._stage(), [np.frombuffer(view, dtype=np.uint8) for view in views]
        src, base = _pointers(starts, arrays, batch.src), staging.bytes.ctypes.data
        copy_runs(src, batch.dst + base, batch.nbytes)
        staging.push(int((batch.dst + batch.nbytes).max()))

    def _stage(self) -> Staging:
        staging: Staging | None = getattr(self._staging, "one", None)
        if staging is None:
            staging = self._staging.one = Staging(self._layout, STAGING_BYTES)
        return staging


def _pointers(starts: Ints, arrays: Sequence[Bytes], offsets: Ints) -> Ints:
    """Where offsets in an object lie, whose stretches from `starts` on are `arrays`."""
    which = np.searchsorted(starts, offsets, side="right") - 1
    bases = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
    return bases[which] + offsets - starts[which]


def _stretches(layout: ChunkLayout, batch: CopyBatch) -> list[range]:
    """The blocks that runs lie in, as ranges of consecutive ones."""
    edges = layout.blocks
    if batch.total == layout.nbytes:  # all, as where both sides have the same heads and layers
        return [range(edges.size - 1)]
    touched = np.zeros(edges.size, dtype=np.int64)
    np.add.at(touched, np.searchsorted(edges, batch.src, side="right") - 1, 1)
    np.add.at(touched, np.searchsorted(edges, batch.src + batch.nbytes, side="left"), -1)
    needed = np.flatnonzero(np.cumsum(touched) > 0)
    gaps = edges[needed[1:]] - edges[needed[:-1] + 1]
    breaks = np.flatnonzero(gaps > MAX_GAP) + 1
    return [range(int(part[0]), int(part[-1]) + 1) for part in np.split(needed, breaks)]
