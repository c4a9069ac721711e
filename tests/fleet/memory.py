"""What peers and rooms take up in the machines of a fleet: the objects that can be reached."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING

import numpy as np

from disagg.protocol.peers.prefill_peers import PrefillPeers
from disagg.protocol.rooms.decode_room import DecodeRoom

if TYPE_CHECKING:
    from tests.fleet.ranks import Rank

NOT_DATA = (type, ModuleType, FunctionType, BuiltinFunctionType)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, of one rank: `peer` for each rank that it is connected with, `room` for each room that
    is over and not yet forgotten.
    """

    prefill_peer: int
    prefill_room: int
    decode_peer: int
    decode_room: int


class MemoryProbe:
    def __init__(self) -> None:
        self._alone: dict[str, int] = {}
        self._rooms: dict[str, int] = {}

    def begin(self, *ranks: Rank) -> None:
        """Notes what ranks take up that have no peers."""
        for rank in ranks:
            self._alone[rank.side] = footprint(rank.endpoint.machine.peers)

    def sample(self, rank: Rank, number: int, due: bool) -> None:
        """Measures a room that has just ended, the first of its side that is due."""
        if not due or rank.side in self._rooms:
            return
        room = rank.endpoint.machine.rooms()[number]
        shared: set[int] = set()
        if isinstance(room, DecodeRoom):
            footprint(room.link, shared)
        self._rooms[rank.side] = footprint(room, shared)

    def measured(self, ranks: Sequence[Rank]) -> Memory:
        """The figures, of the ranks that have the most peers now."""
        measures: dict[str, int] = {}
        for side in ("prefill", "decode"):
            mine = [(_peers(rank), rank) for rank in ranks if rank.side == side]
            peers, rank = max(mine, key=lambda each: each[0])
            more = footprint(rank.endpoint.machine.peers) - self._alone[side]
            measures[f"{side}_peer"] = more // max(1, peers)
            measures[f"{side}_room"] = self._rooms.get(side, 0)
        return Memory(**measures)


def _peers(rank: Rank) -> int:
    peers = rank.endpoint.machine.peers
    return len(peers.alive if isinstance(peers, PrefillPeers) else peers.ranks())


def footprint(root: object, seen: set[int] | None = None) -> int:
    """Bytes of an object and of all data that can be reached from it, except what was seen."""
    seen = set() if seen is None else seen
    left, total = [root], 0
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, NOT_DATA):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        left.extend(gc.get_referents(value))
        if isinstance(value, np.ndarray) and value.base is not None:
            left.append(value.base)
    return total
