"""From the layouts of all source ranks and of one destination to the copies between them.

Regions are paired by (owner, layer, role), wherever they lie; shard axes are intersected; what
remains is proved to cover the destination exactly once. Pure: no torch, no engine, no memory
touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.plan.bind import Columns, CopyBatch, bind
from disagg.plan.match import Piece, elect, mismatches, tile
from disagg.plan.runs import EntryRuns, Record, Route, entry_runs, join, records, route
from kvpool.layout import Key, PoolLayout, RequestAddress
from kvpool.layout.sentences import ranges

if TYPE_CHECKING:
    from disagg.plan.explain import Explanation


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one region of the destination cannot be filled, and what would make it work."""

    owner: str
    layer: int
    role: str
    sentence: str


class IncompatibleLayouts(ValueError):
    """The destination cannot be filled from these sources; `reasons` lists every region and why."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        self.reasons = tuple(reasons)
        lines = [f"  {line}" for line in self.lines()]
        count = f"{len(lines)} reason{'s' if len(lines) > 1 else ''}"
        super().__init__("\n".join([f"{count}.", *lines]))

    def lines(self) -> list[str]:
        """One sentence for all layers of an owner and role that share it."""
        grouped: dict[tuple[str, str, str], list[int]] = {}
        for reason in self.reasons:
            key = reason.owner, reason.role, reason.sentence
            grouped.setdefault(key, []).append(reason.layer)
        return [
            f"{owner} layer{'s' if len(layers) > 1 else ''} {ranges(layers)} {role}: {sentence}"
            for (owner, role, sentence), layers in grouped.items()
        ]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Copies from `sources` to `dest`, as routes. `unsent` are regions that only sources have,
    `missing` those that only the destination has and that the caller allowed."""

    sources: tuple[PoolLayout, ...]
    dest: PoolLayout
    routes: tuple[Route, ...]
    unsent: tuple[Key, ...]
    missing: tuple[Key, ...]
    elected: tuple[tuple[Piece, int], ...] = field(repr=False, compare=False)
    """What of the destination's regions comes from which source."""
    _columns: dict[int, Columns] = field(default_factory=dict, repr=False, compare=False)

    def contributors(self) -> list[int]:
        """Source ranks from which bytes are read."""
        return sorted({each.source for each in self.routes})

    def bind(
        self,
        source: int,
        source_address: RequestAddress,
        dest_address: RequestAddress,
        *,
        tokens: range | None = None,
        columns: Columns | None = None,
    ) -> CopyBatch:
        """Runs that move positions `tokens` (default: all of the destination's) from source rank
        `source`.

        Returns addresses and lengths in bytes, coalesced, `[N]` each, valid until `columns`
        (default: the plan's own of that source) are used again. Raises IncompleteTransfer if the
        source does not hold a position that the destination needs, and ValueError if an id lies
        outside its buffer.
        """
        if not 0 <= source < len(self.sources):
            raise ValueError(
                f"source {source}: this plan has sources 0 to {len(self.sources) - 1}."
            )
        reach = range(dest_address.num_tokens) if tokens is None else tokens
        into = self._columns.setdefault(source, Columns()) if columns is None else columns
        mine = [each for each in self.routes if each.source == source]
        return bind(
            mine, self.sources[source], self.dest, source_address, dest_address, reach, into
        )

    def bind_all(
        self,
        source_addresses: Sequence[RequestAddress],
        dest_address: RequestAddress,
        *,
        tokens: range | None = None,
    ) -> list[CopyBatch]:
        """`bind` for every source rank, one batch each (empty where nothing is read)."""
        if len(source_addresses) != len(self.sources):
            raise ValueError(f"{len(source_addresses)} addresses for {len(self.sources)} sources.")
        return [
            self.bind(source, address, dest_address, tokens=tokens)
            for source, address in enumerate(source_addresses)
        ]

    def verify(self) -> None:
        """Proves the plan once more by brute force, byte by byte; slow, for tests. Raises
        RuntimeError.
        """
        from disagg.plan.verify import verify

        verify(self)

    def explain(self, tokens: int = 2048) -> Explanation:
        """Per role: how its bytes travel, in how many runs, and why, for a request of `tokens`
        tokens.
        """
        from disagg.plan.explain import explain_plan

        return explain_plan(self, tokens)


def plan(
    sources: Sequence[PoolLayout], dest: PoolLayout, *, allow_missing: Collection[str] = ()
) -> TransferPlan:
    """Plans every transfer that `dest` requires from `sources`, one layout per rank.

    `allow_missing` names owners or roles that sources may lack altogether.
    Raises IncompatibleLayouts with every reason at once.
    """
    given = [] if isinstance(sources, PoolLayout) else [*sources, dest]
    if not given or any(not isinstance(layout, PoolLayout) for layout in given):
        raise TypeError("plan: a list of source layouts (pool.layout), and the destination's.")
    offered: dict[Key, list[int]] = {}
    for number, layout in enumerate(sources):
        for region in layout.regions:
            offered.setdefault(region.key, []).append(number)
    # what some source has is not missing altogether: a forgotten stage stays refused
    owners = {owner for owner, _, _ in offered}
    pairs = {(owner, role) for owner, _, role in offered}
    reasons: list[Reason] = []
    missing: list[Key] = []
    pieces: list[Piece] = []
    for region in dest.regions:
        holders = offered.pop(region.key, [])
        without_owner = region.owner in allow_missing and region.owner not in owners
        without_role = region.role in allow_missing and (region.owner, region.role) not in pairs
        if without_owner or without_role:
            missing.append(region.key)
            continue
        problems = mismatches(region, dest, sources, holders)
        if not problems:
            found, problems = tile(region, sources, holders)
            pieces.extend(found)
        reasons.extend(Reason(*region.key, problem) for problem in problems)
    if reasons:
        raise IncompatibleLayouts(reasons)
    elected = tuple(elect(pieces))
    routes = _routes(sources, dest, elected)
    return TransferPlan(tuple(sources), dest, routes, tuple(offered), tuple(missing), elected)


def _routes(
    sources: Sequence[PoolLayout], dest: PoolLayout, elected: Iterable[tuple[Piece, int]]
) -> tuple[Route, ...]:
    """Joins the runs of every record pair, and gathers the pairs of one shape."""
    here = records(dest)
    there = [records(layout) for layout in sources]
    parts: dict[tuple[int, int, int], list[EntryRuns]] = {}
    keys: dict[tuple[int, int, int], list[Key]] = {}
    ends: dict[tuple[int, int, int], tuple[Record, Record]] = {}
    for piece, source in elected:
        dst, dst_at = here[piece.dest.buffer]
        other = sources[source].region_by_key[piece.dest.key]
        src, src_at = there[source][other.buffer]
        pair = source, id(src), id(dst)
        ends[pair] = src, dst
        keys.setdefault(pair, []).append(piece.dest.key)
        parts.setdefault(pair, []).append(entry_runs(other, src_at, piece.dest, dst_at, piece.box))
    shapes: dict[object, list[tuple[int, int, int]]] = {}
    joined = {pair: join(runs) for pair, runs in parts.items()}
    for pair, runs in joined.items():
        shape = (
            pair[0],
            tuple((owner, role) for owner, _, role in keys[pair]),
            *(
                (r.space.name, r.stride, r.pad_starts.tobytes(), r.pad_ends.tobytes())
                for r in ends[pair]
            ),
            *(column.tobytes() for column in runs.columns()),
        )
        shapes.setdefault(shape, []).append(pair)
    routes = []
    for pairs in shapes.values():
        moved = tuple(key for pair in pairs for key in keys[pair])
        alike = [ends[pair] for pair in pairs]
        routes.append(route(pairs[0][0], alike, joined[pairs[0]], moved))
    return tuple(routes)
