"""The floor of Mooncake's store: a cluster's memory, kept by a `mooncake_master`.

An object is created in a session of Mooncake's: it is announced to the master, which lets one
writer in, then its bytes are written, and its end makes it visible. A session whose end is called
although a write has failed makes a broken object visible, so it is revoked instead. A writer that
dies leaves an announced object, which the master gives up 30 seconds later
(`--put_start_discard_timeout_sec`).

A name may give other bytes than were written: where another process deletes or replaces the object
that is being read (Mooncake's leases of 10 seconds keep objects from eviction, not from that), and
whole other objects where a master began with an old snapshot (`--enable_snapshot_restore`) and the
memory was used again since. Readers check digests, and that the object says the name they asked
for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import quote

import numpy as np

from disagg.store.floors.base import (
    BeyondEnd,
    ByteRange,
    Bytes,
    BytesLike,
    FloorError,
    FloorFull,
    Listed,
    NotThere,
    Spans,
    byte_views,
    check_names,
    cut,
    nothing_of,
    prefix_of,
    spans_of,
    under,
    valid_name,
)
from disagg.store.floors.mooncake_client import (
    EXISTS,
    FULL,
    INVALID,
    NOT_FOUND,
    NOT_READY,
    MooncakeClient,
    words,
)
from disagg.store.floors.staging import LentStaging
from disagg.store.floors.url import FloorURL

STAGING_BYTES = 64 << 20
PIECE_BYTES = 16 << 20
"""An object is written in pieces of so many bytes at most, and of a quarter of the staging."""
LISTED_AT_ONCE = 50
UNSENT = INVALID, NOT_FOUND, NOT_READY
"""Codes of ranges for which no transfer began."""


class MooncakeFloor:
    """A floor of `mooncake.store`."""

    def __init__(self, url: FloorURL) -> None:
        self._url = url
        self._client = MooncakeClient(url)
        self._staging = LentStaging(url.options.get("staging", STAGING_BYTES))
        self._lock = threading.Lock()
        self._writing: set[str] = set()
        self._unrevoked: set[str] = set()

    def create(self, name: str, parts: Sequence[BytesLike]) -> bool:
        check_names([name])
        views = byte_views(parts)
        with self._lock:
            if name in self._writing:
                return False  # by another thread: Mooncake has one session for a name
            self._writing.add(name)
        try:
            with self._client.used(self._staging) as client:
                return self._create(client, name, views)
        finally:
            with self._lock:
                self._writing.discard(name)

    def put(self, name: str, parts: Sequence[BytesLike]) -> None:
        check_names([name])
        views = byte_views(parts)
        size = sum(view.size for view in views)
        with (
            self._client.used(self._staging) as client,
            self._staging.lent(size, f"{self._url}: put {name}") as piece,
        ):
            _gather(views, piece.memory)
            code = client.upsert_from(name, piece.address, size)
            if code:
                piece.uncertain = True
                raise self._failure(f"put {name}", code)

    def read(
        self, name: str, ranges: Sequence[ByteRange]
    ) -> AbstractContextManager[Sequence[memoryview]]:
        check_names([name])
        spans = spans_of(ranges)
        if not spans.spans:
            return nothing_of(self, f"{self._url}: no object {name}.", name, spans)
        return self._read(name, spans)

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        if not names:
            return []
        with self._client.used(self._staging) as client:
            codes = client.batch_is_exist([*names])
        if (worst := min(codes)) < 0:
            raise self._failure("exists", worst)
        return [code == 1 for code in codes]

    def list(self, prefix: str) -> Iterator[Listed]:
        folder = prefix_of(prefix)
        batch: list[str] = []
        for name in self._client.all_names():
            if valid_name(name) and under(folder, name):
                batch.append(name)
            if len(batch) == LISTED_AT_ONCE:
                yield from self._listed(batch)
                batch = []
        if batch:
            yield from self._listed(batch)

    def delete(self, names: Sequence[str]) -> None:
        check_names(names)
        if not names:
            return
        with self._client.used(self._staging) as client:
            # else what was read in the last 10 seconds stays: it has a lease
            codes = client.batch_remove([*names], force=True)
        for name, code in zip(names, codes):
            if code not in (0, NOT_FOUND, NOT_READY):  # these are invisible already
                raise self._failure(f"delete {name}", code)

    def sweep(self, age: float) -> int:
        return 0  # the master does, 30 seconds after a writer is gone

    def close(self) -> None:
        self._client.close()

    def _create(self, client: Any, name: str, views: Sequence[Bytes]) -> bool:
        if name in self._unrevoked and not self._revoke(client, name):
            # its end may have arrived although the answer did not, and the object is whole
            (code,) = client.batch_is_exist([name])
            if code == 1:
                return False
            raise self._failure(f"create {name}", code or INVALID)
        size = sum(view.size for view in views)
        (code,) = client.batch_put_session_start([name], [size])
        if code == EXISTS:
            return False
        if code:
            # the master may have begun it although its answer did not come
            raise self._failure(f"create {name}", code)
        try:
            self._send(client, name, views)
            (code,) = client.batch_put_session_end([name])
            if code:
                raise self._failure(f"create {name}", code)
        except BaseException:
            self._revoke(client, name)
            raise
        return True

    def _send(self, client: Any, name: str, views: Sequence[Bytes]) -> None:
        """Writes the bytes of an announced object, in pieces."""
        size = sum(view.size for view in views)
        most = max(1, min(PIECE_BYTES, self._staging.nbytes // 4))
        for first in range(0, size, most):
            count = min(most, size - first)
            with self._staging.lent(count, f"{self._url}: create {name}") as piece:
                _gather(_slices(views, first, count), piece.memory)
                (code,) = client.batch_put_from_multi_buffer_ranges(
                    [name], [[piece.address]], [[count]], [[first]]
                )
                if code != count:
                    piece.uncertain = True
                    raise self._failure(f"create {name}", code)

    def _revoke(self, client: Any, name: str) -> bool:
        """Gives an announced object up; whether that worked. Where the master is away, the next
        `create` of that name does it again: until then Mooncake's client refuses to begin.
        """
        (code,) = client.batch_put_session_revoke([name])
        failed = code not in (0, INVALID)  # INVALID: this client has no such session
        with self._lock:
            (self._unrevoked.add if failed else self._unrevoked.discard)(name)
        return not failed

    @contextmanager
    def _read(self, name: str, spans: Spans) -> Iterator[Sequence[memoryview]]:
        what = f"{self._url}: read {name}"
        staging = self._staging
        sizes = [stop - start for start, stop in spans.spans]
        offsets = [0, *np.cumsum(sizes)[:-1].tolist()]
        with self._client.used(staging) as client, staging.lent(spans.size, what) as piece:
            sources = [start for start, _ in spans.spans]
            # not by a session: those are one for a name, and two threads may read it
            codes = client.get_into_ranges(
                [piece.address], [[name]], [[offsets]], [[sources]], [[sizes]]
            )[0][0]
            if codes != sizes:
                piece.uncertain = any(code not in (*sizes, *UNSENT) for code in codes)
                raise self._read_failure(client, name, spans, codes)
            memory = piece.memory.data.toreadonly()
            buffers = [memory[first : first + size] for first, size in zip(offsets, sizes)]
            yield cut(spans, buffers)

    def _read_failure(
        self, client: Any, name: str, spans: Spans, codes: Sequence[int]
    ) -> FloorError:
        code = min(codes)
        if code in (NOT_FOUND, NOT_READY):
            return NotThere(f"{self._url}: no object {name}.")
        last = max(stop for _, stop in spans.spans)
        if code == INVALID and 0 <= (size := client.get_size(name)) < last:
            return BeyondEnd(f"{self._url}: {name} ends at byte {size}, before {last}.")
        return self._failure(f"read {name}", code)

    def _listed(self, names: Sequence[str]) -> Iterator[Listed]:
        """Those that are complete. The HTTP server's answer gives no lease, unlike the client's
        `batch_get_replica_desc`, so a list keeps nothing from eviction.
        """
        query = quote(",".join(names), safe=",/")
        answer = self._client.answer(f"/batch_query_keys?keys={query}")
        try:
            objects = json.loads(answer)["data"]
            rows = [(name, objects[name]) for name in names if objects.get(name, {}).get("ok")]
            # of an object that lies on a disk only, Mooncake tells no size here
            sizes = [(name, row["values"][0]["size_"]) for name, row in rows if row.get("values")]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FloorError(
                f"{self._url}: the master's answer to /batch_query_keys cannot be read: {error!r}."
            ) from error
        for name, size in sizes:
            yield Listed(name, int(size), None)

    def _failure(self, what: str, code: int) -> FloorError:
        if code == FULL:
            return FloorFull(
                f"{self._url}: {what}: {words(code)}. Start kvpool store serve with more --memory, "
                "or open stores with memory= in their URLs."
            )
        return FloorError(f"{self._url}: {what}: {words(code)}.")


def _gather(views: Sequence[Bytes], place: Bytes) -> None:
    """Copies bytes one behind the other; numpy does it without the GIL."""
    first = 0
    for view in views:
        place[first : first + view.size] = view
        first += view.size


def _slices(views: Sequence[Bytes], first: int, count: int) -> list[Bytes]:
    """`count` bytes of the views, from byte `first` of them all."""
    slices: list[Bytes] = []
    for view in views:
        if first < view.size and count > 0:
            piece = view[first : first + count]
            slices.append(piece)
            count -= piece.size
        first = max(0, first - view.size)
    return slices
