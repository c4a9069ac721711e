"""Whom prefill serves: greeting, signs of life and loss of decodes, as a state machine; no
sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from disagg.protocol.liveness import Silence
from disagg.protocol.messages import (
    MAX_TEXT,
    Abort,
    DigestRequest,
    Hello,
    Message,
    Ping,
    Pong,
    ReadDone,
    ReadRequest,
    Refuse,
    Room,
    UnknownPeer,
    greeting_problems,
    joined,
    reason_text,
)
from disagg.protocol.prefill_state import Decode, Peer
from disagg.protocol.status import Failure, Kind

KEPT_REFUSALS = 100
MAX_PEERS = 1024


class Decodes:
    """All decodes of one prefill endpoint, by connection. What is to be said goes to `post(peer,
    message)`; `gone(peer, rooms that it wants, failure)` is called when one is served no more.
    """

    def __init__(
        self,
        hello: Hello,
        post: Callable[[Peer, Message], None],
        gone: Callable[[Peer, set[Room], Failure], None],
        clock: Callable[[], float],
    ) -> None:
        self.hello, self.alive = hello, dict[Peer, Decode]()
        self.refusals: deque[str] = deque(maxlen=KEPT_REFUSALS)
        self._post, self._gone, self._clock = post, gone, clock
        self._silence: Silence[Peer] = Silence(hello.timeout, clock())

    def receive(
        self, peer: Peer, message: Message
    ) -> tuple[Decode, ReadRequest | DigestRequest | ReadDone | Abort] | None:
        """Takes what concerns no room; returns what does, and whose it is. Notes signs of life."""
        decode = self.alive.get(peer)
        if decode is not None:
            self._silence.heard(peer, self._clock())
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif isinstance(message, Refuse):
            self.refusals.append(joined(message.reasons))
            self._drop(peer, Failure("decode", reason_text(self.refusals[-1]), "refused"))
        elif not isinstance(message, (Ping, ReadRequest, DigestRequest, ReadDone, Abort)):
            self.refuse(peer, f"{type(message).__name__} is not prefill's.")
        elif decode is None or message.generation != self.hello.generation:
            self._post(peer, UnknownPeer(message.generation))
        elif isinstance(message, Ping):
            self._post(peer, Pong(message.generation))
        else:
            return decode, message
        return None

    def look(self, now: float) -> None:
        """Gives up those that have been silent too long."""
        for peer in self._silence.dead(now):
            self.lost(peer, f"decode was silent for more than {self.hello.timeout:g} s.")

    def refuse(self, peer: Peer, reason: str) -> None:
        """Drops a peer that does not keep the protocol, and tells it why."""
        self._post(peer, Refuse([reason_text(reason, MAX_TEXT)]))
        self.lost(peer, f"decode was refused: {reason}", "refused")

    def lost(self, peer: Peer, reason: str, kind: Kind = "lost") -> None:
        """A peer cannot be reached any more."""
        if peer in self.alive:
            self._drop(peer, Failure("prefill", reason, kind))

    def farewell(self) -> None:
        """Tells all that this life is over, so that none waits for a time-out."""
        for peer in self.alive:
            self._post(peer, UnknownPeer(self.hello.generation))

    def _greet(self, peer: Peer, hello: Hello) -> None:
        reasons = greeting_problems(self.hello, hello)
        if peer not in self.alive and len(self.alive) >= MAX_PEERS:
            reasons = [f"{MAX_PEERS} decodes are connected already."]
        if reasons:
            self._post(peer, Refuse(reasons))
            return
        self.alive.setdefault(peer, Decode(hello.generation))
        self._silence.heard(peer, self._clock())
        self._post(peer, self.hello)

    def _drop(self, peer: Peer, failure: Failure) -> None:
        decode = self.alive.pop(peer, None)
        self._silence.forget(peer)
        if decode is not None:
            self._gone(peer, decode.rooms, failure)
