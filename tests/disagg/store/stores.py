"""Stores of several ranks over one floor, and what waits for them."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import ExitStack, contextmanager

from disagg.store import Store
from disagg.store.floors import open_floor

CHUNK = 24
"""Tokens of a chunk: pages of 4 and of 12, windows in pages of 5 and rings fit or do not."""
_urls = itertools.count()


def fresh():
    """The URL of a floor that nobody else uses."""
    return f"memory://store{next(_urls)}"


@contextmanager
def stores(url, holders, **options):
    """A store for each rank of an engine."""
    layouts = [holder.layout for holder in holders]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Store(url, layout, ranks=layouts, rank=rank, **{"chunk_tokens": CHUNK, **options})
            )
            for rank, layout in enumerate(layouts)
        ]


def put(store, tokens, address, **options):
    """Writes, and waits until it is written; returns how many objects."""
    count = store.write(tokens, address, **options)
    until = time.monotonic() + 20
    while store.stats().queued_bytes:
        assert time.monotonic() < until
        time.sleep(0.001)
    return count


def outcome(store, job, seconds=20):
    """How a lookup or read ends."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for ended in store.ended():
            assert ended.job == job
            return ended
        time.sleep(0.001)
    raise AssertionError(f"job {job} does not end")


def got(store, tokens, address, positions=None, **options):
    """Reads, and returns why it has failed."""
    return outcome(store, store.read(tokens, address, positions, **options)).failure


class SlowFloor:
    """A floor that answers when it is told to."""

    def __init__(self):
        self.go = threading.Event()

    def __getattr__(self, name):
        def call(*given):
            assert self.go.wait(20)
            return getattr(self.floor, name)(*given)

        return call


def slow(monkeypatch):
    """The floor of the next store that is opened, which does not answer yet."""
    slow = SlowFloor()

    def opened(url):
        slow.floor = open_floor(url)
        return slow

    monkeypatch.setattr("disagg.store.store.open_floor", opened)
    return slow
