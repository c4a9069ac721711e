"""What rooms have read, compared with what prefill holds: digests of both sides, as a state machine
beside `disagg.protocol.decode`'s.
"""

from __future__ import annotations

from collections.abc import Callable

from disagg.digest.digest import pieces
from disagg.digest.digester import Verification, differences
from disagg.plan import TransferPlan
from disagg.protocol.decode_peers import Links
from disagg.protocol.decode_state import DecodeRoom
from disagg.protocol.messages import DigestRequest, Digests, Room
from disagg.protocol.status import Failure
from kvpool.layout import PoolLayout


class Comparisons:
    """Asks both sides for digests. Calls append to `checks`; `digested` is the answer.

    `passed(room name)` is called when a room holds what all its ranks hold, `failed(room name,
    failure)` where it does not, or where that cannot be told.
    """

    def __init__(
        self,
        links: Links,
        layout: PoolLayout,
        passed: Callable[[Room], None],
        failed: Callable[[Room, Failure], None],
        clock: Callable[[], float],
    ) -> None:
        self.checks: list[Verification] = []
        self._links, self._layout, self._clock = links, layout, clock
        self._passed, self._failed = passed, failed

    def begin(self, name: Room, room: DecodeRoom, plan: TransferPlan) -> None:
        """Asks for digests of all that a room has read, from every rank that contributed."""
        room.checks = {}
        now, total = self._clock(), room.address.num_tokens
        mine = self._layout, room.address
        for source in plan.contributors():
            given = pieces(plan, source, range(room.start, total), total)
            self._ask(room, Verification(name, room.attempt, source, *mine, given, now))

    def answered(self, room: DecodeRoom, source: int, message: Digests) -> None:
        """Takes a rank's digests."""
        check = room.checks.get(source) if room.checks else None
        if check is None or check.each != message.each or check.theirs is not None:
            return  # a duplicate
        if message.problem:
            reason = f"{room.link.name(source)} gives no digests: {message.problem}"
            self._failed(message.room, Failure("prefill", reason, "digest"))
            return
        check.theirs = message.values
        self._compare(room, check)

    def digested(
        self, room: DecodeRoom, check: Verification, values: bytes | None, problem: str
    ) -> None:
        """Takes this side's digests, or why there are none."""
        if values is None:
            self._failed(check.room, Failure("decode", problem, "digest"))
            return
        check.own = values
        self._compare(room, check)

    def _ask(self, room: DecodeRoom, check: Verification) -> None:
        hello = room.link.hellos[check.source]
        if not check.pieces or room.checks is None or hello is None:
            return
        room.checks[check.source] = check
        self.checks.append(check)
        asked = DigestRequest(hello.generation, check.room, check.attempt, check.each, check.wire())
        self._links.post(room.link, check.source, asked)

    def _compare(self, room: DecodeRoom, check: Verification) -> None:
        """Once both sides' digests are there: equal, or asked again entry by entry, or named."""
        if check.own is None or check.theirs is None or room.checks is None:
            return
        if check.own == check.theirs:
            del room.checks[check.source]
            room.metrics.verify_seconds += self._clock() - check.begun
            if not room.checks:
                self._passed(check.room)
            return
        finer, sentence = differences(check, room.link.name(check.source))
        if finer is not None:
            self._ask(room, finer)
        else:
            self._failed(check.room, Failure("decode", sentence, "digest"))
