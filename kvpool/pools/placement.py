"""Where a pool's buffers lie in its memory.

With block placement all kinds of state take blocks of equal bytes from one free list. What one id
of a kind would hold of all its layers differs widely (a state of linear attention is as large as
thousands of tokens), so the layers of a kind are cut into groups, each with ids of its own. A group
is as many layers as fit: groups of two kinds need not have equally many.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import index
from typing import Literal

from kvpool.layout import Buffer, LayoutError, Space
from kvpool.layout.formats import BufferSpec
from kvpool.layout.template import alignment

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
    if list_space.block_pool is not None:
        return "num_pages"
    if list_space.per_request:
        return "num_slots"
    return "num_pages" if list_space.window is None else "num_window_pages"


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
            name, owns_ids = _group_name(space.name, n), space.ids is None
            ids = None if space.ids is None else _group_name(space.ids, n)
            if owns_ids or name in named:
                block_pool = pool if owns_ids else None
                by_group[name] = replace(space, name=name, ids=ids, block_pool=block_pool)
    return cut, by_group


def groups_of(sizes: Sequence[Mapping[int, int]]) -> list[list[frozenset[int]]]:
    """The groups of each id list, from the bytes by layer of one of its items: at most MAX_GROUPS
    in all, or one each, so that the list with the most padding in its blocks has the least, to a
    percent; of equals, the fewest groups.

    `[{0: 100, 1: 100}, {2: 60, 3: 60, 4: 60}]`: blocks of 200 bytes, of layers 0 and 1 and of 2 to
    4, with a tenth of padding in the second.
    """
    lists = [[by_layer[layer] for layer in sorted(by_layer)] for by_layer in sizes]
    floor = max(max(layers) for layers in lists)
    blocks = {
        max(floor, _least(layers, count))
        for layers in lists
        for count in range(1, min(len(layers), MAX_GROUPS) + 1)
    }
    blocks.add(max(sum(layers) for layers in lists))  # one group each always does

    def padded(block: int) -> tuple[bool, float, int, int]:
        counts = [len([*_filled(layers, block)]) for layers in lists]
        waste = max(1 - sum(layers) / (n * block) for layers, n in zip(lists, counts))
        return sum(counts) > max(MAX_GROUPS, len(lists)), round(waste, 2), sum(counts), block

    block, groups = min(blocks, key=padded), []
    for by_layer, layers in zip(sizes, lists):
        rest = iter(sorted(by_layer))
        groups.append([frozenset(islice(rest, count)) for count in _filled(layers, block)])
    return groups


def _filled(sizes: Sequence[int], block: int) -> Iterator[int]:
    """How many layers each block holds, filled in order."""
    count = used = 0
    for size in sizes:
        if used + size > block:
            yield count
            count = used = 0
        count, used = count + 1, used + size
    yield count


def _least(sizes: Sequence[int], count: int) -> int:
    """The fewest bytes of a block of which `count` hold all layers."""
    low, high = max(sizes), sum(sizes)
    within = range(low, high + 1)
    return low + bisect_left(within, -count, key=lambda block: -len([*_filled(sizes, block)]))


def _group_name(space: str, group: int) -> str:
    return f"{space}.{group}" if group else space


def place(
    specs: Sequence[BufferSpec],
    spaces: Mapping[str, Space],
    items: Mapping[str, int],
    *,
    owner: str,
    placement: Placement,
    step: int,
) -> tuple[list[Buffer], int]:
    """Buffers of `items[space]` items with bases from 0, and their bytes in all.

    `layer`: a stretch of memory per layer. `page`: all layers of a page side by side. `stack`: all
    layers of a specification one after the other. `block`: as `page`, the items of all id lists
    over one another. Stretches begin at multiples of `step` bytes. What a template leaves free is
    padding: the pool owns all of an item.
    """
    rows = {
        name: [(spec, layer) for spec in specs if spec.space == name for layer in spec.layers]
        for name in spaces
    }
    buffers: list[Buffer] = []
    top = 0

    def add(spec: BufferSpec, layer: int, base: int, stride: int = 0) -> int:
        """Adds a buffer whose items are adjacent without a `stride`; returns an item's bytes."""
        size = spec.item_bytes
        buffer = Buffer(
            name=spec.buffer_name(owner, layer),
            space=spec.space,
            base=base,
            item_stride=stride or size,
            item_bytes=size,
            items=items[spec.space],
            padding=True,
        )
        buffers.append(buffer)
        return size

    if placement in ("layer", "stack"):
        for space, record in rows.items():
            for spec, layer in record:
                top += items[space] * add(spec, layer, top)
                if placement == "layer" or layer == spec.layers[-1]:
                    top = _up(top, step)
        return buffers, top
    records: dict[str, list[tuple[BufferSpec, int]]] = {}
    for name, record in rows.items():
        ids = spaces[name].id_list if placement == "block" else name
        records.setdefault(ids, []).extend(record)
    block = _stride(records.values()) if placement == "block" else 0
    for ids, record in records.items():
        base = start = 0 if block else top
        stride = block or _stride([record])
        # largest alignment first keeps every item aligned without gaps
        for spec, layer in sorted(record, key=lambda row: -alignment(row[0].item)):
            base += add(spec, layer, base, stride)
        top = _up(start + items[ids] * stride, step)
    return buffers, top


def _stride(records: Iterable[Sequence[tuple[BufferSpec, int]]]) -> int:
    """Bytes of the largest of several records, aligned for all of them."""
    rows = [row for record in records for row in record]
    most = max(sum(spec.item_bytes for spec, _ in record) for record in records)
    return _up(most, max((alignment(spec.item) for spec, _ in rows), default=1))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
