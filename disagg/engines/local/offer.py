"""What a process offers to peers of its host, and how a peer receives it over a unix socket.

The kernel reports which process serves the socket, and passes open files along. A process or a file
that a peer only names is not trusted.
"""

from __future__ import annotations

import array
import os
import socket
import stat
import struct
import time
from contextlib import ExitStack

import msgspec

from disagg.engines.base import TransferError
from disagg.engines.local.device import DeviceSegment
from disagg.engines.local.host import Segment
from disagg.host.unix_sockets import MAX_PATH, Credentials, peer_credentials
from kvpool.layout.types import MAX_INT

LENGTH = struct.Struct(">I")
"""Comes before an offer's bytes."""
MAX_BYTES = 16 << 20
MAX_SEGMENTS = 1 << 16
MAX_FILES = 1024
FILES_PER_MESSAGE = 250
"""Linux passes at most 253."""
OFFER_SECONDS = 30.0
"""How long a peer may send nothing of its offer."""
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
