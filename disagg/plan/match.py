"""Matches source regions to a destination region, or says why they do not match.

The shard axes of both sides are intersected. Sources that hold the same part are replicas, of which
one is elected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.plan.runs import Box
from kvpool.layout import PoolLayout, Region
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.sentences import ranges


@dataclass(frozen=True, slots=True)
class Overlap:
    """The part `box` of a destination region that the replicas `holders` all hold."""

    dest: Region
    box: Box
    holders: tuple[int, ...]


def mismatches(
    region: Region, dest: PoolLayout, sources: Sequence[PoolLayout], holders: Sequence[int]
) -> list[str]:
    """Reasons why the sources' bytes cannot fill this region."""
    if not holders:
        held = sorted(
            {
                other.layer
                for layout in sources
                for other in layout.regions
                if (other.owner, other.role) == (region.owner, region.role)
            }
        )
        where = f"it holds layers {ranges(held)}" if held else "it holds none"
        return [
            f"prefill offers no such region ({where}). Give prefill that region too"
            + ("." if region.owner == "target" else f", or allow_missing={{{region.owner!r}}}.")
        ]
    here = dest.space_of(region)
    axes = {axis.name: axis.total for axis in region.inner_axes}
    found: dict[str, None] = {}
    for holder in holders:
        other = sources[holder].region_by_key[region.key]
        there = sources[holder].space_of(other)
        if other.packing != region.packing:
            found[_other_packing(other, region)] = None
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
            (" space", there.kind, here.kind, "Use the same kind of space on both sides"),
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
                found[f"{theirs}{what} on prefill, {ours}{what} on decode. {cure}."] = None
    return list(found)


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


def tile(
    region: Region, sources: Sequence[PoolLayout], holders: Sequence[int]
) -> tuple[list[Overlap], list[str]]:
    """Overlaps that cover the region's shard exactly once, or the reason why there are none."""
    axes = region.inner_axes
    replicas: dict[Box, list[int]] = {}
    for holder in holders:
        other = sources[holder].region_by_key[region.key]
        box: list[tuple[str, int, int]] = []
        for axis in axes:
            theirs = other.axis(axis.name) or axis
            box.append((axis.name, max(axis.start, theirs.start), min(axis.stop, theirs.stop)))
        if all(low < high for _, low, high in box):
            replicas.setdefault(tuple(box), []).append(holder)
    taken: list[Box] = []
    for candidate in sorted(replicas, key=lambda box: (-_volume(box), box)):
        if all(_apart(candidate, other) for other in taken):
            taken.append(candidate)
    needed = tuple((axis.name, axis.start, axis.stop) for axis in axes)
    if sum(map(_volume, taken)) != _volume(needed):
        held = "; ".join(sorted({_say(box) for box in replicas})) or "none of it"
        return [], [
            f"decode needs {_say(needed)}, prefill offers {held}, which does not cover it exactly "
            "once. Plan with the layouts of all prefill ranks."
        ]
    return [Overlap(region, box, tuple(replicas[box])) for box in taken], []


def elect(overlaps: Sequence[Overlap]) -> list[tuple[Overlap, int]]:
    """One holder for each overlap. Replicas share the layers in contiguous blocks, so that all of
    them send.
    """
    layers: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for each in overlaps:
        layers.setdefault(each.holders, []).append((each.dest.owner, each.dest.layer))
    turn: dict[tuple[tuple[int, ...], tuple[str, int]], int] = {}
    for holders, held in layers.items():
        ordered = sorted(set(held))
        for number, layer in enumerate(ordered):
            turn[holders, layer] = holders[number * len(holders) // len(ordered)]
    return [(o, turn[o.holders, (o.dest.owner, o.dest.layer)]) for o in overlaps]


def _volume(box: Box) -> int:
    volume = 1
    for _, low, high in box:
        volume *= high - low
    return volume


def _apart(one: Box, other: Box) -> bool:
    return any(a[2] <= b[1] or b[2] <= a[1] for a, b in zip(one, other))


def _say(box: Box) -> str:
    return ", ".join(f"{name} {ranges(range(low, high))}" for name, low, high in box) or "all"
