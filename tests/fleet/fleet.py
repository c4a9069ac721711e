"""A fleet: engines, the rooms between them, what goes wrong, and what must hold all the same.

Real endpoints run in their own loop over an in-memory network, in virtual time. From one seed
follows one trace.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import get_args

import numpy as np

from disagg.plan import Group
from disagg.protocol import messages
from disagg.protocol.rooms.decode_room import DecodeRoom
from disagg.protocol.status import Failure, KVPoll
from tests.fleet.network import FIRST_SECOND, FleetNetwork, Line, Timeline
from tests.fleet.ranks import DecodeRank, FleetRoom, Part, PrefillRank, Rank
from tests.fleet.spec import MOST_TOKENS, PAGE, RESTART, Spec

MOST_BROKEN = 20
"""Broken promises that are listed."""
SIDES = {"prefill": PrefillRank, "decode": DecodeRank}
ABOUT_ROOMS = frozenset(
    str(kind.__struct_config__.tag)
    for kind in {*get_args(messages.ToPrefill), *get_args(messages.ToDecode)}
    if "room" in kind.__struct_fields__
)
"""Types of messages that name a room; the others are of a connection."""
NOT_DATA = (type, ModuleType, FunctionType, BuiltinFunctionType)


class Fleet:
    """Runs a spec once. `broken` lists what must not have happened.

    `seconds` are of virtual time, of which new rooms began in the first `busy_seconds`. `parts`
    count rooms of ranks by side and end, `failures` those that failed by side and kind. `peaks` are
    the most messages that waited for a rank's turn (`inbox`), rooms that were open, and rooms that
    waited for pages (`backlog`). `memory` has the bytes of one rank for each rank that it is
    connected with, and for each room that is over and not yet forgotten.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec, self.timeline = spec, Timeline()
        self.network = FleetNetwork(spec, self.timeline)
        self.routes, self._faults = (random.Random(f"{use} {spec.seed}") for use in "rf")
        self.layouts = {
            side: [spec.layout(side, rank) for rank in range(spec.tp(side))] for side in SIDES
        }
        ours = tuple(self.layouts["decode"])
        self.groups = [Group(ours, member) for member in range(len(ours))]
        self.alive: dict[str, Rank] = {}
        """By name: the generations that live."""
        self.broken: list[str] = []
        self.peaks: Counter[tuple[str, str]] = Counter()
        self.memory: dict[str, int] = {}
        self.parts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.open_prefill = self.failed = self.died = self._started = self._ended = 0
        self._seconds: list[float] = []
        self._last_began = FIRST_SECOND
        self._parked: list[int] = []
        self.engines = {
            side: [
                [self._rank(kind, engine, index, 0) for index in range(spec.tp(side))]
                for engine in range(spec.engines(side))
            ]
            for side, kind in SIDES.items()
        }
        # what ranks take up that have no peers
        self._alone = {
            side: footprint(engines[0][0].endpoint.machine.peers)
            for side, engines in self.engines.items()
        }
        deaths = sorted(self._faults.randrange(spec.rooms) for _ in range(spec.deaths))
        self._deaths = deaths[::-1]

    def run(self) -> Fleet:
        """Begins all rooms and waits until they have ended on both sides; raises RuntimeError if
        that takes longer than any time-out allows. What endpoints log as errors breaks a promise.
        """
        began, log, handler = time.process_time(), logging.getLogger("disagg"), logging.Handler()
        handler.setLevel(logging.ERROR)
        handler.emit = lambda record: self.check(False, record.getMessage())
        before, log.propagate = log.propagate, False
        log.addHandler(handler)
        try:
            self._run()
        finally:
            log.removeHandler(handler)
            log.propagate = before
        self.cpu_seconds = time.process_time() - began
        return self

    def _run(self) -> None:
        spec = self.spec
        for engine in range(spec.engines("decode")):
            for _ in range(spec.in_flight):
                self._start(engine)
        bounds = spec.lease, spec.offer_timeout, RESTART[1] * spec.peer_timeout
        most = 2 * (sum(bounds) + spec.peer_timeout) + 100 * spec.compute
        quiet, before = self.timeline.now, -1
        while self._started < spec.rooms or self._ended < self._started or self.open_prefill:
            self.timeline.step()
            if (done := sum(self.parts.values())) != before:
                quiet, before = self.timeline.now, done
            if self.timeline.now - quiet > most:
                raise RuntimeError(f"no room has ended for {most:g} s: {self._waiting()}")
        self.seconds = self.timeline.now - FIRST_SECOND
        self.busy_seconds = self._last_began - FIRST_SECOND
        self._settle(most)
        self._measure_peers()

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds and len(self.broken) < MOST_BROKEN:
            self.broken.append(otherwise)

    def peak(self, side: str, what: str, number: int) -> None:
        self.peaks[side, what] = max(self.peaks[side, what], number)

    def note_end(self, rank: Rank, part: Part, state: KVPoll, failure: Failure | None) -> None:
        number = part.room.number
        self.timeline.note(rank.name, number, state.name)
        self.parts[f"{rank.side} {state.name}"] += 1
        if f"{rank.side}_room" not in self.memory and 2 * number >= self.spec.rooms:
            room, shared = rank.endpoint.machine.rooms.by_name[number], set()
            if isinstance(room, DecodeRoom):
                footprint(room.link, shared)
            self.memory[f"{rank.side}_room"] = footprint(room, shared)
        if failure is not None:
            self.failures[f"{failure.side} {failure.kind}"] += 1
            faulty = self.spec.loss or self.spec.deaths
            self.check(bool(faulty), f"room {number} failed: {failure}")

    def part_over(self, room: FleetRoom) -> None:
        """A decode rank has nothing more to do with a room. After the last, the next begins."""
        room.parts -= 1
        if room.parts:
            return
        self._ended += 1
        self.failed += room.failed
        self._seconds.append(self.timeline.now - room.began)
        self.timeline.at(self.timeline.now, partial(self._start, room.decode))

    def _rank(self, kind: type[Rank], engine: int, index: int, life: int) -> Rank:
        rank = kind(self, engine, index, life)
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
        prefills, decodes = self.engines["prefill"], self.engines["decode"][decode]
        whole = [n for n, ranks in enumerate(prefills) if all(rank.alive for rank in ranks)]
        if not whole or not all(rank.alive for rank in decodes):
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
        for prefill in prefills[room.prefill]:
            prefill.admit(room)
        # some serving engines ask before prefill has computed, others afterwards
        asked = now + room.compute * self.routes.uniform(0, 1.5)
        for rank in decodes:
            self.timeline.at(asked, partial(self._ask, rank, room))

    def _ask(self, rank: Rank, room: FleetRoom) -> None:
        if rank.alive:
            rank.admit(room)
        else:
            self._dies_with(rank, room)

    def _dies_with(self, rank: Rank, room: FleetRoom) -> None:
        self.parts[f"{rank.side} died"] += 1
        if rank.side == "prefill":
            self.open_prefill -= 1
        else:
            room.failed = True
            self.part_over(room)

    def _kill(self) -> None:
        if not self.alive:
            return
        rank = self._faults.choice(list(self.alive.values()))
        self.died += 1
        rank.alive = False
        del self.alive[rank.name]
        self.timeline.note(rank.name, "dies")
        if rank.side == "prefill":
            del self.network.listeners[rank.address]
            dialled = [r for engine in self.engines["decode"] for r in engine if r.alive]
            lines = [c for r in dialled for c in r.transport.connections.values()]
            lines = [line for line in lines if line.address == rank.address]
        else:
            lines = rank.transport.connections.values()
        mine = [line for line in lines if isinstance(line, Line)]
        self.network.break_all(mine, gone=rank.side == "decode")
        for room in [*(part.room for part in rank.parts.values()), *rank.backlog]:
            self._dies_with(rank, room)
        away = self._faults.uniform(*RESTART) * self.spec.peer_timeout
        self.timeline.at(self.timeline.now + away, partial(self._restart, rank))

    def _restart(self, dead: Rank) -> None:
        rank = self._rank(type(dead), dead.engine, dead.index, dead.life + 1)
        self.engines[dead.side][dead.engine][dead.index] = rank
        self.timeline.note(dead.address, "is back")
        parked, self._parked = self._parked, []
        for engine in parked:
            self._start(engine)

    def _settle(self, seconds: float) -> None:
        """Waits until nothing is left that time-outs end, and checks that nothing is."""
        until = self.timeline.now + seconds
        while self.timeline.now < until and any(
            rank.endpoint.machine.rooms.open for rank in self.alive.values()
        ):
            self.timeline.step()
        for rank in self.alive.values():
            machine, leases = rank.endpoint.machine, rank.endpoint.leases()
            self.check(not machine.rooms.open, f"{rank.name}: rooms have not ended")
            left = any(leases.leased.values()) or any(leases.quarantined.values())
            self.check(not left, f"{rank.name}: pages are leased and no room is open")
            whole = len(rank.free) == self.spec.pages(rank.side) - 1
            self.check(whole and not rank.parts, f"{rank.name}: pages are not free")
        for side in SIDES:
            ended = sum(self.parts[f"{side} {how}"] for how in ("Success", "Failed", "died"))
            began = self.spec.tp(side) * self._started
            self.check(ended == began, f"{side}: {ended} rooms of ranks ended, {began} began")

    def _waiting(self) -> str:
        lines = [
            f"room {name} of {rank.name} waits for {rooms.known(name).waits_for}"
            for rank in self.alive.values()
            for rooms in [rank.endpoint.machine.rooms]
            for name in rooms.open
        ]
        return "; ".join(lines[:MOST_BROKEN]) or "none is open"

    def _measure_peers(self) -> None:
        """Of the ranks that have the most peers now."""
        for side in SIDES:
            mine = [r.endpoint.machine.peers for r in self.alive.values() if r.side == side]
            counts = [len(p.alive if side == "prefill" else p.by_number) for p in mine]
            most = int(np.argmax(counts))
            more = footprint(mine[most]) - self._alone[side]
            self.memory[f"{side}_peer"] = more // max(1, counts[most])

    # figures

    @property
    def decodes(self) -> list[Rank]:
        return [rank for rank in self.alive.values() if rank.side == "decode"]

    @property
    def links(self) -> int:
        """Pairs of a decode rank and a prefill rank that are connected in the end."""
        return sum(len(rank.links) for rank in self.decodes) * self.spec.prefill_tp

    @property
    def rooms_per_second(self) -> float:
        """In virtual time, while new rooms began: what ended then makes room for those."""
        first = self.spec.in_flight * self.spec.engines("decode")
        if self.spec.rooms <= first:
            return self.spec.rooms / self.seconds
        return (self.spec.rooms - first) / self.busy_seconds

    def per_room(self, counts: Counter[str], about_rooms: bool = True) -> float:
        """Messages or bytes for each room, of messages that name a room or of the others."""
        chosen = (n for tag, n in counts.items() if (tag in ABOUT_ROOMS) == about_rooms)
        return sum(chosen) / self.spec.rooms

    def room_seconds(self, part: float) -> float:
        """The time within which that part of the rooms ended."""
        ordered = sorted(self._seconds)
        return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def footprint(root: object, seen: set[int] | None = None) -> int:
    """Bytes of an object and of all data that can be reached from it, except what was seen."""
    seen = set() if seen is None else seen
    left, total = [root], 0
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, NOT_DATA):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        left.extend(gc.get_referents(value))
        if isinstance(value, np.ndarray) and value.base is not None:
            left.append(value.base)
    return total


def growth(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of log y over log x, by least squares: 1 is linear."""
    if len(xs) < 2 or min(*xs, *ys) <= 0:
        return math.nan
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])
