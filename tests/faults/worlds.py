"""Seeded runs, one after another, in processes that are reused."""

from __future__ import annotations

import random
import time
import warnings

from tests.faults.kinds import KINDS
from tests.faults.run import Outcome, Run
from tests.faults.shapes import SHAPES
from tests.faults.world import Late, Violation, World

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
                outcome = _run(self._world, seed)
            except Violation as broken:
                self._drop()
                if repeated == REPEATS or not isinstance(broken, Late):
                    raise
                warnings.warn(str(broken), stacklevel=2)
            else:
                outcome.repeated = repeated
                return outcome
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
