"""`python -m tests.engines.sglang.bench`: what a hit of the store costs SGLang's scheduler.

Real pools, allocators and tree, without an engine: prompts that another cache has written are read
into this one. Times are processor time of the scheduler's thread, medians of the prompts: of all
that SGLang calls of the cache until a request may begin, and within that of SGLang's own tree and
allocators. The loop goes round without a pause, as a scheduler's with other requests does. Turns in
which nothing happens are a column of their own: how many there are depends on how long one takes.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from contextlib import ExitStack, contextmanager
from statistics import median
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from tests.engines.sglang import caches, sides
from tests.engines.sglang.caches import Side, contexts

CHUNK = 256
CALLS = "prefetch_from_storage", "check_hicache_events", "check_prefetch_progress"
THEIRS = "insert", "lock", "unlock", "path_device_indices"


class Watch:
    """Seconds of the thread in calls of the cache, and `own` of those in SGLang's."""

    def __init__(self, side):
        self.begin()
        cache = side.cache
        for name in CALLS:
            setattr(cache, name, self._timed(getattr(cache, name)))
        own = [(cache, name) for name in THEIRS]
        own += [(cache.tree_core, "match_prefix"), (cache.token_to_kv_pool_allocator, "alloc")]
        for owner, name in own:
            setattr(owner, name, self._within(getattr(owner, name)))

    def begin(self):
        self.total, self.own, self.idle, self.inside = 0.0, 0.0, [], False

    def _timed(self, call):
        def timed(*given, **more):
            self.inside, before, began = True, self.own, time.thread_time()
            answer = call(*given, **more)
            taken = time.thread_time() - began
            self.inside = False
            if call.__name__ != CALLS[0] and before == self.own and not answer:
                self.idle.append(taken)
            else:
                self.total += taken
            return answer

        return timed

    def _within(self, call):
        def timed(*given, **more):
            began = time.thread_time()
            answer = call(*given, **more)
            if self.inside:
                self.own += time.thread_time() - began
            return answer

        return timed


@contextmanager
def sized(tokens, page, requests):
    """Pools with room for so many requests of so many tokens."""
    pages = (requests + 2) * (tokens // page + 1)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sides, "PAGES", pages))
        stack.enter_context(mock.patch.object(caches, "CHUNK", CHUNK))
        stack.enter_context(contexts())
        yield


def hits(tokens, page, core, count, pause):
    """Microseconds of each hit: in all, of them SGLang's own, and of a turn with nothing to do."""
    prompts = [[random.randrange(4, 900) for _ in range(tokens + 1)] for _ in range(count)]
    url = f"file://{tempfile.mkdtemp(prefix='kvpool-bench-')}"
    options = {"page": page, "core": core, "most": tokens + 64}
    with sized(tokens, page, count):
        with Side(url, **options) as writes:
            for prompt in prompts:
                writes.serves(prompt)
        with Side(url, **options) as reads:
            watch, rows = Watch(reads), []
            for prompt in prompts:
                watch.begin()
                request = reads.request(prompt)
                while not reads.cache.check_prefetch_progress(request.cache_request_handle):
                    reads.cache.check_hicache_events()
                    time.sleep(pause) if pause else None
                rows.append((watch.total, watch.own, 2 * median(watch.idle)))
                assert reads.begins(request) == tokens
                reads.computes(request)
                reads.ends(request)
    return [1e6 * median(column) for column in zip(*rows[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hits", type=int, default=12, help="the first is not counted")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two turns")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("tree, page", "a hit", "of it SGLang's own", "kvpool's", "an idle turn")
    for core in ("rust", "python"):
        for page in (1, 16, 64):
            total, own, idle = hits(given.tokens, page, core, given.hits, given.pause)
            row = [f"{value:.0f}" for value in (total, own, total - own, idle)]
            table.add_row(f"{core}, {page}", *row)
    Console().print(table, "microseconds of the scheduler's thread")


if __name__ == "__main__":
    main()
