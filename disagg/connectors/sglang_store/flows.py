"""What requests wait for that a store may have, agreed on by an engine's ranks.

Each rank schedules by itself, and all must do the same. So a rank says what it knows of each flow
in a list of numbers; what is the smallest of all ranks is what all go by. It needs no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.store import ChunkKeys, Hit, Store

log = logging.getLogger("sglang.kvpool")

NOT_YET = -1
ANY = 1 << 62
"""What a rank says that has no say: another's is smaller."""


@dataclass(kw_only=True)
class Flow:
    """What a request waits for: the lookup of its prompt, then room, then a read. `context` is the
    engine's, of the prompt.
    """

    name: Any
    keys: ChunkKeys
    context: Any
    job: int | None
    """A lookup or read that is under way on this rank."""
    hit: Hit | None = None
    tokens: int | None = None
    """How many of the first tokens the store has, as agreed."""
    wanted: bool = False
    """Whether the engine would begin with the request if it were not for this."""
    place: Any = None
    """The engine's, of what is read."""
    fence: Any = None
    """What must be over on a device before anything is written to the place."""
    landed: int | None = None
    """Tokens that are in the place of this rank: 0 for a read that has failed."""


@dataclass(kw_only=True)
class Flows:
    """Those of one rank. `leads`: whether it asks the store how much there is, for all ranks."""

    store: Store
    leads: bool
    _flows: dict[Hashable, Flow] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._flows)

    def __iter__(self) -> Any:
        return iter(list(self._flows.values()))

    def get(self, name: Hashable) -> Flow | None:
        return self._flows.get(name)

    def begin(self, name: Hashable, keys: ChunkKeys, context: Any) -> None:
        """Looks up a prompt's chunks."""
        job = self.store.ask(keys) if self.leads else None
        self._flows[name] = Flow(name=name, keys=keys, context=context, job=job)

    def drop(self, flow: Flow) -> None:
        """Forgets a flow. When this returns nothing is written to its place any more."""
        if flow.job is not None:
            self.store.abort(flow.job)
        self._flows.pop(flow.name, None)

    def turn(self) -> None:
        """Notes what has ended, and begins reads whose place is free to be written to."""
        by_job = {flow.job: flow for flow in self._flows.values() if flow.job is not None}
        for ended in self.store.ended():
            flow = by_job.get(ended.job)
            if flow is None:
                continue
            flow.job = None
            if ended.what == "lookup":
                flow.hit = ended.hit
            else:
                flow.landed = ended.hit.tokens
        for flow in self._flows.values():
            if flow.fence is not None and flow.fence.query():
                flow.fence = None
                self._read(flow)

    def read(self, flow: Flow, place: Any, fence: Any = None) -> None:
        """Reads to a place: `place.address`, the positions `place.positions`; behind a fence."""
        flow.place, flow.fence = place, fence
        if fence is None:
            self._read(flow)

    def says(self) -> list[int]:
        """What this rank knows of each flow, in the order in which they began."""
        return [self._says(flow) for flow in self._flows.values()]

    def _says(self, flow: Flow) -> int:
        if flow.tokens is not None:  # until there is a place, there is nothing to say
            return NOT_YET if flow.landed is None else flow.landed
        if not self.leads:
            return ANY
        return NOT_YET if flow.hit is None else flow.hit.tokens

    def agreed(self, numbers: Sequence[int]) -> list[Flow]:
        """Takes what is the smallest of all ranks' numbers; returns the flows whose reads have
        ended on all ranks, with what has landed on every one.
        """
        ended = []
        for flow, number in zip(self, numbers, strict=True):
            if number == NOT_YET:
                continue
            if flow.tokens is None:
                flow.tokens = number
            else:
                flow.landed = number
                ended.append(flow)
        return ended

    def _read(self, flow: Flow) -> None:
        try:
            flow.job = self.store.read(
                flow.keys, flow.place.address, flow.place.positions, hit=flow.hit
            )
        except ValueError:  # the engine serves on: what is not read is computed
            log.exception("request %s is not read from the store", flow.name)
            flow.landed = 0
