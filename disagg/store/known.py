"""What a process remembers of a store's objects, by name: so many, the latest."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

MOST_NAMES = 1 << 14
KNOWN_SECONDS = 60.0
"""For how long an object counts as there after it was written or met: floors evict."""


class KnownObjects:
    """Which objects are there, so that they are not written again, and which are damaged, so that
    they are, and count as absent until then. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._there: OrderedDict[str, float] = OrderedDict()
        """By name, until when. In the order of time."""
        self._damaged: OrderedDict[str, None] = OrderedDict()

    def is_there(self, name: str) -> bool:
        return self._there.get(name, 0.0) > time.monotonic()

    def is_damaged(self, name: str) -> bool:
        return name in self._damaged

    def there(self, name: str) -> None:
        """An object was written, or another writer's was met."""
        now = time.monotonic()
        with self._lock:
            self._damaged.pop(name, None)
            self._there[name] = now + KNOWN_SECONDS
            self._there.move_to_end(name)
            while len(self._there) > MOST_NAMES or next(iter(self._there.values())) < now:
                self._there.popitem(last=False)

    def damaged(self, name: str) -> None:
        """An object is not what it should be."""
        with self._lock:
            self._there.pop(name, None)
            self._damaged[name] = None
            self._damaged.move_to_end(name)
            if len(self._damaged) > MOST_NAMES:
                self._damaged.popitem(last=False)

    def absent(self, names: Iterable[str]) -> None:
        """Objects were looked for and are not there: they have been evicted since, if they were."""
        with self._lock:
            for name in names:
                self._there.pop(name, None)
