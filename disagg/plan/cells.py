"""Cells that one side declares as an axis and the other does not.

A cell of n elements is an axis of n steps, one element apart. Where a layout reorders it, it
declares that axis: vLLM's CPU attention has keys of `[head, dim, token]`, others cells of `dim` per
token and head. The cell is then cut, so that both sides have the same axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvpool.layout import Axis, Key, PoolLayout, Region
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.types import MAX_AXES


def cut(region: Region, name: str) -> Region:
    """The same bytes, with the elements of a cell as the steps of axis `name`."""
    size = ITEMSIZE[region.dtype]
    axis = Axis(name, region.width // size, size)
    return replace(region, axes=(*region.axes, axis), width=size)


def with_equal_cells(
    sources: Sequence[PoolLayout], dest: PoolLayout
) -> tuple[list[PoolLayout], PoolLayout]:
    """The layouts, cells cut where another of them has an axis in their place.

    It is one axis that a region lacks, with as many steps as its cell has elements, and after the
    cut all cells are of one element: else which axis a cell holds is not known, and the regions
    are left as they are.
    """
    layouts = [*sources, dest]
    changed: list[dict[Key, Region]] = [{} for _ in layouts]
    held: dict[Key, list[int]] = {region.key: [] for region in dest.regions}
    for number, layout in enumerate(layouts):
        for region in layout.regions:
            if region.key in held:
                held[region.key].append(number)
    for key, numbers in held.items():
        regions = [layouts[number].region_by_key[key] for number in numbers]
        for number, region in zip(numbers, _cut_alike(regions)):
            changed[number][key] = region
    found = [
        replace(layout, regions=tuple(new.get(region.key, region) for region in layout.regions))
        if new
        else layout
        for layout, new in zip(layouts, changed)
    ]
    return found[:-1], found[-1]


def _cut_alike(regions: Sequence[Region]) -> list[Region]:
    """All regions of one key with the axes of all; none if they cannot have them."""
    first = [axis.name for axis in regions[0].inner_axes]
    if all([axis.name for axis in region.inner_axes] == first for region in regions):
        return []
    totals = {axis.name: axis.total for region in regions for axis in region.inner_axes}
    found = []
    for region in regions:
        lacking = sorted(totals.keys() - {axis.name for axis in region.inner_axes})
        if lacking and not region.packing and len(region.axes) < MAX_AXES:
            region = cut(region, lacking[0])
        names = {axis.name: axis.total for axis in region.inner_axes}
        if names != totals or region.width != ITEMSIZE[region.dtype]:
            return []
        found.append(region)
    return found
