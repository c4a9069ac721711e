"""What a process offers to peers of its host over a unix socket, and how a peer receives it.

The kernel reports which process serves the socket, and passes open files along: the offer is one of
them, so that it comes in one message. A process or a file that a peer only names is not trusted.
"""

from __future__ import annotations

import array
import fcntl
import os
import selectors
import socket
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from disagg.engines.base import TransferError, decode_metadata
from disagg.engines.local.device import DeviceSegment
from disagg.engines.ranges import MAX_REGIONS, Ranges
from disagg.engines.shared_files import Segment, sealed_size
from disagg.host.unix_sockets import MAX_PATH, Credentials, new_path, peer_credentials
from disagg.log import log

MAX_BYTES = 16 << 20
MAX_FILES = 250
"""Linux passes at most 253, and the offer is a file too."""
MAX_READERS = 1024
RETRY_SECONDS = 1.0
"""Pause after an error, which may come again at once: no file can be opened, for instance."""
ENDED = "the peer's process has ended, or has closed its engine."
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Registered memory. Host segments name the files that come with the offer by their index."""

    segments: list[Segment]
    devices: list[DeviceSegment]

    def ranges(self) -> Ranges:
        """Where segments lie. Raises TransferError if they are too many, overlap or overflow."""
        parts: list[Segment | DeviceSegment] = [*self.segments, *self.devices]
        if len(parts) > MAX_REGIONS:
            raise TransferError(
                f"{len(parts)} segments of memory, at most {MAX_REGIONS} can be offered. Allocate "
                "fewer and larger tensors, or use engine nixl."
            )
        try:
            return Ranges.of((part.base, part.nbytes) for part in parts)
        except ValueError as error:
            raise TransferError(f"malformed offer: {error}") from None


def dial(path: bytes) -> tuple[socket.socket, int]:
    """A connection to a peer's socket, and which process serves it, as the kernel names it (0: it
    is in a process namespace out of sight). Once the offer is here nothing comes over it: while it
    is open and silent, that number is of no other process.

    Raises TransferError at once if no process serves the socket, or one of another user.
    """
    if not path.startswith(b"/") or b"\0" in path or len(path) > MAX_PATH:
        raise TransferError(
            f"malformed metadata: {path[: MAX_PATH + 1]!r} is no absolute path of at most "
            f"{MAX_PATH} bytes."
        )
    name = os.fsdecode(path)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # a stranger's metadata must not lead to the sockets of other services
        folder = os.stat(os.path.dirname(path))
        _check_user(name, folder.st_uid)
        if folder.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TransferError(
                f"the peer's socket {name!r} lies in a folder that other users may open, which "
                "no socket of engine local does."
            )
        link.setblocking(False)
        link.connect(path)
        process = peer_credentials(link)
        _check_user(name, process.uid)
    except OSError as error:
        link.close()
        raise TransferError(
            f"the peer's socket {name!r} cannot be reached ({error.strerror}): its process has "
            "ended, or the two processes do not see one folder. Give both the same "
            "XDG_RUNTIME_DIR or /tmp, or use engine nixl."
        ) from None
    except TransferError:
        link.close()
        raise
    return link, process.pid


def _check_user(name: str, uid: int) -> None:
    if not Credentials(0, uid).trusted:
        raise TransferError(
            f"the peer's socket {name!r} is of user {uid}, this process runs as user "
            f"{os.geteuid()}: engine local reads memory of its own user only. Run both as one "
            "user, or use engine nixl."
        )


def receive_files(link: socket.socket, wait: float) -> list[int] | None:
    """The files that a peer passes: its offer, and those that the offer names. The caller closes
    them. None if they have not come within `wait` seconds. Raises TransferError.
    """
    link.settimeout(wait)
    files = array.array("i")
    room = socket.CMSG_LEN((MAX_FILES + 1) * files.itemsize)
    try:
        data, passed, flags, _ = link.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    except (BlockingIOError, TimeoutError):
        return None
    except OSError as error:
        raise TransferError(f"the peer's offer was cut off ({error.strerror}).") from None
    for level, kind, numbers in passed:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(numbers)
    problem = None
    if flags & socket.MSG_CTRUNC:
        problem = (
            f"the peer's files cannot be received: they are more than {MAX_FILES}, or this process "
            "may open no more. Raise its limit (ulimit -n)."
        )
    elif not data:
        problem = ENDED
    elif not files:
        problem = "malformed offer: no file came."
    if problem is not None:
        for file in files:
            os.close(file)
        raise TransferError(problem)
    return files.tolist()


def read_offer(file: int) -> Offer:
    """The offer in a peer's file (untrusted). Raises TransferError."""
    size = sealed_size(file)
    if size > MAX_BYTES:
        raise TransferError(f"malformed offer: {size} bytes, at most {MAX_BYTES} are read.")
    return decode_metadata(os.pread(file, size, 0), Offer, "offer")


class OfferServer:
    """Passes an offer and its files to peers that dial `path`. Its thread sleeps until then; the
    endpoint's loop has no part in it, so that both sides may be turned by one thread.

    An open connection shows the reader that this process lives.
    """

    def __init__(self, offer: Offer, files: Sequence[int]) -> None:
        """Raises TransferError if the offer is too large, or if there is no place for a socket."""
        offer.ranges()
        body = msgspec.msgpack.encode(offer)
        if len(files) > MAX_FILES or len(body) > MAX_BYTES:
            raise TransferError(
                f"memory in {len(files)} shared files, described in {len(body)} bytes: at most "
                f"{MAX_FILES} and {MAX_BYTES} can be offered. Allocate fewer and larger tensors, "
                "or use engine nixl."
            )
        self._closing = threading.Event()
        self._denied: set[str] = set()
        # no epoll: its state would be shared with forked children
        self._selector = selectors.PollSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path = os.fsencode(new_path())
            self._listener.bind(self.path)
            self._listener.listen(MAX_READERS)
            self._body = os.memfd_create("offer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            self._listener.close()
            raise TransferError(f"no socket can be made for peers: {error}") from None
        os.write(self._body, body)
        fcntl.fcntl(self._body, fcntl.F_ADD_SEALS, SEALS)
        self._rights = array.array("i", [self._body, *files])
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
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        os.close(self._body)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                for key, _ in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    else:  # it has gone: a reader never sends
                        self._selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
            except Exception:  # one reader's fault must not end what serves all
                if not self._closing.is_set():
                    log.exception("engine local: a peer could not be served")
                    self._closing.wait(RETRY_SECONDS)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has gone
            return
        try:
            problem = self._problem(connection)
            if problem is None:
                # one byte and the files fit, or the system passes no more files
                connection.setblocking(False)
                rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, self._rights
                # registered first: a child forked once the peer has its files must close it too
                self._selector.register(connection, selectors.EVENT_READ)
                try:
                    connection.sendmsg([b"\0"], [rights], socket.MSG_NOSIGNAL)
                except OSError:
                    self._selector.unregister(connection)
                    raise
                return
        except ConnectionError:  # it has gone
            problem = None
        except OSError as error:
            problem = f"a peer could not be sent what it may read ({error})"
        connection.close()
        if problem is not None and problem not in self._denied:
            self._denied.add(problem)
            log.warning("engine local refused a peer (logged once): %s.", problem)

    def _problem(self, connection: socket.socket) -> str | None:
        """Why a peer is offered nothing."""
        peer = peer_credentials(connection)
        if not peer.trusted:
            return f"user {peer.uid} asked for memory of user {os.geteuid()}"
        if len(self._selector.get_map()) > MAX_READERS:
            return f"more than {MAX_READERS} peers at once asked for memory"
        return None
