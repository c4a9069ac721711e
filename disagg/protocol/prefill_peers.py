"""The decodes that prefill serves: their handshakes, signs of life and loss. Part of
`PrefillMachine`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from disagg.protocol import messages
from disagg.protocol.effects import Effects
from disagg.protocol.liveness import Liveness
from disagg.protocol.messages import Hello, Message, Room, reason_text
from disagg.protocol.prefill_state import Decode
from disagg.protocol.status import Failure, FailureKind

KEPT_REFUSALS = 100
MAX_PEERS = 1024


class RoomMessage(NamedTuple):
    """A message about a room, from a decode that is served."""

    decode: Decode
    message: messages.ReadRequest | messages.DigestRequest | messages.ReadDone | messages.Abort


class LostPeer(NamedTuple):
    """A decode that is served no more: the rooms that it has asked for fail."""

    peer: bytes
    rooms: set[Room]
    failure: Failure


class PrefillPeers:
    """All decodes of one prefill endpoint, by connection."""

    def __init__(self, hello: Hello, effects: Effects, now: float) -> None:
        self.hello, self.alive = hello, dict[bytes, Decode]()
        self.refusals: deque[str] = deque(maxlen=KEPT_REFUSALS)
        self.liveness: Liveness[bytes] = Liveness(hello.timeout, now)
        self._effects = effects

    def receive(self, peer: bytes, message: Message, now: float) -> RoomMessage | LostPeer | None:
        """Handles what concerns no room; returns what does. Notes signs of life."""
        decode = self.alive.get(peer)
        if decode is not None:
            self.liveness.heard(peer, now)
        if isinstance(message, Hello):
            self._handshake(peer, message, now)
        elif isinstance(message, messages.Refuse):
            self.refusals.append(messages.join_reasons(message.reasons))
            return self._drop(peer, Failure("decode", reason_text(self.refusals[-1]), "refused"))
        elif not isinstance(message, messages.ToPrefill):
            return self.refuse(peer, f"{type(message).__name__} is not prefill's.")
        elif decode is None or message.generation != self.hello.generation:
            self._effects.send(peer, messages.UnknownPeer(message.generation))
        elif isinstance(message, messages.Ping):
            self._effects.send(peer, messages.Pong(message.generation))
        else:
            return RoomMessage(decode, message)
        return None

    def find_dead(self, now: float) -> list[LostPeer]:
        """Gives up decodes that have been silent too long."""
        reason = f"decode was silent for more than {self.hello.timeout:g} s."
        lost = [self.mark_dead(peer, reason) for peer in self.liveness.dead(now)]
        return [each for each in lost if each is not None]

    def refuse(self, peer: bytes, reason: str) -> LostPeer | None:
        """Drops a peer that breaks the protocol, and tells it why."""
        self._effects.send(peer, messages.Refuse([reason_text(reason, messages.MAX_TEXT)]))
        return self.mark_dead(peer, f"decode was refused: {reason}", "refused")

    def mark_dead(self, peer: bytes, reason: str, kind: FailureKind = "lost") -> LostPeer | None:
        """Drops a peer that cannot be reached any more."""
        return self._drop(peer, Failure("prefill", reason, kind))

    def notify_shutdown(self) -> None:
        """Tells every decode that this generation is over, so that none waits for a timeout."""
        for peer in self.alive:
            self._effects.send(peer, messages.UnknownPeer(self.hello.generation))

    def _handshake(self, peer: bytes, hello: Hello, now: float) -> None:
        reasons = messages.handshake_problems(self.hello, hello)
        if peer not in self.alive and len(self.alive) >= MAX_PEERS:
            reasons = [f"{MAX_PEERS} decodes are connected already."]
        if reasons:
            self._effects.send(peer, messages.Refuse(reasons))
            return
        self.alive.setdefault(peer, Decode(hello.generation))
        self.liveness.heard(peer, now)
        self._effects.send(peer, self.hello)

    def _drop(self, peer: bytes, failure: Failure) -> LostPeer | None:
        decode = self.alive.pop(peer, None)
        self.liveness.forget(peer)
        return None if decode is None else LostPeer(peer, decode.rooms, failure)
