"""Plans the copies from all source ranks to one destination, from their layouts alone.

Regions are paired by (owner, layer, role); shard axes are intersected; the result must cover the
destination exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from disagg.plan.bind import Binder, CopyBatch, Count
from disagg.plan.cast.arrival import Arrival, without
from disagg.plan.explain import Explanation, explain_routes
from disagg.plan.lookup import id_clash
from disagg.plan.match import Group, Part, elect, share_out
from disagg.plan.matching import Matched, Wanted, match_members
from disagg.plan.pairing import pair
from disagg.plan.proof import prove
from disagg.plan.routes import records_of, routes_of
from disagg.plan.runs import Route
from kvpool.layout import Key, PoolLayout, RequestAddress, need_layouts
from kvpool.layout.text import counted, ranges


class Cast(NamedTuple):
    """Rows that are converted: where they arrive, and how they come there."""

    arrival: Arrival
    plan: TransferPlan


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """Copies from `sources` to `dest`, as routes. `unsent` are regions that only sources have,
    `missing` regions that only the destination has and that `allow_missing` names. `asks` are the
    source ranks that a member of a group asks for each request, each with how many members ask
    that rank; empty without a group.
    """

    sources: tuple[PoolLayout, ...]
    dest: PoolLayout
    routes: tuple[Route, ...]
    unsent: tuple[Key, ...]
    missing: tuple[Key, ...]
    parts: tuple[Part, ...] = field(repr=False, compare=False)
    """The source rank that each part of a destination region is read from."""
    layer_routes: tuple[Route, ...] = field(repr=False, compare=False)
    """The same copies without a run over two layers; `routes` if it has none."""
    asks: Mapping[int, int] = field(compare=False)
    cast: Cast | None = None
    """Of regions whose rows are converted; none of the other fields is about them."""

    def __repr__(self) -> str:
        """One line; `explain()` has every role."""
        owners = {owner: set[int]() for owner, _, _ in self.dest.region_by_key}
        for owner, layer, _ in self.dest.region_by_key:
            owners[owner].add(layer)
        layers = (f"{owner} layers {ranges(sorted(numbers))}" for owner, numbers in owners.items())
        words = [
            counted(len(self.sources), "source rank"),
            *layers,
            counted(len(self.routes), "route"),
        ]
        for name in ("unsent", "missing"):
            if keys := getattr(self, name):
                words.append(f"{counted(len(keys), 'region')} {name}")
        if self.cast is not None:
            words.append(f"{counted(len(self.cast.arrival.conversions), 'region')} converted")
        return f"TransferPlan({', '.join(words)})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return self.explain()._repr_html_()

    def between(self, sources: Sequence[PoolLayout], dest: PoolLayout) -> TransferPlan:
        """The same plan for layouts of the fingerprints of those that were planned."""
        cast = self.cast
        if cast is not None:
            cast = cast._replace(plan=cast.plan.between(sources, cast.arrival.layout))
            dest = without(dest, cast.arrival.converted)
        shapes = [layout.fingerprint() for layout in (*sources, dest)]
        if shapes != [layout.fingerprint() for layout in (*self.sources, self.dest)]:
            paired = pair(sources, dest)  # cells of the layouts given were cut
            sources, dest = paired.sources, paired.dest
        return replace(self, sources=tuple(sources), dest=dest, cast=cast)

    def contributors(self, layers: range | None = None, owner: str = "target") -> list[int]:
        """Source ranks that bytes are read from, or those that bytes of `owner`'s `layers` are."""
        ranks = range(len(self.sources))
        return [source for source in ranks if self.contributes(source, layers, owner)]

    def contributes(self, source: int, layers: range | None = None, owner: str = "target") -> bool:
        """Whether bytes are read from a source rank, or bytes of `owner`'s `layers`."""
        if self.cast is not None and self.cast.plan.contributes(source, layers, owner):
            return True
        routes = self._routes_of.get((source, None if layers is None else owner), ())
        return any(layers is None or route.within(layers).any() for route in routes)

    def needs_count(self, source: int) -> bool:
        """Whether some of what moves from a source rank depends on how many tokens a request has:
        windows, slots, rings, and the last item of a packed region.
        """
        if self.cast is not None and self.cast.plan.needs_count(source):
            return True
        routes = self._routes_of.get((source, None), ())
        return any(route.packed or not route.grows for route in routes)

    def bind(
        self,
        source: int,
        source_address: RequestAddress,
        dest_address: RequestAddress,
        *,
        tokens: range | None = None,
        layers: range | None = None,
        owner: str = "target",
        count: Count = Count.KNOWN,
        checked: bool = False,
    ) -> CopyBatch:
        """Runs that move positions `tokens` (default: all of the destination's) from source rank
        `source`; with `layers`, a range of layer numbers, of these layers of `owner` only.

        Returns pointers and lengths in bytes, coalesced, `[N]` each. Items of packed regions move
        whole, with the position that completes them; positions of such an item before `tokens` must
        be of this very transfer. With the last positions dead entries of the last page may move
        along. `count` is for destinations that do not know at first how many tokens the request
        has. Raises IncompleteTransfer if the source does not hold a position that the destination
        needs, and ValueError if a page id lies outside its buffer, or its block is listed for two
        spaces of the block pool: with `checked`, neither block table does that (see `id_clash`).
        """
        if not 0 <= source < len(self.sources):
            raise ValueError(
                f"source {source}: this plan has sources 0 to {len(self.sources) - 1}."
            )
        tokens = range(dest_address.num_tokens) if tokens is None else tokens
        if not checked:
            for side, layout, address in (
                ("source", self.sources[source], source_address),
                ("destination", self.dest, dest_address),
            ):
                if clash := id_clash(layout, address):
                    raise ValueError(f"{side}: {clash}")
        part = source, None if layers is None else owner
        binder = self._binders.get(part)
        if binder is None:
            routes = self._routes_of.get(part, ())
            binder = self._binders[part] = Binder(routes, self.sources[source], self.dest)
        return binder.bind(source_address, dest_address, tokens=tokens, layers=layers, count=count)

    @cached_property
    def _binders(self) -> dict[tuple[int, str | None], Binder]:
        """Of all routes from a source rank, or of those of one owner by layer."""
        return {}

    @cached_property
    def _routes_of(self) -> dict[tuple[int, str | None], list[Route]]:
        """`routes` by source rank and None, `layer_routes` by source rank and owner."""
        by_part: dict[tuple[int, str | None], list[Route]] = {}
        for route in self.routes:
            by_part.setdefault((route.source, None), []).append(route)
        for route in self.layer_routes:
            by_part.setdefault((route.source, route.owner), []).append(route)
        return by_part

    def bind_all(
        self,
        source_addresses: Sequence[RequestAddress],
        dest_address: RequestAddress,
        *,
        tokens: range | None = None,
        layers: range | None = None,
        owner: str = "target",
    ) -> list[CopyBatch]:
        """`bind` for every source rank, one batch each (empty where nothing is read)."""
        if len(source_addresses) != len(self.sources):
            raise ValueError(
                f"{len(source_addresses)} block tables for {len(self.sources)} sources."
            )
        return [
            self.bind(source, address, dest_address, tokens=tokens, layers=layers, owner=owner)
            for source, address in enumerate(source_addresses)
        ]

    def explain(self, tokens: int = 2048) -> Explanation:
        """How the bytes of each role travel, in how many runs and why, for `tokens` tokens."""
        skipped = {"missing": self.missing, "unsent": self.unsent}
        own = explain_routes(self.sources, self.dest, self.routes, tokens, skipped)
        if self.cast is None:
            return own
        arrival, planned = self.cast
        arriving = explain_routes(planned.sources, arrival.layout, planned.routes, tokens)
        rows = [row.converted(arrival.words(row.owner, row.roles)) for row in arriving.rows]
        return Explanation(tokens, (*own.rows, *rows))


def plan(
    sources: Sequence[PoolLayout],
    dest: PoolLayout,
    *,
    allow_missing: Collection[str] = (),
    group: Group | None = None,
    cast: bool | Collection[str] = False,
) -> TransferPlan:
    """Plans all copies that fill `dest` from `sources`, one layout per rank.

    `cast` names roles whose rows may be stored in another format than they have in `sources`; True
    allows that of all.

    `allow_missing` names owners or roles that no source has to hold. With `group`, `dest` is its
    member: of replicas it reads from its share, and the plan says which source ranks it asks.
    Raises IncompatibleLayouts with all reasons at once, those of other members among them,
    ValueError if `dest` is not that member, and RuntimeError if a run would cover a byte that is
    neither moved nor declared padding: a fault of the planner.
    """
    says = "plan(sources, dest): `sources` is a list of layouts (pool.layout)."
    need_layouts(sources, says)
    need_layouts([dest], says)
    wanted = Wanted(sources, allow_missing, cast)
    if group is None:
        matched = wanted.match(dest)
        parts, asks = tuple(elect(matched.overlaps)), dict[int, int]()
    else:
        group.check(dest)
        members = match_members(wanted, dest, group)
        matched = members[group.member]
        overlaps = [member.overlaps for member in members]
        parts, asks = share_out(overlaps, group.member, len(sources))
    planned = _planned(matched, parts, asks)
    if matched.arrival is None or matched.converted is None:
        return planned
    return replace(planned, cast=Cast(matched.arrival, _planned(matched.converted, parts, asks)))


def _planned(matched: Matched, parts: Sequence[Part], asks: Mapping[int, int]) -> TransferPlan:
    """The copies of those parts that are of the matched destination."""
    paired = matched.paired
    dest = paired.dest
    parts = tuple(part for part in parts if part.keys[0] in dest.region_by_key)
    records = records_of([*paired.sources, dest])
    routes = layer_routes = routes_of(records, parts)
    prove(records, parts, routes)
    if any((route.layers < 0).any() for route in routes):
        layer_routes = routes_of(records, parts, by_layer=True)
        prove(records, parts, layer_routes)
    wanted = dest.region_by_key.keys() | matched.arriving
    return TransferPlan(
        sources=paired.sources,
        dest=dest,
        routes=routes,
        unsent=tuple(key for key in paired.offered if key not in wanted),
        missing=tuple(key for key in dest.region_by_key if key in matched.missing),
        parts=parts,
        layer_routes=layer_routes,
        asks=asks,
    )
