"""Plans that were made, by the shape of their layouts."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

from disagg.plan.match import Group
from disagg.plan.planner import TransferPlan, plan
from kvpool.layout import PoolLayout


class PlanCache:
    """The `capacity` plans used last, all for one `allow_missing`, by the shape of their layouts:
    peers of one shape differ in pointers only. Not thread-safe.
    """

    def __init__(
        self,
        allow_missing: Collection[str] = (),
        capacity: int = 64,
        *,
        cast: bool | Collection[str] = False,
    ) -> None:
        self.allow_missing, self.capacity, self.cast = frozenset(allow_missing), capacity, cast
        self.hits = self.misses = 0
        self.seconds = 0.0
        """Spent in all, refusals included."""
        self._plans: OrderedDict[object, TransferPlan] = OrderedDict()
        """By fingerprints of sources and destination, and `Group.shape`."""

    def plan(
        self, sources: Sequence[PoolLayout], dest: PoolLayout, group: Group | None = None
    ) -> TransferPlan:
        """As `disagg.plan.plan`. A refusal is computed and raised each time."""
        began = time.perf_counter()
        try:
            shapes = [layout.fingerprint() for layout in (*sources, dest)]
            key = tuple(shapes), group.shape if group else None
            planned = self._plans.get(key)
            if planned is None:
                self.misses += 1
                planned = plan(
                    sources, dest, allow_missing=self.allow_missing, group=group, cast=self.cast
                )
                self._plans[key] = planned
                if len(self._plans) > self.capacity:
                    self._plans.popitem(last=False)
                return planned
            self.hits += 1
            self._plans.move_to_end(key)
            return planned.between(sources, dest)
        finally:
            self.seconds += time.perf_counter() - began
