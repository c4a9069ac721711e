"""Free lists: the items that can be taken, and how many requests hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.layout import PoolLayout, Space
from kvpool.layout.grid import Ints
from kvpool.prefix.index import PrefixIndex


class OutOfPages(RuntimeError):
    """Fewer items are free than are needed; nothing was changed."""


class FreeList:
    """Items of the id list of one space, or of those of a block pool, free or held, with reference
    counts. The first `reserved` items are padding and never taken. Of free items, those in the
    prefix index `kept` (None: there is none) are taken last.
    """

    def __init__(self, spaces: Sequence[Space], items: int) -> None:
        pool = spaces[0].block_pool
        self.name = f"space {spaces[0].name}" if pool is None else f"block pool {pool}"
        self.spaces, self.items, self.reserved = spaces, items, spaces[0].reserved
        # a stack with the lowest id on top: a new request gets consecutive ids, which fuse
        self._stack: Ints = np.arange(items - 1, self.reserved - 1, -1, dtype=np.int64)
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
            self.num_free -= self.kept.wake(ids).size
        self._counts[ids] += 1

    def is_shared(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which of held items have several holders."""
        return np.asarray(self._counts[ids] > 1)

    def is_wanted(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which of held items have several holders, or are kept for more."""
        return self.is_shared(ids) | self.is_kept(ids)

    def is_kept(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which items are a known prefix's."""
        return np.zeros(ids.shape, np.bool_) if self.kept is None else self.kept.known[ids]

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

    def forget(self, ids: Ints) -> None:
        """These items are no prefix's any more: those that are free are so like other items."""
        if self.kept is not None:
            height, idle = self._height, self.kept.wake(ids)
            self.kept.forget(ids)
            self._stack[height : height + idle.size] = idle

    def check(self, needed: Mapping[str, int], gone: Mapping[str, Ints]) -> None:
        """Raises OutOfPages if id lists need more items than are free, and than would be after the
        release of `gone`.
        """
        more = {space.name: needed[space.name] for space in self.spaces if needed[space.name]}
        if not more:
            return
        back = [gone[space.name] for space in self.spaces if space.name in gone]
        free = self.num_free + (self._freed_by(np.concatenate(back)) if back else 0)
        if sum(more.values()) <= free:
            return
        size = "" if self.spaces[0].per_request else f" of {self.spaces[0].tokens_per_item} tokens"
        if self.spaces[0].block_pool is not None:
            size = f" ({', '.join(f'{name} {count}' for name, count in more.items())})"
        raise OutOfPages(
            f"{self.name}: {sum(more.values())} more items{size} are needed, {free} of "
            f"{self.usable} are free. Free a request, or build a larger pool."
        )

    def check_integrity(self, held: Ints) -> None:
        """Raises RuntimeError unless every item is free, or held as often as `held` names it and
        as it is counted.
        """
        free = self._stack[: self._height]
        if self.kept is not None:
            self.kept.check_integrity(self.name)
            free = np.concatenate([free, self.kept.idle_ids()])
        everywhere = np.concatenate([free, held])
        outside = everywhere[(everywhere < self.reserved) | (everywhere >= self.items)]
        if outside.size:
            raise RuntimeError(f"{self.name}: item {outside[0]} of {self.items} is free or held.")
        holders = np.bincount(held, minlength=self.items)
        times_free = np.bincount(free, minlength=self.items)
        wrong = (holders != self._counts) | (times_free != (holders == 0))
        for item in np.flatnonzero(wrong[self.reserved :]) + self.reserved:
            raise RuntimeError(
                f"{self.name}: item {item} has {holders[item]} holders, counted "
                f"{self._counts[item]}, and is {times_free[item]} times free."
            )

    def _freed_by(self, ids: Ints) -> int:
        """How many items `release(ids)` would free."""
        items, times = np.unique(ids, return_counts=True)
        return int((self._counts[items] == times).sum())

    @property
    def _height(self) -> int:
        """Items on the stack."""
        return self.num_free if self.kept is None else self.num_free - self.kept.num_idle


def free_lists(layout: PoolLayout, id_lists: Iterable[str]) -> dict[str, FreeList]:
    """The free list of each id list: one each, and one for all those of a block pool."""
    items: dict[str, int] = {}
    for buffer in layout.buffers:
        name = layout.space_by_name[buffer.space].id_list
        items[name] = min(items.get(name, buffer.items), buffer.items)
    users: dict[tuple[str | None, str], list[Space]] = {}
    for space in (layout.space_by_name[name] for name in id_lists):
        key = space.block_pool, space.name if space.block_pool is None else ""
        users.setdefault(key, []).append(space)
    by_id_list: dict[str, FreeList] = {}
    for spaces in users.values():
        free_list = FreeList(spaces, min(items[space.name] for space in spaces))
        by_id_list.update((space.name, free_list) for space in spaces)
    return by_id_list
