"""Mooncake's store client: made once for a floor, and what its numbers mean.

What Mooncake 0.3.13 does, each seen here:

- `setup` keeps the GIL until the master answers or MC_RPC_TIMEOUT_MS is over, so a master that is
  away or hangs is found before that, by a socket and by its HTTP server.
- A client reconnects by itself, and mounts its memory again at a master that has forgotten it.
- `close` keeps the GIL for one to three seconds. The calls that a floor makes let it go.
- Its transfers listen on all interfaces, with any address: a process that reaches those ports
  can read and write the memory that it offers.
"""

from __future__ import annotations

import http.client
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from disagg.engines.base import EngineUnavailable
from disagg.engines.mooncake.package import choose, package
from disagg.host.exits import ABANDONED_IN_CHILD, CLOSED_AT_EXIT, close_aside, keep_for_ever
from disagg.log import log
from disagg.store.floors.base import FloorError
from disagg.store.floors.url import FloorURL
from kvpool.extras import MissingExtra

RPC_VARIABLES = {
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}
"""Set unless the environment sets them, once for the process: Mooncake waits 30 seconds."""
CONNECT_SECONDS = 2.0
PAUSE_SECONDS = 1.0
"""After a master was not there, calls in this time fail as that one did, without asking."""
CLOSE_SECONDS = 15.0
HTTP_PORT = 9003
"""Of a master that is started without --metrics_port."""

FULL, NOT_READY, NOT_FOUND, EXISTS = -200, -703, -704, -705
INVALID = -600
WORDS = {
    -101: "no process offers memory",
    FULL: "no room in the memory that processes offer",
    INVALID: "invalid parameters",
    NOT_READY: "the object is being written",
    NOT_FOUND: "no such object",
    -707: "the lease ran out during the transfer",
    -714: "the object is being copied",
    -800: "the transfer failed: the process that offers the memory is gone, or hangs",
    -900: "the master is not there",
    -901: "the master does not answer",
}
"""Codes of Mooncake's `ErrorCode` (mooncake-store/include/types.h)."""


def words(code: int) -> str:
    """What a code says."""
    return f"{WORDS.get(code, 'Mooncake refuses')} (code {code})"


def store_module() -> Any:
    """Mooncake's `store` module. Raises MissingExtra with the command that installs it."""
    try:
        package()
        return importlib.import_module("mooncake.store")
    except EngineUnavailable as error:
        raise MissingExtra(f"A store at mooncake://: {error}", name="mooncake") from None


class MooncakeClient:
    """One client of a master, which connects at the first call."""

    def __init__(self, url: FloorURL) -> None:
        self._url, self._module = url, store_module()
        self._lock = threading.Condition()
        self._connecting = threading.Lock()
        self._client: Any = None
        self._staging: Any = None  # as long as the client knows its memory
        self._calls = 0
        self._closed = ""
        self._failed: tuple[float, FloorError] | None = None
        CLOSED_AT_EXIT.add(self)  # its threads must end before the interpreter does
        ABANDONED_IN_CHILD.add(self)

    @contextmanager
    def used(self, staging: Any) -> Iterator[Any]:
        """Mooncake's client, for one call; `close` waits for its end. Raises FloorError."""
        if self._client is None:
            with self._connecting:
                if self._client is None:
                    self._connect(staging)
        with self._lock:
            if self._closed:
                raise FloorError(f"{self._url}: {self._closed}.")
            client = self._client
            self._calls += 1
        try:
            yield client
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()

    def all_names(self) -> Iterator[str]:
        """Names of all objects, as the master's HTTP server tells them. Mooncake's client has no
        list.
        """
        with self._answer("/get_all_keys") as response:
            for line in response:
                yield line.decode("utf-8", "replace").rstrip("\n")

    def answer(self, path: str) -> bytes:
        """What the master's HTTP server answers. Raises FloorError."""
        with self._answer(path) as response:
            return response.read()

    def close(self) -> None:
        """Waits for calls; what would wait longer than CLOSE_SECONDS is left as it is."""
        with self._lock:
            self._closed = self._closed or "the store is closed"
            self._lock.wait_for(lambda: not self._calls, CLOSE_SECONDS)
            client, self._client = self._client, None
            busy = self._calls
        if client is None:
            return
        if busy:  # closing it under a call would crash
            log.warning("%s: a call of Mooncake does not end; its client stays open", self._url)
            keep_for_ever(client)
        else:
            client.close()

    drop = close

    def __del__(self) -> None:
        if getattr(self, "_client", None) is not None and not sys.is_finalizing():
            close_aside(self)

    def abandon(self) -> None:
        """A forked child has no thread of Mooncake's."""
        self._lock, self._connecting = threading.Condition(), threading.Lock()
        self._closed = "this store belongs to the process that forked this one: open another here"
        if self._client is not None:
            keep_for_ever(self._client)
            self._client = None

    def _connect(self, staging: Any) -> None:
        if self._closed:
            raise FloorError(f"{self._url}: {self._closed}.")
        if self._failed is not None and time.monotonic() < self._failed[0]:
            raise FloorError(str(self._failed[1]))
        try:
            self._client, self._staging = self._connected(staging), staging
        except FloorError as error:
            self._failed = time.monotonic() + PAUSE_SECONDS, error
            raise

    def _connected(self, staging: Any) -> Any:
        url, options = self._url, self._url.options
        address = self._own_address()
        self._check_health()
        for name, value in RPC_VARIABLES.items():
            os.environ.setdefault(name, value)
        protocol = options.get("protocol", "tcp")
        try:
            choose(protocol)
        except EngineUnavailable as error:
            raise FloorError(f"{url}: {error}") from None
        client = self._module.MooncakeDistributedStore()
        code = client.setup(
            local_hostname=address,
            metadata_server="P2PHANDSHAKE",
            global_segment_size=options.get("memory", 0),
            local_buffer_size=0,
            protocol=protocol,
            rdma_devices=options.get("device", ""),
            master_server_addr=f"{url.place}:{url.port}",
        )
        if not code:
            code = client.register_buffer(staging.address, staging.nbytes)
        if code:
            client.close()
            raise FloorError(
                f"{url}: Mooncake cannot join as {address} (code {code}). Set MC_LOG_LEVEL=INFO "
                "for the reason."
            )
        return client

    def _own_address(self) -> str:
        """The address at which the others reach this process, and whether the master is there."""
        url = self._url
        try:
            with socket.create_connection((url.place, url.port), CONNECT_SECONDS) as connection:
                return str(url.options.get("address") or connection.getsockname()[0])
        except OSError as error:
            raise FloorError(
                f"{url}: no mooncake_master at {url.place}:{url.port}: {error.strerror or error}. "
                "Start one: kvpool store serve."
            ) from error

    def _check_health(self) -> None:
        """Raises FloorError if the master hangs: it accepts connections, and does not answer."""
        try:
            self.answer("/health")
        except FloorError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise
            # its HTTP server may be elsewhere: lists need it, nothing else does

    @contextmanager
    def _answer(self, path: str) -> Iterator[http.client.HTTPResponse]:
        port = self._url.options.get("http", HTTP_PORT)
        place = f"{self._url.place}:{port}"
        connection = http.client.HTTPConnection(self._url.place, port, timeout=CONNECT_SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            if response.status != 200:
                raise FloorError(
                    f"{self._url}: the HTTP server at {place} answers {response.status} to "
                    f"{path.partition('?')[0]}. Is it the master's (--metrics_port)?"
                )
            yield response
        except TimeoutError as error:
            raise FloorError(
                f"{self._url}: the master's HTTP server at {place} does not answer."
            ) from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, FloorError):
                raise
            raise FloorError(
                f"{self._url}: the master's HTTP server at {place} cannot be read: {error}. Its "
                "port is --metrics_port of mooncake_master, and http= of the URL."
            ) from error
        finally:
            with suppress(OSError):
                connection.close()
