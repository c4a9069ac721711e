"""A peer as one life of our agent knows him: from a batch to NIXL's reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.nixl.agent import HERE, Agent, Rows
from disagg.engines.nixl.lists import Places
from disagg.engines.nixl.memory import Memory, Told, memory_of
from disagg.plan.bind import CopyBatch

if TYPE_CHECKING:
    from disagg.plan import TransferPlan

WORTH = 8192
"""Reads of fewer runs are made no faster by number; far larger ones by address cost page faults."""


class Link:
    """One connection, and the lists that were prepared for it."""

    def __init__(self, agent: Agent, here: Memory, peer: Told) -> None:
        self.agent, self._here, self._there = agent, here, memory_of(peer.memory)
        self._name = agent.connect(peer.agent)
        self._places: Places | None = None
        self._lists: list[int] = []

    def make(self, batch: CopyBatch, plan: TransferPlan | None) -> tuple[list[int], int]:
        """Reads of a batch: one by number, one by address, or both; and how many runs of it go by
        number. Nothing is posted yet.
        """
        if plan is None or not batch.blocks or batch.runs < WORTH:
            return [self._by_address(batch, slice(None))], 0
        numbered = self._prepared(plan, batch).number(batch)
        if not numbered.src.size:
            return [self._by_address(batch, slice(None))], 0
        src, dst = self._lists
        reads = [self.agent.numbered(src, numbered.src, dst, numbered.dst)]
        if numbered.others.size:
            try:
                reads.append(self._by_address(batch, numbered.others))
            except TransferError:
                self.agent.release(reads[0])
                raise
        return reads, numbered.src.size

    def drop_lists(self) -> None:
        """Frees what was prepared; reads in flight have no need of it."""
        self._places = None
        while self._lists:
            self.agent.release(self._lists.pop())

    def leave(self) -> None:
        """Frees all of it, once no read is in flight."""
        self.drop_lists()
        self.agent.disconnect(self._name)

    def _prepared(self, plan: TransferPlan, batch: CopyBatch) -> Places:
        """The places of the batch's source, and the lists of them, made once."""
        if self._places is None:
            source = batch.blocks[0].route.source
            routes = [route for route in plan.routes if route.source == source]
            places = Places(routes, plan.sources[source], plan.dest)
            if places.src_rows.size:
                theirs = self.agent.prepare(self._name, places.src_rows, self._there)
                self._lists.append(theirs)
                self._lists.append(self.agent.prepare(HERE, places.dst_rows, self._here))
            self._places = places
        return self._places

    def _by_address(self, batch: CopyBatch, which: slice | np.ndarray) -> int:
        src, dst, nbytes = (column[which] for column in batch)
        rows: Rows = np.zeros((2, src.size, 3), dtype=np.uint64)
        rows[0, :, 0], rows[1, :, 0] = src, dst
        rows[:, :, 1] = nbytes
        return self.agent.described(self._name, (rows[0], self._there), (rows[1], self._here))
