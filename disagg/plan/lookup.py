"""Ids of a request's items from its block table, and whether that can be one of a layout."""

from __future__ import annotations

import numpy as np

from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.grid import Ints


class IncompleteTransfer(ValueError):
    """A source does not hold all positions that the destination needs."""


class BlockLookup:
    """Ids of requests' items in one space, checked against its buffers. Errors begin with `who`."""

    def __init__(self, space: Space, layout: PoolLayout, who: str = "") -> None:
        self.space, self._who, self._list = space, f"{who}: " if who else "", space.id_list
        self._items = layout.items_by_space[space.name]
        self._per_request = space.per_request

    def id(self, address: RequestAddress, number: int) -> int:
        """The id of one of the request's items. Raises as `part` does."""
        span = address.spans.get(self._list)
        if span is not None:
            index = number if self._per_request else number - span.first_item
            if 0 <= index < span.ids.size:
                item_id: int = span.ids.item(index)
                if self.space.reserved <= item_id < self._items:
                    return item_id
        return int(self.part(address, number, number + 1)[0])

    def ids(self, address: RequestAddress, numbers: Ints) -> Ints:
        """Ids of the request's items `numbers`, which ascend. Raises as `part` does."""
        first = int(numbers[0])
        span, ids = self._listed(address, first, int(numbers[-1]) + 1)
        return self._inside(span, ids if numbers.size == 1 else ids[numbers - first])

    def part(self, address: RequestAddress, first: int, stop: int) -> Ints:
        """Ids of the request's items `first` to `stop`. Raises IncompleteTransfer for items that
        are not listed, ValueError for ids outside the buffer.
        """
        return self._inside(*self._listed(address, first, stop))

    def _listed(self, address: RequestAddress, first: int, stop: int) -> tuple[Span, Ints]:
        span, space = address.spans.get(self._list), self.space
        if span is None:
            raise ValueError(f"{self._who}its block table has no ids for space {self._list!r}.")
        start = 0 if self._per_request else span.first_item
        if first < start or stop > start + span.ids.size:
            wanted = self._positions(first, stop)
            listed = self._positions(start, start + span.ids.size)
            raise IncompleteTransfer(
                f"{self._who}space {space.name} needs items for positions {wanted}, its block "
                f"table covers {listed}. List the items of all of them."
            )
        return span, span.ids[first - start : stop - start]

    def _inside(self, span: Span, ids: Ints) -> Ints:
        reserved, stop = self.space.reserved, self._items
        if span.low < reserved or span.high >= stop:
            outside = ids[(ids < reserved) | (ids >= stop)]
            if outside.size:
                cure = (
                    f" Items below {reserved} are padding; where they hold tokens, the space is "
                    "declared with reserved=0."
                )
                raise ValueError(
                    f"{self._who}item {outside[0]} of space {self.space.name} lies outside "
                    f"{reserved} to {stop - 1}.{cure if 0 <= outside[0] < reserved else ''}"
                )
        return ids

    def _positions(self, first: int, stop: int) -> str:
        """First and last position that items `first` to `stop` hold."""
        space = self.space
        if first == stop:
            return "none"
        size, per = space.entries_per_item, space.tokens_per_entry
        last = space.held.number(stop * size - 1)
        return f"{space.held.number(first * size) * per} to {(last + 1) * per - 1}"


class Apart(BlockLookup):
    """Ids in the worst case: no two items of a request are adjacent."""

    def __init__(self, space: Space) -> None:
        self.space = space

    def id(self, address: RequestAddress, number: int) -> int:
        return 2 * number

    def ids(self, address: RequestAddress, numbers: Ints) -> Ints:
        return 2 * numbers

    def part(self, address: RequestAddress, first: int, stop: int) -> Ints:
        return 2 * np.arange(first, stop)


def id_clash(layout: PoolLayout, address: RequestAddress) -> str | None:
    """Why a block table cannot be one of this layout: it lists items of one block of a block pool
    for two of its spaces. None if it does not. Reserved blocks belong to no space, and any may
    list them.
    """
    for pool, lists in layout.block_pools.items():
        items = {name: address.spans[name].ids for name in lists if name in address.spans}
        if len(items) < 2:
            continue
        sizes = {name: layout.space_by_name[name].items_per_block for name in lists}
        # a block's items in one space are no clash: each block once a space
        blocks = np.concatenate(
            [
                ids if sizes[name] == 1 else np.unique(ids // sizes[name])
                for name, ids in items.items()
            ]
        )
        blocks.sort()
        reserved = layout.space_by_name[lists[0]].reserved // sizes[lists[0]]
        twice = (blocks[1:] == blocks[:-1]) & (blocks[1:] >= reserved)
        if twice.any():
            block = int(blocks[twice.argmax()])
            listed = [
                f"{name} (item {ids[ids // sizes[name] == block][0]})"
                for name, ids in items.items()
                if (ids // sizes[name] == block).any()
            ]
            return (
                f"block {block} of block pool {pool} is listed in spaces "
                f"{' and '.join(listed[:2])}, but it can be in use by one of them only. Give each "
                "space blocks of its own, and leave out those that a window has freed "
                "(Span.first_item)."
            )
    return None
