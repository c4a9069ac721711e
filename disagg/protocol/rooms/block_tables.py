"""Whether a block table can be one of a layout, before anything is read or written by it; and which
items or blocks rooms of decode will write: two that write one both succeed, one with wrong bytes.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from disagg.errors import RoomError
from disagg.plan.lookup import BlockLookup, id_clash
from disagg.protocol.messages import Room
from kvpool.layout import PoolLayout, RequestAddress, Space
from kvpool.layout.grid import Ints
from kvpool.layout.text import ranges

MAX_NAMED = 20
"""Items or blocks that a refusal names."""


class BlockTables:
    """Checks the block tables of one layout. Spaces whose regions are all of owners or roles in
    `allow_missing` may be left out of them.
    """

    def __init__(self, layout: PoolLayout, allow_missing: Collection[str] = ()) -> None:
        self._layout = layout
        needed = {
            layout.space_of(region).name
            for region in layout.regions
            if region.owner not in allow_missing and region.role not in allow_missing
        }
        spaces = map(layout.space_by_name.__getitem__, layout.items_by_space)
        self._lookups = [(BlockLookup(space, layout), space.name in needed) for space in spaces]

    def check(
        self,
        room: Room,
        table: RequestAddress,
        tokens: range,
        *,
        last: bool = True,
        at_most: bool = False,
    ) -> None:
        """Raises RoomError for a block table that lacks items for live positions of `tokens`, lists
        an item outside the buffers or a reserved one for them, or a block for two spaces of a pool.

        Slots and rings must be listed with the `last` chunk. With `at_most` the request may have
        fewer tokens, and which items of a window it needs is not known yet: one of at most 100
        tokens and with a window of 8 may end after 20, and then needs those of positions 12 to 19.
        """
        who = f"room {room!r}"
        if clash := id_clash(self._layout, table):
            raise RoomError(f"{who}: {clash}")
        for lookup, needed in self._lookups:
            space = lookup.space
            if space.id_list not in table.spans and not (needed and (last or space.grows)):
                continue
            if at_most and space.window is not None and not space.per_request:
                continue
            entries = space.held.part(space.needed_entries(tokens, table.num_tokens))
            size = space.entries_per_item
            try:
                if entries and space.per_request:
                    lookup.id(table, 0)
                elif entries:
                    lookup.part(table, entries.start // size, (entries.stop - 1) // size + 1)
            except ValueError as error:
                raise RoomError(f"{who}: {error}") from None


class WrittenItems:
    """Items by id list (`kv`, `swa`, `state`, ...), or of the id lists of a block pool, its blocks.
    A room has what it writes from `claim` to `release`.
    """

    def __init__(self, layout: PoolLayout) -> None:
        self._spaces: dict[str, list[Space]] = {}
        self._taken: dict[str, npt.NDArray[np.bool_]] = {}
        self._pools = {name: pool for pool, lists in layout.block_pools.items() for name in lists}
        sizes: dict[str, int] = {}
        for name, items in layout.items_by_space.items():
            space = layout.space_by_name[name]
            self._spaces.setdefault(space.id_list, []).append(space)
            blocks = items // layout.space_by_name[space.id_list].items_per_block
            sizes[space.id_list] = max(blocks, sizes.get(space.id_list, 0))
        self._per_block = {name: layout.space_by_name[name].items_per_block for name in sizes}
        by_pool: dict[object, npt.NDArray[np.bool_]] = {}
        for name, size in sizes.items():
            pool = self._pools.get(name, (name,))  # a list without one is alone
            self._taken[name] = by_pool.setdefault(pool, np.zeros(size, dtype=np.bool_))
        self._packed = [
            (region, layout.space_by_name[name])
            for name, region in layout.packed_spaces.items()
            if not layout.space_by_name[name].per_request
        ]
        self._rooms: dict[Room, dict[str, Ints]] = {}

    def claim(self, room: Room, table: RequestAddress, start: int, at_most: bool = False) -> None:
        """Takes what a room writes, or with `at_most` may write, that lacks positions from `start`
        on. Raises RoomError, and changes nothing, if another room has any of it, or if `start` lies
        inside a packed page. No block is listed for two lists of its pool.
        """
        self._check_start(room, table.num_tokens, start, at_most)
        wanted = {name: self._written(name, table, start) for name in self._taken}
        for name, ids in wanted.items():
            if self._taken[name][ids].any():
                self._refuse(room, name, ids)
        for name, ids in wanted.items():
            self._taken[name][ids] = True
        self._rooms[room] = wanted

    def release(self, room: Room) -> None:
        """Gives back what a room has: nothing writes it any more."""
        for name, ids in self._rooms.pop(room).items():
            self._taken[name][ids] = False

    def _written(self, name: str, table: RequestAddress, start: int) -> Ints:
        """Ids of one list, or their blocks: of pages those from the item of position `start` on, of
        slots and rings all. Reserved ones, and those outside, are left out: reads refuse them.
        """
        span, spaces = table.spans.get(name), self._spaces[name]
        if span is None:
            return np.empty(0, dtype=np.int64)
        ids = span.ids
        if not any(space.per_request for space in spaces):
            # a list's spaces may be interleaved differently: from the first item that one writes
            first = min(
                space.held.below(start // space.tokens_per_entry) // space.entries_per_item
                for space in spaces
            )
            ids = ids[max(0, first - span.first_item) :] if start < table.num_tokens else ids[:0]
        size = self._per_block[name]
        blocks = ids // size if size > 1 else ids
        reserved, stop = min(space.reserved for space in spaces) // size, self._taken[name].size
        if span.low // size >= reserved and span.high // size < stop:
            return blocks
        return blocks[(blocks >= reserved) & (blocks < stop)]

    def _check_start(self, room: Room, tokens: int, start: int, at_most: bool) -> None:
        """A packed page comes whole: it must not hold positions that are only kept."""
        for region, space in self._packed:
            size = space.tokens_per_item
            moves = at_most or start // size in space.alive_items(tokens)
            if start < tokens and start % size and moves:
                below = start // size * size
                raise RoomError(
                    f"room {room!r}: start {start} lies inside a page of space {space.name}, "
                    f"positions {below} to {below + size - 1}. {region} has packing "
                    f"{region.packing!r}, whose pages are written whole. Receive from {below} "
                    f"on, or from {min(below + size, tokens)}."
                )

    def _refuse(self, room: Room, name: str, ids: Ints) -> None:
        for room_name, lists in self._rooms.items():
            for list_name, written in lists.items():
                if self._taken[list_name] is not self._taken[name]:  # one array for a block pool
                    continue
                shared = np.intersect1d(ids, written)
                if not shared.size:
                    continue
                more = f" and {shared.size - MAX_NAMED} more" if shared.size > MAX_NAMED else ""
                through = "" if list_name == name else f" through id list {list_name}"
                pool = f" (block pool {self._pools[name]})" if name in self._pools else ""
                what = "block" if pool else "item"
                raise RoomError(
                    f"room {room!r}: {what} {ranges(shared[:MAX_NAMED].tolist())}{more} of id list "
                    f"{name}{pool} is written by room {room_name!r}{through}, until that has ended "
                    f"and `reading` is false. Give every room {what}s of its own; only pages "
                    "before `start` are shared."
                )
