"""One run: requests, a fault at a random point, and the checks afterwards."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.protocol.status import KVPoll
from tests.faults.orders import Course
from tests.faults.stock import MOST_TOKENS
from tests.faults.world import BOUND, PATIENCE, Late, Room, Violation, World, parts

ENOUGH = 0.4
"""Seconds after which the fault is injected even if its point was not reached."""
TOLD = 10.0
"""Seconds within which a decode that lives says that it was told of a failure."""
SLOW = ("was silent", "has not answered", "lease ended", "nothing has arrived")
"""Parts of failures that a starved process causes."""
GIVEN_UP = "it is no longer offered"
DECODE_POINTS = (
    *["read"] * 3,
    "read after",
    *("send ReadRequest", "take ChunkReady", "send ReadDone", "sent ReadDone", "take ReleaseAck"),
)
DIGEST_POINTS = ("send DigestRequest", "take Digests")
PREFILL_POINTS = (
    *("take ReadRequest", "send ChunkReady", "sent ChunkReady", "take DigestRequest"),
    *("send Digests", "take ReadDone", "send ReleaseAck", "sent ReleaseAck"),
)


@dataclass
class Outcome:
    """The result of one run. Times in seconds."""

    seed: int
    kind: str
    shape: str
    point: str = ""
    seconds: float = 0.0
    succeeded: int = 0
    failed: int = 0
    noticed: list[float] = field(default_factory=list)
    """From a death or stop to the end of each room on the other side."""
    quarantine: list[float] = field(default_factory=list)
    """From the end of a failed room on decode until its pages came back."""


@dataclass
class Run:
    """One run in a world whose processes are all up."""

    world: World
    outcome: Outcome
    random: random.Random
    victim: str
    rooms: list[Room] = field(default_factory=list)
    at: float = 0.0
    """When a process was killed, stopped or closed."""

    def ask_for(
        self, link: str | None = None, sink: str | None = None, name: str | None = None
    ) -> Room:
        pick, shape, course = self.random, self.world.shape, self.course()
        sinks = ["d0", "d1"] if shape.readers == 2 else [sink or pick.choice(("d0", "d1"))]
        room = self.world.order(link or pick.choice([*shape.links()]), sinks, course, name)
        self.rooms.append(room)
        return room

    def course(self) -> Course:
        pick = self.random
        tokens = pick.choice((1, 7, 40, 100, 160, MOST_TOKENS - 1))
        stops = sorted({pick.randrange(tokens) for _ in range(pick.randrange(4))} - {0})
        return Course(
            tokens=tokens,
            salt=pick.randrange(16),
            stops=tuple(stops),
            gap=pick.choice((0.0, 0.002, 0.02)),
            start=pick.choice((0, 0, pick.randrange(tokens))),
            offered=pick.choice((0.0, 0.0, 0.01, 0.03)),
            wanted=pick.choice((0.0, 0.0, 0.01, 0.03)),
        )

    def wave(self) -> None:
        """Several requests at once, at least one of them the victim's."""
        while not any(self.victim in room.who for room in self.rooms):
            self.ask_for()
        for _ in range(self.random.randrange(3, 7)):
            self.ask_for()

    def others(self) -> None:
        """All but the victim serve new requests at once."""
        shape = self.world.shape
        links = [name for name, who in shape.links().items() if self.victim not in who]
        sinks = [sink for sink in ("d0", "d1") if sink != self.victim]
        if links and len(sinks) >= shape.readers:
            rooms = [self.ask_for(link, sink) for link in links for sink in sinks]
            self.must_succeed(rooms)

    def strike(self, *order: object, signalled: int = 0) -> None:
        """Makes a wave and injects the fault, an order or a signal, at a random point."""
        world, pick, victim = self.world, self.random, self.victim
        own = {"d0": DECODE_POINTS + DIGEST_POINTS, "d1": DECODE_POINTS}.get(victim, PREFILL_POINTS)
        holder, point = victim, pick.choice(own)
        if signalled and victim[0] == "p" and pick.random() < 0.5:
            holder, point = pick.choice(("d0", "d1")), "read"
        reads = 80_000 // parts(world.shape.engine)[0]
        count = pick.randrange(1, reads) if point.startswith("read") else pick.randrange(1, 4)
        timed = pick.random() < 0.3
        world.tripped = None
        if order == ("close",):
            world.mortal.add(victim)
        if timed:
            self.outcome.point = "any time"
        elif signalled:
            world.trip(holder, point, count, victim, signalled)
        else:
            world.tell(holder, "trip_order", point, count, *order)
        self.wave()
        if timed:
            world.until(lambda: False, pick.uniform(0, 0.06))
        else:
            self.outcome.point = f"{holder} {point}"
            self._await_trip(holder)
            if world.tripped is None:
                self.wave()
                world.until(lambda: False, pick.uniform(0, 0.04))
        if world.tripped is None:
            self.outcome.point = "any time"
            if signalled:
                world.signal(victim, signalled)
            else:
                world.tell(victim, *order)
        if signalled or order == ("close",):
            self.at = world.tripped or time.monotonic()

    def _await_trip(self, holder: str) -> None:
        """Waits until the point is reached, or cannot be reached any more."""
        world, rooms, answer = self.world, self.rooms, (holder, "untrip")

        def met() -> bool:
            return world.tripped is not None

        world.until(lambda: met() or all(room.over() for room in rooms), ENOUGH)
        if not met():
            world.tell(holder, "untrip")
            world.until(lambda: met() or answer in world.answers, PATIENCE)
            if not world.answers.pop(answer, True):
                world.until(met, PATIENCE)

    def noticed(self, rooms: Sequence[Room]) -> None:
        """Every room of the victim has failed on the other side within the bound."""
        for room in rooms:
            for who, since in room.begun.items():
                since = max(self.at, since)
                at, state, reason = room.ended.get(who, (0.0, None, ""))
                ended = state is KVPoll.Failed and "not every reader was done" not in reason
                if who == self.victim or at < since or not (ended or len(room.sinks) == 1):
                    continue  # of two readers the victim may not have asked yet
                if at - since > BOUND:
                    raise Late(f"{who} noticed after {at - since:.1f} s: {room}")
                if state is KVPoll.Failed:
                    self.outcome.noticed.append(at - since)

    def settle(self) -> None:
        """Waits until all rooms end; those that one side has lost are aborted on the other, unless
        that has been told and says so soon.
        """
        world, until = self.world, time.monotonic() + PATIENCE
        while not world.until(lambda: all(room.over() for room in self.rooms), 0.3):
            now = time.monotonic()
            if now > until:
                stuck = [str(room) for room in self.rooms if not room.over()]
                raise Violation(f"not over after {PATIENCE:g} s: {stuck}")
            for room in self.rooms:
                waiting = {*room.sinks} - room.back.keys() - room.ended.keys()
                lost = now - max(self.at, self._lost_at(room))
                told = any(
                    who in room.begun and room.ended[who][1] is KVPoll.Failed
                    for who in room.ended.keys() - {*room.sinks}
                )
                if told and not self.at and len(room.sinks) == 1:
                    if waiting and lost > TOLD:
                        raise Violation(f"decode did not learn that it has failed: {room}")
                elif waiting and lost > BOUND:
                    for who in waiting:
                        world.tell(who, "abort", room.number, GIVEN_UP)

    def _lost_at(self, room: Room) -> float:
        """When the last prefill has given back the pages of a room; infinity before. One that was
        asked for alone is that of its name.
        """
        of = room if room.sources else next(each for each in self.rooms if each.name == room.name)
        if not of.back.keys() >= {*of.sources}:
            return math.inf
        return max(of.back[who] for who in of.sources)

    def must_succeed(self, rooms: Sequence[Room]) -> None:
        """Checks rooms that the fault does not affect."""
        self.world.until(lambda: all(room.over() for room in rooms), 10)
        for room in rooms:
            if not room.succeeded():
                raise unexpected(f"the fault does not affect {room}", room)

    def rejoin(self) -> None:
        """Every prefill serves every decode again."""
        shape = self.world.shape
        sinks = ["d0", "d1"][: 1 if shape.readers == 2 else 2]
        for link, prefills in shape.links().items():
            for sink in sinks:
                touched = self.victim in (*prefills, sink) or shape.readers == 2
                until = time.monotonic() + PATIENCE
                while True:
                    room = self.ask_for(link, sink)
                    self.settle()
                    if room.succeeded():
                        break
                    if not touched or time.monotonic() > until:
                        raise unexpected(f"the fault does not affect {room}", room)

    def check(self) -> None:
        for room in self.rooms:
            states = {who: state for who, (_, state, _) in room.ended.items()}
            won = [who for who in room.sinks if states.get(who) is KVPoll.Success]
            for who in room.sources:
                if states.get(who) is KVPoll.Success:
                    if any(room.done.get(sink) != 0 for sink in room.sinks):
                        raise Violation(f"{who} got ReadDone, {room.done} wrong bytes: {room}")
                elif won and who in states and len(room.sinks) == 1:
                    raise Violation(f"success on decode alone: {room}")
            if any(room.done.get(who) != 0 for who in won):
                raise Violation(f"success without ReadDone: {room}")
            for who in room.sinks:
                if states.get(who) is KVPoll.Failed:
                    self.outcome.quarantine.append(room.back[who] - room.ended[who][0])
            self.outcome.succeeded += room.succeeded()
            self.outcome.failed += not room.succeeded()
        self.world.check_pages()


def unexpected(what: str, *rooms: Room) -> Violation:
    """What must not happen to these rooms: Late if one of them was only slow."""
    slow = any(not room.over() or any(word in str(room) for word in SLOW) for room in rooms)
    return (Late if slow else Violation)(what)
