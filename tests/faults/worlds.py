"""The faults: what is done to a victim, and which rooms must not be affected; and seeded runs with
one each, in processes that are reused.
"""

from __future__ import annotations

import random
import signal
import time
import warnings
from collections.abc import Callable

from disagg.protocol.status import KVPoll
from tests.faults.orders import SHAPES
from tests.faults.run import Outcome, Run, unexpected
from tests.faults.world import PEER_TIMEOUT, Late, Violation, World


def _kill(run: Run, restarted: bool) -> None:
    """Kills the victim. One that is restarted may have been closed properly instead."""
    if restarted and run.random.random() < 0.4:
        run.strike("close")
    else:
        run.strike(signalled=signal.SIGKILL)
    before = [room for room in run.rooms if run.victim in room.who]
    run.world.bury(run.victim)
    if restarted:
        run.world.ensure()
    run.others()
    run.settle()
    run.noticed(before)
    run.world.ensure()


def _stop(run: Run) -> None:
    run.strike(signalled=signal.SIGSTOP)
    before = [room for room in run.rooms if run.victim in room.who]
    until = run.at + run.random.uniform(1.5, 4.5) * PEER_TIMEOUT
    run.others()
    run.world.until(lambda: False, until - time.monotonic())
    run.world.signal(run.victim, signal.SIGCONT)
    run.settle()
    run.noticed(before)


def _stop_briefly(run: Run) -> None:
    run.strike(signalled=signal.SIGSTOP)
    until = run.at + run.random.uniform(0.1, 0.5) * PEER_TIMEOUT
    run.world.until(lambda: False, until - time.monotonic())
    run.world.signal(run.victim, signal.SIGCONT)
    run.must_succeed(run.rooms)


def _abort(run: Run) -> None:
    room = run.ask_for(*_touched(run))
    run.strike("abort", room.number, "aborted by the test")
    run.settle()
    # decode is told also where it asks late; another rank's lease may end first
    reasons = "aborted by the test", *["its lease ended"] * (run.world.shape.ranks > 1)
    for who, (_, state, reason) in room.ended.items():
        if state is KVPoll.Failed and not any(each in reason for each in reasons):
            raise unexpected(f"{who} fails for another reason: {room}", room)
    run.must_succeed([each for each in run.rooms if each is not room])


def _retry(run: Run) -> None:
    """The room fails, and is requested again by its name, from another prefill if there is one."""
    room = run.ask_for(*_touched(run))
    run.strike("abort", room.number, "aborted by the test")
    links = [link for link in run.world.shape.links() if link != room.link]
    if not links:
        run.settle()
    run.ask_for(links[0] if links else room.link, room.sinks[0], room.name)
    run.settle()
    run.must_succeed([each for each in run.rooms if each is not room])


def _requested_twice(run: Run) -> None:
    """By the same decode, which refuses, or by another one: one of both gets it, or none if two
    ranks heard them in different order.
    """
    room = run.ask_for(*_touched(run))
    if run.world.shape.readers == 2 or run.random.random() < 0.5:
        run.strike("again", room.number)
        run.must_succeed(run.rooms)
        return
    run.wave()
    other = "d1" if run.victim == "d0" else "d0"
    rival = run.world.order(room.link, [other], room.course, room.name, offered=False)
    run.rooms.append(rival)
    run.settle()
    run.must_succeed([each for each in run.rooms if each not in (room, rival)])
    wins = [each for each in (room, rival) if each.ended[each.sinks[0]][1] is KVPoll.Success]
    if len(wins) > 1:
        raise Violation(f"only one may succeed: {room}, {rival}")
    if not wins and len(room.sources) == 1:
        raise unexpected(f"one must succeed: {room}, {rival}", room, rival)
    if wins:
        room.done = dict.fromkeys(room.sinks, wins[0].done[wins[0].sinks[0]])


def _duplicated_messages(run: Run) -> None:
    for name in run.world.peers:
        run.world.tell(name, "double", 0.6)
    run.outcome.point = "every message"
    run.wave()
    run.must_succeed(run.rooms)
    for name in run.world.peers:
        run.world.ask(name, "untrip")


def _touched(run: Run) -> tuple[str, str]:
    """A link and a decode, one of them the victim's."""
    links = [name for name, who in run.world.shape.links().items() if run.victim in who]
    sink = run.victim if run.victim[0] == "d" else run.random.choice(("d0", "d1"))
    return run.random.choice(links or [*run.world.shape.links()]), sink


KINDS: dict[str, tuple[str, Callable[[Run], None]]] = {
    "kill prefill": ("p", lambda run: _kill(run, False)),
    "abort by decode": ("d", _abort),
    "stop prefill briefly": ("p", _stop_briefly),
    "restart decode": ("d", lambda run: _kill(run, True)),
    "retry": ("d", _retry),
    "stop decode": ("d", _stop),
    "duplicated messages": ("d", _duplicated_messages),
    "kill decode": ("d", lambda run: _kill(run, False)),
    "abort by prefill": ("p", _abort),
    "stop decode briefly": ("d", _stop_briefly),
    "restart prefill": ("p", lambda run: _kill(run, True)),
    "requested twice": ("d", _requested_twice),
    "stop prefill": ("p", _stop),
}
"""By name: the victim's side, and what is done to it."""


IN_A_ROW = 3
"""Consecutive runs of one shape."""
REPEATS = 2
"""How often a run is repeated in which something was late."""


class Worlds:
    """Makes runs; processes live as long as the shape stays the same."""

    def __init__(self) -> None:
        self._world: World | None = None

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def run(self, seed: int) -> Outcome:
        """Makes one run; raises Violation. A run that was late is repeated, twice at most."""
        shape = list(SHAPES.values())[seed // IN_A_ROW % len(SHAPES)]
        for repeated in range(REPEATS + 1):
            try:
                if self._world is None or self._world.shape is not shape:
                    self.close()
                    self._world = World(shape)
                return _run(self._world, seed)
            except Violation as broken:
                self._drop()
                if repeated == REPEATS or not isinstance(broken, Late):
                    raise
                warnings.warn(str(broken), stacklevel=2)
        raise AssertionError

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._drop()

    def _drop(self) -> None:
        if self._world is not None:
            self._world.kill()
            self._world = None


def _run(world: World, seed: int) -> Outcome:
    began, pick = time.monotonic(), random.Random(seed)
    # in each round over the shapes, they get other kinds
    round_ = seed // (IN_A_ROW * len(SHAPES))
    kind = list(KINDS)[(seed + IN_A_ROW * round_) % len(KINDS)]
    side, fault = KINDS[kind]
    outcome = Outcome(seed, kind, world.shape.name)
    this = Run(world, outcome, pick, side + pick.choice("01"))
    try:
        world.ensure()
        world.rooms.clear()
        fault(this)
        this.rejoin()
        this.check()
    except Violation as broken:
        raise type(broken)(
            f"seed {seed}, {kind} {this.victim} over {world.shape.name} at {outcome.point}: "
            f"{broken} (see {world.logs})"
        ) from None
    outcome.seconds = time.monotonic() - began
    return outcome
