"""Where a pool's buffers lie in its memory.

With block placement all kinds of state take blocks of equal bytes from one free list. What one id
of a kind would hold of all its layers differs widely (a state of linear attention is as large as
thousands of tokens), so the layers of a kind are cut into groups, each with ids of its own. A group
is as many layers as fit: groups of two kinds need not have equally many.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Literal

from kvpool.layout import Buffer, LayoutError, Space
from kvpool.layout.formats import BufferSpec

if TYPE_CHECKING:
    from kvpool.pools.base import KVPool

Placement = Literal["layer", "page", "stack", "block"]
ITEM_COUNTS = ("num_pages", "num_window_pages", "num_slots")
MAX_GROUPS = 16
"""Groups of one pool: a request has a list of ids for each."""


def layer_numbers(layers: Iterable[int], owner: str) -> tuple[int, ...]:
    """The layers of a pool, in order. Raises TypeError and ValueError for anything else."""
    try:
        numbers = tuple(sorted(map(index, layers)))
    except TypeError:
        instead = f"range({layers})" if isinstance(layers, int) else "range(2) or [0, 3]"
        raise TypeError(
            f"{owner} layers: the numbers of the layers that the pool holds, got {layers!r}. "
            f"Give them, such as {instead}."
        ) from None
    if not numbers or len(set(numbers)) != len(numbers) or numbers[0] < 0:
        raise ValueError(f"{owner} layers: distinct numbers from 0, got {[*numbers]}.")
    return numbers


def count_argument(list_space: Space) -> str:
    """Which of `ITEM_COUNTS` gives the items of an id list, named by the space that owns it."""
    if list_space.grows or list_space.block_pool is not None:
        return "num_pages"
    return "num_slots" if list_space.per_request else "num_window_pages"


def used_spaces(named: set[str], names: str, spaces: Iterable[Space]) -> dict[str, Space]:
    """Spaces of buffers and of their id lists, by name with prefix `names`."""
    by_name: dict[str, Space] = {}
    for space in spaces:
        if space.interleave is not None:
            raise LayoutError(
                f"space {space.name}: interleave={space.interleave}: a pool holds all positions of "
                "its requests, and its allocator counts them. Describe memory that an engine "
                "interleaves with kvpool.describe."
            )
        ids, pool = (None if n is None else names + n for n in (space.ids, space.block_pool))
        name = names + space.name
        by_name[name] = replace(space, name=name, ids=ids, block_pool=pool)
    if missing := named - set(by_name):
        raise LayoutError(f"spaces {sorted(missing)}: named by buffers, missing from spaces().")
    used = named | {by_name[name].id_list for name in named}
    return {name: space for name, space in by_name.items() if name in used}


def grouped(
    specs: Sequence[BufferSpec], spaces: Mapping[str, Space], pool: str
) -> tuple[tuple[BufferSpec, ...], dict[str, Space]]:
    """Specifications and spaces by group, with ids from block pool `pool`. The first group has the
    space's name, `kv`, the others `kv.1`, `kv.2`.
    """
    sizes: dict[str, dict[int, int]] = {}  # bytes of an item by layer, of each id list
    for spec in specs:
        by_layer = sizes.setdefault(spaces[spec.space].id_list, {})
        for layer in spec.layers:
            by_layer[layer] = by_layer.get(layer, 0) + spec.item_bytes
    groups = dict(zip(sizes, groups_of(list(sizes.values()))))
    cut = tuple(
        replace(spec, layers=kept, space=_group_name(spec.space, n))
        for spec in specs
        for n, layers in enumerate(groups[spaces[spec.space].id_list])
        if (kept := tuple(layer for layer in spec.layers if layer in layers))
    )
    named = {spec.space for spec in cut}
    by_group = {}
    for space in spaces.values():
        if space.block_pool is not None:
            raise LayoutError(
                f"space {space.name}: block pool {space.block_pool}, but with placement='block' "
                "all spaces are of one. Leave out either."
            )
        for n in range(len(groups[space.id_list])):
            name = _group_name(space.name, n)
            if space.ids is None:
                by_group[name] = replace(space, name=name, block_pool=pool)
            elif name in named:
                by_group[name] = replace(space, name=name, ids=_group_name(space.ids, n))
    return cut, by_group


def groups_of(sizes: Sequence[Mapping[int, int]]) -> list[list[list[int]]]:
    """The groups of each id list, from the bytes by layer of one of its items: at most MAX_GROUPS
    in all, or one each, so that the list with the most padding in its blocks has the least, to a
    percent; of equals, the fewest groups.

    `[{0: 100, 1: 100}, {2: 60, 3: 60, 4: 60}]`: blocks of 200 bytes, of layers 0 and 1 and of 2 to
    4, with a tenth of padding in the second.
    """
    floor = max(max(by_layer.values()) for by_layer in sizes)
    blocks = {
        max(floor, _least(by_layer, count))
        for by_layer in sizes
        for count in range(1, min(len(by_layer), MAX_GROUPS) + 1)
    }
    blocks.add(max(sum(by_layer.values()) for by_layer in sizes))  # one group each always does

    def padded(block: int) -> tuple[bool, float, int, int]:
        counts = [len(_filled(by_layer, block)) for by_layer in sizes]
        waste = max(1 - sum(x.values()) / (n * block) for x, n in zip(sizes, counts))
        return sum(counts) > max(MAX_GROUPS, len(sizes)), round(waste, 2), sum(counts), block

    block = min(blocks, key=padded)
    return [_filled(by_layer, block) for by_layer in sizes]


def _filled(sizes: Mapping[int, int], block: int) -> list[list[int]]:
    """The layers that each block holds, filled in order."""
    groups: list[list[int]] = [[]]
    used = 0
    for layer, size in sorted(sizes.items()):
        if used + size > block:
            groups.append([])
            used = 0
        groups[-1].append(layer)
        used += size
    return groups


def _least(sizes: Mapping[int, int], count: int) -> int:
    """The fewest bytes of a block such that `count` blocks hold all layers."""
    low, high = max(sizes.values()), sum(sizes.values())
    within = range(low, high + 1)
    return low + bisect_left(within, -count, key=lambda block: -len(_filled(sizes, block)))


def _group_name(space: str, group: int) -> str:
    return f"{space}.{group}" if group else space


def place(
    pool: KVPool, spaces: Mapping[str, Space], items: Mapping[str, int], step: int
) -> tuple[list[Buffer], int]:
    """A pool's buffers of `items[space]` items with bases from 0, and their bytes in all.

    `layer`: a stretch of memory per layer. `page`: all layers of a page side by side. `stack`: all
    layers of a specification one after the other. `block`: as `page`, the items of all id lists
    over one another. Stretches begin at multiples of `step` bytes. What a template leaves free is
    padding: the pool owns all of an item.
    """
    # what lies side by side in an item, in the order of the spaces
    records: dict[str, list[tuple[BufferSpec, int]]] = {}
    for spec in sorted(pool.specs, key=lambda spec: [*spaces].index(spec.space)):
        shared = {"page": spec.space, "block": spaces[spec.space].id_list}.get(pool.placement)
        for layer in spec.layers:
            name = shared or spec.buffer_name(pool.owner, layer)
            records.setdefault(name, []).append((spec, layer))
    buffers: list[Buffer] = []
    block = _stride(records.values()) if pool.placement == "block" else 0
    top = 0
    for record in records.values():
        start = base = 0 if block else top
        stride = block or _stride([record])
        # largest alignment first keeps every item aligned without gaps
        for spec, layer in sorted(record, key=lambda row: -row[0].alignment):
            buffer = Buffer(
                name=spec.buffer_name(pool.owner, layer),
                space=spec.space,
                base=base,
                item_stride=stride,
                item_bytes=spec.item_bytes,
                items=items[spec.space],
                padding=True,
            )
            buffers.append(buffer)
            base += spec.item_bytes
        top = start + buffer.items * stride
        if pool.placement != "stack" or layer == spec.layers[-1]:
            top = _up(top, step)
    return buffers, top


def _stride(records: Iterable[Sequence[tuple[BufferSpec, int]]]) -> int:
    """Bytes of the largest of several records, aligned for all of them."""
    rows = [row for record in records for row in record]
    most = max(sum(spec.item_bytes for spec, _ in record) for record in records)
    return _up(most, max((spec.alignment for spec, _ in rows), default=1))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
