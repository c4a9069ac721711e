"""What a process offers to peers of its host over a unix socket, and how a peer receives it.

The kernel reports which process serves the socket, and passes open files along. A process or a file
that a peer only names is not trusted.
"""

from __future__ import annotations

import array
import logging
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec

from disagg.engines.base import TransferError
from disagg.engines.local.device import DeviceSegment
from disagg.engines.local.host import Segment
from disagg.host.unix_sockets import MAX_PATH, Credentials, new_path, peer_credentials
from kvpool.layout.types import MAX_INT

log = logging.getLogger("disagg")

LENGTH = struct.Struct(">I")
"""Comes before an offer's bytes."""
MAX_BYTES = 16 << 20
MAX_SEGMENTS = 1 << 16
MAX_FILES = 1024
FILES_PER_MESSAGE = 250
"""Linux passes at most 253."""
OFFER_SECONDS = 30.0
"""How long a peer may send nothing of its offer."""
MAX_READERS = 1024
RETRY_SECONDS = 1.0
"""Pause after an error, which may come again at once: no file can be opened, for instance."""
ENDED = "the peer's process has ended, or has closed its engine."
_PIECE = 1 << 16


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Registered memory. Host segments name the files that come with the offer by their index."""

    segments: list[Segment]
    devices: list[DeviceSegment]

    def check(self) -> None:
        """Raises TransferError if segments are too many, overlap or overflow."""
        parts: list[Segment | DeviceSegment] = [*self.segments, *self.devices]
        if len(parts) > MAX_SEGMENTS:
            raise TransferError(
                f"{len(parts)} segments of memory, at most {MAX_SEGMENTS} can be offered. Allocate "
                "fewer and larger tensors, or use engine nixl."
            )
        end = 0
        for part in sorted(parts, key=lambda part: part.base):
            if part.base < end or part.nbytes < 1 or part.base + part.nbytes > MAX_INT:
                raise TransferError(
                    f"malformed offer: {part.nbytes} bytes at {part.base:#x} overlap another "
                    "segment or overflow."
                )
            end = part.base + part.nbytes


class PeerConnection:
    """To the process `pid` that serves a peer's socket, as the kernel names it (0: it is in a
    process namespace out of sight). Once the offer is here nothing comes over it: while it is open
    and silent, `pid` is no other process.
    """

    def __init__(self, link: socket.socket, pid: int) -> None:
        self.link, self.pid = link, pid

    def close(self) -> None:
        """Hangs up."""
        self.link.close()


def dial(path: bytes) -> PeerConnection:
    """Connects to a peer's socket. Raises TransferError at once if no process serves it, or
    one of another user.
    """
    if not path.startswith(b"/") or b"\0" in path or len(path) > MAX_PATH:
        raise TransferError(
            f"malformed metadata: {path[: MAX_PATH + 1]!r} is no absolute path of at most "
            f"{MAX_PATH} bytes."
        )
    name = os.fsdecode(path)
    try:
        # a stranger's metadata must not lead to the sockets of other services
        folder = os.stat(os.path.dirname(path))
        _check_user(name, folder.st_uid)
        if folder.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TransferError(
                f"the peer's socket {name!r} lies in a folder that other users may open, which "
                "no socket of engine local does."
            )
        with ExitStack() as undo:
            link = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            link.setblocking(False)
            link.connect(path)
            peer = peer_credentials(link)
            _check_user(name, peer.uid)
            undo.pop_all()
    except OSError as error:
        raise TransferError(
            f"the peer's socket {name!r} cannot be reached ({error.strerror}): its process has "
            "ended, or the two processes do not see one folder. Give both the same "
            "XDG_RUNTIME_DIR or /tmp, or use engine nixl."
        ) from None
    return PeerConnection(link, peer.pid)


def _check_user(name: str, uid: int) -> None:
    if not Credentials(0, uid).trusted:
        raise TransferError(
            f"the peer's socket {name!r} is of user {uid}, this process runs as user "
            f"{os.geteuid()}: engine local reads memory of its own user only. Run both as one "
            "user, or use engine nixl."
        )


class IncomingOffer:
    """An offer on its way, and the files that have come with it."""

    def __init__(self, connection: PeerConnection) -> None:
        self.files: list[int] = []
        self._link = connection.link
        self._data = bytearray()
        self._deadline = time.monotonic() + OFFER_SECONDS

    def receive(self, wait: float) -> Offer | None:
        """The offer, once all of it is here; None if that takes more than `wait` seconds from now.

        Raises TransferError if it is malformed, or if nothing has come for OFFER_SECONDS and
        nothing is here now.
        """
        until = time.monotonic() + wait
        while (lacking := self._lacking()) > 0:
            left = min(until, self._deadline) - time.monotonic()
            self._link.settimeout(max(0.0, left))
            try:
                self._take(min(lacking, _PIECE))
                self._deadline = time.monotonic() + OFFER_SECONDS
            except (BlockingIOError, TimeoutError):
                left = 0.0
            except OSError as error:
                raise TransferError(f"the peer's offer was cut off ({error.strerror}).") from None
            if left <= 0 and self._lacking() > 0:
                if time.monotonic() < self._deadline:
                    return None
                raise TransferError(
                    f"the peer has not offered its memory within {OFFER_SECONDS:g} s: its process "
                    "is stopped, busy, or no peer."
                )
        try:
            offer = msgspec.msgpack.decode(memoryview(self._data)[LENGTH.size :], type=Offer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"malformed offer: {error}") from None
        offer.check()
        return offer

    def close(self) -> None:
        """Closes the files."""
        while self.files:
            os.close(self.files.pop())

    def _lacking(self) -> int:
        if len(self._data) < LENGTH.size:
            return LENGTH.size - len(self._data)
        (size,) = LENGTH.unpack_from(self._data)
        if size > MAX_BYTES:
            raise TransferError(f"malformed offer: {size} bytes, at most {MAX_BYTES} are read.")
        return LENGTH.size + int(size) - len(self._data)

    def _take(self, most: int) -> None:
        room = socket.CMSG_SPACE((FILES_PER_MESSAGE + 3) * array.array("i").itemsize)
        data, passed, flags, _ = self._link.recvmsg(most, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, numbers in passed:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.files.extend(array.array("i", numbers))
        if flags & socket.MSG_CTRUNC:
            raise TransferError(
                "the peer's files cannot be received: this process may open no more. Raise its "
                "limit (ulimit -n)."
            )
        if len(self.files) > MAX_FILES:
            raise TransferError(f"malformed offer: more than {MAX_FILES} files.")
        if not data:
            raise TransferError(ENDED)
        self._data += data


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
