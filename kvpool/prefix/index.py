"""Items by the prefix whose state they hold, and those without holders in the order of disuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.layout.grid import Ints
from kvpool.prefix.chain import Key


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
        self.on_forget: Callable[[str, list[Key]], None] = lambda id_list, keys: None
        self._items: dict[str, dict[Key, int]] = {}
        self._prefixes: dict[int, tuple[str, Key]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Known items without holders."""
        return len(self._idle)

    def use(self, id_list: str) -> None:
        """Makes an id list known."""
        self._items[id_list] = {}

    def ids(self, id_list: str) -> Ints:
        """Known items of an id list, ascending."""
        # a copy first: other threads may ask while items are added
        return np.sort(np.array(list(self._items[id_list].values()), dtype=np.int64))

    def find(self, id_list: str, keys: Sequence[Key]) -> Ints:
        """The items of prefixes by their keys `[N]`; -1 where there is none."""
        items = self._items[id_list]
        return np.array([items.get(key, -1) for key in keys], dtype=np.int64)

    def add(self, id_list: str, keys: Sequence[Key], ids: Ints) -> Ints:
        """Makes held items `[N]` those of prefixes with keys `[N]`. Leaves out prefixes that have
        an item, and items of another prefix; returns which were added, in order.
        """
        items, prefixes, added = self._items[id_list], self._prefixes, []
        for number, (key, item) in enumerate(zip(keys, ids.tolist())):
            if key not in items and item not in prefixes:
                items[key] = item
                prefixes[item] = id_list, key
                added.append(number)
        places: Ints = np.array(added, dtype=np.int64)
        self.known[ids[places]] = True
        return places

    def idle(self, ids: Ints) -> None:
        """These known items have no holders by now; the first of them is taken first."""
        self._idle.update(dict.fromkeys(ids.tolist()))

    def wake(self, ids: Ints) -> Ints:
        """These items are not idle any more, as they have a holder; returns those that were."""
        idle = [item for item in ids.tolist() if item in self._idle]
        for item in idle:
            del self._idle[item]
        return np.array(idle, dtype=np.int64)

    def take(self, count: int) -> Ints:
        """The `count` items that have been idle longest, all of which must be there; forgets their
        prefixes.
        """
        oldest = [self._idle.popitem(last=False)[0] for _ in range(count)]
        ids: Ints = np.array(oldest, dtype=np.int64)
        self.forget(ids)
        return ids

    def forget(self, ids: Ints) -> None:
        """These items, held or just taken, are no prefix's any more."""
        forgotten: dict[str, list[Key]] = {}
        for item in ids.tolist():
            if item in self._prefixes:
                id_list, key = self._prefixes.pop(item)
                del self._items[id_list][key]
                forgotten.setdefault(id_list, []).append(key)
        self.known[ids] = False
        for id_list, keys in forgotten.items():
            self.on_forget(id_list, keys)

    def idle_ids(self) -> Ints:
        """Idle items, the first to be taken first."""
        return np.array(list(self._idle), dtype=np.int64)

    def check_integrity(self, name: str) -> None:
        """Raises RuntimeError, which begins with `name`, unless keys and items name each other."""
        listed = {
            item: (id_list, key)
            for id_list, items in self._items.items()
            for key, item in items.items()
        }
        if listed != self._prefixes:
            raise RuntimeError(f"{name}: items are kept for prefixes that do not list them.")
        marked = set(np.flatnonzero(self.known).tolist())
        if marked != listed.keys() or not self._idle.keys() <= marked:
            raise RuntimeError(f"{name}: items are listed, or idle, that are no prefix's.")
