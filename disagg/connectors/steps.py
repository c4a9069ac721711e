"""What an engine's scheduler decides in a step, for its workers: requests, rooms and blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.connectors.blocks import Blocks
from disagg.connectors.source import Source
from disagg.protocol.messages import Room

if TYPE_CHECKING:  # what a store needs is installed where there is one
    from disagg.connectors.store.steps import StoreStep


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTask:
    """Positions `start` to `stop` are in `blocks`; `following` is the token after the `last`."""

    request: str
    room: Room
    blocks: Blocks
    start: int
    stop: int
    last: bool
    following: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveTask:
    """Positions `start` to `stop`, to be read to `blocks`. With `waits`, a step waits by layer."""

    request: str
    source: Source
    blocks: Blocks
    start: int
    stop: int
    waits: bool = False
    traceparent: str | None = None


@dataclass(slots=True)
class Step:
    """What the workers do in one step. Of rooms in `declines` nothing is needed: prefill may have
    its blocks back. `aborts` are requests. `store`: what there is to do for the engine's store.
    `idle`: the engine computes nothing in it.
    """

    sends: list[SendTask] = field(default_factory=list)
    receives: list[ReceiveTask] = field(default_factory=list)
    declines: list[Source] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    store: StoreStep | None = None
    idle: bool = False
