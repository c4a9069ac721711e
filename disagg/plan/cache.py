"""Plans by the shape of layouts: peers of one shape differ in pointers only."""

from __future__ import annotations

import operator
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

from disagg.plan.matching.group import Group
from disagg.plan.matching.pairing import pair
from disagg.plan.planner import TransferPlan, plan
from kvpool.layout import PoolLayout

_Shapes = tuple[tuple[str, ...], tuple[int, tuple[str, ...]] | None]
"""Fingerprints of sources and destination, and `Group.shape`."""


class PlanCache:
    """The `capacity` plans used last, all for one `allow_missing`. Not thread-safe."""

    def __init__(self, allow_missing: Collection[str] = (), capacity: int = 64) -> None:
        self.allow_missing, self.capacity = frozenset(allow_missing), capacity
        self.hits = 0
        self.misses = 0
        self.seconds = 0.0
        """Spent in all, refusals included."""
        self._plans: OrderedDict[_Shapes, tuple[TransferPlan, bool]] = OrderedDict()
        """By fingerprints, with whether it is of the layouts as they were given."""

    def plan(
        self, sources: Sequence[PoolLayout], dest: PoolLayout, group: Group | None = None
    ) -> TransferPlan:
        """As `disagg.plan.plan`. A refusal is computed and raised each time."""
        began = time.perf_counter()
        try:
            shapes = tuple([layout.fingerprint() for layout in (*sources, dest)])
            key = shapes, group.shape if group else None
            if key not in self._plans:
                self.misses += 1
                fresh = plan(sources, dest, allow_missing=self.allow_missing, group=group)
                uncut = all(map(operator.is_, (*fresh.sources, fresh.dest), (*sources, dest)))
                self._plans[key] = fresh, uncut
                if len(self._plans) > self.capacity:
                    self._plans.popitem(last=False)
                return fresh
            self.hits += 1
            self._plans.move_to_end(key)
            planned, uncut = self._plans[key]
            if not uncut:
                paired = pair(sources, dest)
                sources, dest = paired.sources, paired.dest
            return planned.between(sources, dest)
        finally:
            self.seconds += time.perf_counter() - began
