"""Matches source regions to a destination region, or says why they do not match.

The shard axes of both sides are intersected, and the positions that their ranks hold. Sources that
hold the same part are replicas; one is elected, or one for each member of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType

import numpy as np

from disagg.plan.pairing import Alike, SourceRegion
from disagg.plan.runs import Box, volume
from kvpool.layout import Interleave, Key, PoolLayout, Region, Space, need_layouts
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.text import ranges

MAX_LISTED = 20
"""Owners and roles that a reason names."""

CURES = {
    "": "Build both pools with the same dtype and packing",
    " elements per cell": "Build both pools for the same model",
    " axes": "Declare the same axes on both sides",
    " in total": "Build both pools for the same model",
    " space": "Use the same kind of space on both sides",
    " tokens per entry": "Use the same compression on both sides",
    " partial entries": "Use the same compression on both sides",
    " entries an item": "Items of packing {packing!r} move whole: use the same page size on both "
    "sides",
}
"""What to do where sides differ, by the words for what differs."""

Holders = tuple[int, ...]
"""Source ranks that hold the same."""


@dataclass(frozen=True, slots=True)
class Part:
    """The steps `box` of destination regions that are alike, for the entries `held` of a request,
    which the source ranks `holders` all hold: replicas, or the one that was elected to send it.
    """

    keys: tuple[Key, ...]
    box: Box
    held: Interleave
    holders: Holders

    @property
    def source(self) -> int:
        """The rank that sends it."""
        return self.holders[0]


@dataclass(frozen=True, slots=True)
class Group:
    """The layouts of all decode ranks that read each request, and which of them (`member`) this one
    is. Pointers and generations of the others mean nothing here.

    Every member works out for itself which of them asks which source rank: nothing is exchanged for
    it. So all must be given the same layouts in the same order and the same `allow_missing`, and
    must see the same layouts of prefill: endpoints ask prefill for the owners and roles of all
    members. Members may hold different ones, as stages do whose layers are of different kinds.
    """

    layouts: tuple[PoolLayout, ...]
    member: int

    def __post_init__(self) -> None:
        need_layouts(
            self.layouts or None, "Group(layouts, member): `layouts` are those of all members."
        )
        object.__setattr__(self, "layouts", tuple(self.layouts))
        if not 0 <= self.member < len(self.layouts):
            raise ValueError(
                f"group: member {self.member} of {len(self.layouts)} layouts: give a number from 0 "
                f"to {len(self.layouts) - 1}."
            )

    def check(self, layout: PoolLayout) -> None:
        """Raises ValueError if `layout` is not like this member's."""
        if layout.fingerprint() != self.layouts[self.member].fingerprint():
            raise ValueError(
                f"group: layout {self.member} is not like that of member {self.member}, which this "
                "rank is. Give the layouts of all members, each at its own number."
            )

    @property
    def shape(self) -> tuple[int, tuple[str, ...]]:
        """Equal for groups that differ in pointers only."""
        return self.member, tuple([layout.fingerprint() for layout in self.layouts])


def absent(region: Region, layers: Collection[int], others: str) -> str:
    """Why no source offers a region: they offer `layers` of its owner and role, or `others`."""
    offered, cure = f"layers {ranges(layers)}", "Give prefill that region too"
    if not layers:
        offered = f"none, but {others}" if others else "none"
        cure = "Connect pools of the same model, or give prefill that region too"
    missing = "" if region.owner == "target" else f", or allow_missing={{{region.owner!r}}}"
    return f"prefill offers no such region (it holds {offered}). {cure}{missing}."


def named_pairs(pairs: Collection[tuple[str, str]]) -> str:
    """Owners and roles for a sentence, at most a few."""
    names = [" ".join(pair) for pair in sorted(pairs)]
    more = [f"{len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return ", ".join([*names[:MAX_LISTED], *more])


def mismatches(alike: Alike) -> dict[str, list[int]]:
    """Reasons why the holders' bytes cannot fill these regions, and the source ranks of each."""
    wanted, space = alike.region, alike.space
    reasons: dict[str, list[int]] = {}
    for holder in alike.holders:
        offered, source = holder.region, holder.space
        if offered.packing != wanted.packing:
            reasons.setdefault(_other_packing(offered, wanted), []).extend(holder.sources)
            continue
        # pages and rings pair by entries; the destination needs those that are alive
        by_entry = source.has_entries and space.has_entries and not wanted.packing
        facts = _facts(offered, source, wanted, by_entry), _facts(wanted, space, offered, by_entry)
        for what, cure in CURES.items():
            theirs, ours = (side[what] for side in facts)
            if theirs != ours:
                cure = cure.format(packing=wanted.packing)
                if not what and "uint8" in (theirs, ours):
                    cure += ", or give describe(dtype=...) of a tensor that holds raw bytes"
                reason = f"{theirs}{what} on prefill, {ours}{what} on decode. {cure}."
                reasons.setdefault(reason, []).extend(holder.sources)
    return reasons


def _facts(region: Region, space: Space, counterpart: Region, by_entry: bool) -> dict[str, object]:
    """What must be equal on both sides, where a region pairs with `counterpart`, by its words."""
    totals = {axis.name: axis.total for axis in region.inner_axes}
    return {
        "": region.dtype,
        " elements per cell": region.width // ITEMSIZE[region.dtype],
        " axes": sorted(totals),
        " in total": {name: total for name, total in totals.items() if counterpart.axis(name)},
        " space": by_entry or space.kind,
        " tokens per entry": space.tokens_per_entry,
        " partial entries": space.partial,
        " entries an item": not region.packing or space.entries_per_item,
    }


def _other_packing(offered: Region, wanted: Region) -> str:
    theirs, ours = (
        f"packing {region.packing!r}" if region.packing else "no packing"
        for region in (offered, wanted)
    )
    return (
        f"{theirs} on prefill, {ours} on decode. Packed items move only between equals: run the "
        "same backend, in the same version and on the same kind of device, on both sides, or "
        "describe the axes of both."
    )


def tile(alike: Alike) -> tuple[list[Part], list[str]]:
    """Overlaps that cover the regions' positions and shard exactly once, or the reasons why there
    are none.

    Ranks whose stretches are equally many and long hold every position once; of these all that meet
    the destination's positions are needed, each for the whole shard. For heads 1 to 4, of ranks
    with heads 0-1, 2-3 and 4-5, come head 1 of the first, 2-3 of the second and 4 of the third.
    """
    families: dict[tuple[int, int], dict[int, list[SourceRegion]]] = {}
    for holder in alike.holders:
        interleave = holder.space.held
        families.setdefault((interleave.ranks, interleave.size), {}).setdefault(
            interleave.rank, []
        ).append(holder)
    reasons: list[str] = []
    for (ranks, size), by_rank in sorted(families.items()):
        overlaps: list[Part] = []
        problems: list[str] = []
        needed = _ranks_needed(size, ranks, alike.space.held)
        missing = [rank for rank in needed if rank not in by_rank]
        if missing:
            problems.append(_say_missing(next(iter(by_rank.values()))[0].space, missing))
        for rank in needed:
            if rank in by_rank:
                part = Interleave(size, rank, ranks)
                tiles, problem = _tile_shard(alike, part, by_rank[rank])
                overlaps += tiles
                problems += problem
        if not problems:
            return overlaps, []
        reasons += problems
    return [], list(dict.fromkeys(reasons))


def _say_missing(space: Space, missing: Sequence[int]) -> str:
    size = space.held.size * space.tokens_per_entry
    ranks, are = ("ranks", "are") if len(missing) > 1 else ("rank", "is")
    return (
        f"{ranks} {ranges(missing)} of {space.held.ranks} of prefill's space {space.name}, in "
        f"stretches of {size} positions, {are} missing. Plan with the layouts of all prefill ranks."
    )


def _ranks_needed(size: int, ranks: int, dest: Interleave) -> list[int]:
    """Of ranks that hold stretches of `size`, those that hold something of `dest`: the second of
    two ranks with stretches of 16 needs ranks 1 and 3 of four with stretches of 16.
    """
    starts = np.arange(ranks, dtype=np.int64) * size
    # what is held by both differs by a multiple of the period; a number of one stretch less a
    # number of the other is anything from low to high
    period = gcd(size * ranks, dest.size * dest.ranks)
    high = starts + size - 1 - dest.rank * dest.size
    low = starts - (dest.rank + 1) * dest.size + 1
    needed: list[int] = np.flatnonzero(high // period * period >= low).tolist()
    return needed


def _tile_shard(
    alike: Alike, interleave: Interleave, holders: Sequence[SourceRegion]
) -> tuple[list[Part], list[str]]:
    """Overlaps that cover the regions' shard exactly once, or the reason why there are none."""
    axes = alike.region.inner_axes
    replicas: dict[Box, list[int]] = {}
    for holder in holders:
        box: list[tuple[str, int, int]] = []
        for axis in axes:
            theirs = holder.region.axis(axis.name) or axis
            box.append((axis.name, max(axis.start, theirs.start), min(axis.stop, theirs.stop)))
        if all(low < high for _, low, high in box):
            replicas.setdefault(tuple(box), []).extend(holder.sources)
    taken: list[Box] = []
    for candidate in sorted(replicas, key=lambda box: (-volume(box), box)):
        if all(_apart(candidate, earlier) for earlier in taken):
            taken.append(candidate)
    needed = tuple((axis.name, axis.start, axis.stop) for axis in axes)
    if sum(map(volume, taken)) != volume(needed):
        offered = "; ".join(sorted({_say(box) for box in replicas})) or "none of it"
        of = (
            f" on rank {interleave.rank} of {interleave.ranks} of its positions"
            if interleave.ranks > 1
            else ""
        )
        return [], [
            f"decode needs {_say(needed)}, prefill offers {offered}{of}, which does not cover it "
            "exactly once. Plan with the layouts of all prefill ranks."
        ]
    return [Part(alike.keys, box, interleave, tuple(sorted(replicas[box]))) for box in taken], []


def elect(
    overlaps: Sequence[Part], turns: Mapping[Holders, Holders] = MappingProxyType({})
) -> Iterator[Part]:
    """One holder for each region of each overlap. Replicas share the layers in contiguous blocks,
    so that all of them send: of five layers, two replicas send 0 to 2, and 3 and 4. `turns` says of
    replicas that others read too which this destination reads.
    """
    layers: dict[Holders, set[tuple[str, int]]] = {}
    for overlap in overlaps:
        layers.setdefault(overlap.holders, set()).update(key[:2] for key in overlap.keys)
    elected: dict[Holders, dict[tuple[str, int], int]] = {}
    for holders, shared in layers.items():
        ranks = turns.get(holders, holders)
        elected[holders] = {
            layer: ranks[number * len(ranks) // len(shared)]
            for number, layer in enumerate(sorted(shared))
        }
    for overlap in overlaps:
        source_of, shares = elected[overlap.holders], dict[int, list[Key]]()
        for key in overlap.keys:
            shares.setdefault(source_of[key[:2]], []).append(key)
        for source, keys in shares.items():
            yield replace(overlap, keys=tuple(keys), holders=(source,))


def share_out(
    overlaps: Sequence[Sequence[Part]], member: int, sources: int
) -> tuple[tuple[Part, ...], dict[int, int]]:
    """What one of the members whose destinations have these `overlaps` reads, and which source
    ranks it asks for each request, each with how many members ask that rank.

    Members that read from the same replicas take them in turn. A source rank that is not
    read is asked by member `rank % members`: it must learn that, too. A member that
    would ask no rank asks rank `member % ranks`: how its rooms end is told by those that it asks.
    """
    readers: dict[Holders, list[int]] = {}
    for number, wanted in enumerate(overlaps):
        for holders in dict.fromkeys(overlap.holders for overlap in wanted):
            readers.setdefault(holders, []).append(number)
    turns: list[dict[Holders, Holders]] = [{} for _ in overlaps]
    for holders, numbers in readers.items():
        for place, number in enumerate(numbers):
            # each replica is read by as few members as can be: the second of two members reads
            # from ranks 2 and 3 of four
            low, high = (n * len(holders) // len(numbers) for n in (place, place + 1))
            turns[number][holders] = holders[low : max(high, low + 1)]
    parts = [tuple(elect(wanted, turn)) for wanted, turn in zip(overlaps, turns)]
    asked = [{part.source for part in read} for read in parts]
    for idle in set(range(sources)).difference(*asked):
        asked[idle % len(asked)].add(idle)
    for number, ranks in enumerate(asked):
        if not ranks:
            ranks.add(number % sources)
    askers = Counter(source for ranks in asked for source in ranks)
    return parts[member], {source: askers[source] for source in sorted(asked[member])}


def _apart(first: Box, second: Box) -> bool:
    return any(a[2] <= b[1] or b[2] <= a[1] for a, b in zip(first, second))


def _say(box: Box) -> str:
    return ", ".join(f"{name} {ranges(range(low, high))}" for name, low, high in box) or "all"
