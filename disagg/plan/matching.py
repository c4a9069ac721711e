"""What of sources fits where in a destination, region by region, and all reasons why something does
not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from disagg.plan.cast.arrival import Arrival, arrival_of, without
from disagg.plan.match import Group, Part, absent, mismatches, named_pairs, tile
from disagg.plan.pairing import Pairing, pair
from disagg.plan.refusal import IncompatibleLayouts, Reason
from kvpool.layout import Key, PoolLayout
from kvpool.layout.text import ranges

CAST_VALUES = 'True, False, or a list of roles, such as ["k", "v"]'
"""What `cast` may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """What of each source fits where in a destination, and what may be missing of it. With an
    `arrival`, the same of rows that are `converted`.
    """

    paired: Pairing
    own: list[Part]
    missing: set[Key]
    arrival: Arrival | None = None
    converted: Matched | None = None

    @property
    def overlaps(self) -> list[Part]:
        """Those of rows that are converted among them."""
        return self.own if self.converted is None else [*self.own, *self.converted.own]

    @property
    def arriving(self) -> Set[Key]:
        """Regions of sources that are converted."""
        return set() if self.arrival is None else self.arrival.layout.region_by_key.keys()


class Wanted(NamedTuple):
    """What destinations may be filled from, and how."""

    sources: Sequence[PoolLayout]
    allow_missing: Collection[str]
    cast: bool | Collection[str]

    def match(self, dest: PoolLayout) -> Matched:
        """Raises IncompatibleLayouts, and ValueError for a text as `cast`, which is no list."""
        if isinstance(self.cast, str):
            raise ValueError(f"cast={self.cast!r}: {CAST_VALUES}.")
        arrival = arrival_of(self.sources, dest, self.cast) if self.cast else None
        if arrival is None:
            try:
                return _match(self.sources, dest, self.allow_missing)
            except IncompatibleLayouts as error:
                raise _with_casts(error, self.sources, dest) from None
        rest = without(dest, arrival.converted)
        matched: list[Matched] = []
        reasons: list[Reason] = []
        for layout, missing in ((rest, self.allow_missing), (arrival.layout, ())):
            try:
                matched.append(_match(self.sources, layout, missing))
            except IncompatibleLayouts as error:
                reasons += error.reasons
        if reasons:
            raise _with_casts(IncompatibleLayouts(reasons), self.sources, dest, arrival)
        own, converted = matched
        return replace(own, arrival=arrival, converted=converted)


def _with_casts(
    error: IncompatibleLayouts,
    sources: Sequence[PoolLayout],
    dest: PoolLayout,
    allowed: Arrival | None = None,
) -> IncompatibleLayouts:
    """The reasons, and where rows could be converted beside those that are `allowed` to be, how to
    allow that: their scales are then no reason of their own.
    """
    arrival = arrival_of(sources, dest, True)
    if arrival is None:
        return error
    converted = arrival.converted - (allowed.converted if allowed else set())
    hints = {
        key: f" Or let decode convert {rows.arrival.format} to {rows.dest.format}: cast=True."
        for key, rows in arrival.conversions.items()
        if key in converted
    }
    own = [(r, (r.owner, r.layer, r.role)) for r in error.reasons]
    return IncompatibleLayouts(
        [
            replace(reason, sentence=reason.sentence + hints.get(key, ""))
            for reason, key in own
            if key in hints or key not in converted
        ]
    )


def _match(
    sources: Sequence[PoolLayout], dest: PoolLayout, allow_missing: Collection[str]
) -> Matched:
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
                Reason(
                    owner=owner,
                    layer=layer,
                    role=role,
                    sentence=sentence,
                    sources=tuple(sorted(ranks)),
                )
                for owner, layer, role in dest.region_by_key
                for sentence, ranks in problems.get((owner, layer, role), {}).items()
            ]
        )
    return Matched(paired=paired, own=overlaps, missing=missing)


def match_members(wanted: Wanted, dest: PoolLayout, group: Group) -> list[Matched]:
    """For each member of a group, those alike at once. Raises IncompatibleLayouts."""
    alike: dict[str, list[int]] = {}
    for number, layout in enumerate(group.layouts):
        alike.setdefault(layout.fingerprint(), []).append(number)
    matched: dict[int, Matched] = {}
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
