"""Which items the rooms of a decode endpoint will write, so that no two rooms write one. Part of
`DecodeMachine`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from disagg.errors import RoomError
from disagg.protocol.messages import Room
from kvpool.layout import PoolLayout, RequestAddress, Space
from kvpool.layout.grid import Ints
from kvpool.layout.sentences import ranges

MAX_NAMED = 20
"""Items that a refusal names."""


class WrittenItems:
    """Items by id list (`kv`, `swa`, `state`, ...). A room has its items from `claim` to
    `release`.
    """

    def __init__(self, layout: PoolLayout) -> None:
        self._spaces: dict[str, list[Space]] = {}
        self._taken: dict[str, npt.NDArray[np.bool_]] = {}
        sizes: dict[str, int] = {}
        for name, items in layout.items_by_space.items():
            space = layout.space_by_name[name]
            self._spaces.setdefault(space.id_list, []).append(space)
            sizes[space.id_list] = max(items, sizes.get(space.id_list, 0))
        for name, size in sizes.items():
            self._taken[name] = np.zeros(size, dtype=np.bool_)
        self._rooms: dict[Room, dict[str, Ints]] = {}

    def claim(self, room: Room, address: RequestAddress, start: int) -> None:
        """Takes what a room writes that lacks positions from `start` on. Raises RoomError, and
        changes nothing, if another room has any of it.
        """
        wanted = {name: self._written(name, address, start) for name in self._taken}
        for name, ids in wanted.items():
            if self._taken[name][ids].any():
                self._refuse(room, name, ids)
        for name, ids in wanted.items():
            self._taken[name][ids] = True
        self._rooms[room] = wanted

    def release(self, room: Room) -> None:
        """Gives a room's items back: nothing writes them any more."""
        for name, ids in self._rooms.pop(room).items():
            self._taken[name][ids] = False

    def _written(self, name: str, address: RequestAddress, start: int) -> Ints:
        """Ids of one list: of pages those from the item of position `start` on, of slots and rings
        all. Ids that no buffer has are left out: reads refuse them.
        """
        span, spaces = address.spans.get(name), self._spaces[name]
        if span is None:
            return np.empty(0, dtype=np.int64)
        ids = span.ids
        if not any(space.per_request for space in spaces):
            # a list's spaces may be interleaved differently: from the first item that one writes
            first = min(
                space.held.below(start // space.tokens_per_entry) // space.entries_per_item
                for space in spaces
            )
            ids = ids[max(0, first - span.first_item) :] if start < address.num_tokens else ids[:0]
        return ids[ids < self._taken[name].size]

    def _refuse(self, room: Room, name: str, ids: Ints) -> None:
        for other, held in self._rooms.items():
            both = np.intersect1d(ids, held[name])
            if both.size:
                more = f" and {both.size - MAX_NAMED} more" if both.size > MAX_NAMED else ""
                raise RoomError(
                    f"room {room!r}: item {ranges(both[:MAX_NAMED].tolist())}{more} of id list "
                    f"{name} is written by room {other!r}, until that has ended and `reading` is "
                    "false. Give every room items of its own; only pages before `start` are shared."
                )
