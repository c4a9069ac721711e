"""Free lists: items that can be taken, holders of the others, and those kept for prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.layout import PoolLayout, Space
from kvpool.layout.grid import Ints
from kvpool.prefix.chain import PrefixKey


class OutOfPages(RuntimeError):
    """Fewer items are free than are needed; nothing was changed."""


class FreeList:
    """Items of the id list of one space, or of those of a block pool, free or held, with reference
    counts. The first `reserved` items are padding and never taken. Of free items, those that are
    `kept` for prefixes are taken last.
    """

    def __init__(self, spaces: Sequence[Space], items: int) -> None:
        pool = spaces[0].block_pool
        self.name = f"space {spaces[0].name}" if pool is None else f"block pool {pool}"
        self.spaces, self.items, self.reserved = spaces, items, spaces[0].reserved
        self.usable = items - self.reserved
        # a stack with the lowest id on top: a new request gets consecutive ids, which fuse
        self._stack: Ints = np.arange(items - 1, self.reserved - 1, -1, dtype=np.int64)
        self.num_free = self._stack.size
        self._counts: Ints = np.zeros(items, dtype=np.int64)
        self.kept = PrefixIndex(items)

    def take(self, count: int) -> Ints:
        """Takes `count` items; at least as many must be free. Each is then held once."""
        height = self._height
        popped = min(count, height)
        ids = self._stack[height - popped : height][::-1]
        if popped < count:
            ids = np.concatenate([ids, self.kept.take_idle(count - popped)])
        self.num_free -= count
        self._counts[ids] = 1
        return ids

    def share(self, ids: Ints) -> None:
        """One more holder of each of these items, which are held, or kept."""
        self.num_free -= self.kept.wake(ids).size
        self._counts[ids] += 1

    def is_shared(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which of held items have several holders."""
        return np.asarray(self._counts[ids] > 1)

    def is_wanted(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which of held items have several holders, or are kept for more."""
        return self.is_shared(ids) | self.kept.known[ids]

    def release(self, ids: Ints) -> None:
        """One holder fewer of each item, each time it is named; those without one are free."""
        if not ids.size:
            return
        np.subtract.at(self._counts, ids, 1)
        # in the order of allocation, the first on top
        _, order = np.unique(ids, return_index=True)
        back = ids[np.sort(order)]
        back = back[self._counts[back] == 0][::-1]
        height, kept = self._height, self.kept.known[back]
        plain = back[~kept]
        self._stack[height : height + plain.size] = plain
        self.num_free += back.size
        self.kept.idle.update(dict.fromkeys(back[kept].tolist()))

    def forget(self, ids: Ints) -> None:
        """These items are no prefix's any more: those that are free are so like other items."""
        height, idle = self._height, self.kept.wake(ids)
        self.kept.forget(ids)
        self._stack[height : height + idle.size] = idle

    def check(self, needed: Mapping[str, int], gone: Mapping[str, Ints]) -> None:
        """Raises OutOfPages if id lists need more than is free, once `gone` is released too."""
        more = {space.name: needed[space.name] for space in self.spaces if needed[space.name]}
        if not more:
            return
        back = [gone[space.name] for space in self.spaces]
        items, times = np.unique(np.concatenate(back), return_counts=True)
        free = self.num_free + int((self._counts[items] == times).sum())
        if sum(more.values()) <= free:
            return
        size = "" if self.spaces[0].per_request else f" of {self.spaces[0].tokens_per_item} tokens"
        if self.spaces[0].block_pool is not None:
            size = f" ({', '.join(f'{name} {count}' for name, count in more.items())})"
        cure = "build a larger pool."
        if not any(space.grows for space in self.spaces):
            cure = (
                "build the pool for more requests, or for longer passes of windows: "
                "from_budget(requests=..., chunk_tokens=...)."
            )
        raise OutOfPages(
            f"{self.name}: {sum(more.values())} more items{size} are needed, {free} of "
            f"{self.usable} are free. Free a request, or {cure}"
        )

    def check_integrity(self, held_items: Ints) -> None:
        """Raises RuntimeError unless items are free, or in `held_items` as often as counted."""
        self.kept.check_integrity(self.name)
        idle = np.array([*self.kept.idle], dtype=np.int64)
        free = np.concatenate([self._stack[: self._height], idle])
        everywhere = np.concatenate([free, held_items])
        outside = everywhere[(everywhere < self.reserved) | (everywhere >= self.items)]
        if outside.size:
            raise RuntimeError(f"{self.name}: item {outside[0]} of {self.items} is free or held.")
        holders = np.bincount(held_items, minlength=self.items)
        times_free = np.bincount(free, minlength=self.items)
        wrong = (holders != self._counts) | (times_free != (holders == 0))
        for item in np.flatnonzero(wrong[self.reserved :]) + self.reserved:
            raise RuntimeError(
                f"{self.name}: item {item} has {holders[item]} holders, counted "
                f"{self._counts[item]}, and is {times_free[item]} times free."
            )

    @property
    def _height(self) -> int:
        """Items on the stack."""
        return self.num_free - len(self.kept.idle)


class PrefixIndex:
    """The items of one free list that hold the state of known prefixes.

    An item is of one id list and one prefix, the one that ends with it. An item without holders is
    idle: it is free, and taken after all other free items, the one that became idle first before
    the others. Of a chain of pages the last is to become idle first: then no page is taken while a
    later one is idle. `on_forget` is called with an id list and the keys of its items that are
    forgotten.
    """

    def __init__(self, items: int) -> None:
        self.known: npt.NDArray[np.bool_] = np.zeros(items, dtype=np.bool_)
        self.on_forget: Callable[[str, list[PrefixKey]], None] = lambda id_list, keys: None
        self._items: dict[tuple[str, PrefixKey], int] = {}  # by id list and key
        self._prefixes: dict[int, tuple[str, PrefixKey]] = {}  # the inverse
        self.idle: OrderedDict[int, None] = OrderedDict()  # the first to be taken first

    def ids(self, id_list: str) -> Ints:
        """Known items of an id list, ascending."""
        # a copy first: other threads may ask while items are added
        items = [item for (name, _), item in list(self._items.items()) if name == id_list]
        return np.sort(np.array(items, dtype=np.int64))

    def find(self, id_list: str, keys: Sequence[PrefixKey]) -> Ints:
        """The items of prefixes by their keys `[N]`; -1 where there is none."""
        return np.array([self._items.get((id_list, key), -1) for key in keys], dtype=np.int64)

    def add_prefixes(self, id_list: str, keys: Sequence[PrefixKey], ids: Ints) -> Ints:
        """Makes held items `[N]` those of prefixes with keys `[N]`. Leaves out prefixes that have
        an item, and items of another prefix; returns which were added, in order.
        """
        added = []
        for number, (key, item) in enumerate(zip(keys, ids.tolist())):
            prefix = id_list, key
            if prefix not in self._items and item not in self._prefixes:
                self._items[prefix], self._prefixes[item] = item, prefix
                added.append(number)
        places: Ints = np.array(added, dtype=np.int64)
        self.known[ids[places]] = True
        return places

    def wake(self, ids: Ints) -> Ints:
        """These items are not idle any more, as they have a holder; returns those that were."""
        idle = [item for item in ids[self.known[ids]].tolist() if item in self.idle]
        for item in idle:
            del self.idle[item]
        return np.array(idle, dtype=np.int64)

    def take_idle(self, count: int) -> Ints:
        """The `count` items idle longest, which must be there; forgets their prefixes."""
        oldest = [self.idle.popitem(last=False)[0] for _ in range(count)]
        ids: Ints = np.array(oldest, dtype=np.int64)
        self.forget(ids)
        return ids

    def forget(self, ids: Ints) -> None:
        """These items, held or just taken, are no prefix's any more."""
        forgotten: dict[str, list[PrefixKey]] = {}
        for item in ids.tolist():
            if item in self._prefixes:
                id_list, key = prefix = self._prefixes.pop(item)
                del self._items[prefix]
                forgotten.setdefault(id_list, []).append(key)
        self.known[ids] = False
        for id_list, keys in forgotten.items():
            self.on_forget(id_list, keys)

    def check_integrity(self, name: str) -> None:
        """Raises RuntimeError, which begins with `name`, unless keys and items name each other."""
        listed = {item: prefix for prefix, item in self._items.items()}
        if listed != self._prefixes:
            raise RuntimeError(f"{name}: items are kept for prefixes that do not list them.")
        marked = set(np.flatnonzero(self.known).tolist())
        if marked != listed.keys() or not self.idle.keys() <= marked:
            raise RuntimeError(f"{name}: items are listed, or idle, that are no prefix's.")


def free_lists(layout: PoolLayout, id_lists: Iterable[str]) -> dict[str, FreeList]:
    """The free list of each id list: one each, and one for all those of a block pool."""
    spaces_of: dict[tuple[str | None, str], list[Space]] = {}
    for space in (layout.space_by_name[name] for name in id_lists):
        key = space.block_pool, space.name if space.block_pool is None else ""
        spaces_of.setdefault(key, []).append(space)
    items = layout.items_by_list
    by_id_list: dict[str, FreeList] = {}
    for spaces in spaces_of.values():
        names = [space.name for space in spaces]
        free_list = FreeList(spaces, min(items[name] for name in names))
        by_id_list.update(dict.fromkeys(names, free_list))
    return by_id_list
