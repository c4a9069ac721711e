"""Free lists: the items that can be taken, and how many requests hold each of the others."""

from __future__ import annotations

import numpy as np

from kvpool.layout.grid import Ints
from kvpool.prefix.index import PrefixIndex


class OutOfPages(RuntimeError):
    """Fewer items are free than are needed; nothing was changed."""


class FreeList:
    """Items `reserved` to `items - 1` of a list of ids, free or held, with reference counts. The
    first `reserved` items are padding and never taken. Of free items, those in the prefix index
    `kept` (None: there is none) are taken last.
    """

    def __init__(self, items: int, reserved: int) -> None:
        self.items, self.reserved = items, reserved
        # a stack with the lowest id on top: a new request gets consecutive ids, which fuse
        self._stack: Ints = np.arange(items - 1, reserved - 1, -1, dtype=np.int64)
        self.num_free = self._stack.size
        self._counts: Ints = np.zeros(items, dtype=np.int64)
        self.kept: PrefixIndex | None = None

    @property
    def usable(self) -> int:
        """Items that can be free: all but the reserved ones."""
        return self.items - self.reserved

    def take(self, count: int) -> Ints:
        """Takes `count` items, of which as many must be free; each is then held once."""
        height = self._height
        popped = min(count, height)
        ids = self._stack[height - popped : height][::-1]
        if self.kept is not None and popped < count:
            ids = np.concatenate([ids, self.kept.take(count - popped)])
        self.num_free -= count
        self._counts[ids] = 1
        return ids

    def share(self, ids: Ints) -> None:
        """One more holder of each of these items, which are held, or kept."""
        if self.kept is not None:
            self.num_free -= self.kept.wake(ids)
        self._counts[ids] += 1

    def shared(self, ids: Ints) -> Ints:
        """Those of held items that have several holders."""
        return ids[self._counts[ids] > 1]

    def wanted(self, ids: Ints) -> Ints:
        """Those of held items that have several holders, or are kept for more."""
        several = self._counts[ids] > 1
        return ids[several if self.kept is None else several | self.kept.known[ids]]

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
        plain = back if self.kept is None else back[~self.kept.known[back]]
        self._stack[self._height : self._height + plain.size] = plain
        self.num_free += back.size
        if self.kept is not None and plain.size < back.size:
            self.kept.idle(back[self.kept.known[back]])

    def forget(self) -> None:
        """Forgets all prefixes: what was kept is free like other items."""
        if self.kept is not None:
            height, idle = self._height, self.kept.take(self.kept.num_idle)
            self._stack[height : height + idle.size] = idle
            self.kept.forget(np.flatnonzero(self.kept.known))

    def check_integrity(self, held: Ints, what: str) -> None:
        """Raises RuntimeError unless every item is free, or held as often as `held` names it and
        as it is counted. `what` begins the sentence: `space kv`.
        """
        free = self._stack[: self._height]
        if self.kept is not None:
            self.kept.check_integrity(what)
            free = np.concatenate([free, self.kept.idle_ids()])
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

    @property
    def _height(self) -> int:
        """Items on the stack."""
        return self.num_free if self.kept is None else self.num_free - self.kept.num_idle
