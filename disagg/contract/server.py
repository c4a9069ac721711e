"""A contract over HTTP: `GET /contract`, `/labels` and `/healthz`, by threads that serve nothing
else.

Answers are made once; `/healthz` has another, with status 503, from `drain` on. Of a request the
head is read, within bounds of bytes and seconds, and never a body; at most `MAX_READERS` are
answered at once.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

from disagg.contract.contract import Contract
from disagg.contract.labelling import labels
from disagg.runtime.sockets.address import tcp_text
from disagg.runtime.sockets.listen_address import ListenAddress

MAX_READERS = 8
MAX_HEAD = 8 << 10
HEAD_SECONDS = 5.0
ANSWER_SECONDS = 30.0
CLOSE_SECONDS = 0.05
"""After which a server that waits for clients notices that it is closed."""


class ContractServer(AbstractContextManager["ContractServer"]):
    """Serves until it is closed. `place` is HOST:PORT; `offset` is added to a port that is not `*`,
    so that the ranks of an engine can be given one place. `address` is where it listens.

    Raises ValueError for a place that cannot be used.
    """

    def __init__(self, place: str, contract: Contract, offset: int = 0) -> None:
        answers = {
            "/contract": ("application/json", contract.to_json()),
            "/labels": ("application/json", json.dumps(labels(contract))),
            "/healthz": ("text/plain", "ok\n"),
        }
        try:
            listen = ListenAddress.parse(f"tcp://{place}")
            if listen.first != listen.last:
                raise ValueError("it names several ports")
            address = replace(listen, by_rank=listen.first > 0).of_rank(offset)
            family, socket_address = address.places()[0]
            self._server = _HTTPServer(
                family, (socket_address[0], address.first, *socket_address[2:])
            )
        except (OSError, ValueError) as error:  # no name is a UnicodeError, a ValueError
            raise ValueError(
                f"contract at {place}: {error}. Give HOST:PORT of this host."
            ) from None
        self._server.answers = {
            path: (kind, text.encode()) for path, (kind, text) in answers.items()
        }
        self.address = tcp_text(self._server.socket.getsockname()).removeprefix("tcp://")
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSE_SECONDS,), name="contract", daemon=True
        )
        self._thread.start()

    def drain(self) -> None:
        """The engine takes no new requests any more: `/healthz` says so."""
        self._server.unhealthy = b"draining\n"

    def close(self) -> None:
        self.drain()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    answers: dict[str, tuple[str, bytes]]
    unhealthy: bytes | None = None

    def __init__(self, family: socket.AddressFamily, place: Any) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(MAX_READERS)
        super().__init__(place, _ContractHandler)

    def server_bind(self) -> None:
        # HTTPServer asks a name server for this host's name, which takes long where there is none
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread for it
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has gone or is silent needs no report."""


class _ContractHandler(BaseHTTPRequestHandler):
    server: _HTTPServer
    server_version, sys_version = "kvpool", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = BytesIO(_head(self.connection))
        self.connection.settimeout(ANSWER_SECONDS)  # of `sendall`, in all

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answer = self.server.answers.get(path)
        if answer is None:
            self.send_error(404)
            return
        (kind, data), unhealthy = answer, self.server.unhealthy
        if path != "/healthz" or unhealthy is None:
            self.send_response(200)
        else:
            data = unhealthy
            self.send_response(503)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Not a line for each request."""


def _head(connection: socket.socket) -> bytes:
    """A request up to its empty line. Raises OSError where it is too long or takes too long."""
    data, deadline = b"", time.monotonic() + HEAD_SECONDS
    while b"\r\n\r\n" not in data and b"\n\n" not in data:
        left = deadline - time.monotonic()
        if left <= 0 or len(data) >= MAX_HEAD:
            raise TimeoutError("no request came.")
        connection.settimeout(left)
        more = connection.recv(MAX_HEAD - len(data))
        if not more:
            break
        data += more
    return data
