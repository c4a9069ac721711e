"""`verify="checksum"`: what was read, digested on both sides and compared.

First one digest for each region and range; where these differ, one for each of its entries, so that
the positions that differ can be named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from disagg.digest.digest import Piece, differing, from_wire, pieces, to_wire
from disagg.plan import TransferPlan
from disagg.protocol.codec import MAX_MESSAGE
from disagg.protocol.events import ComputeDigest, Effects
from disagg.protocol.messages import DigestRequest, Digests
from disagg.protocol.peers.link import PrefillRank
from disagg.protocol.status import Failure, Side
from kvpool.layout import PoolLayout

if TYPE_CHECKING:
    from disagg.protocol.rooms.decode_room import DecodeRoom
    from disagg.protocol.rooms.prefill_rooms import PrefillRoom

MAX_ENTRIES = 1 << 20
"""The most entries for which one comparison asks for digests one by one."""


@dataclass(eq=False, slots=True, kw_only=True)
class Verification:
    """What a room has read from one source rank, to be digested on both sides: little-endian
    uint64, one for each piece, or with `each` one for each of its entries.
    """

    room: DecodeRoom
    rank: PrefillRank
    pieces: list[Piece]
    begun: float
    each: bool = False
    own: bytes | None = None
    theirs: bytes | None = None


def differences(
    check: Verification, layout: PoolLayout, who: str
) -> tuple[Verification | None, str]:
    """Of digests that are not equal: a finer check, or a sentence that names what differs."""
    count = sum(piece.numbers().size if check.each else 1 for piece in check.pieces)
    sizes = [len(side or b"") for side in (check.own, check.theirs)]
    if sizes != 2 * [8 * count]:
        return None, f"{who} gave {sizes[1]} bytes of digests, here they are {sizes[0]}."
    own, theirs = (np.frombuffer(side or b"", dtype="<u8") for side in (check.own, check.theirs))
    if check.each:
        named = differing(check.pieces, own, theirs, layout)
        what = "\n".join(named) or "not by entry: its pages changed while they were compared."
        return None, f"what was read differs from what {who} holds: {what}"
    wrong = [check.pieces[number] for number in np.flatnonzero(own != theirs)]
    entries = np.cumsum([len(piece.entries) for piece in wrong])
    most = max(1, int(np.searchsorted(entries, MAX_ENTRIES, side="right")))
    return replace(check, pieces=wrong[:most], each=True, own=None, theirs=None), ""


class Comparisons:
    """Asks both sides for digests. A room's comparisons are in `room.checks` until they agree."""

    def __init__(self, layout: PoolLayout, effects: Effects) -> None:
        self._layout, self._effects = layout, effects

    def begin(self, room: DecodeRoom, plan: TransferPlan, now: float) -> None:
        """Asks for digests of all that a room has read, from every rank that contributed."""
        total = room.table.num_tokens
        for source in plan.contributors():
            parts = pieces(plan, source, range(room.start, total), total)
            if plan.cast is not None:
                parts += pieces(plan.cast.plan, source, range(room.start, total), total)
            rank = room.link.ranks[source]
            self._ask(Verification(room=room, rank=rank, pieces=parts, begun=now))

    def answered(self, room: DecodeRoom, source: int, reply: Digests, now: float) -> Failure | None:
        """Takes a rank's digests; returns why the room fails, if it does."""
        check = room.checks.get(source)
        if check is None or check.each != reply.each or check.theirs is not None:
            return None  # a duplicate
        check.theirs = reply.values
        problem = reply.problem and f"{check.rank} gives no digests: {reply.problem}"
        return self.compare(check, "prefill", problem, now)

    def _ask(self, check: Verification) -> None:
        room, rank = check.room, check.rank
        if not check.pieces or rank.hello is None:
            return
        room.checks[rank.source] = check
        arrived = room.arrived.get(rank.source)
        self._effects.append(
            ComputeDigest(
                key=check, table=room.table, pieces=check.pieces, each=check.each, arrived=arrived
            )
        )
        parts, generation = to_wire(check.pieces), rank.hello.generation
        request = room.message(DigestRequest, generation, each=check.each, pieces=parts)
        self._effects.send(rank.number, request)

    def compare(self, check: Verification, side: Side, problem: str, now: float) -> Failure | None:
        """Once both sides' digests are there: equal, asked again entry by entry, or a failure, as a
        `problem` of one side is.
        """
        room = check.room
        room.touched = now
        if problem:
            return Failure(side, problem, "digest")
        if check.own is None or check.theirs is None:
            return None
        if check.own == check.theirs:
            del room.checks[check.rank.source]
            room.metrics.verify_seconds += now - check.begun
            return None
        finer, sentence = differences(check, self._layout, str(check.rank))
        if finer is None:
            return Failure("decode", sentence, "digest")
        self._ask(finer)
        return None


class DigestAnswers:
    """Answers of prefill to requests for digests."""

    def __init__(self, layout: PoolLayout, effects: Effects) -> None:
        self._layout, self._effects = layout, effects

    def asked(self, peer: bytes, request: DigestRequest, room: PrefillRoom | None) -> str | None:
        """Takes a request about `room`, None if unknown; returns what is wrong with the peer."""
        if room is None or room.failure is not None or not room.whole or peer in room.done:
            self.answer(peer, request, b"", "the room's pages are not leased.")
            return None
        if (peer, request.each) in room.digested:
            return None  # a duplicate
        try:
            # a decode reads a region from one rank in one piece; starting a piece takes time
            wanted = from_wire(request.pieces, len(self._layout.regions))
        except ValueError as error:
            return str(error)
        if request.each and 16 * sum(len(piece.entries) for piece in wanted) > MAX_MESSAGE:
            most = f"{MAX_MESSAGE} bytes, the most of one message."
            self.answer(peer, request, b"", f"the digests are more than {most}")
            return None
        room.digested.add((peer, request.each))
        key = peer, request
        self._effects.append(ComputeDigest(key, room.tables[-1], wanted, request.each))
        return None

    def answer(self, peer: bytes, request: DigestRequest, values: bytes, problem: str) -> None:
        """Sends the digests, or why there are none."""
        digests = request.answer(Digests, each=request.each, values=values, problem=problem)
        self._effects.send(peer, digests)
