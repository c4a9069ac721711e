"""`verify="checksum"`: digests of what a room has read, compared with prefill's."""

from __future__ import annotations

from disagg.digest.digest import from_wire, pieces
from disagg.digest.digester import Verification, differences
from disagg.plan import TransferPlan
from disagg.protocol.codec import MAX_MESSAGE
from disagg.protocol.effects import ComputeDigest, Effects
from disagg.protocol.messages import DigestRequest, Digests, Room
from disagg.protocol.rooms.decode_rooms import DecodeRoom
from disagg.protocol.rooms.prefill_rooms import PrefillRoom
from disagg.protocol.status import Failure, Side
from kvpool.layout import PoolLayout


class Comparisons:
    """Asks both sides for digests. A room's comparisons are in `room.checks` until they agree."""

    def __init__(self, layout: PoolLayout, effects: Effects) -> None:
        self._layout, self._effects = layout, effects

    def begin(self, name: Room, room: DecodeRoom, plan: TransferPlan, now: float) -> None:
        """Asks for digests of all that a room has read, from every rank that contributed."""
        total = room.address.num_tokens
        for source in plan.contributors():
            check = Verification(
                room=name,
                attempt=room.attempt,
                source=source,
                layout=self._layout,
                address=room.address,
                pieces=pieces(plan, source, range(room.start, total), total),
                begun=now,
            )
            self._ask(room, check)

    def answered(
        self, room: DecodeRoom, source: int, message: Digests, now: float
    ) -> Failure | None:
        """Takes a rank's digests; returns why the room fails, if it does."""
        check = room.checks.get(source)
        if check is None or check.each != message.each or check.theirs is not None:
            return None  # a duplicate
        check.theirs = message.values
        problem = message.problem
        if problem:
            problem = f"{room.link.ranks[source]} gives no digests: {problem}"
        return self._compare(room, check, "prefill", problem, now)

    def computed(
        self, room: DecodeRoom, check: Verification, values: bytes | None, problem: str, now: float
    ) -> Failure | None:
        """Takes this side's digests, or why there are none; returns why the room fails."""
        check.own = values
        return self._compare(room, check, "decode", problem, now)

    def _ask(self, room: DecodeRoom, check: Verification) -> None:
        rank = room.link.ranks[check.source]
        if not check.pieces or rank.hello is None:
            return
        room.checks[check.source] = check
        self._effects.append(
            ComputeDigest(check, check.address, pieces=check.pieces, each=check.each)
        )
        request = DigestRequest(
            generation=rank.hello.generation,
            room=check.room,
            attempt=check.attempt,
            each=check.each,
            pieces=check.wire(),
        )
        self._effects.send(rank.number, request)

    def _compare(
        self, room: DecodeRoom, check: Verification, side: Side, problem: str, now: float
    ) -> Failure | None:
        """Once both sides' digests are there: equal, asked again entry by entry, or a failure."""
        room.touched = now
        if problem:
            return Failure(side, problem, "digest")
        if check.own is None or check.theirs is None:
            return None
        if check.own == check.theirs:
            del room.checks[check.source]
            room.metrics.verify_seconds += now - check.begun
            return None
        finer, sentence = differences(check, str(room.link.ranks[check.source]))
        if finer is None:
            return Failure("decode", sentence, "digest")
        self._ask(room, finer)
        return None


class DigestAnswers:
    """Answers of prefill to requests for digests. `room.digested` are the peers that have asked,
    each with whether for one of each entry.
    """

    def __init__(self, layout: PoolLayout, effects: Effects) -> None:
        self._layout, self._effects = layout, effects

    def asked(self, peer: bytes, request: DigestRequest, room: PrefillRoom | None) -> str | None:
        """Takes a request about `room`, None where the peer's room is none. Returns what is wrong
        with the peer, if anything.
        """
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
        self._effects.append(ComputeDigest(key, room.addresses[-1], wanted, request.each))
        return None

    def answer(self, peer: bytes, request: DigestRequest, values: bytes, problem: str) -> None:
        """Sends the digests, or why there are none."""
        digests = request.answer(Digests, each=request.each, values=values, problem=problem)
        self._effects.send(peer, digests)
