"""Serves an offer on a unix socket, to processes of this user."""

from __future__ import annotations

import array
import logging
import os
import selectors
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from disagg.engines.base import TransferError
from disagg.engines.local.offer import (
    FILES_PER_MESSAGE,
    LENGTH,
    MAX_BYTES,
    MAX_FILES,
    Offer,
)
from disagg.host.unix_sockets import new_path, peer_credentials

log = logging.getLogger("disagg")

MAX_READERS = 1024
RETRY_SECONDS = 1.0
"""Pause after an error, which may come again at once: no file can be opened, for instance."""


@dataclass(eq=False)
class OfferReader:
    """A connection, and what is still to be sent; it stays open as long as the reader."""

    connection: socket.socket
    left: memoryview
    files: Sequence[int]


class OfferServer:
    """Answers whoever dials `path` with an offer and its files. Its thread sleeps until then; the
    endpoint's loop has no part in it, so that both sides may be turned by one thread.

    An open connection shows the reader that this process lives.
    """

    def __init__(self, offer: Offer, files: Sequence[int]) -> None:
        """Raises TransferError if the offer is too large, or if there is no place for a socket."""
        offer.check()
        body = msgspec.msgpack.encode(offer)
        if len(files) > MAX_FILES or len(body) > MAX_BYTES:
            raise TransferError(
                f"memory in {len(files)} shared files, described in {len(body)} bytes: at most "
                f"{MAX_FILES} and {MAX_BYTES} can be offered. Allocate fewer and larger tensors, "
                "or use engine nixl."
            )
        self._data, self._files = LENGTH.pack(len(body)) + body, list(files)
        self._closing = threading.Event()
        self._denied: set[str] = set()
        # no epoll: its state would be shared with forked children
        self._selector = selectors.PollSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path = os.fsencode(new_path())
            self._listener.bind(self.path)
            self._listener.listen(MAX_READERS)
        except OSError as error:
            self._listener.close()
            raise TransferError(f"no socket can be made for peers: {error}") from None
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="OfferServer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and all connections, and removes the path."""
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self.abandon()
        with suppress(OSError):
            os.unlink(self.path)

    def abandon(self) -> None:
        """Closes this process's descriptors only. In a forked child the parent serves on."""
        for reader in self._readers():
            reader.connection.close()
        self._listener.close()
        self._selector.close()

    def _readers(self) -> list[OfferReader]:
        keys = list((self._selector.get_map() or {}).values())
        return [key.data for key in keys if key.data is not None]

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception:  # one reader's fault must not end what serves all
                if not self._closing.is_set():
                    log.exception("engine local: a peer could not be served")
                    self._closing.wait(RETRY_SECONDS)

    def _turn(self) -> None:
        for key, events in self._selector.select():
            if key.data is None:
                self._accept()
            elif events & selectors.EVENT_READ or not self._send(key.data):
                self._drop(key.data)  # it has gone: a reader never sends

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has gone
            return
        try:
            connection.setblocking(False)
            peer = peer_credentials(connection)
            problem = None
            if not peer.trusted:
                problem = f"user {peer.uid} asked for memory of user {os.geteuid()}"
            elif len(self._readers()) >= MAX_READERS:
                problem = f"more than {MAX_READERS} peers at once asked for memory"
            if problem is not None:
                self._deny(connection, problem)
                return
            reader = OfferReader(connection, memoryview(self._data), self._files)
            self._selector.register(connection, selectors.EVENT_WRITE, reader)
        except BaseException:
            connection.close()
            raise

    def _deny(self, connection: socket.socket, problem: str) -> None:
        connection.close()
        if problem not in self._denied:
            self._denied.add(problem)
            log.warning("engine local: %s, and was refused; this is said once.", problem)

    def _send(self, reader: OfferReader) -> bool:
        """Sends what the reader takes now; whether it is still there."""
        try:
            while reader.left:
                files = reader.files[:FILES_PER_MESSAGE]
                later = reader.files[FILES_PER_MESSAGE:]
                part = reader.left[:1] if later else reader.left
                passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
                sent = reader.connection.sendmsg(
                    [part], passed if files else [], socket.MSG_NOSIGNAL
                )
                reader.left, reader.files = reader.left[sent:], later
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        except OSError as error:
            log.warning("engine local: a peer could not be sent what it may read: %s", error)
            return False
        self._selector.modify(reader.connection, selectors.EVENT_READ, reader)
        return True

    def _drop(self, reader: OfferReader) -> None:
        self._selector.unregister(reader.connection)
        reader.connection.close()
