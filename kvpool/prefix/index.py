"""Items by the prefix whose state they hold, and those that nobody holds in the order of disuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

import numpy as np

from kvpool.layout.grid import Ints

NOT_IDLE = -1
LEAST_LOOK = 1024
"""Places of the queue that are looked at together."""


class PrefixIndex:
    """The items of one free list that hold the state of known prefixes.

    `tables` has, for each id list, the item by the key of the prefix that ends with it. An item is
    of one id list and one prefix. An item without holders is idle: it is free, and taken when no
    other is, the one that became idle first before others. Of a chain of pages the last is to
    become idle first: then no page is taken while a later one is idle. `on_forget` is called with
    the id list and key of each item that is forgotten.
    """

    def __init__(self, items: int) -> None:
        self.tables: dict[str, dict[bytes, int]] = {}
        self.known = np.zeros(items, dtype=np.bool_)
        self.num_idle = 0
        self._lists = [""] * items
        self._keys = [b""] * items
        # idle items in order; one that was woken stays, and differs from its place
        self._queue: Ints = np.zeros(2 * items, dtype=np.int64)
        self._place: Ints = np.full(items, NOT_IDLE, dtype=np.int64)
        self._head = self._tail = 0
        self.on_forget: Callable[[str, bytes], None] = lambda id_list, key: None

    def find(self, id_list: str, keys: Sequence[bytes]) -> Ints:
        """The items of the prefixes that have these keys, `[keys]`; -1 where there is none."""
        get = self.tables[id_list].get
        return np.fromiter(map(get, keys, repeat(-1)), dtype=np.int64, count=len(keys))

    def add(self, id_list: str, keys: Sequence[bytes], ids: Ints) -> Ints:
        """Makes held items `[keys]` those of prefixes. Leaves out prefixes that have an item, and
        items of another prefix; returns which were added, in order.
        """
        table, added = self.tables[id_list], []
        for number, (key, item) in enumerate(zip(keys, ids.tolist())):
            if key not in table and not self.known[item]:
                table[key] = item
                self._lists[item], self._keys[item] = id_list, key
                self.known[item] = True
                added.append(number)
        return np.array(added, dtype=np.int64)

    def idle(self, ids: Ints) -> None:
        """These known items have no holders, the first of them is taken first. Of those that were
        idle, it is as if they were held until now.
        """
        if self._tail + ids.size > self._queue.size:
            left = self.idle_ids()
            self._queue[: left.size] = left
            self._place[left] = np.arange(left.size)
            self._head, self._tail = 0, left.size
        self.num_idle += int((self._place[ids] == NOT_IDLE).sum())
        stop = self._tail + ids.size
        self._queue[self._tail : stop] = ids
        self._place[ids] = np.arange(self._tail, stop)
        self._tail = stop

    def touch(self, ids: Ints) -> None:
        """Those of these items that are idle are taken after all others, the first first."""
        self.idle(ids[self._place[ids] != NOT_IDLE])

    def wake(self, ids: Ints) -> int:
        """These items have a holder; returns how many of them were idle."""
        woken = int((self._place[ids] != NOT_IDLE).sum())
        self._place[ids] = NOT_IDLE
        self.num_idle -= woken
        return woken

    def take(self, count: int) -> Ints:
        """The `count` items that have been idle longest, of which as many must be there; forgets
        their prefixes.
        """
        parts = []
        while count:
            stop = min(self._head + max(count, LEAST_LOOK), self._tail)
            places = np.arange(self._head, stop)
            places = places[self._place[self._queue[self._head : stop]] == places][:count]
            count -= places.size
            self._head = int(places[-1]) + 1 if not count else stop
            parts.append(self._queue[places])
        taken = np.concatenate(parts) if parts else self._queue[:0].copy()
        self.wake(taken)
        self.forget(taken)
        return taken

    def forget(self, ids: Ints) -> None:
        """These items, held or just taken, are no prefix's any more."""
        for item in ids[self.known[ids]].tolist():
            id_list, key = self._lists[item], self._keys[item]
            del self.tables[id_list][key]
            self._keys[item] = b""
            self.on_forget(id_list, key)
        self.known[ids] = False

    def idle_ids(self) -> Ints:
        """Idle items, the first to be taken first."""
        queued = self._queue[self._head : self._tail]
        idle: Ints = queued[self._place[queued] == np.arange(self._head, self._tail)]
        return idle

    def check_integrity(self, what: str) -> None:
        """Raises RuntimeError, beginning with `what`, unless tables and items name each other."""
        listed = [
            (id_list, key, item)
            for id_list, table in self.tables.items()
            for key, item in table.items()
        ]
        for id_list, key, item in listed:
            if (self._lists[item], self._keys[item]) != (id_list, key) or not self.known[item]:
                raise RuntimeError(f"{what}: item {item} is listed for a prefix that it is not of.")
        idle = self.idle_ids()
        if len(listed) != self.known.sum() or not self.known[idle].all():
            raise RuntimeError(f"{what}: items are kept for prefixes that do not list them.")
        if idle.size != self.num_idle or (self._place != NOT_IDLE).sum() != self.num_idle:
            raise RuntimeError(f"{what}: {self.num_idle} items counted idle, {idle.size} are.")
