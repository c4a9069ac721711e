"""Pins: a request that a room offers or receives keeps its items until the room needs them no more.

A block table names the request whose it is as its holder. An endpoint that is given one pins it, as
does a call that reads or writes its items (`pinned_by_call`); the allocator asks the pins before it
changes or frees what they name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from kvpool.layout.sentences import ranges

if TYPE_CHECKING:
    from kvpool.layout import PoolLayout, RequestAddress


class RequestPinned(RuntimeError):
    """A room that has not ended offers or receives this request; nothing was changed."""


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """The claim of a room on the items of `address`, in the memory of `layout`.

    They are read by peers (`offered`), or written by reads, from position `start` on (`received`).
    With `last`, all that is alive at `address.num_tokens` tokens must stay; without, more of the
    request will be offered. `call`: not a room but a call of the name `room` reads or writes them,
    until it returns.
    """

    room: int | str
    side: Literal["offered", "received"]
    address: RequestAddress = field(repr=False)
    layout: PoolLayout = field(repr=False)
    last: bool
    held: Callable[[], bool] = field(repr=False)
    """Whether the room still needs them. Any thread may ask: it takes no lock."""
    start: int = 0
    call: bool = False

    @property
    def claimant(self) -> str:
        return str(self.room) if self.call else f"room {self.room!r}"

    def lost(self, tokens: int, first: Callable[[str], int]) -> str | None:
        """What a request has lost of this block table once it has `tokens` tokens, and of an id
        list the items from number `first(id_list)` on; None if nothing.
        """
        pinned = self.address.num_tokens
        for name in self.layout.items_by_space:
            space = self.layout.space_by_name[name]
            alive, span = space.alive(pinned), self.address.spans.get(space.id_list)
            if span is None or not alive:
                continue
            if space.per_request:
                if tokens != pinned:
                    return f"the state in {space.kind} {ranges(span.ids.tolist())} of space {name}"
                continue
            needed = space.alive_items(pinned)
            if space.wraps and tokens != pinned:
                ids = span.ids[needed.start - span.first_item : needed.stop - span.first_item]
                return f"the rings in items {ranges(ids.tolist())} of space {name}"
            filled, more = divmod(pinned, space.tokens_per_item)
            if name in self.layout.packed_spaces and more and tokens != pinned and filled in needed:
                ids = span.ids[filled - span.first_item :][:1]  # it is one whole, its tail too
                return f"the packed page in item {ranges(ids.tolist())} of space {name}"
            gone = range(needed.start, min(first(space.id_list), needed.stop))
            if gone:
                ids = span.ids[max(0, gone.start - span.first_item) : gone.stop - span.first_item]
                return f"items {ranges(ids.tolist())} of space {name}"
        return None

    def meets(self, other: Pin) -> bool:
        """Whether both are of the same memory."""
        theirs = {buffer.base for buffer in other.layout.buffers}
        return any(buffer.base in theirs for buffer in self.layout.buffers)

    def refusal(self, change: str) -> RequestPinned:
        """The error of a call that would make `change`."""
        does = "offers" if self.side == "offered" else "receives"
        wait = "Wait until the room has ended; abort it if it is not needed."
        if self.call:
            wait = "Wait until that call has returned."
        elif self.side == "received":
            wait = wait.replace(";", f" and reading({self.room!r}) is false;")
        return RequestPinned(
            f"{self.claimant} {does} the {self.address.num_tokens} tokens of this request: "
            f"{change}. {wait}"
        )


class Holder(Protocol):
    """The request whose items a block table lists."""

    def pin(self, pin: Pin) -> None:
        """Keeps the items that `pin` names while it is held.

        Raises ValueError if the request is no longer what `pin.address` says, or if other requests
        share what would be written; RequestPinned if another room reads or writes it.
        """

    def unpin(self, pin: Pin) -> None:
        """Lets go of them at once."""

    def pins(self) -> Sequence[Pin]:
        """The pins that are held."""


@contextmanager
def pinned_by_call(
    name: str,
    address: RequestAddress,
    layout: PoolLayout,
    side: Literal["offered", "received"],
    start: int = 0,
) -> Iterator[None]:
    """Pins the request whose block table it is while a call reads its items, or writes them from
    position `start` on. Raises what Holder.pin does; without a holder nothing is checked.
    """
    if address.holder is None:
        yield
        return
    pin = Pin(
        room=name,
        side=side,
        address=address,
        layout=layout,
        last=True,
        held=lambda: True,
        start=start,
        call=True,
    )
    address.holder.pin(pin)
    try:
        yield
    finally:
        address.holder.unpin(pin)
