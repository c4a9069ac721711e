"""Which regions of sources and destination pair, with the same axes on both sides.

Layers of one model are alike, and so are ranks: each kind of region is looked at once, however many
layers and ranks have it.

A cell of n elements is an axis of n steps, one element apart. Where a layout reorders it, it
declares that axis: vLLM's CPU attention has keys of `[head, dim, token]`, others cells of `dim` per
token and head. The cell is then cut, so that both sides have the same axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvpool.layout import Axis, Key, PoolLayout, Region, Space
from kvpool.layout.codec import encode
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.types import MAX_AXES


@dataclass(frozen=True, slots=True)
class SourceRegion:
    """Source ranks of one fingerprint, and a region that they hold."""

    sources: tuple[int, ...]
    region: Region
    space: Space


@dataclass(frozen=True, slots=True)
class Alike:
    """Regions of the destination of one owner and role, by their `keys`. They differ from `region`
    in layer and buffer only, and so do those of each holder from its own.
    """

    keys: tuple[Key, ...]
    region: Region
    space: Space
    holders: tuple[SourceRegion, ...]


@dataclass(frozen=True, slots=True)
class Pairing:
    """The paired layouts, all regions of the destination, and the keys of all that sources hold."""

    sources: tuple[PoolLayout, ...]
    dest: PoolLayout
    alike: tuple[Alike, ...]
    offered: tuple[Key, ...]


def pair(sources: Sequence[PoolLayout], dest: PoolLayout) -> Pairing:
    """What pairs, with cells cut where another layout has an axis in their place.

    It is one axis that a region lacks, with as many steps as its cell has elements, and after the
    cut all cells are of one element: else which axis a cell holds is not known, and the regions
    are left as they are.
    """
    pairing = _pair(sources, dest)
    cuts: list[dict[Key, str]] = [{} for _ in (*sources, dest)]
    for alike in pairing.alike:
        ranks = [*(holder.sources for holder in alike.holders), (-1,)]
        regions = [*(holder.region for holder in alike.holders), alike.region]
        for numbers, name in zip(ranks, _lacking(regions)):
            for number in numbers if name else ():
                cuts[number].update(dict.fromkeys(alike.keys, name))
    if not any(cuts):
        return pairing
    return _pair(list(map(_with_cuts, sources, cuts)), _with_cuts(dest, cuts[-1]))


def encoded(*parts: object) -> bytes:
    """What a peer may choose, as a key: hashes of tuples of numbers can be made to collide."""
    return encode(parts)


def cut(region: Region, name: str) -> Region:
    """The same bytes, with the elements of a cell as the steps of axis `name`: a cell of 256 bytes
    of bf16 becomes an axis of 128 steps, 2 bytes apart, of cells of 2 bytes.
    """
    size = ITEMSIZE[region.dtype]
    axis = Axis(name, region.width // size, size)
    return replace(region, axes=(*region.axes, axis), width=size)


def _pair(sources: Sequence[PoolLayout], dest: PoolLayout) -> Pairing:
    ranks: dict[str, list[int]] = {}
    for number, layout in enumerate(sources):
        ranks.setdefault(layout.fingerprint(), []).append(number)
    equal = {numbers[0]: tuple(numbers) for numbers in ranks.values()}
    forms: dict[bytes, int] = {}
    offered: dict[Key, list[tuple[int, int]]] = {}
    for rank in equal:
        for key, form in _forms(sources[rank], forms):
            offered.setdefault(key, []).append((rank, form))
    kinds: dict[object, list[Key]] = {}
    for key, form in _forms(dest, forms):
        owner, _, role = key
        kinds.setdefault((owner, role, form, *offered.get(key, ())), []).append(key)
    alike = []
    for keys in kinds.values():
        first = keys[0]
        holders = []
        for rank, _ in offered.get(first, ()):
            region = sources[rank].region_by_key[first]
            holders.append(SourceRegion(equal[rank], region, sources[rank].space_of(region)))
        region = dest.region_by_key[first]
        alike.append(Alike(tuple(keys), region, dest.space_of(region), tuple(holders)))
    return Pairing(tuple(sources), dest, tuple(alike), tuple(offered))


def _forms(layout: PoolLayout, numbers: dict[bytes, int]) -> Iterator[tuple[Key, int]]:
    """For each key a number, equal for regions that differ in owner, role, layer, buffer only."""
    spaces = {buffer.name: buffer.space for buffer in layout.buffers}
    for key, r in layout.region_by_key.items():
        form = encoded(r.offset, r.dtype, r.axes, r.width, r.packing, spaces[r.buffer])
        yield key, numbers.setdefault(form, len(numbers))


def _with_cuts(layout: PoolLayout, names: Mapping[Key, str]) -> PoolLayout:
    """The layout with the cells of some regions cut."""
    if not names:
        return layout
    regions = (cut(r, names[r.key]) if r.key in names else r for r in layout.regions)
    return replace(layout, regions=tuple(regions))


def _lacking(regions: Sequence[Region]) -> list[str]:
    """For each of the regions of one key the axis that its cells are, so that all have the axes of
    all; empty names where nothing is cut, and no names if they cannot have them.
    """
    first = [axis.name for axis in regions[0].inner_axes]
    if all([axis.name for axis in region.inner_axes] == first for region in regions):
        return []
    totals = {axis.name: axis.total for region in regions for axis in region.inner_axes}
    names_to_cut = []
    for region in regions:
        lacking = sorted(totals.keys() - {axis.name for axis in region.inner_axes})
        name = ""
        if lacking and not region.packing and len(region.axes) < MAX_AXES:
            name = lacking[0]
            region = cut(region, name)
        names = {axis.name: axis.total for axis in region.inner_axes}
        if names != totals or region.width != ITEMSIZE[region.dtype]:
            return []
        names_to_cut.append(name)
    return names_to_cut
