"""Where a pool's buffers lie in its memory.

With block placement all kinds of state take blocks of equal bytes from one free list. What one id
of a kind would hold of all its layers differs widely (a state of linear attention is as large as
thousands of tokens), so the layers of a kind are cut into groups, each with ids of its own. A group
is as many layers as fit: groups of two kinds need not have equally many.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Literal

from kvpool.layout.formats.heads import Heads
from kvpool.layout.template import Template, alignment, item_bytes, item_regions
from kvpool.layout.types import Buffer, LayoutError, Region, Space
from kvpool.pools.buf_infos import StateType

Placement = Literal["layer", "page", "stack", "block"]
ITEM_COUNTS = ("num_pages", "num_window_pages", "num_slots")
MAX_GROUPS = 16
"""Groups of one pool: a request has a list of ids for each."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the sharded axes a pool holds: `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"shard: rank {self.rank} of {self.size}. The rank is 0 to size-1.")

    def of(self, total: int) -> tuple[int, int]:
        """(start, size) of the steps held, of `total`; with fewer steps than parts, several parts
        hold the same step.
        """
        if total % self.size == 0:
            return self.rank * (total // self.size), total // self.size
        if self.size % total == 0:
            return self.rank // (self.size // total), 1
        raise ValueError(
            f"shard: {total} heads cannot be split over {self.size} ranks. One must divide the "
            "other."
        )

    def heads(self, total: int) -> Heads:
        """The heads held, of `total`."""
        return Heads(*self.of(total), total)


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Buffers of one name: one for each of `layers`, in `space`, with items of template `item`.

    `state` is the component under which connectors list them (None: the main cache).
    """

    name: str
    layers: tuple[int, ...]
    space: str
    item: Template
    state: StateType | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of an item, rounded up to its alignment."""
        return _up(item_bytes(self.item), alignment(self.item))

    def buffer_name(self, owner: str, layer: int) -> str:
        """The name of one layer's buffer."""
        return f"{owner}.{self.name}.{layer}"

    def regions(self, owner: str) -> list[Region]:
        """The regions of all layers."""
        names = {layer: self.buffer_name(owner, layer) for layer in self.layers}
        return [
            region
            for layer, buffer in names.items()
            for region in item_regions(self.item, owner=owner, layer=layer, buffer=buffer)
        ]


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
    known: dict[str, Space] = {}
    for space in spaces:
        if space.interleave is not None:
            raise LayoutError(
                f"space {space.name}: interleave={space.interleave}: a pool holds all positions of "
                "its requests, and its allocator counts them. Describe memory that an engine "
                "interleaves with kvpool.describe."
            )
        ids, pool = (None if n is None else names + n for n in (space.ids, space.block_pool))
        known[names + space.name] = replace(
            space, name=names + space.name, ids=ids, block_pool=pool
        )
    unknown = named - set(known)
    if unknown:
        raise LayoutError(f"spaces {sorted(unknown)}: named by buffers, missing from spaces().")
    list_spaces = {known[name].id_list for name in named}
    return {name: space for name, space in known.items() if name in named | list_spaces}


def grouped(
    specs: Sequence[BufferSpec], spaces: Mapping[str, Space], pool: str
) -> tuple[tuple[BufferSpec, ...], dict[str, Space]]:
    """Specifications and spaces by group, with ids from block pool `pool`. The first group has the
    space's name, `kv`, the others `kv.1`, `kv.2`.
    """
    sizes: dict[str, dict[int, int]] = {}
    for part in specs:
        held = sizes.setdefault(spaces[part.space].id_list, {})
        for layer in part.layers:
            held[layer] = held.get(layer, 0) + part.item_bytes
    groups = dict(zip(sizes, groups_of(list(sizes.values()))))
    cut = tuple(
        replace(part, layers=kept, space=_group_name(part.space, n))
        for part in specs
        for n, layers in enumerate(groups[spaces[part.space].id_list])
        if (kept := tuple(layer for layer in part.layers if layer in layers))
    )
    named = {part.space for part in cut}
    found = {}
    for space in spaces.values():
        if space.block_pool is not None:
            raise LayoutError(
                f"space {space.name}: block pool {space.block_pool}, but with placement='block' "
                "all spaces are of one. Leave out either."
            )
        for n in range(len(groups[space.id_list])):
            name, own = _group_name(space.name, n), space.ids is None
            ids = None if space.ids is None else _group_name(space.ids, n)
            if own or name in named:
                found[name] = replace(space, name=name, ids=ids, block_pool=pool if own else None)
    return cut, found


def groups_of(sizes: Sequence[Mapping[int, int]]) -> list[list[frozenset[int]]]:
    """The groups of each id list, from the bytes by layer of one of its items: at most MAX_GROUPS
    in all, or one each, so that the list with the most padding in its blocks has the least, to a
    percent; of equals, the fewest groups.
    """
    lists = [[held[layer] for layer in sorted(held)] for held in sizes]
    floor = max(max(each) for each in lists)
    blocks = {
        max(floor, _least(each, count))
        for each in lists
        for count in range(1, min(len(each), MAX_GROUPS) + 1)
    }
    blocks.add(max(sum(each) for each in lists))  # one group each always does

    def padded(block: int) -> tuple[bool, float, int, int]:
        counts = [len([*_filled(each, block)]) for each in lists]
        waste = max(1 - sum(each) / (n * block) for each, n in zip(lists, counts))
        return sum(counts) > max(MAX_GROUPS, len(lists)), round(waste, 2), sum(counts), block

    block = min(blocks, key=padded)
    found = []
    for held, each in zip(sizes, lists):
        layers = iter(sorted(held))
        found.append([frozenset(next(layers) for _ in range(n)) for n in _filled(each, block)])
    return found


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
        name: [(part, layer) for part in specs if part.space == name for layer in part.layers]
        for name in spaces
    }
    buffers: list[Buffer] = []
    top = 0
    if placement in ("layer", "stack"):
        for space, held in rows.items():
            for part, layer in held:
                name, size = part.buffer_name(owner, layer), part.item_bytes
                buffers.append(Buffer(name, space, top, size, size, items[space], padding=True))
                top += items[space] * size
                if placement == "layer" or layer == part.layers[-1]:
                    top = _up(top, step)
        return buffers, top
    records: dict[str, list[tuple[BufferSpec, int]]] = {}
    for name, held in rows.items():
        ids = spaces[name].id_list if placement == "block" else name
        records.setdefault(ids, []).extend(held)
    block = _stride(records.values()) if placement == "block" else 0
    for ids, held in records.items():
        at = start = 0 if block else top
        stride = block or _stride([held])
        # largest alignment first keeps every item aligned without gaps
        for part, layer in sorted(held, key=lambda row: -alignment(row[0].item)):
            name, size, count = part.buffer_name(owner, layer), part.item_bytes, items[part.space]
            buffers.append(Buffer(name, part.space, at, stride, size, count, padding=True))
            at += size
        top = _up(start + items[ids] * stride, step)
    return buffers, top


def _stride(records: Iterable[Sequence[tuple[BufferSpec, int]]]) -> int:
    """Bytes of the largest of several records, aligned for all of them."""
    rows = [row for record in records for row in record]
    most = max(sum(part.item_bytes for part, _ in record) for record in records)
    return _up(most, max((alignment(part.item) for part, _ in rows), default=1))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
