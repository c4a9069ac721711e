"""Plans the copies from all source ranks to one destination, from their layouts alone.

Regions are paired by (owner, layer, role); shard axes are intersected; the result must cover the
destination exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from disagg.plan.bind import Binder, CopyBatch, Count
from disagg.plan.cast import Arrival, arrival_of, without
from disagg.plan.explain import Explanation, explain_routes
from disagg.plan.lookup import id_clash
from disagg.plan.match import Group, Part, absent, elect, mismatches, named_pairs, share_out, tile
from disagg.plan.pairing import Pairing, pair
from disagg.plan.proof import prove
from disagg.plan.refusal import IncompatibleLayouts, Reason
from disagg.plan.routes import records_of, routes_of
from disagg.plan.runs import Route
from kvpool.layout import Key, PoolLayout, RequestAddress, need_layouts
from kvpool.layout.sentences import ranges


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
    """Of which source rank each part of a destination region is read."""
    layer_routes: tuple[Route, ...] = field(repr=False, compare=False)
    """The same copies, no run of which is of two layers; `routes` where these are so already."""
    asks: Mapping[int, int] = field(compare=False)
    cast: Cast | None = None
    """Of regions whose rows are converted; none of the other fields is about them."""

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
        there = explain_routes(planned.sources, arrival.layout, planned.routes, tokens)
        rows = [row.converted(arrival.words(row.owner, row.roles)) for row in there.rows]
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
    wanted = _Wanted(sources, allow_missing, cast)
    if group is None:
        matched = wanted.match(dest)
        parts, asks = tuple(elect(matched.overlaps)), dict[int, int]()
    else:
        group.check(dest)
        members = _match_members(wanted, dest, group)
        matched = members[group.member]
        overlaps = [member.overlaps for member in members]
        parts, asks = share_out(overlaps, group.member, len(sources))
    planned = _planned(matched, parts, asks)
    if matched.arrival is None or matched.converted is None:
        return planned
    return replace(planned, cast=Cast(matched.arrival, _planned(matched.converted, parts, asks)))


def _planned(matched: _Matched, parts: Sequence[Part], asks: Mapping[int, int]) -> TransferPlan:
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
    known = dest.region_by_key.keys() | matched.arriving
    return TransferPlan(
        sources=paired.sources,
        dest=dest,
        routes=routes,
        unsent=tuple(key for key in paired.offered if key not in known),
        missing=tuple(key for key in dest.region_by_key if key in matched.missing),
        parts=parts,
        layer_routes=layer_routes,
        asks=asks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matched:
    """What of each source fits where in a destination, and what may be missing of it. With an
    `arrival`, the same of rows that are `converted`.
    """

    paired: Pairing
    own: list[Part]
    missing: set[Key]
    arrival: Arrival | None = None
    converted: _Matched | None = None

    @property
    def overlaps(self) -> list[Part]:
        """Those of rows that are converted among them."""
        return self.own if self.converted is None else [*self.own, *self.converted.own]

    @property
    def arriving(self) -> Set[Key]:
        """Regions of sources that are converted."""
        return set() if self.arrival is None else self.arrival.layout.region_by_key.keys()


class _Wanted(NamedTuple):
    """What destinations may be filled from, and how."""

    sources: Sequence[PoolLayout]
    allow_missing: Collection[str]
    cast: bool | Collection[str]

    def match(self, dest: PoolLayout) -> _Matched:
        """Raises IncompatibleLayouts."""
        arrival = arrival_of(self.sources, dest, self.cast) if self.cast else None
        if arrival is None:
            try:
                return _match(self.sources, dest, self.allow_missing)
            except IncompatibleLayouts as error:
                raise _with_casts(error, self.sources, dest) from None
        rest = without(dest, arrival.converted)
        converted = _match(self.sources, arrival.layout, ())
        own = _match(self.sources, rest, self.allow_missing)
        return replace(own, arrival=arrival, converted=converted)


def _with_casts(
    error: IncompatibleLayouts, sources: Sequence[PoolLayout], dest: PoolLayout
) -> IncompatibleLayouts:
    """The same reasons, and where rows could be converted, how to allow that."""
    arrival = arrival_of(sources, dest, True)
    if arrival is None:
        return error
    hints = {
        key: f" Or let decode convert {rows.arrival.format} to {rows.dest.format}: cast=True."
        for key, rows in arrival.conversions.items()
    }
    return IncompatibleLayouts(
        [
            replace(r, sentence=r.sentence + hints.get((r.owner, r.layer, r.role), ""))
            for r in error.reasons
        ]
    )


def _match(
    sources: Sequence[PoolLayout], dest: PoolLayout, allow_missing: Collection[str]
) -> _Matched:
    """Raises IncompatibleLayouts."""
    paired = pair(sources, dest)
    # an owner or role that one source has is not missing: a forgotten stage stays refused
    owners = {owner for owner, _, _ in paired.offered}
    layers: dict[tuple[str, str], set[int]] = {}
    for owner, layer, role in paired.offered:
        layers.setdefault((owner, role), set()).add(layer)
    absences: dict[tuple[str, str], str] = {}
    offered_names = named_pairs(layers)
    problems: dict[Key, dict[str, list[int]]] = {}
    missing: set[Key] = set()
    overlaps: list[Part] = []
    for alike in paired.alike:
        region = alike.region
        name = region.owner, region.role
        without_owner = region.owner in allow_missing and region.owner not in owners
        without_role = region.role in allow_missing and name not in layers
        if without_owner or without_role:
            missing.update(alike.keys)
            continue
        reasons = mismatches(alike)
        if not alike.holders:
            if name not in absences:  # named once for all layers: they may be many
                absences[name] = absent(region, layers.get(name, ()), offered_names)
            reasons = {absences[name]: []}
        if not reasons:
            tiles, gaps = tile(alike)
            overlaps.extend(tiles)
            ranks = [number for holder in alike.holders for number in holder.sources]
            reasons = dict.fromkeys(gaps, ranks)
        if reasons:
            problems.update(dict.fromkeys(alike.keys, reasons))
    if problems:
        raise IncompatibleLayouts(
            [
                Reason(owner, layer, role, sentence, tuple(sorted(ranks)))
                for owner, layer, role in dest.region_by_key
                for sentence, ranks in problems.get((owner, layer, role), {}).items()
            ]
        )
    return _Matched(paired=paired, own=overlaps, missing=missing)


def _match_members(wanted: _Wanted, dest: PoolLayout, group: Group) -> list[_Matched]:
    """For each member of a group, those alike at once. Raises IncompatibleLayouts."""
    alike: dict[str, list[int]] = {}
    for number, layout in enumerate(group.layouts):
        alike.setdefault(layout.fingerprint(), []).append(number)
    matched: dict[int, _Matched] = {}
    reasons: list[Reason] = []
    for numbers in alike.values():
        own = group.member in numbers
        into = dest if own else group.layouts[numbers[0]]
        try:
            matched.update(dict.fromkeys(numbers, wanted.match(into)))
        except IncompatibleLayouts as error:
            who = "" if own else f"on decode rank {ranges(numbers)} of its group: "
            reasons += [replace(reason, sentence=who + reason.sentence) for reason in error.reasons]
    if reasons:
        raise IncompatibleLayouts(reasons)
    return [matched[number] for number in range(len(group.layouts))]
