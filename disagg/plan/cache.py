"""Plans by the shape of layouts: a restarted peer, or another peer of the same shape, differs in
pointers only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from disagg.plan.cells import with_equal_cells
from disagg.plan.planner import TransferPlan, plan
from disagg.plan.records import adjacent_buffers
from disagg.plan.runs import Route
from kvpool.layout import PoolLayout

Shape = tuple[str, frozenset[tuple[tuple[str, int], ...]]]


class PlanCache:
    """The `capacity` plans used last, all for one `allow_missing`. Not thread-safe."""

    def __init__(self, allow_missing: Collection[str] = (), capacity: int = 64) -> None:
        self.allow_missing, self.capacity = frozenset(allow_missing), capacity
        self.hits = 0
        self.misses = 0
        self.seconds = 0.0
        """Spent in all, refusals included."""
        self._plans: OrderedDict[tuple[Shape, ...], TransferPlan] = OrderedDict()
        self._dest: tuple[PoolLayout, Shape] | None = None

    def plan(self, sources: Sequence[PoolLayout], dest: PoolLayout) -> TransferPlan:
        """As `disagg.plan.plan`. A refusal is computed and raised each time."""
        began = time.perf_counter()
        try:
            return self._plan(sources, dest)
        finally:
            self.seconds += time.perf_counter() - began

    def _plan(self, sources: Sequence[PoolLayout], dest: PoolLayout) -> TransferPlan:
        if self._dest is None or self._dest[0] is not dest:
            self._dest = dest, _shape(dest)
        key = (*map(_shape, sources), self._dest[1])
        known = self._plans.get(key)
        if known is None:
            self.misses += 1
            self._plans[key] = made = plan(sources, dest, allow_missing=self.allow_missing)
            if len(self._plans) > self.capacity:
                self._plans.popitem(last=False)
            return made
        self.hits += 1
        self._plans.move_to_end(key)
        sources, dest = with_equal_cells(sources, dest)
        routes = layer_routes = _rebased(known.routes, sources, dest)
        if known.layer_routes is not known.routes:
            layer_routes = _rebased(known.layer_routes, sources, dest)
        skipped = known.unsent, known.missing
        return TransferPlan(tuple(sources), dest, routes, *skipped, known.elected, layer_routes)


def _rebased(
    routes: Sequence[Route], sources: Sequence[PoolLayout], dest: PoolLayout
) -> tuple[Route, ...]:
    """The routes with the base pointers of other layouts."""
    found = []
    for route in routes:
        src, dst = (
            np.array([layout.buffer_by_name[name].base for name in names], dtype=np.int64)
            for layout, names in (
                (sources[route.source], route.src_buffers),
                (dest, route.dst_buffers),
            )
        )
        found.append(replace(route, src_base=src, dst_base=dst))
    return tuple(found)


def _shape(layout: PoolLayout) -> Shape:
    """All that a plan depends on except pointers: the layout's fingerprint, and which buffers have
    items side by side.
    """
    groups = (group for group in adjacent_buffers(layout) if len(group) > 1)
    return layout.fingerprint(), frozenset(
        tuple((buffer.name, buffer.base - group[0].base) for buffer in group) for group in groups
    )
