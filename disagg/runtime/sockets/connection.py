"""Messages as frames of one non-blocking stream: a length, then the message.

Memory is taken for what has arrived, never for what a length announces.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress
from itertools import islice

from disagg.host import brief
from disagg.protocol.effects import Peer
from disagg.protocol.messages import MAX_MESSAGE
from disagg.runtime.sockets.address import Dial

LENGTH = struct.Struct(">I")
MESSAGES_A_TURN = 1000
QUEUED = 100_000
"""Messages that wait for one peer before it is given up as one that does not read."""
MAX_UNSENT = 256 << 20
"""Bytes that wait for one peer."""
MAX_OPENING = 16
_OTHERS = (
    "ZeroMQ's greeting reads as such a length: are keys set on one side only? Or does that side "
    "run a kvpool so old that it used ZeroMQ without keys too? Run the same kvpool."
)
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_FRAMES_A_CALL = 64
_BRIEF_BYTES = 64 << 10


class Connection:
    """A stream to one peer. `dial` is what this side dials; None for a peer that has dialled in.

    `opening` is what was sent to a dialled peer that has not said anything yet. If it hangs up
    without a word, the next one who answers there gets it too.
    """

    __slots__ = (
        "age",
        "dial",
        "heard",
        "mask",
        "more",
        "opening",
        "peer",
        "problem",
        "stream",
        "unread",
        "unsent",
        "unsent_bytes",
        "up",
    )

    def __init__(self, peer: Peer, dial: Dial | None = None) -> None:
        self.peer, self.dial = peer, dial
        self.stream: socket.socket | None = None
        self.up = False
        """Whether the stream is connected."""
        self.heard = False
        """Whether a message has come."""
        self.problem: str | None = None
        """Why it has ended."""
        self.mask = 0
        """What epoll watches it for."""
        self.age = 0
        """Seconds for which a message is unfinished."""
        self.more = False
        """Whether `unread` may hold another whole message."""
        self.unread = bytearray()
        self.unsent: deque[bytes | memoryview] = deque()
        self.unsent_bytes = 0
        self.opening: list[bytes] | None = None if dial is None else []

    def send(self, data: bytes, *, later: bool = False) -> str | None:
        """Sends a message or queues it (`later`: in any case); returns what is wrong with the peer,
        if anything.
        """
        if self.problem is not None:
            return f"it cannot be reached: {self.problem}"
        frame: bytes | memoryview = (whole := LENGTH.pack(len(data)) + data)
        if len(self.unsent) >= QUEUED or self.unsent_bytes + len(frame) > MAX_UNSENT:
            waiting = f"{len(self.unsent):,} messages ({self.unsent_bytes:,} bytes)"
            return f"it does not read what is sent: {waiting} wait for it."
        if self.opening is not None:
            self.opening.append(whole)
            if len(self.opening) > MAX_OPENING:
                self.opening = None
        if self.stream is not None and self.up and not self.unsent and not later:
            try:
                frame = memoryview(whole)[brief.send(self.stream.fileno(), whole, _FLAGS) :]
            except BlockingIOError:
                pass
            except OSError:
                self._break(self.stream)
                return None
        if frame:
            self.unsent.append(frame)
            self.unsent_bytes += len(frame)
        return None

    def flush(self) -> None:
        """Sends what is queued, as far as the stream takes it."""
        if self.stream is None:
            return
        try:
            while self.unsent:
                frames = list(islice(self.unsent, _FRAMES_A_CALL))
                if self.unsent_bytes <= _BRIEF_BYTES:
                    sent = brief.send(self.stream.fileno(), b"".join(frames), _FLAGS)
                else:
                    sent = self.stream.sendmsg(frames, (), _FLAGS)
                self.unsent_bytes -= sent
                for frame in frames:
                    if sent < len(frame):
                        self.unsent[0] = memoryview(frame)[sent:]
                        break
                    sent -= len(self.unsent.popleft())
        except BlockingIOError:
            return
        except OSError:
            self._break(self.stream)

    def read(self, scratch: brief.Scratch) -> memoryview | None:
        """What has arrived, in `scratch`; None if nothing has. At the end it sets `problem`."""
        if self.stream is None:
            return None
        try:
            count = scratch.receive(self.stream.fileno(), _FLAGS)
        except BlockingIOError:
            return None
        except OSError as error:
            self.problem = f"its connection broke ({error.strerror})."
            return None
        if not count:
            self.problem = "its connection has ended."
            return None
        return scratch.view[:count]

    def take(self, data: memoryview) -> list[bytes]:
        """The messages that are complete with `data`, at most MESSAGES_A_TURN. Raises ValueError
        for a length that no message has, when all messages before it were taken.
        """
        if self.unread:
            self.unread += data
            with memoryview(self.unread) as view:
                found, at, self.more = _split(view)
            del self.unread[:at]
        else:
            found, at, self.more = _split(data)
            self.unread += data[at:]
        if found:
            self.heard, self.opening, self.age = True, None, 0
        return found

    def restart(self) -> None:
        """Prepares to dial again: the next stream begins as the last one did."""
        self.problem, self.up, self.more, self.age = None, False, False, 0
        self.unread.clear()
        self.unsent = deque(self.opening or ())
        self.unsent_bytes = sum(map(len, self.unsent))

    def _break(self, stream: socket.socket) -> None:
        """A message could not be sent: none may follow. What the peer said last is still read."""
        self.unsent.clear()
        self.unsent_bytes = 0
        with suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)


def _split(data: memoryview) -> tuple[list[bytes], int, bool]:
    """Whole messages, the bytes that they and their lengths take, and whether more may follow."""
    found: list[bytes] = []
    at, end = 0, len(data)
    while end - at >= LENGTH.size:
        if len(found) == MESSAGES_A_TURN:
            return found, at, True
        (size,) = LENGTH.unpack_from(data, at)
        if not 0 < size <= MAX_MESSAGE:
            if found:
                return found, at, True
            raise ValueError(
                f"it sent what is no message: a length of {size:,} bytes, where 1 to "
                f"{MAX_MESSAGE:,} are possible. {_OTHERS}"
            )
        start, stop = at + LENGTH.size, at + LENGTH.size + size
        if stop > end:
            break
        found.append(bytes(data[start:stop]))
        at = stop
    return found, at, False
