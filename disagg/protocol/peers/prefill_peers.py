"""The decodes that prefill serves: their handshakes, signs of life and loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from msgspec import structs

from disagg.log import log
from disagg.protocol import messages
from disagg.protocol.agreement import NO_REGION, handshake_kind, handshake_problems
from disagg.protocol.codec import Pair, layout_for, pairs_of, wanted_pairs
from disagg.protocol.events import Effects
from disagg.protocol.messages import Hello, Message, Room
from disagg.protocol.peers.counts import PeerCounts, RefusalKind
from disagg.protocol.peers.liveness import Latest, Liveness
from disagg.protocol.status import Failure
from disagg.protocol.versions import spoken
from kvpool.layout import PoolLayout
from kvpool.layout.types import MAX_REASON

KEPT_REFUSALS = 100
KEPT_HELLOS = 32
MAX_PEERS = 1024
MAX_GREETED = 4 * MAX_PEERS
"""So many connections are remembered to have an answered hello: the latest."""


@dataclass(slots=True)
class Decode:
    """A decode that has said hello: its generation, and the rooms that it has asked for."""

    generation: str
    rooms: set[Room] = field(default_factory=set)


_Shown = tuple[frozenset[Pair], frozenset[Pair], int]
"""What an answer shows: the pairs that both have, others, and the protocol that it speaks."""
OfServed = messages.ReadRequest | messages.DigestRequest | messages.ReadDone | messages.Abort
"""A message about a room, from a decode that is served."""


class PrefillPeers:
    """All decodes of one prefill endpoint, by connection."""

    def __init__(self, hello: Hello, layout: PoolLayout, effects: Effects, now: float) -> None:
        self.hello, self.alive = hello, dict[bytes, Decode]()
        self.refusals: deque[str] = deque(maxlen=KEPT_REFUSALS)
        self.counts = PeerCounts()
        self.liveness: Liveness[bytes] = Liveness(hello.timeout, now)
        self._effects, self._layout = effects, layout
        self._pairs = pairs_of(layout.regions)
        self._hellos: Latest[_Shown, Hello] = Latest(KEPT_HELLOS)
        self._greeted: Latest[bytes, None] = Latest(MAX_GREETED)

    def receive(
        self, peer: bytes, message: Message, now: float, origin: str = ""
    ) -> OfServed | messages.DropRoom | Failure | None:
        """Handles what concerns no room; returns what does, or why the peer is to be dropped."""
        decode = self.alive.get(peer)
        if decode is not None:
            self.liveness[peer] = now
        if problem := self._effects.excess(peer, message):
            return self.refuse(peer, problem)
        if isinstance(message, Hello):
            return self._handshake(peer, message, now, origin)
        if isinstance(message, messages.Refuse):
            self._note_refusal(message.why)
            self.counts.refuse("decode", ["told"])
            return Failure("decode", message.why[:MAX_REASON], "refused")
        if isinstance(message, messages.Disconnect):
            return Failure("decode", "decode has disconnected.", "abort")
        if isinstance(message, messages.DropRoom):
            return message
        if not isinstance(message, messages.ToPrefill):
            return self.refuse(peer, f"{type(message).__name__} is not prefill's.")
        if decode is None or message.generation != self.hello.generation:
            # a decode that was dropped learns it from the answer to its next ping, not by silence
            self._effects.send(peer, messages.UnknownPeer(generation=message.generation))
        elif isinstance(message, messages.Ping):
            self._effects.send(peer, messages.Pong(generation=message.generation))
        else:
            return message
        return None

    def refuse(self, peer: bytes, reason: str) -> Failure:
        """Tells a peer that breaks the protocol why it is to be dropped; it may come back."""
        self.counts.refuse("prefill", ["breach"])
        self._effects.send(peer, messages.Refuse([reason], final=False))
        return Failure("prefill", f"decode was refused: {reason}", "refused")

    def drop(self, peer: bytes) -> set[Room]:
        """Serves a peer no more, if it was served; returns the rooms that it has asked for."""
        self.liveness.pop(peer, None)
        self._effects.protocols.pop(peer, None)
        decode = self.alive.pop(peer, None)
        return decode.rooms if decode else set()

    def live(self) -> int:
        """Decodes that are served."""
        return len(self.alive)

    def notify_shutdown(self) -> None:
        """Tells every decode that this generation is over, so that none waits for a timeout."""
        for peer in self.alive:
            self.send_away(peer)

    def send_away(self, peer: bytes) -> None:
        """Tells a decode that it is served no more; it says hello again."""
        self._effects.send(peer, messages.UnknownPeer(generation=self.hello.generation))

    def renew(self, metadata: bytes) -> None:
        """From now on decodes are told this of the engine."""
        self.hello = structs.replace(self.hello, metadata=metadata)
        self._hellos.clear()

    def _handshake(self, peer: bytes, hello: Hello, now: float, origin: str) -> Failure | None:
        """Answers a connection's hello, once: the answer is hundreds of times as large."""
        decode = self.alive.get(peer)
        if decode is not None and decode.generation == hello.generation:
            return None  # a message that comes twice has no effect
        if peer in self._greeted:
            reason = "says hello over a connection whose hello was answered already. Connect again."
            return self.refuse(peer, f"generation {hello.generation!r} {reason}")
        speaks = hello.protocol in spoken(self.hello.protocol)
        own = structs.replace(self.hello, protocol=hello.protocol) if speaks else self.hello
        reasons = handshake_problems(own, hello, own)
        kind: RefusalKind = handshake_kind(own, hello) if reasons else "layout"
        final, answer = True, own
        try:
            if not reasons:
                answer = self._answer(wanted_pairs(hello.layout), own)
        except ValueError as error:
            reasons = [str(error)]
        if not reasons and len(self.alive) >= MAX_PEERS:
            reasons, final = [f"{MAX_PEERS} decodes are connected already."], False
            kind = "full"
        if reasons:
            self.counts.refuse("prefill", [kind])
            refusal = messages.Refuse(reasons, final)
            self._effects.send(peer, refusal)
            name = hello.generation or "of another version"
            self._note_refusal(f"decode {name}{origin and f' ({origin})'}: {refusal.why}")
            return None
        self.alive[peer] = Decode(hello.generation)
        self.liveness[peer] = now
        self._effects.protocols[peer] = hello.protocol
        self._effects.send(peer, answer)
        self._greeted[peer] = None
        return None

    def _note_refusal(self, reason: str) -> None:
        """Lists and logs why a decode cannot work with this prefill, once."""
        if reason not in self.refusals:
            self.refusals.append(reason)
            log.error("a decode engine cannot read from here: %s", reason[:MAX_REASON])

    def _answer(self, wanted: frozenset[Pair], own: Hello) -> Hello:
        """The hello for a decode that has regions of these pairs. If none of them is here, other
        ranks of prefill may hold all that decode needs: only its plan, over all ranks, can tell.
        Raises ValueError for a decode without any region, and for layouts that its protocol cannot
        say.
        """
        if not wanted:
            raise ValueError(NO_REGION)
        shared = wanted & self._pairs
        # an owner that decode may allow to be missing must be seen where prefill has it, and if
        # nothing is shared a refusal names what is here
        owners = {owner for owner, _ in shared}
        theirs = {owner for owner, _ in wanted}
        shown = frozenset(
            (owner, role)
            for owner, role in self._pairs
            if owner not in owners and (owner in theirs or not shared)
        )
        key = shared, shown, own.protocol
        answer = self._hellos.get(key)
        if answer is None:
            part = shared_part(self._layout, shared, shown)
            metadata = own.metadata if shared else b""  # no engine connects to this rank
            layout = layout_for(part, own.protocol)
            answer = structs.replace(own, layout=layout, metadata=metadata)
        self._hellos[key] = answer
        return answer


def shared_part(
    layout: PoolLayout, pairs: Collection[Pair], shown: Collection[Pair] = ()
) -> PoolLayout:
    """What a decode with regions of `pairs` needs of a layout: these regions of all layers, one of
    each pair of `shown`, their buffers and spaces. Other bytes are foreign then, not padding.
    """
    regions = [region for region in layout.regions if (region.owner, region.role) in pairs]
    first = {(region.owner, region.role): region for region in reversed(layout.regions)}
    regions += [first[pair] for pair in sorted(shown)]
    inside = {region.buffer for region in regions}
    cut = {region.buffer for region in set(layout.regions).difference(regions)}
    buffers = tuple(
        replace(buffer, padding=buffer.padding and buffer.name not in cut)
        for buffer in layout.buffers
        if buffer.name in inside
    )
    spaces = {layout.space_by_name[buffer.space] for buffer in buffers}
    lists = {space.name for space in spaces} | {space.id_list for space in spaces}
    return replace(
        layout,
        regions=tuple(regions),
        buffers=buffers,
        spaces=tuple(space for space in layout.spaces if space.name in lists),
    )
