"""Requests that prefill hands over in another format: rows are converted into a pool of that format
before they are offered, so that half the bytes travel. That pool's items belong to rooms, not to
the engine's requests.

offers = ConvertedOffers(pool.layout, wire.layout)
offered_table = offers.convert(room, block_table)
offers.free(room)  # once the room has ended
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

import numpy as np

from disagg.portable.pool_converter import PoolConverter
from kvpool.allocation.free_list import FreeList, OutOfPages
from kvpool.layout import PoolLayout, RequestAddress, Span
from kvpool.layout.grid import Ints


class ConvertedOffers:
    """From the pool of `layout` to that of `offered`, which has as many tokens a page, in memory of
    the same kind. Raises IncompatibleLayouts, DeviceUnavailable, and ValueError for other pages.
    """

    def __init__(
        self, layout: PoolLayout, offered: PoolLayout, *, cast: bool | Collection[str] = True
    ) -> None:
        self._converter = PoolConverter(layout, offered, cast=cast)
        self._free: dict[str, FreeList] = {}
        self._held: dict[Hashable, dict[str, Ints]] = {}
        """By room and id list, the items of a request from its first one on; -1 for none."""
        for name in offered.items_by_space:
            space, own = offered.space_by_name[name], layout.space_by_name.get(name)
            if own is None or own.item_span != space.item_span or own.id_list != space.id_list:
                own_words = "none" if own is None else f"{own.item_span} tokens an item"
                raise ValueError(
                    f"space {name}: {own_words}, and {space.item_span} in the pool that is "
                    "offered. Build both with the same sizes of pages."
                )
            if space.block_pool is not None:
                raise ValueError(f"space {name}: pools of blocks that several spaces share.")
        counts: dict[str, int] = {}
        for name, count in offered.items_by_space.items():
            id_list = offered.space_by_name[name].id_list
            counts[id_list] = min(count, counts.get(id_list, count))
        for name, count in counts.items():
            self._free[name] = FreeList([offered.space_by_name[name]], count)

    def convert(
        self,
        room: Hashable,
        address: RequestAddress,
        tokens: range | None = None,
        *,
        layers: range | None = None,
        owner: str = "target",
    ) -> RequestAddress:
        """Converts positions `tokens` (default: all) of a request, of all layers or of `layers` of
        `owner`; returns the block table of what is offered. Chunks come in order. Raises
        OutOfPages, with nothing changed, and as `PoolConverter.convert`.
        """
        items_by_list = self._held.get(room, {})
        needed = {
            name: self._lacking(items_by_list.get(name), span)
            for name, span in address.spans.items()
        }
        for name, numbers in needed.items():
            free = self._free[name]
            if numbers.size > free.num_free:
                raise OutOfPages(
                    f"space {name} of the pool that is offered: {numbers.size} more items are "
                    f"needed, {free.num_free} of {free.usable} are free. Build a larger one."
                )
        spans: dict[str, Span] = {}
        for name, span in address.spans.items():
            items, numbers = items_by_list.get(name, np.empty(0, dtype=np.int64)), needed[name]
            stop = span.first_item + span.ids.size
            if stop > items.size:
                items = np.concatenate([items, np.full(stop - items.size, -1, dtype=np.int64)])
            items[numbers] = self._free[name].take(numbers.size)
            items_by_list[name] = items
            spans[name] = Span(items[span.first_item : stop], span.first_item)
        self._held[room] = items_by_list
        offered = RequestAddress(address.num_tokens, spans)
        self._converter.convert(address, offered, tokens, layers=layers, owner=owner)
        return offered

    def free(self, room: Hashable) -> None:
        """Gives the items of a room back, which has ended; of one that has none nothing."""
        for name, items in self._held.pop(room, {}).items():
            self._free[name].release(items[items >= 0])

    @property
    def num_free(self) -> dict[str, int]:
        """How many items are free, by id list."""
        return {name: free.num_free for name, free in self._free.items()}

    @staticmethod
    def _lacking(items: Ints | None, span: Span) -> Ints:
        """The numbers of a request's items for which there is none here yet."""
        numbers = np.arange(span.first_item, span.first_item + span.ids.size)
        if items is None:
            return numbers
        present = numbers < items.size
        present[present] = items[numbers[present]] >= 0
        return numbers[~present]
