"""Explains a plan: how the bytes of each role travel, in how many runs, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg.plan.bind import cost
from disagg.plan.positions import scattered, scattered_items
from disagg.plan.runs import Route
from kvpool.layout import Axis, Key, PoolLayout, Region
from kvpool.layout.sentences import held_words, ranges, steps

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class ExplainRow:
    """How roles that share runs travel: direct, strided, resharded, missing or unsent.

    Runs are those of the worst case, in which no two pages of the request are adjacent.
    """

    owner: str
    roles: tuple[str, ...]
    layers: tuple[int, ...]
    how: str
    runs: int
    nbytes: int
    why: str

    @property
    def bytes_per_run(self) -> float:
        """Mean length of a run."""
        return self.nbytes / self.runs if self.runs else 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row for all roles and layers that travel alike, for a request of `tokens` tokens."""

    tokens: int
    rows: tuple[ExplainRow, ...]

    @property
    def runs(self) -> int:
        """Total runs."""
        return sum(row.runs for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return sum(row.nbytes for row in self.rows)

    def with_skipped(self, missing: Sequence[Key], unsent: Sequence[Key]) -> Explanation:
        """With rows for the regions that are not moved."""
        rows = list(self.rows)
        for how, keys, why in (
            ("missing", missing, "no source has it; allowed"),
            ("unsent", unsent, "the destination has no such region"),
        ):
            skipped: dict[tuple[str, str], list[int]] = {}
            for owner, layer, role in keys:
                skipped.setdefault((owner, role), []).append(layer)
            for (owner, role), layers in skipped.items():
                rows.append(ExplainRow(owner, (role,), tuple(sorted(layers)), how, 0, 0, why))
        return Explanation(self.tokens, tuple(rows))

    def table(self) -> Table:
        """The rows as a rich table."""
        from rich.markup import escape

        from kvpool.render.table import FittedTable

        title = f"plan for {self.tokens:,} tokens (worst case: no two pages adjacent)"
        table = FittedTable("roles", "layers", title=title)
        for name in ("runs", "bytes", "bytes/run"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("how")
        for row in self.rows:
            name = escape(f"{row.owner} {', '.join(row.roles)}")
            sizes = (f"{row.runs:,}", f"{row.nbytes:,}", f"{row.bytes_per_run:,.0f}")
            table.add_row(name, steps(row.layers), *sizes, escape(f"{row.how}: {row.why}"))
        if len(self.rows) > 1:
            table.add_section()
            mean = self.nbytes / self.runs if self.runs else 0
            table.add_row("all", "", f"{self.runs:,}", f"{self.nbytes:,}", f"{mean:,.0f}", "")
        return table

    def __str__(self) -> str:
        return "\n".join(
            f"{row.owner} {', '.join(row.roles)} (layers {ranges(row.layers)}): {row.how}, "
            f"{row.runs} runs, {row.nbytes} bytes, {row.bytes_per_run:.0f} a run: {row.why}"
            for row in self.rows
        )


def explain_routes(
    sources: Sequence[PoolLayout], dest: PoolLayout, routes: Sequence[Route], tokens: int
) -> Explanation:
    """Explains routes, one row for all that travel alike."""
    found: dict[tuple[str, tuple[str, ...], str, str], tuple[set[int], int, int]] = {}
    for route in routes:
        owner = route.keys[0][0]
        roles = tuple(dict.fromkeys(role for _, _, role in route.keys))
        how, why = _how(sources[route.source], dest, route)
        layers, runs, nbytes = found.get((owner, roles, how, why), (set[int](), 0, 0))
        if route.packed:
            pairs = scattered_items(route.dst_space, tokens)
        else:
            pairs = scattered(route.src_space, route.dst_space, tokens)
        more = cost(route, pairs)
        layers |= {layer for _, layer, _ in route.keys}
        found[owner, roles, how, why] = layers, runs + more[0], nbytes + more[1]
    rows = (
        ExplainRow(owner, roles, tuple(sorted(layers)), how, runs, nbytes, why)
        for (owner, roles, how, why), (layers, runs, nbytes) in found.items()
    )
    return Explanation(tokens, tuple(rows))


def _how(source: PoolLayout, dest: PoolLayout, route: Route) -> tuple[str, str]:
    """How a route's bytes travel, and the first reason why items do not travel whole."""
    key = route.keys[0]
    there, here = source.region_by_key[key], dest.region_by_key[key]
    pages = route.src_space.steps, route.dst_space.steps
    cut = [
        f"{ours.name}: {theirs.size} of {ours.total} on the source, {ours.size} on the destination"
        for ours in here.inner_axes
        if (theirs := there.axis(ours.name))
        if (theirs.start, theirs.size) != (ours.start, ours.size)
    ]
    if route.src_space.held != route.dst_space.held:
        spaces = route.src_space, route.dst_space
        words = [held_words(space) or "all positions" for space in spaces]
        cut.append(f"{words[0]} on the source, {words[1]} on the destination")
    if cut:
        return "resharded", "; ".join(cut)
    change = f"items of {pages[0]} entries on the source, {pages[1]} on the destination"
    if route.packed:
        return "direct" if route.dense else "strided", f"whole items of packing {here.packing}"
    if route.linear or route.dense:
        return "direct", "whole items" if pages[0] == pages[1] else change
    if [axis.name for axis in _outermost(there)] != [axis.name for axis in _outermost(here)]:
        return "strided", f"{_order(there)} on the source, {_order(here)} on the destination"
    if pages[0] != pages[1]:
        return "strided", change
    if route.whole is not None and route.whole.size == 1:
        return "direct", "whole items, among other regions"
    return "strided", "other bytes lie in between"


def _outermost(region: Region) -> list[Axis]:
    return sorted((a for a in region.axes if a.size > 1), key=lambda axis: -axis.stride)


def _order(region: Region) -> str:
    return " before ".join(axis.name for axis in _outermost(region))
