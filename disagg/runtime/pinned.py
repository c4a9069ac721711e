"""Rooms pin the requests whose block tables they are given, for as long as they need them.

A pin asks its room, and nothing has to be undone when the room ends. It keeps the room's object:
another room of the same name is not meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from disagg.protocol.decode import DecodeMachine
from disagg.protocol.messages import Room
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.rooms.decode_room import DecodeRoom
from disagg.protocol.rooms.prefill_room import PrefillRoom
from kvpool.layout import Pin, PoolLayout, RequestAddress


@contextmanager
def pinned(
    machine: PrefillMachine | DecodeMachine,
    name: Room,
    address: RequestAddress,
    layout: PoolLayout,
    *,
    last: bool = True,
    start: int = 0,
) -> Iterator[None]:
    """Pins the holder of `address`, if it has one, before the call that gives it to a room. Raises
    what Holder.pin does. If the call raises, nothing is pinned.
    """
    holder, room, chunks, called = address.holder, None, 0, False
    if holder is None:
        yield
        return

    def held() -> bool:
        return not called or (room is not None and _needs(room, address, chunks))

    pin = Pin(
        room=name,
        side="received" if isinstance(machine, DecodeMachine) else "offered",
        address=address,
        layout=layout,
        last=last,
        held=held,
        start=start,
    )
    holder.pin(pin)
    try:
        yield
    except BaseException:
        holder.unpin(pin)
        raise
    room = machine.rooms().get(name)
    chunks = len(room.addresses) if isinstance(room, PrefillRoom) else 0
    called = True


def _needs(room: PrefillRoom | DecodeRoom, address: RequestAddress, chunks: int) -> bool:
    """Whether a room needs a block table, that of its first `chunks` chunks on prefill."""
    if isinstance(room, DecodeRoom):
        return room.reading or not room.phase.poll.ended
    # the pin of a later chunk of the same request says at least as much
    later = any(table.holder is address.holder for table in room.addresses[chunks:])
    return not (later or room.phase.poll.ended)
