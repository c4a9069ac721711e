"""Explains a plan: how the bytes of each role travel, in how many runs, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from disagg.plan.bind import cost
from disagg.plan.runs import Route
from kvpool.layout import Key, PoolLayout, Region
from kvpool.layout.summary import html_table
from kvpool.layout.text import held_words, ranges, steps

if TYPE_CHECKING:
    from rich.table import Table

SKIPPED = {"missing": "no source has it; allowed", "unsent": "the destination has no such region"}
"""Why regions are not moved."""
HEAD = ("roles", "layers", "runs", "bytes", "bytes/run", "how")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRow:
    """How roles that share runs travel: direct, strided, resharded, converted, missing or unsent.
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

    def converted(self, words: str) -> ExplainRow:
        """The same of rows that are stored in another format."""
        return replace(self, how="converted", why=f"{words}; read {self.how}: {self.why}")


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row for all roles and layers that travel alike, for a request of `tokens` tokens."""

    tokens: int
    rows: tuple[ExplainRow, ...]

    @property
    def runs(self) -> int:
        """Runs of all rows."""
        return sum(row.runs for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    def table(self) -> Table:
        """The rows as a table of `rich`."""
        from rich.markup import escape

        from kvpool.render.table import FittedTable

        roles, layers, *sizes, how = HEAD
        table = FittedTable(roles, layers, title=self.title)
        for name in sizes:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column(how)
        for number, cells in enumerate(self.cells()):
            if number == len(self.rows):
                table.add_section()
            table.add_row(*map(escape, cells))
        return table

    @property
    def title(self) -> str:
        """What is explained, in a line."""
        return f"plan for {self.tokens:,} tokens (worst case: no two pages adjacent)"

    def cells(self) -> list[tuple[str, ...]]:
        """The rows of a table, and their sum where there are several."""
        rows: list[tuple[str, ...]] = [
            (
                f"{row.owner} {', '.join(row.roles)}",
                steps(row.layers),
                *_sizes(row.runs, row.nbytes),
                f"{row.how}: {row.why}",
            )
            for row in self.rows
        ]
        total = ("all", "", *_sizes(self.runs, self.nbytes), "")
        return [*rows, total] if len(rows) > 1 else rows

    def _repr_html_(self) -> str:
        """For notebooks."""
        return self.html()

    def html(self) -> str:
        """An HTML table."""
        return html_table([HEAD, *self.cells()])

    def __str__(self) -> str:
        return "\n".join(
            f"{row.owner} {', '.join(row.roles)} (layer{'s' * (len(row.layers) > 1)} "
            f"{ranges(row.layers)}): {row.how}, "
            f"{row.runs} runs, {row.nbytes} bytes, {row.bytes_per_run:.0f} a run: {row.why}"
            for row in self.rows
        )


def _sizes(runs: int, nbytes: int) -> tuple[str, str, str]:
    return f"{runs:,}", f"{nbytes:,}", f"{nbytes / runs if runs else 0:,.0f}"


def explain_routes(
    sources: Sequence[PoolLayout],
    dest: PoolLayout,
    routes: Sequence[Route],
    tokens: int,
    skipped: Mapping[str, Sequence[Key]] = MappingProxyType({}),
) -> Explanation:
    """Explains routes, one row for all that travel alike, and the regions that are `skipped`."""
    rows: dict[tuple[str, tuple[str, ...], str, str], tuple[set[int], int, int]] = {}
    for route in routes:
        roles = tuple(dict.fromkeys(role for _, _, role in route.keys))
        row = route.owner, roles, *_how(sources[route.source], dest, route)
        layers, runs, nbytes = rows.get(row, (set[int](), 0, 0))
        more_runs, more_bytes = cost(route, tokens)
        layers |= {layer for _, layer, _ in route.keys}
        rows[row] = layers, runs + more_runs, nbytes + more_bytes
    for how, keys in skipped.items():
        for owner, layer, role in keys:
            rows.setdefault((owner, (role,), how, SKIPPED[how]), (set(), 0, 0))[0].add(layer)
    return Explanation(
        tokens,
        tuple(
            ExplainRow(
                owner=owner,
                roles=roles,
                layers=tuple(sorted(layers)),
                how=how,
                runs=runs,
                nbytes=nbytes,
                why=why,
            )
            for (owner, roles, how, why), (layers, runs, nbytes) in rows.items()
        ),
    )


def _how(source: PoolLayout, dest: PoolLayout, route: Route) -> tuple[str, str]:
    """How a route's bytes travel, and the first reason why items do not travel whole."""
    key, runs = route.keys[0], route.runs
    offered, wanted = source.region_by_key[key], dest.region_by_key[key]
    pages = route.src.space.steps, route.dst.space.steps
    cut = [
        f"{ours.name}: {theirs.size} of {ours.total} on the source, {ours.size} on the destination"
        for ours in wanted.inner_axes
        if (theirs := offered.axis(ours.name))
        if (theirs.start, theirs.size) != (ours.start, ours.size)
    ]
    if route.src.space.held != route.dst.space.held:
        words = [held_words(s.space) or "all positions" for s in (route.src, route.dst)]
        cut.append(f"{words[0]} on the source, {words[1]} on the destination")
    if cut:
        return "resharded", "; ".join(cut)
    change = f"items of {pages[0]} entries on the source, {pages[1]} on the destination"
    if route.packed:
        return "direct" if runs.dense else "strided", f"whole items of packing {wanted.packing}"
    if runs.linear or runs.dense:
        return "direct", "whole items" if pages[0] == pages[1] else change
    orders = _order(offered), _order(wanted)
    if all(orders) and orders[0] != orders[1]:
        return "strided", f"{orders[0]} on the source, {orders[1]} on the destination"
    if pages[0] != pages[1]:
        return "strided", change
    if runs.whole is not None and runs.whole.size == 1:
        return "direct", "whole items, among other regions"
    return "strided", "other bytes lie in between"


def _order(region: Region) -> str:
    """Its axes, outermost first."""
    return " before ".join(axis.name for axis in region.axes_by_stride if axis.size > 1)
