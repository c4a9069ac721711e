"""Writes what a rank holds of chunks: gathered at once, put behind serving."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

from disagg.host.memory import host_memory
from disagg.plan import TransferPlan, plan
from disagg.plan.lookup import IncompleteTransfer
from disagg.portable.staging import Staging
from disagg.store.catalogue import CatalogueFull
from disagg.store.chunks import ChunkLayout, elected, of_kind
from disagg.store.floors.base import Floor, FloorError
from disagg.store.geometry import Geometry
from disagg.store.known import KnownObjects
from disagg.store.objects import NO_PARENT, ObjectId, encode_head
from disagg.store.stats import Outcomes
from disagg.store.transfer.binding import ChunkBinder
from disagg.store.transfer.held import HeldCopies
from disagg.store.workers import Workers
from kvpool.layout import PoolLayout, RequestAddress

ROOM_SHARE = 16
"""Of the host's memory, one part of so many is an engine's `room`."""
LEAST_ROOM, MOST_ROOM = 256 << 20, 8 << 30
"""Of a rank."""


def default_room(ranks: int) -> int:
    """Bytes that one of an engine's ranks may have gathered and not put yet: all ranks may be on
    this host, and each has its own.
    """
    return min(max(LEAST_ROOM, host_memory() // ROOM_SHARE // ranks), MOST_ROOM)


def writer_threads() -> int:
    """One for four of the cores that this process may use, four at most: the engine computes
    meanwhile.
    """
    return min(max(1, len(os.sched_getaffinity(0)) // 4), 4)


SPARE_BYTES = 64 << 20
"""Of memory that is kept to be gathered to."""


class ObjectWriter:
    """Writes objects of one rank. `room` is how many bytes may be gathered and not put yet.
    `publish` puts the geometry in the catalogue, before its first object. What is `known` to be
    there is not written, and what is damaged is replaced.
    """

    def __init__(
        self,
        floor: Floor,
        namespace: str,
        ranks: Sequence[PoolLayout],
        rank: int,
        geometry: Geometry,
        *,
        room: int,
        outcomes: Outcomes,
        publish: Callable[[Geometry], None],
        known: KnownObjects,
    ) -> None:
        self._floor, self._namespace, self._rank = floor, namespace, rank
        self._geometry, self._room, self._outcomes = geometry, room, outcomes
        own, parts = elected(ranks)[rank], geometry.parts[rank]
        self._layout, self._publish = own, publish
        self._plans: dict[str, TransferPlan] = {
            kind: plan([of_kind(own, kind)], part.layout) for kind, part in parts.items()
        }
        self._lasting = {
            kind
            for kind in parts
            if kind == "full"
            and all(buffer.on_host for buffer in own.buffers)
            and not any(space.wraps for space in self._plans[kind].sources[0].spaces)
        }
        """Kinds that neither a request nor a stream of a device overwrites."""
        lock = threading.Lock()
        self._binders = {
            kind: ChunkBinder(self._plans[kind], part, "src", lock=lock)
            for kind, part in parts.items()
        }
        self._workers = Workers(writer_threads(), "kvpool store writer")
        self._held = HeldCopies(self._workers)
        self._lock = threading.Lock()
        self._queued = 0
        self._spare: dict[int, list[Staging]] = {}
        """By size: the kernel takes longer to make pages of new memory than a copy takes."""
        self._known = known

    def write(
        self, keys: Sequence[bytes], address: RequestAddress, chunks: range, *, held: bool = False
    ) -> int:
        """Copies what this rank holds of chunks, and puts it later; returns how many objects that
        are. State that a request has once is written where the last chunk ends with the request.
        Where items are `held`, what stays in them as it is may be copied later, but before `settle`
        returns.
        """
        count = 0
        for chunk in chunks:
            parent = keys[chunk - 1] if chunk else NO_PARENT
            for kind, part in self._geometry.parts[self._rank].items():
                if not self._listed(kind, address):
                    continue
                ends = (chunk + 1) * part.tokens == address.num_tokens
                if not ends and self._overwritten(kind, (chunk + 1) * part.tokens):
                    continue
                identity = ObjectId(
                    kind=kind,
                    key=keys[chunk],
                    geometry=self._geometry.digest,
                    part=self._rank,
                    chunk=chunk,
                )
                name = identity.name(self._namespace)
                if self._known.is_there(name) or not self._has_room(part.nbytes):
                    continue
                if held and kind in self._lasting:
                    self._held.add_copy(partial(self._write, name, identity, parent, part, address))
                    count += 1
                else:
                    count += self._write(name, identity, parent, part, address)
        return count

    def settle(self) -> None:
        """Waits until all that was written of held items is copied."""
        self._held.settle()

    def _listed(self, kind: str, address: RequestAddress) -> bool:
        """Whether a block table has all that an object of that kind needs."""
        spaces = self._plans[kind].sources[0].spaces
        return all(space.id_list in address.spans for space in spaces)

    def _overwritten(self, kind: str, tokens: int) -> bool:
        """Whether a request that goes on after so many tokens may have overwritten state: what it
        has once, and rings that it is in the middle of.
        """
        if kind == "state":
            return True
        spaces = self._plans[kind].sources[0].spaces
        return any(space.wraps and tokens % space.tokens_per_item for space in spaces)

    @property
    def queued(self) -> int:
        """Bytes that are gathered and not put yet."""
        return self._queued

    def close(self, timeout: float) -> bool:
        self.settle()
        return self._workers.close(timeout)

    def _has_room(self, nbytes: int) -> bool:
        """Whether there is room for so many bytes more, which are then queued."""
        with self._lock:
            if self._queued + nbytes > self._room:
                why = f"{self._queued:,} of {self._room:,} bytes in memory wait to be written."
                self._outcomes.count("dropped", nbytes, why)
                return False
            self._queued += nbytes
        return True

    def _write(
        self,
        name: str,
        identity: ObjectId,
        parent: bytes,
        part: ChunkLayout,
        address: RequestAddress,
    ) -> bool:
        """Copies an object that there is room for."""
        try:
            staging = self._gather(identity, part, address)
        except IncompleteTransfer:
            self._outcomes.count("gone", part.nbytes)
            self._put_done(part.nbytes)
            return False
        except BaseException:
            self._put_done(part.nbytes)
            raise
        data = staging.bytes
        head = partial(encode_head, identity, parent, part, data)  # digests take their time
        self._workers.do(lambda: self._put(name, head, staging))
        return True

    def _gather(self, identity: ObjectId, part: ChunkLayout, address: RequestAddress) -> Staging:
        source = RequestAddress((identity.chunk + 1) * part.tokens, address.spans)
        batch = self._binders[identity.kind].bind_chunk(identity.chunk, source)
        with self._lock:
            spare = self._spare.get(part.nbytes)
            staging = spare.pop() if spare else None
        if staging is None:
            staging = Staging(self._layout, part.nbytes)
        if batch.total < part.nbytes:
            staging.clear()  # else what memory held before would be written
        staging.gather(batch.src, batch.dst, batch.nbytes, part.nbytes)
        return staging

    def _put(self, name: str, head: Callable[[], bytes], staging: Staging) -> None:
        nbytes = staging.bytes.size
        try:
            self._publish(self._geometry)
            parts = [head(), staging.bytes.data]
            if self._known.is_damaged(name):
                self._floor.put(name, parts)
            elif not self._floor.create(name, parts):
                self._outcomes.count("already there", nbytes)
                self._known.there(name)
                return
            self._outcomes.count("written", nbytes)
            self._known.there(name)
            self._keep(staging)
        except (FloorError, CatalogueFull) as error:
            self._outcomes.count("not written", nbytes, str(error))
        finally:
            self._put_done(nbytes)

    def _keep(self, staging: Staging) -> None:
        """For another object. What was not written as it should be may still be read by a floor's
        thread.
        """
        size = staging.bytes.size
        with self._lock:
            kept = sum(nbytes * len(spare) for nbytes, spare in self._spare.items())
            if kept + size <= SPARE_BYTES:
                self._spare.setdefault(size, []).append(staging)

    def _put_done(self, nbytes: int) -> None:
        with self._lock:
            self._queued -= nbytes
