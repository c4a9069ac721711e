"""A plan in words: per role, how its bytes travel, in how many runs, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from disagg.bind import cost
from disagg.plan import IncompatibleLayouts, Reason, TransferPlan, plan
from disagg.walk import scattered
from kvpool.layout import Axis, PoolLayout, Region, Space
from kvpool.show import ranges

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class RoleRow:
    """How one (owner, role) travels. `how` is direct, strided, resharded, refused, missing or
    unsent.
    """

    owner: str
    role: str
    layers: tuple[int, ...]
    how: str
    runs: int
    nbytes: int
    why: str

    @property
    def bytes_per_run(self) -> float:
        """Mean length of a run when no two items are neighbours."""
        return self.nbytes / self.runs if self.runs else 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Rows per role, and what all of them together cost once neighbours are fused."""

    tokens: int
    rows: tuple[RoleRow, ...]
    runs: int
    nbytes: int

    def table(self) -> Table:
        """The rows as a rich table."""
        from rich.table import Table

        title = f"plan for {self.tokens:,} tokens in scattered items"
        table = Table("region", "layers", "how", title=title)
        for name in ("runs", "bytes", "bytes/run"):
            table.add_column(name, justify="right")
        table.add_column("why")
        for row in self.rows:
            sizes = (f"{row.runs:,}", f"{row.nbytes:,}", f"{row.bytes_per_run:,.0f}")
            table.add_row(f"{row.owner} {row.role}", ranges(row.layers), row.how, *sizes, row.why)
        per_run = self.nbytes / self.runs if self.runs else 0
        table.add_section()
        totals = (f"{self.runs:,}", f"{self.nbytes:,}", f"{per_run:,.0f}")
        table.add_row("all", "", "fused", *totals, "")
        return table

    def __str__(self) -> str:
        lines = [
            f"{row.owner} {row.role} (layers {ranges(row.layers)}): {row.how}, {row.runs} runs, "
            f"{row.nbytes} bytes, {row.bytes_per_run:.0f} a run: {row.why}"
            for row in self.rows
        ]
        return "\n".join([*lines, f"all, fused: {self.runs} runs, {self.nbytes} bytes"])


def explain_plan(made: TransferPlan, tokens: int) -> Explanation:
    """See TransferPlan.explain."""
    rows = []
    for (owner, role), regions in _by_role(made.dest).items():
        keys = {region.key for region in regions}
        layers = tuple(sorted(region.layer for region in regions))
        if keys <= set(made.missing):
            why = "prefill has none; allowed"
            rows.append(RoleRow(owner, role, layers, "missing", 0, 0, why))
            continue
        only = replace(made.dest, regions=tuple(regions))
        alone = plan(made.sources, only, allow_missing={owner})
        runs, nbytes = _cost(alone, tokens)
        how, why = _how(alone, regions)
        rows.append(RoleRow(owner, role, layers, how, runs, nbytes, why))
    unsent: dict[tuple[str, str], list[int]] = {}
    for owner, layer, role in made.unsent:
        unsent.setdefault((owner, role), []).append(layer)
    for (owner, role), held in unsent.items():
        why = "decode has no such region"
        rows.append(RoleRow(owner, role, tuple(sorted(held)), "unsent", 0, 0, why))
    return Explanation(tokens, tuple(rows), *_cost(made, tokens))


def explain_refusal(error: IncompatibleLayouts, tokens: int) -> Explanation:
    """The reasons of a refusal as rows."""
    grouped: dict[tuple[str, str, str], list[Reason]] = {}
    for reason in error.reasons:
        grouped.setdefault((reason.owner, reason.role, reason.sentence), []).append(reason)
    rows = [
        RoleRow(owner, role, tuple(sorted(r.layer for r in reasons)), "refused", 0, 0, why)
        for (owner, role, why), reasons in grouped.items()
    ]
    return Explanation(tokens, tuple(rows), 0, 0)


def explain(
    layouts: Annotated[list[Path], "layout files: one per prefill rank, decode's last"],
    tokens: int = 2048,
) -> None:
    """Explain the transfer between layouts, given as JSON or msgpack files (PoolLayout.to_json).

    Exit status 1 if decode cannot be filled, with all the reasons.
    """
    import typer
    from rich.console import Console

    if len(layouts) < 2:
        raise typer.BadParameter("at least two layouts: prefill's ranks, then decode's.")
    *sources, dest = [_read(path) for path in layouts]
    try:
        found = explain_plan(plan(sources, dest), tokens)
    except IncompatibleLayouts as error:
        found = explain_refusal(error, tokens)
    Console().print(found.table())
    if any(row.how == "refused" for row in found.rows):
        raise typer.Exit(1)


def _read(path: Path) -> PoolLayout:
    import typer

    try:
        data = path.read_bytes()
        text = data.lstrip()[:1] == b"{"
        return PoolLayout.from_json(data) if text else PoolLayout.from_msgpack(data)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None


def _by_role(layout: PoolLayout) -> dict[tuple[str, str], list[Region]]:
    found: dict[tuple[str, str], list[Region]] = {}
    for region in layout.regions:
        found.setdefault((region.owner, region.role), []).append(region)
    return found


def _cost(made: TransferPlan, tokens: int) -> tuple[int, int]:
    costs = [
        cost(route, scattered(route.src_space, route.dst_space, tokens)) for route in made.routes
    ]
    return sum(runs for runs, _ in costs), sum(nbytes for _, nbytes in costs)


def _how(made: TransferPlan, regions: Sequence[Region]) -> tuple[str, str]:
    """How and why: shards first, then whatever else keeps items from being copied whole."""
    dest = regions[0]
    source = next(s.region_by_key[dest.key] for s in made.sources if dest.key in s.region_by_key)
    sharded = [
        f"{axis.name}: {theirs.size} of {theirs.total} a rank there, {axis.size} here"
        for axis in dest.axes
        if axis.name != "entry" and (theirs := source.axis(axis.name)) and _cut(theirs, axis)
    ]
    if sharded:
        return "resharded", "; ".join(sharded)
    if all(route.linear or route.dense for route in made.routes):
        return "direct", "whole items" if made.routes else "nothing to move"
    there, here = made.routes[0].src_space, made.routes[0].dst_space
    return "strided", _difference(there, here)


def _cut(theirs: Axis, ours: Axis) -> bool:
    return (theirs.start, theirs.size) != (ours.start, ours.size)


def _difference(there: Space, here: Space) -> str:
    if there.entries_per_item != here.entries_per_item:
        return f"items of {there.entries_per_item} entries there, {here.entries_per_item} here"
    return "other bytes lie in between, or the axes are in another order"
