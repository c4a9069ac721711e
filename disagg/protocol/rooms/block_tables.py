"""Whether a block table can be one of a layout, before anything is read or written by it."""

from __future__ import annotations

from collections.abc import Collection

from disagg.errors import RoomError
from disagg.plan.positions import BlockLookup, id_clash
from disagg.protocol.messages import Room
from kvpool.layout import PoolLayout, RequestAddress


class BlockTables:
    """Checks the block tables of one layout. Spaces of which all regions are of owners or roles in
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
        self._spaces = [(space, space.name in needed) for space in spaces]

    def check(
        self,
        room: Room,
        address: RequestAddress,
        tokens: range,
        *,
        last: bool = True,
        at_most: bool = False,
    ) -> None:
        """Raises RoomError, for a block table that lacks items for live
        positions of `tokens`, that lists an item outside the buffers or a reserved one for them, or
        a block for two spaces of its pool.

        Slots and rings must be listed with the `last` chunk. With `at_most` the request may have
        fewer tokens, and which items of a window it needs is not known yet: one of at most 100
        tokens and with a window of 8 may end after 20, and then needs those of positions 12 to 19.
        """
        who = f"room {room!r}"
        if clash := id_clash(self._layout, address):
            raise RoomError(f"{who}: {clash}")
        for space, needed in self._spaces:
            lookup = BlockLookup(space, self._layout, address, who)
            if lookup.span is None and not (needed and (last or space.grows)):
                continue
            if at_most and space.window is not None and not space.per_request:
                continue
            entries = space.held.part(space.needed_entries(tokens, address.num_tokens))
            size = space.entries_per_item
            try:
                if entries and space.per_request:
                    lookup.consecutive(0, 1)
                elif entries:
                    lookup.consecutive(entries.start // size, (entries.stop - 1) // size + 1)
            except ValueError as error:
                raise RoomError(str(error)) from None
