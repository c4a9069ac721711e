"""Matches source regions to a destination region, or says why they do not match.

The shard axes of both sides are intersected, and the positions that their ranks hold. Sources that
hold the same part are replicas, of which one is elected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from disagg.plan.matching.pairing import Alike, Holder
from disagg.plan.runs import Box
from kvpool.layout import Interleave, Key, Region, Space
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.sentences import ranges

MAX_LISTED = 20
"""Owners and roles that a reason names."""

Holders = tuple[int, ...]
"""Source ranks that hold the same."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The steps `box` of destination regions that are alike, which the replicas `holders` all hold,
    for the entries `held` of a request.
    """

    keys: tuple[Key, ...]
    box: Box
    held: Interleave
    holders: Holders


@dataclass(frozen=True, slots=True)
class Part:
    """What source rank `source` is to send: the steps `box` of destination regions that are alike,
    for the entries `held` of a request.
    """

    keys: tuple[Key, ...]
    box: Box
    held: Interleave
    source: int


class Turn(NamedTuple):
    """Number `place` of `ranks` destinations that read from the same replicas."""

    place: int
    ranks: int

    def of(self, holders: Holders) -> Holders:
        """The replicas of which this one reads: each is read, by as few destinations as can be."""
        low, high = (place * len(holders) // self.ranks for place in (self.place, self.place + 1))
        return holders[low : max(high, low + 1)]


ALONE = Turn(0, 1)


def absent(region: Region, layers: Collection[int], others: str) -> str:
    """The reason that no source offers a region, with the layers that they offer of its owner and
    role, or in its place `others`, see `named_pairs`.
    """
    where, cure = f"layers {ranges(layers)}", "Give prefill that region too"
    if not layers:
        where = f"none, but {others}" if others else "none"
        cure = "Connect pools of the same model, or give prefill that region too"
    missing = "" if region.owner == "target" else f", or allow_missing={{{region.owner!r}}}"
    return f"prefill offers no such region (it holds {where}). {cure}{missing}."


def named_pairs(pairs: Collection[tuple[str, str]]) -> str:
    """Owners and roles for a sentence, at most a few."""
    names = [" ".join(pair) for pair in sorted(pairs)]
    more = [f"{len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return ", ".join([*names[:MAX_LISTED], *more])


def mismatches(alike: Alike) -> dict[str, list[int]]:
    """Reasons why the holders' bytes cannot fill these regions, and the source ranks of each."""
    region, here = alike.region, alike.space
    axes = {axis.name: axis.total for axis in region.inner_axes}
    found: dict[str, list[int]] = {}
    for holder in alike.holders:
        other, there = holder.region, holder.space
        if other.packing != region.packing:
            found.setdefault(_other_packing(other, region), []).extend(holder.sources)
            continue
        totals = {axis.name: axis.total for axis in other.inner_axes}
        for what, theirs, ours, cure in (
            ("", other.dtype, region.dtype, "Build both pools with the same dtype and packing"),
            (
                " elements per cell",
                other.width // ITEMSIZE[other.dtype],
                region.width // ITEMSIZE[region.dtype],
                "Build both pools for the same model",
            ),
            (" axes", sorted(totals), sorted(axes), "Declare the same axes on both sides"),
            (
                " in total",
                {name: total for name, total in totals.items() if name in axes},
                {name: total for name, total in axes.items() if name in totals},
                "Build both pools for the same model",
            ),
            (
                " space",
                *kinds(there, here, region),
                "Use the same kind of space on both sides",
            ),
            (
                " tokens per entry",
                there.tokens_per_entry,
                here.tokens_per_entry,
                "Use the same compression on both sides",
            ),
            (
                " entries an item",
                there.entries_per_item if region.packing else None,
                here.entries_per_item if region.packing else None,
                f"Items of packing {region.packing!r} move whole: use the same page size on both "
                "sides",
            ),
        ):
            if theirs != ours:
                reason = f"{theirs}{what} on prefill, {ours}{what} on decode. {cure}."
                found.setdefault(reason, []).extend(holder.sources)
    return found


def kinds(there: Space, here: Space, region: Region) -> tuple[str, str]:
    """The kinds of two spaces, as far as they must be equal: pages and rings pair by entries, of
    which the destination needs those that are alive.
    """
    by_entry = {there.kind, here.kind} <= {"paged", "ring"} and not region.packing
    return ("", "") if by_entry else (there.kind, here.kind)


def _other_packing(theirs: Region, ours: Region) -> str:
    """Why a packed region does not pair with another."""
    there, here = (
        f"packing {region.packing!r}" if region.packing else "no packing"
        for region in (theirs, ours)
    )
    return (
        f"{there} on prefill, {here} on decode. Packed items move only between equals: run the "
        "same backend, in the same version and on the same kind of device, on both sides, or "
        "describe the axes of both."
    )


def tile(alike: Alike) -> tuple[list[Overlap], list[str]]:
    """Overlaps that cover the regions' positions and shard exactly once, or the reasons why there
    are none.

    Ranks whose stretches are equally many and long hold every position once; of these all that meet
    the destination's positions are needed, each for the whole shard.
    """
    here = alike.space.held
    families: dict[tuple[int, int], dict[int, list[Holder]]] = {}
    for holder in alike.holders:
        held = holder.space.held
        families.setdefault((held.ranks, held.size), {}).setdefault(held.rank, []).append(holder)
    reasons: list[str] = []
    for (ranks, size), by_rank in sorted(families.items()):
        found: list[Overlap] = []
        problems: list[str] = []
        missing: list[int] = []
        for rank in _ranks_needed(size, ranks, here):
            if rank not in by_rank:
                missing.append(rank)
                continue
            part = Interleave(size, rank, ranks)
            overlaps, problem = _tile_shard(alike, part, by_rank[rank])
            found += overlaps
            problems += problem
        if missing:
            problems.insert(0, _say_missing(next(iter(by_rank.values()))[0].space, missing))
        if not problems:
            return found, []
        reasons += problems
    return [], list(dict.fromkeys(reasons))


def _say_missing(space: Space, missing: Sequence[int]) -> str:
    """Names ranks that share out a space of prefill's with the rank of `space`."""
    size = space.held.size * space.tokens_per_entry
    ranks, are = ("ranks", "are") if len(missing) > 1 else ("rank", "is")
    return (
        f"{ranks} {ranges(missing)} of {space.held.ranks} of prefill's space {space.name}, in "
        f"stretches of {size} positions, {are} missing. Plan with the layouts of all prefill ranks."
    )


def _ranks_needed(size: int, ranks: int, here: Interleave) -> list[int]:
    """Of ranks that hold stretches of `size`, those that hold something of `here`."""
    starts = np.arange(ranks, dtype=np.int64) * size
    # what is held by both differs by a multiple of the period; a number of one stretch less a
    # number of the other is anything from low to high
    period = gcd(size * ranks, here.size * here.ranks)
    high = starts + size - 1 - here.rank * here.size
    low = starts - (here.rank + 1) * here.size + 1
    found: list[int] = np.flatnonzero(high // period * period >= low).tolist()
    return found


def _tile_shard(
    alike: Alike, held: Interleave, holders: Sequence[Holder]
) -> tuple[list[Overlap], list[str]]:
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
    for candidate in sorted(replicas, key=lambda box: (-_volume(box), box)):
        if all(_apart(candidate, other) for other in taken):
            taken.append(candidate)
    needed = tuple((axis.name, axis.start, axis.stop) for axis in axes)
    if sum(map(_volume, taken)) != _volume(needed):
        offered = "; ".join(sorted({_say(box) for box in replicas})) or "none of it"
        of = f" on rank {held.rank} of {held.ranks} of its positions" if held.ranks > 1 else ""
        return [], [
            f"decode needs {_say(needed)}, prefill offers {offered}{of}, which does not cover it "
            "exactly once. Plan with the layouts of all prefill ranks."
        ]
    return [Overlap(alike.keys, box, held, tuple(sorted(replicas[box]))) for box in taken], []


def elect(
    overlaps: Sequence[Overlap], turns: Mapping[Holders, Turn] = MappingProxyType({})
) -> Iterator[Part]:
    """One holder for each region of each overlap. Replicas share the layers in contiguous blocks,
    so that all of them send; `turns` says of which replicas others read too, and of which of them
    this destination does.
    """
    layers: dict[Holders, set[tuple[str, int]]] = {}
    for each in overlaps:
        layers.setdefault(each.holders, set()).update(key[:2] for key in each.keys)
    elected: dict[Holders, dict[tuple[str, int], int]] = {}
    for holders, held in layers.items():
        mine = turns.get(holders, ALONE).of(holders)
        elected[holders] = {
            layer: mine[number * len(mine) // len(held)]
            for number, layer in enumerate(sorted(held))
        }
    for each in overlaps:
        source_of, shares = elected[each.holders], dict[int, list[Key]]()
        for key in each.keys:
            shares.setdefault(source_of[key[:2]], []).append(key)
        for source, keys in shares.items():
            yield Part(tuple(keys), each.box, each.held, source)


def _volume(box: Box) -> int:
    volume = 1
    for _, low, high in box:
        volume *= high - low
    return volume


def _apart(one: Box, other: Box) -> bool:
    return any(a[2] <= b[1] or b[2] <= a[1] for a, b in zip(one, other))


def _say(box: Box) -> str:
    return ", ".join(f"{name} {ranges(range(low, high))}" for name, low, high in box) or "all"
