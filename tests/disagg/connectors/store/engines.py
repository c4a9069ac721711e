"""An engine as a store's two halves see it: blocks of three groups over one memory, a request that
is computed step by step, and what its blocks must hold, said without layouts.
"""

from __future__ import annotations

import itertools
import logging
import time

import numpy as np
import torch

from disagg.connectors.blocks import BlockGroup
from disagg.connectors.settings import Settings
from disagg.connectors.store.scheduler import StoreScheduler
from disagg.connectors.store.worker import StoreWorker
from kvpool.describe import describe
from kvpool.layout import PoolLayout, Space

CHUNK, WINDOW, BLOCKS = 16, 12, 100
log = logging.getLogger("test.store")


def state_of(tokens, layer):
    """16 bytes that depend on all of `tokens`, and on the layer."""
    seed = [layer, *tokens]
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 16, dtype=np.uint8))


class Engine:
    """One rank, with blocks of `block` tokens: full attention, a window, and a state."""

    def __init__(
        self, url, block=8, *, recomputes=1, unit=1, state=True, timeout=10.0, said=(), **extra
    ):
        torch.manual_seed(block)
        self.block = block
        self.memory = torch.randint(0, 255, (BLOCKS, 3, block, 16), dtype=torch.uint8)
        spaces = [
            Space("kv0", "paged", block, block_pool="blocks"),
            Space("swa1", "paged", block, window=WINDOW, block_pool="blocks"),
            Space("state2", "slot", block_pool="blocks"),
        ]
        dims = "item", "entry", "dim"
        parts = [
            describe(self.memory[:, 0], dims, role="k", layer=0, space="kv0"),
            describe(self.memory[:, 1], dims, role="swa.k", layer=1, space="swa1"),
            describe(
                self.memory[:, 2, 0], ("item", "dim"), role="temporal", layer=2, space="state2"
            ),
        ]
        groups = [BlockGroup("kv0", 1, block), BlockGroup("swa1", 1, block)]
        if state:
            groups.append(BlockGroup("state2", 1, block, "first"))
        count = len(groups)
        self.layout = PoolLayout.of(*parts[:count], spaces=spaces[:count])
        self.settings = Settings.read(
            {"store": url, "chunk_tokens": CHUNK, "store_timeout": timeout, **extra}, "test"
        )
        self.scheduler = StoreScheduler(self.settings, recomputes=recomputes, unit=unit)
        self.scheduler.open([(self.layout.to_msgpack(), {"weights": "w", **dict(said)})])
        self.worker = StoreWorker(self.settings, self.layout, groups, rank=0, log=log)
        self.groups, self.received, self.failed, self.cleared = groups, [], set(), []
        self._ids = itertools.cycle(range(1, BLOCKS))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.scheduler.close()
        self.worker.close()

    def blocks(self, tokens, whole=False):
        """Blocks for a request of so many tokens, of windows those that it sees, or `whole`."""
        count = -(-tokens // self.block)
        table = [next(self._ids) for _ in range(count)]
        window = [next(self._ids) for _ in range(count)]
        gone = 0 if whole else max(0, tokens - WINDOW) // self.block
        state = [(next(self._ids),)] if len(self.groups) > 2 else []
        return (table, [0] * gone + window[gone:], *state)

    def step(self, forward=lambda: None, runs=()):
        """One step of the engine, in which requests go on; what its scheduler is told of it."""
        self.scheduler.kept(lambda: runs)
        step = self.scheduler.step()
        self.worker.settle(step)
        self.worker.begin(step, self.cleared.append)
        forward()
        self.worker.save(step)
        results = self.worker.results()
        self.received += results.received
        self.failed |= results.failed
        self.scheduler.received(results.received, results.failed)
        return step

    def until(self, true):
        until = time.monotonic() + 20
        while not true():
            assert time.monotonic() < until
            self.step()

    def matched(self, name, computed=0):
        """What the store has, once that is known."""
        answer = []

        def known():
            answer.append(self.scheduler.matched(name, computed))
            return answer[-1] is not None

        self.until(known)
        return answer[-1]

    def compute(self, name, tokens, blocks, start, stop):
        """A step that computes positions `start` to `stop`."""
        self.scheduler.computed(name, stop, lambda: blocks)
        self.step(lambda: self.fill(tokens, blocks, start, stop), {name})

    def fill(self, tokens, blocks, start, stop):
        for position in range(start, stop):
            for group in (0, 1):
                place = self.place(blocks, group, position)
                if place is not None:
                    place[:] = state_of(tokens[: position + 1], group)
        if len(self.groups) > 2:
            self.memory[blocks[2][0], 2, 0] = state_of(tokens[:stop], 2)

    def place(self, blocks, group, position):
        block = blocks[group][position // self.block]
        return self.memory[block, group, position % self.block] if block else None

    def holds(self, tokens, blocks, start, stop):
        """Whether `blocks` hold all that a request of the first `stop` tokens needs."""
        full = all(
            torch.equal(self.place(blocks, 0, p), state_of(tokens[: p + 1], 0))
            for p in range(start, stop)
        )
        seen = all(
            torch.equal(self.place(blocks, 1, p), state_of(tokens[: p + 1], 1))
            for p in range(max(start, stop - WINDOW), stop)
        )
        state = len(self.groups) < 3 or torch.equal(
            self.memory[blocks[2][0], 2, 0], state_of(tokens[:stop], 2)
        )
        return full and seen and state

    def written(self):
        """Waits until all that was gathered is there."""
        self.until(lambda: not self.worker._store or not self.worker._store.stats().queued_bytes)
