"""A request's block table: the ids of its items, by space, and how many tokens they hold. And pins:
a request that a room offers or receives keeps its items until the room needs them no more.

A block table names the request whose it is as its holder. An endpoint that is given one pins it, as
does a call that reads or writes its items (`pinned_by_call`); the allocator asks the pins before it
changes or frees what they name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from kvpool.layout.text import ranges

if TYPE_CHECKING:
    from kvpool.layout import PoolLayout

MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Span:
    """A block table's ids of one space, int64 `[I]`. `ids[0]` is item number `first_item` of the
    request: more than 0 where items before a window were freed. `low` and `high` are the smallest
    and the largest id; 0 and -1 where there is none.
    """

    ids: npt.NDArray[np.int64]
    first_item: int
    low: int = field(repr=False)
    high: int = field(repr=False)

    def __init__(self, ids: npt.ArrayLike, first_item: SupportsIndex = 0) -> None:
        ids = np.array(_flat(ids), dtype=np.int64)  # a copy: the caller may change its list
        low, high = 0, -1
        if ids.size == 1:
            low = high = ids.item()
        elif ids.size:
            # of most tables they are: sorting takes eight times as long as looking
            ordered = ids if (ids[1:] > ids[:-1]).all() else np.sort(ids)
            low, high = ordered.item(0), ordered.item(-1)
            if (same := ordered[1:] == ordered[:-1]).any():
                raise ValueError(f"span ids: item {ordered.item(same.argmax())} is listed twice.")
        if low < 0:
            raise ValueError(f"span ids: {low} is negative.")
        ids.setflags(write=False)
        first = _count(first_item, "span first_item")
        setters = {"ids": ids, "first_item": first, "low": low, "high": high}
        for name, value in setters.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_blocks(
        cls, blocks: npt.ArrayLike, null: int = 0, items_per_block: SupportsIndex = 1
    ) -> Self:
        """The span of a list of block ids `[B]`, item 0 first, in which `null` stands for blocks
        before a window that are no longer held (vLLM's null block). Each is `items_per_block` items
        (`Space.items_per_block`).

        `Span.from_blocks([0, 0, 5, 2])` is `Span([5, 2], first_item=2)`, and of 3 items a block
        `Span([15, 16, 17, 6, 7, 8], first_item=6)`. Raises ValueError for null after a live block.
        """
        listed = _flat(blocks)
        live = listed != null
        first = int(live.argmax()) if live.any() else listed.size
        if not live[first:].all():
            dead = first + int(live[first:].argmin())
            raise ValueError(
                f"span blocks: null block {null} at index {dead}, after live ones from index "
                f"{first} on. Null blocks stand only before the live ones; leave out what follows "
                "those."
            )
        size = _count(items_per_block, "span items_per_block", 1)
        items = listed[first:, None].astype(np.int64) * size + np.arange(size)
        return cls(items.ravel(), first * size)


@dataclass(frozen=True, slots=True, eq=False)
class RequestAddress:
    """The block table of a request's first `num_tokens` positions: spans by space name.

    `holder` is the request that `Request.address()` is of. Endpoints pin it; without one, whoever
    made the block table sees to it that its items stay what they are.
    """

    num_tokens: int
    spans: Mapping[str, Span]
    holder: Holder | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", _count(self.num_tokens, "num_tokens"))
        spans = dict(self.spans)
        for name, span in spans.items():
            if not isinstance(span, Span):
                raise ValueError(f"space {name}: a Span of ids, got {type(span).__name__}.")
        object.__setattr__(self, "spans", MappingProxyType(spans))

    def __repr__(self) -> str:
        return f"RequestAddress({self.words()})"

    def words(self) -> str:
        """`100 tokens, 7 items of kv`."""
        spans = (f"{span.ids.size:,} items of {name}" for name, span in self.spans.items())
        return ", ".join([f"{self.num_tokens:,} tokens", *spans])


class RequestPinned(RuntimeError):
    """A room that has not ended offers or receives this request; nothing was changed."""


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """The claim of a room on the items of `address`, in the memory of `layout`.

    They are read by peers (`offered`), or written by reads, from position `start` on (`received`).
    With `last`, all that is alive at `address.num_tokens` tokens must stay; without, more of the
    request will be offered. `call`: `room` names not a room but a call that uses them.
    """

    room: int | str
    side: Literal["offered", "received"]
    address: RequestAddress = field(repr=False)
    layout: PoolLayout = field(repr=False)
    last: bool = True
    held: Callable[[], bool] = field(default=lambda: True, repr=False)
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
    pin = Pin(room=name, side=side, address=address, layout=layout, start=start, call=True)
    address.holder.pin(pin)
    try:
        yield
    finally:
        address.holder.unpin(pin)


def _flat(ids: npt.ArrayLike) -> npt.NDArray[Any]:
    """A list of integers as an array `[I]`."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"span ids: a flat list of integers, got {array.dtype}{array.shape}.")
    return array


def _count(value: SupportsIndex, what: str, low: int = 0) -> int:
    """An int from `low` to MAX_TOKENS; numpy's integers are taken."""
    try:
        number = index(value)
    except TypeError:
        raise ValueError(f"{what}: a whole number, got {value!r}.") from None
    if not low <= number <= MAX_TOKENS:
        raise ValueError(f"{what}: {low} to {MAX_TOKENS}, got {number}.")
    return number


def need_block_table(table: object) -> None:
    """Raises TypeError for what is none."""
    if not isinstance(table, RequestAddress):
        raise TypeError(
            f"a block table: a RequestAddress, got {type(table).__name__}. An Allocator's requests "
            "have one, `request.address()`; of your own ids it is RequestAddress(num_tokens, "
            "{space: Span(ids)})."
        )
