"""Free lists: the items that can be taken, and how many requests hold each of the others."""

from __future__ import annotations

import numpy as np

from kvpool.layout.grid import Ints


class OutOfPages(RuntimeError):
    """Fewer items are free than are needed; nothing was changed."""


class FreeList:
    """Items `reserved` to `items - 1` of a list of ids, free or held, with reference counts. The
    first `reserved` items are padding and never taken.
    """

    def __init__(self, items: int, reserved: int) -> None:
        self.items, self.reserved = items, reserved
        # a stack with the lowest id on top: a new request gets consecutive ids, which fuse
        self._stack: Ints = np.arange(items - 1, reserved - 1, -1, dtype=np.int64)
        self.num_free = self._stack.size
        self._counts: Ints = np.zeros(items, dtype=np.int64)

    @property
    def usable(self) -> int:
        """Items that can be free: all but the reserved ones."""
        return self.items - self.reserved

    def take(self, count: int) -> Ints:
        """Takes `count` items, of which as many must be free; each is then held once."""
        self.num_free -= count
        ids = self._stack[self.num_free : self.num_free + count][::-1]
        self._counts[ids] = 1
        return ids

    def share(self, ids: Ints) -> None:
        """One more holder of each of these items, which are held."""
        self._counts[ids] += 1

    def shared(self, ids: Ints) -> Ints:
        """Those of held items that have several holders."""
        return ids[self._counts[ids] > 1]

    def freed_by(self, ids: Ints) -> int:
        """How many items `release(ids)` would free."""
        if not ids.size:
            return 0
        held, times = np.unique(ids, return_counts=True)
        return int((self._counts[held] == times).sum())

    def release(self, ids: Ints) -> None:
        """One holder fewer of each item, for each time that it is named; those without one are
        free.
        """
        if not ids.size:
            return
        np.subtract.at(self._counts, ids, 1)
        # in the order of allocation, the first on top
        _, order = np.unique(ids, return_index=True)
        back = ids[np.sort(order)]
        back = back[self._counts[back] == 0][::-1]
        self._stack[self.num_free : self.num_free + back.size] = back
        self.num_free += back.size

    def check_integrity(self, held: Ints, what: str) -> None:
        """Raises RuntimeError unless every item is free, or held as often as `held` names it and
        as it is counted. `what` begins the sentence: `space kv`.
        """
        free = self._stack[: self.num_free]
        everywhere = np.concatenate([free, held])
        outside = everywhere[(everywhere < self.reserved) | (everywhere >= self.items)]
        if outside.size:
            raise RuntimeError(f"{what}: item {int(outside[0])} of {self.items} is free or held.")
        holders = np.bincount(held, minlength=self.items)
        on_stack = np.bincount(free, minlength=self.items)
        expected = (holders == 0) & (np.arange(self.items) >= self.reserved)
        for name, found, wanted in (
            ("held", self._counts, holders),
            ("free", on_stack, expected.astype(np.int64)),
        ):
            wrong = np.flatnonzero(found != wanted)
            if wrong.size:
                at = int(wrong[0])
                raise RuntimeError(
                    f"{what}: item {at}: counted {name} {found[at]} times, is {wanted[at]}."
                )
