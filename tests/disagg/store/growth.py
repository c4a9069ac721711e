"""How many entries an object's containers have, whatever they are called."""

from __future__ import annotations

from collections import Counter, deque
from queue import SimpleQueue
from typing import Any

CONTAINERS = dict, list, set, frozenset, tuple, deque
OURS = "disagg.", "kvpool."
MOST_LOOKED_INTO = 1_000
"""Entries of one container: all are counted."""


def entries(name: str, root: Any) -> Counter[str]:
    """By path of attributes, the entries of all containers that can be reached from `root` by way
    of containers and of our own objects; `queue` those that wait in a queue.
    """
    total: Counter[str] = Counter()
    left, seen = [(name, root)], set()
    while left:
        path, one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, SimpleQueue):
            total[path] += one.qsize()
        elif isinstance(one, CONTAINERS):
            total[path] += len(one)
            values = [*one.values()] if isinstance(one, dict) else [*one]
            left += [(f"{path}[]", value) for value in values[:MOST_LOOKED_INTO]]
        elif type(one).__module__.startswith((*OURS, "tests.")):
            left += [(f"{path}.{name}", value) for name, value in _attributes(one)]
    return total


def _attributes(one: Any):
    yield from list(getattr(one, "__dict__", {}).items())
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                yield name, getattr(one, name)
