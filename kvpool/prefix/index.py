"""Items by the prefix whose state they hold, and those that nobody holds in the order of disuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpool.layout.grid import Ints
from kvpool.prefix.keys import SUMS, Sums

NOT_IDLE = -1
EMPTY, GONE = -1, -2
"""Slots of the hash table in which no item ever was, and none is any more."""
LEAST_LOOK = 1024
"""Places of the queue that are looked at together."""


class PrefixIndex:
    """The items of one free list that hold the state of known prefixes.

    An item is of one id list and one prefix, that which ends with it. An item without holders is
    idle: it is free, and taken when no other is, the one that became idle first before others. Of a
    chain of pages the last is to become idle first: then no page is taken while a later one is
    idle. `on_forget` is called with an id list and the keys of its items that are forgotten.

    A hash table with open addressing, all of whose operations are of arrays. Keys are random: the
    first bits of one are its hash, and a list's number, added, makes them those of the list.
    """

    def __init__(self, items: int) -> None:
        self.known = np.zeros(items, dtype=np.bool_)
        self.num_idle = 0
        self.on_forget: Callable[[str, Sums], None] = lambda id_list, key: None
        self._numbers: dict[str, np.uint64] = {}
        self._list: npt.NDArray[np.uint64] = np.zeros(items, dtype=np.uint64)
        self._keys: Sums = np.zeros((items, SUMS), dtype=np.uint64)
        bits = (4 * items - 1).bit_length()
        self._shift, self._mask = np.uint64(64 - bits), (1 << bits) - 1
        self._slots: Ints = np.full(1 << bits, EMPTY, dtype=np.int64)
        self._slot: Ints = np.zeros(items, dtype=np.int64)
        self._used = 0  # slots that are not empty
        # idle items in order; one that was woken stays, and differs from its place
        self._queue: Ints = np.zeros(2 * items, dtype=np.int64)
        self._place: Ints = np.full(items, NOT_IDLE, dtype=np.int64)
        self._head = self._tail = 0

    def use(self, id_list: str) -> None:
        """Makes an id list known."""
        self._numbers[id_list] = np.uint64(len(self._numbers))

    def ids(self, id_list: str) -> Ints:
        """Known items of an id list."""
        return np.flatnonzero(self.known & (self._list == self._numbers[id_list]))

    def find(self, id_list: str, keys: Sums) -> Ints:
        """The items of the prefixes with keys `[N, SUMS]`; -1 where there is none."""
        keys = keys + self._numbers[id_list]
        found: Ints = np.full(len(keys), -1, dtype=np.int64)
        left, at = np.arange(len(keys)), self._home(keys)
        while left.size:
            items = self._slots[at]
            hit = (self._keys[items] == keys[left]).all(1) & (items >= 0)
            found[left[hit]] = items[hit]
            further = ~hit & (items != EMPTY)
            left, at = left[further], (at[further] + 1) & self._mask
        return found

    def add(self, id_list: str, keys: Sums, ids: Ints) -> Ints:
        """Makes held items `[N]` those of prefixes with keys `[N, SUMS]`. Leaves out prefixes that
        have an item, and items of another prefix; returns which were added, in order.
        """
        added = np.flatnonzero((self.find(id_list, keys) < 0) & ~self.known[ids])
        fresh = ids[added]
        number = self._numbers[id_list]
        self._keys[fresh], self._list[fresh] = keys[added] + number, number
        self.known[fresh] = True
        if 2 * (self._used + fresh.size) > self._slots.size:  # after as many as all were forgotten
            self._slots[:], self._used = EMPTY, 0
            fresh = np.flatnonzero(self.known)
        self._insert(fresh)
        return added

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
        self.idle(self.idle_of(ids))

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
        ids = ids[self.known[ids]]
        self._slots[self._slot[ids]] = GONE
        self.known[ids] = False
        for id_list, number in self._numbers.items():
            gone = ids[self._list[ids] == number]
            if gone.size:
                self.on_forget(id_list, self._keys[gone] - number)

    def idle_of(self, ids: Ints) -> Ints:
        """Those of these items that are idle."""
        idle: Ints = ids[self._place[ids] != NOT_IDLE]
        return idle

    def idle_ids(self) -> Ints:
        """Idle items, the first to be taken first."""
        queued = self._queue[self._head : self._tail]
        idle: Ints = queued[self._place[queued] == np.arange(self._head, self._tail)]
        return idle

    def check_integrity(self, what: str) -> None:
        """Raises RuntimeError, beginning with `what`, unless tables and items name each other."""
        for id_list, number in self._numbers.items():
            ids = self.ids(id_list)
            if (self.find(id_list, self._keys[ids] - number) != ids).any():
                raise RuntimeError(f"{what}: items are kept for prefixes that do not list them.")
        idle = self.idle_ids()
        if (self._slots >= 0).sum() != self.known.sum() or not self.known[idle].all():
            raise RuntimeError(f"{what}: items are listed, or idle, that are no prefix's.")
        if idle.size != self.num_idle or (self._place != NOT_IDLE).sum() != self.num_idle:
            raise RuntimeError(f"{what}: {self.num_idle} items counted idle, {idle.size} are.")

    def _home(self, keys: Sums) -> Ints:
        """Slots `[N]` in which the search for keys begins."""
        home: Ints = (keys[:, 0] >> self._shift).astype(np.int64)
        return home

    def _insert(self, ids: Ints) -> None:
        """Lists known items that are not listed."""
        at = self._home(self._keys[ids])
        while ids.size:
            there = self._slots[at]
            self._slots[at[there < 0]] = ids[there < 0]
            won = (there < 0) & (self._slots[at] == ids)  # one of those with the same slot
            self._used += int((there[won] == EMPTY).sum())
            self._slot[ids[won]] = at[won]
            ids, at = ids[~won], (at[~won] + 1) & self._mask
