"""A fleet: engines, the rooms between them, what goes wrong, and what must hold all the same.

Real endpoints run in their own loop over an in-memory network, in virtual time. From one seed
follows one trace.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

from disagg.plan import Group
from disagg.protocol.status import Failure, KVPoll
from tests.fleet.figures import Figures, quantile
from tests.fleet.memory import MemoryProbe
from tests.fleet.network import FIRST_SECOND, FleetNetwork, Line, Timeline, Trace
from tests.fleet.ranks import DecodeRank, FleetRoom, Part, Peaks, PrefillRank, Rank
from tests.fleet.spec import MOST_TOKENS, PAGE, RESTART, Spec

MOST_BROKEN = 20
"""Broken promises that are listed."""


class Fleet:
    """Runs a spec once. `broken` lists what must not have happened."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.timeline, self.trace = Timeline(), Trace()
        self.network = FleetNetwork(spec, self.timeline, self.trace)
        self.routes, self._faults = (random.Random(f"{use} {spec.seed}") for use in "rf")
        self.layouts = {
            side: [spec.layout(side, rank) for rank in range(tp)]
            for side, tp in (("prefill", spec.prefill_tp), ("decode", spec.decode_tp))
        }
        ours = tuple(self.layouts["decode"])
        self.groups = [Group(ours, member) for member in range(len(ours))]
        self.alive: dict[str, Rank] = {}
        """By name: the generations that live."""
        self.broken: list[str] = []
        self.peaks = {"prefill": Peaks(), "decode": Peaks()}
        self.open_prefill = 0
        self._started = self._ended = self._failed = self._died = 0
        self._parts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._last_began = FIRST_SECOND
        self._memory = MemoryProbe()
        self._parked: list[int] = []
        engines = spec.engines
        self.prefills = [
            [self._prefill(engine, index, 0) for index in range(spec.prefill_tp)]
            for engine in range(engines[0])
        ]
        self.decodes = [
            [self._decode(engine, index, 0) for index in range(spec.decode_tp)]
            for engine in range(engines[1])
        ]
        self._memory.begin(self.prefills[0][0], self.decodes[0][0])
        deaths = sorted(self._faults.randrange(spec.rooms) for _ in range(spec.deaths))
        self._deaths = deaths[::-1]

    def run(self) -> Figures:
        """Begins all rooms and waits until they have ended on both sides; raises RuntimeError if
        that takes longer than any time-out allows.
        """
        began = time.process_time()
        with _errors(partial(self.check, False)):
            seconds = self._run()
        return self._figures(seconds, time.process_time() - began)

    def _run(self) -> float:
        """Virtual seconds until all rooms have ended."""
        for engine in range(len(self.decodes)):
            for _ in range(self.spec.in_flight):
                self._start(engine)
        bounds = self.spec.lease, self.spec.offer_timeout, RESTART[1] * self.spec.peer_timeout
        most = 2 * (sum(bounds) + self.spec.peer_timeout) + 100 * self.spec.compute
        quiet, before = self.timeline.now, -1
        while not self._finished():
            self.timeline.step()
            if (done := sum(self._parts.values())) != before:
                quiet, before = self.timeline.now, done
            if self.timeline.now - quiet > most:
                raise RuntimeError(f"no room has ended for {most:g} s: {self._waiting()}")
        seconds = self.timeline.now - FIRST_SECOND
        self._settle(most)
        return seconds

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds and len(self.broken) < MOST_BROKEN:
            self.broken.append(otherwise)

    def note_end(self, rank: Rank, part: Part, state: KVPoll, failure: Failure | None) -> None:
        self.trace.note(self.timeline.now, rank.name, part.room.number, state.name)
        self._parts[f"{rank.side} {state.name}"] += 1
        self._memory.sample(rank, part.room.number, 2 * part.room.number >= self.spec.rooms)
        if failure is not None:
            self._failures[f"{failure.side} {failure.kind}"] += 1
            self.check(self.spec.faulty, f"room {part.room.number} failed: {failure}")

    def part_over(self, room: FleetRoom) -> None:
        """A decode rank has nothing more to do with a room. After the last, the next begins."""
        room.parts -= 1
        if room.parts:
            return
        self._ended += 1
        self._failed += room.failed
        self._seconds.append(self.timeline.now - room.began)
        self.timeline.at(self.timeline.now, partial(self._start, room.decode))

    def _finished(self) -> bool:
        ended = self._started == self.spec.rooms and self._ended == self._started
        return ended and not self.open_prefill

    def _prefill(self, engine: int, index: int, life: int) -> PrefillRank:
        rank = PrefillRank(self, engine, index, life)
        self.alive[rank.name] = rank
        return rank

    def _decode(self, engine: int, index: int, life: int) -> DecodeRank:
        rank = DecodeRank(self, engine, index, life)
        self.alive[rank.name] = rank
        return rank

    def _start(self, decode: int) -> None:
        """The next room of a decode engine, between engines all of whose ranks live."""
        spec, now = self.spec, self.timeline.now
        if self._started == spec.rooms:
            return
        while self._deaths and self._deaths[-1] <= self._started:
            self._deaths.pop()
            self._kill()
        whole = [n for n, ranks in enumerate(self.prefills) if all(rank.alive for rank in ranks)]
        if not whole or not all(rank.alive for rank in self.decodes[decode]):
            self._parked.append(decode)
            return
        pages = self.routes.expovariate(PAGE / spec.tokens)
        longest = max(1, MOST_TOKENS * spec.tokens // PAGE)
        room = FleetRoom(
            number=self._started,
            prefill=self.routes.choice(whole),
            decode=decode,
            tokens=PAGE * min(longest, 1 + int(pages)),
            compute=self.routes.expovariate(1) * spec.compute,
            began=now,
            parts=spec.decode_tp,
        )
        self._started += 1
        self._last_began = now
        self.open_prefill += spec.prefill_tp
        for prefill in self.prefills[room.prefill]:
            prefill.admit(room)
        # some serving engines ask before prefill has computed, others afterwards
        asked = now + room.compute * self.routes.uniform(0, 1.5)
        for rank in self.decodes[decode]:
            self.timeline.at(asked, partial(self._ask, rank, room))

    def _ask(self, rank: DecodeRank, room: FleetRoom) -> None:
        if rank.alive:
            rank.admit(room)
        else:
            self._dies_with(rank, room)

    def _dies_with(self, rank: Rank, room: FleetRoom) -> None:
        self._parts[f"{rank.side} died"] += 1
        if isinstance(rank, PrefillRank):
            self.open_prefill -= 1
        else:
            room.failed = True
            self.part_over(room)

    def _kill(self) -> None:
        if not self.alive:
            return
        rank = self._faults.choice(list(self.alive.values()))
        self._died += 1
        rank.alive = False
        del self.alive[rank.name]
        self._note_peaks(rank)
        self.trace.note(self.timeline.now, rank.name, "dies")
        if isinstance(rank, PrefillRank):
            del self.network.listeners[rank.address]
            ranks = [each for engine in self.decodes for each in engine if each.alive]
            connections = [c for each in ranks for c in each.transport.connections.values()]
            lines = [each for each in connections if each.address == rank.address]
        else:
            lines = list(rank.transport.connections.values())
        mine = [line for line in lines if isinstance(line, Line)]
        self.network.break_all(mine, gone=isinstance(rank, DecodeRank))
        for room in [*(part.room for part in rank.parts.values()), *rank.backlog]:
            self._dies_with(rank, room)
        away = self._faults.uniform(*RESTART) * self.spec.peer_timeout
        self.timeline.at(self.timeline.now + away, partial(self._restart, rank))

    def _restart(self, dead: Rank) -> None:
        where = dead.engine, dead.index, dead.life + 1
        if isinstance(dead, PrefillRank):
            self.prefills[dead.engine][dead.index] = self._prefill(*where)
        else:
            self.decodes[dead.engine][dead.index] = self._decode(*where)
        self.trace.note(self.timeline.now, dead.address, "is back")
        parked, self._parked = self._parked, []
        for engine in parked:
            self._start(engine)

    def _settle(self, seconds: float) -> None:
        """Waits until nothing is left that time-outs end, and checks that nothing is."""
        until = self.timeline.now + seconds
        while self.timeline.now < until and any(
            rank.endpoint.machine.open_rooms() for rank in self.alive.values()
        ):
            self.timeline.step()
        for rank in self.alive.values():
            machine, leases = rank.endpoint.machine, rank.endpoint.leases()
            self.check(not machine.open_rooms(), f"{rank.name}: rooms have not ended")
            left = any(leases.leased.values()) or any(leases.quarantined.values())
            self.check(not left, f"{rank.name}: pages are leased and no room is open")
            whole = len(rank.free) == self.spec.pages(rank.side) - 1
            self.check(whole and not rank.parts, f"{rank.name}: pages are not free")
            self._note_peaks(rank)
        tp = {"prefill": self.spec.prefill_tp, "decode": self.spec.decode_tp}
        for side, ranks in tp.items():
            ended = sum(self._parts[f"{side} {how}"] for how in ("Success", "Failed", "died"))
            what = f"{side}: {ended} rooms of ranks ended, {ranks * self._started} began"
            self.check(ended == ranks * self._started, what)

    def _note_peaks(self, rank: Rank) -> None:
        most, seen = self.peaks[rank.side], rank.peaks
        for name in Peaks.__slots__:
            setattr(most, name, max(getattr(most, name), getattr(seen, name)))

    def _figures(self, seconds: float, cpu_seconds: float) -> Figures:
        decodes = [rank for rank in self.alive.values() if isinstance(rank, DecodeRank)]
        plans = [rank.endpoint.machine.peers.plans for rank in decodes]
        return Figures(
            spec=self.spec,
            seconds=seconds,
            busy_seconds=self._last_began - FIRST_SECOND,
            cpu_seconds=cpu_seconds,
            failed=self._failed,
            died=self._died,
            parts=dict(sorted(self._parts.items())),
            failures=dict(sorted(self._failures.items())),
            room_seconds=(quantile(self._seconds, 0.5), quantile(self._seconds, 0.99)),
            sent=dict(sorted(self.network.sent.items())),
            nbytes=dict(sorted(self.network.nbytes.items())),
            lost=self.network.lost,
            links=sum(len(rank.links) for rank in decodes) * self.spec.prefill_tp,
            peaks={side: asdict(peaks) for side, peaks in self.peaks.items()},
            memory=self._memory.measured([*self.alive.values()]),
            plans=(sum(each.hits for each in plans), sum(each.misses for each in plans)),
            plan_seconds=sum(each.seconds for each in plans),
            trace=str(self.trace),
            broken=tuple(self.broken),
        )

    def _waiting(self) -> str:
        found = [
            f"room {name} of {rank.name} waits for {rank.endpoint.machine.room(name).waits_for}"
            for rank in self.alive.values()
            for name in rank.endpoint.machine.open_rooms()
        ]
        return "; ".join(found[:MOST_BROKEN]) or "none is open"


@contextmanager
def _errors(note: Callable[[str], None]) -> Iterator[None]:
    """Takes what endpoints log: errors are noted, and rooms that fail are counted elsewhere."""
    log, handler = logging.getLogger("disagg"), logging.Handler(logging.ERROR)
    handler.emit = lambda record: note(record.getMessage())  # type: ignore[method-assign]
    before, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before
