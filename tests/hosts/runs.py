"""Seeded runs: several rooms at once, a link that fails at a point that the seed chooses, and the
checks of `tests.faults` afterwards.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import product

from tests.faults.orders import Course
from tests.faults.run import unexpected
from tests.faults.world import PATIENCE, Late, Room, Violation
from tests.faults.worlds import REPEATS
from tests.hosts.links import ENGINES, FENCE, SLACK, WAYS, Link, joined, others_go_on, recovers
from tests.hosts.world import WHOLE, HostWorld

LIMITS = {"peer_timeout": 2.0, "lease": 6.0, "read_timeout": 4.0, "offer_timeout": 9.0}
"""So short that each is met. What waits on prefill for the pages of a lease is offered in time."""
OVER = LIMITS["offer_timeout"] + LIMITS["peer_timeout"] + FENCE + SLACK
"""Seconds after which every room has ended, and its pages are back."""
SECONDS = 0.3, 1.0, 3.0, 8.0
"""For which a link is down."""
VANISHES = "vanishes"
PREFILLS, DECODES = ("p0", "p1"), ("d0", "d1")


class Runs:
    """Makes runs; the hosts of an engine live until a run of another engine, or one that failed."""

    def __init__(self) -> None:
        self._context: AbstractContextManager[HostWorld] | None = None
        self._engine, self._world = "", None

    def run(self, seed: int) -> str:
        """Makes one run, and says how it went. One in which something was only late, which a
        starved machine can also cause, is repeated. Raises Violation.
        """
        for _ in range(REPEATS):
            try:
                return self._once(seed)
            except Late as late:
                print(f"late, and repeated: {late}", file=sys.stderr, flush=True)
        return self._once(seed)

    def _once(self, seed: int) -> str:
        engine = ENGINES[seed // 10 % len(ENGINES)]
        if engine != self._engine or self._context is None:
            self.close()
            self._context, self._engine = joined(engine, **LIMITS), engine
            self._world = self._context.__enter__()
        try:
            return one(self._world, engine, random.Random(seed))
        except AssertionError as broken:
            context, self._context = self._context, None
            context.__exit__(type(broken), broken, broken.__traceback__)
            kind = Late if isinstance(broken, Late) else Violation
            raise kind(f"seed {seed} over {engine}: {broken}") from broken

    def close(self) -> None:
        """Ends the processes, each of which must end well, and the hosts."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


def one(world: HostWorld, engine: str, pick: random.Random) -> str:
    """One run."""
    victim = pick.choice((*PREFILLS, *DECODES))
    way, seconds = pick.choice((*WAYS, VANISHES)), pick.choice(SECONDS)
    pairs = [pair for pair in product(PREFILLS, DECODES) if victim in pair]
    own = world.midway(*pick.choice(pairs), WHOLE, pick.randrange(1, 30))
    rooms = [own, *(_ordered(world, pick) for _ in range(pick.randrange(2, 6)))]
    world.until(lambda: False, pick.uniform(0, 0.2))
    link = Link(world.network, world.host(victim))
    if way == VANISHES:
        world.mortal.add(victim)
        world.network.vanish(link.host)
        world.bury(victim)
    else:
        link.cut(way)
    whole = [room for room in rooms if victim not in room.who]
    others_go_on(world, [p for p in PREFILLS if p != victim], [d for d in DECODES if d != victim])
    world.until(lambda: False, seconds)
    if way == VANISHES:
        world.network.boot(link.host)
        link.mend("both ways")
        world.ensure()
    else:
        link.mend(way)
    over = partial(_all_over, rooms)
    if not world.until(over, OVER):
        late = world.until(over, PATIENCE)
        raise (Late if late else Violation)(f"not over: {[*map(str, rooms)]}")
    for room in whole:
        if not room.succeeded():
            raise unexpected(f"it does not use the link: {room}", room)
    for prefill in PREFILLS:
        recovers(world, prefill)
    right = sum(room.succeeded() for room in rooms)
    reasons = {r for room in rooms for _, _, r in room.ended.values() if r}
    how = f"{engine} {victim} {way} {seconds:g} s: {right} of {len(rooms)} rooms right"
    return "\n    ".join((how, *sorted(reasons)))


def _all_over(rooms: Sequence[Room]) -> bool:
    return all(room.over() for room in rooms)


def _ordered(world: HostWorld, pick: random.Random) -> Room:
    tokens = pick.choice((1, 40, 100))
    course = Course(tokens=tokens, salt=pick.randrange(16), start=pick.choice((0, tokens // 2)))
    return world.order(pick.choice(PREFILLS), [pick.choice(DECODES)], course)
