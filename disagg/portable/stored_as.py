"""A pool with the pages of another, in which floats of positions are of another type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from disagg.plan.cast.arrival import BITS, rows_in
from kvpool.layout import Buffer, PoolLayout, Region
from kvpool.layout.dtypes import ITEMSIZE, dtype_name


def stored_as(layout: PoolLayout, dtype: str, nbytes: int) -> tuple[PoolLayout, Any]:
    """A layout in new memory of `nbytes` bytes at most, of the kind that `layout` lies in, and what
    keeps that memory. Regions of floats that grow with a request are of `dtype` there, others as
    they are; every list of ids has the same share of its items. Raises ValueError for a type that
    is none without scales, where there is nothing of another type, and for too few bytes.
    """
    from kvpool.device import get_device  # imports torch

    wanted = dtype_name(dtype)
    if wanted not in BITS:
        raise ValueError(f"{dtype!r}: one of {', '.join(sorted(BITS))}.")
    plain = {key for key, rows in rows_in(layout).items() if rows.scale is None}
    regions = [
        _dense(layout, region, wanted if region.key in plain else "") for region in layout.regions
    ]
    if all(new.dtype == old.dtype for new, old in zip(regions, layout.regions)):
        raise ValueError(f"{dtype!r}: there is nothing that is of another type.")
    sizes = {region.key: _item_bytes(region) for region in regions}
    items = _items(layout, sizes, nbytes)
    memory = layout.buffers[0].memory
    buffers: list[Buffer] = []
    end = 0
    for region in regions:
        space = layout.space_of(layout.region_by_key[region.key])
        count, size = items[space.id_list], sizes[region.key]
        buffers.append(
            Buffer(
                name=region.buffer,
                space=space.name,
                base=end,
                item_stride=size,
                item_bytes=size,
                items=count,
                memory=memory,
            )
        )
        end += -(-count * size // 64) * 64
    storage = get_device(memory.partition(":")[0]).allocate(end)
    placed = tuple(replace(buffer, base=buffer.base + storage.data_ptr()) for buffer in buffers)
    spaces = tuple(replace(space, block_pool=None, items_per_block=1) for space in layout.spaces)
    stored = PoolLayout(
        buffers=placed,
        regions=tuple(regions),
        spaces=spaces,
        total_kv_layers=layout.total_kv_layers,
        model=layout.model,
    )
    return stored, storage


def _dense(layout: PoolLayout, region: Region, dtype: str) -> Region:
    """A region alone in its buffer, of another type if one is named and it grows."""
    if not dtype or layout.space_of(region).per_request:
        dtype = region.dtype
    width = region.width // ITEMSIZE[region.dtype] * ITEMSIZE[dtype]
    stride, axes = width, []
    for axis in reversed(region.axes):
        axes.append(replace(axis, stride=stride))
        stride *= axis.size
    name = f"{region.owner}.{region.layer}.{region.role}"
    return replace(
        region, buffer=name, offset=0, dtype=dtype, width=width, axes=tuple(reversed(axes))
    )


def _item_bytes(region: Region) -> int:
    return prod([region.width, *(axis.size for axis in region.axes)])


def _items(layout: PoolLayout, sizes: Mapping[Any, int], nbytes: int) -> dict[str, int]:
    """How many items each list of ids has in so many bytes."""
    own: dict[str, int] = {}
    reserved: dict[str, int] = {}
    for name, count in layout.items_by_space.items():
        space = layout.space_by_name[name]
        own[space.id_list] = min(count, own.get(space.id_list, count))
        reserved[space.id_list] = space.reserved
    every = {
        name: sum(
            size
            for key, size in sizes.items()
            if layout.space_of(layout.region_by_key[key]).id_list == name
        )
        for name in own
    }
    fixed = sum(reserved[name] * every[name] for name in own)
    whole = sum((own[name] - reserved[name]) * every[name] for name in own)
    share = min(1.0, (nbytes - fixed) / whole)
    items = {name: reserved[name] + int((own[name] - reserved[name]) * share) for name in own}
    for name, count in items.items():
        if count <= reserved[name]:
            raise ValueError(
                f"{nbytes:,} bytes: not one item of space {name} has room beside the others. Give "
                f"{fixed + sum(every.values()):,} or more."
            )
    return items
