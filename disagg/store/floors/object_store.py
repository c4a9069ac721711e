"""Floors of obstore: this process's memory, S3, Google Cloud Storage, Azure, and in part folders.

Objects are created by one conditional put each, so that the first of two writers wins, and a writer
that is killed leaves nothing that a reader can see: in a folder the bytes go to a file beside it
(`NAME#1`) that is linked when it is complete, elsewhere in one request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from disagg.store.floors.base import (
    BeyondEnd,
    ByteRange,
    BytesLike,
    FloorError,
    Listed,
    NotThere,
    byte_views,
    check_names,
    cut,
    nothing_of,
    prefix_of,
    spans_of,
    valid_name,
)
from disagg.store.floors.object_errors import CREDENTIALS, floor_error, no_bucket
from disagg.store.floors.url import FloorURL
from kvpool.extras import needed_by

T = TypeVar("T")

TIMEOUT_SECONDS = 10.0
"""How long one request may take from its first byte to its last, unless the URL says `timeout=`."""
CONNECT_SECONDS = 3.0
RETRIES = 2
"""Of requests that were refused for the moment (5xx), and of connections that failed. What timed
out is not tried again: the time is spent."""
ASKED_AT_ONCE = 16
"""Requests in flight of one `exists`, where each is a round trip."""
DELETED_AT_ONCE = 1000
ENDPOINTS = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"


class ObjectFloor:
    """A floor of obstore."""

    def __init__(self, url: FloorURL) -> None:
        self._url = url
        self._seconds = url.options.get("timeout", TIMEOUT_SECONDS)
        with needed_by(f"A store at {url.scheme}://"):
            self._store: Any = _store_of(url)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._has_bucket = url.scheme in ("memory", "file")

    def create(self, name: str, parts: Sequence[BytesLike]) -> bool:
        return self._write(name, parts, "create")

    def put(self, name: str, parts: Sequence[BytesLike]) -> None:
        self._write(name, parts, "overwrite")

    def read(
        self, name: str, ranges: Sequence[ByteRange]
    ) -> AbstractContextManager[Sequence[memoryview]]:
        check_names([name])
        spans = spans_of(ranges)
        if not spans.spans:
            return nothing_of(self, f"{self._url}: no object {name}.", name, spans)
        starts, stops = [start for start, _ in spans.spans], [stop for _, stop in spans.spans]
        buffers = self._asked(
            f"read {name}", partial(self._store.get_ranges, name, starts=starts, ends=stops)
        )
        for (start, stop), buffer in zip(spans.spans, buffers):
            if len(buffer) != stop - start:  # obstore gives as many as there are
                raise BeyondEnd(
                    f"{self._url}: {name} ends at byte {start + len(buffer)}, before {stop}."
                )
        return nullcontext(cut(spans, [memoryview(buffer) for buffer in buffers]))

    def exists(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        if self._url.scheme == "memory" or len(names) < 2:
            present = [*map(self._is_there, names)]
        else:
            with self._lock:
                self._check_open("exists")
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(ASKED_AT_ONCE, "Floor")
                answers = self._threads.map(self._is_there, names)
            present = [*answers]
        if not self._has_bucket and not any(present):
            self._check_bucket()
        return present

    def list(self, prefix: str) -> Iterator[Listed]:
        folder = prefix_of(prefix)
        pages = iter(self._asked("list", partial(self._store.list, folder, chunk_size=1000)))
        while True:
            page = self._asked("list", partial(next, pages, None))
            if page is None:
                return
            for meta in page:
                if valid_name(meta["path"]):
                    written = meta["last_modified"].timestamp()
                    yield Listed(meta["path"], int(meta["size"]), written)

    def delete(self, names: Sequence[str]) -> None:
        check_names(names)
        most = DELETED_AT_ONCE if self._url.scheme == "s3" else 1
        for first in range(0, len(names), most):
            # but of S3's, a batch would end at the first that is not there
            batch = [*names[first : first + most]]
            with suppress(NotThere):
                self._asked("delete", partial(self._store.delete, batch))

    def sweep(self, age: float) -> int:
        return 0  # one request makes an object: there is nothing beside those

    def close(self) -> None:
        with self._lock:
            self._closed, threads, self._threads = True, self._threads, None
        if threads is not None:
            threads.shutdown()

    def _write(self, name: str, parts: Sequence[BytesLike], mode: str) -> bool:
        check_names([name])
        # obstore takes flat bytes only; many parts are one upload, not one of several requests
        views = [view.data for view in byte_views(parts)]
        if self._url.scheme == "memory":  # which would keep the caller's own
            views = [np.concatenate(views).data]
        exists = _exceptions().AlreadyExistsError
        try:
            upload = partial(self._store.put, name, views, mode=mode, use_multipart=False)
            self._asked(f"write {name}", upload)
        except NotThere as error:  # of a bucket
            raise FloorError(str(error)) from error.__cause__
        except exists:
            return False
        return True

    def _is_there(self, name: str) -> bool:
        try:
            self._asked(f"exists {name}", partial(self._store.head, name))
        except NotThere:
            return False
        return True

    def _check_bucket(self) -> None:
        """Raises FloorError if the bucket is not there. Whether objects are, servers tell without
        saying so.
        """
        try:
            next(self._store.list(chunk_size=1), None)
        except Exception as error:  # without permission to list, nothing is known
            if no_bucket(error):
                raise floor_error(self._url, "exists", error, self._seconds) from error
        self._has_bucket = True

    def _asked(self, what: str, call: Callable[[], T]) -> T:
        """What obstore answers; its errors as the floor's."""
        self._check_open(what)
        exceptions = _exceptions()
        try:
            return call()
        except FileNotFoundError as error:
            if no_bucket(error):
                raise floor_error(self._url, what, error, self._seconds) from error
            raise NotThere(f"{self._url}: {what}: there is no such object.") from error
        except exceptions.AlreadyExistsError:
            raise
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise floor_error(self._url, what, error, self._seconds) from error

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise self._failure(what, "it is closed")

    def _failure(self, what: str, reason: str) -> FloorError:
        return FloorError(f"{self._url}: {what}: {reason}.")


def _exceptions() -> Any:
    from obstore import exceptions

    return exceptions


def _store_of(url: FloorURL) -> Any:
    """obstore's object for a URL. Raises FloorError where it cannot be made."""
    if url.scheme == "memory":
        return _memory(url.place)
    if url.scheme == "file":
        return _folder(url)
    from obstore import store

    seconds = url.options.get("timeout", TIMEOUT_SECONDS)
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=seconds),
        "connect_timeout": timedelta(seconds=min(seconds, CONNECT_SECONDS)),
    }
    common: dict[str, Any] = {
        "prefix": url.path or None,
        "client_options": client,
        "retry_config": {
            "max_retries": RETRIES,
            # once a request has timed out, this is over
            "retry_timeout": timedelta(seconds=seconds / 2),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        },
    }
    try:
        if url.scheme == "s3":
            config = {key: url.options[key] for key in ("endpoint", "region") if key in url.options}
            endpoints = [config.get("endpoint"), *map(os.environ.get, ENDPOINTS)]
            # an address of http:// is the user's decision
            client["allow_http"] = any((text or "").startswith("http://") for text in endpoints)
            return store.S3Store(url.place, **config, **common)
        if url.scheme == "gs":
            return store.GCSStore(url.place, **common)
        return store.AzureStore(url.place, **common)
    except Exception as error:  # obstore has no type for what a variable says wrong
        reason = floor_error(url, "open", error, seconds)
        raise FloorError(f"{reason} {CREDENTIALS[url.scheme]}") from error


class _MemoryStore:
    """An object that a weak reference can have, of this process's memory."""

    def __init__(self) -> None:
        from obstore.store import MemoryStore

        self.store = MemoryStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


_memories: WeakValueDictionary[str, _MemoryStore] = WeakValueDictionary()
_memories_lock = threading.Lock()


def _memory(name: str) -> _MemoryStore:
    """All floors of one name share it, as long as one of them is there."""
    with _memories_lock:
        memory = _memories.get(name)
        if memory is None:
            memory = _memories[name] = _MemoryStore()
        return memory


def _folder(url: FloorURL) -> Any:
    from obstore.store import LocalStore

    try:
        os.makedirs(url.path, exist_ok=True)
        if not os.access(url.path, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise FloorError(f"{url}: the folder cannot be used: {error.strerror}.") from error
    # folders of namespaces and chains that are deleted go too
    return LocalStore(url.path, automatic_cleanup=True)
