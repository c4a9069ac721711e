"""A request's state to host memory and back, in whole items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvpool.device import DeviceUnavailable
from kvpool.extras import Lazy
from kvpool.layout import Buffer, PoolLayout, RequestAddress, Space
from kvpool.layout.grid import Ints, outer_sum
from kvpool.layout.request_address import pinned_by_call
from kvpool.pools.access import TypedAccess

if TYPE_CHECKING:
    import torch
else:
    torch = Lazy("torch", "kvpool.pools")


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A request's live items: uint8 `[item, byte]` on the host, by buffer."""

    num_tokens: int
    items: dict[str, torch.Tensor]
    shape: dict[str, object]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(rows.numel() for rows in self.items.values())


class _Live(NamedTuple):
    """The items of a buffer, bytes `view` `[item, byte]`, in which a request has live entries
    `alive`: ids `[I]`, the first being item number `first` of the request.
    """

    buffer: Buffer
    view: torch.Tensor
    space: Space
    alive: range
    first: int
    ids: Ints


class HostCopies(TypedAccess):
    """A pool whose requests can be saved to host memory, and loaded from it."""

    def save(self, address: RequestAddress) -> Saved:
        """Copies a request's live items of every space to host memory. Raises RequestPinned while a
        room receives the request, and ValueError if the request is no longer what its block table
        says.
        """
        rows = {}
        with pinned_by_call("save", address, self.layout, "offered"):
            for live in list(_live_items(self, address)):
                ids = torch.from_numpy(live.ids.copy()).to(live.view.device)
                rows[live.buffer.name] = live.view.index_select(0, ids).cpu()
        return Saved(address.num_tokens, rows, _shape(self.layout))

    def load(self, address: RequestAddress, saved: Saved, *, start: int = 0) -> None:
        """Writes saved state to another block table with as many tokens: that of a request extended
        with `received=True`.

        Positions before `start` stay as they are: those of a request that begins with a prefix
        which is there (`new_request(tokens)`, then `start=request.num_tokens`). Of a page that
        `start` lies in, entries before it stay; slots and rings come whole, for any `start`.

        Raises ValueError if pool, tokens or items do not fit, if the request is no longer what its
        block table says, or if other requests or the prefix cache need a page that would be
        written; RequestPinned while a room offers or receives the request. All write nothing. For a
        block table that you made yourself, sharing of its pages is unknown.
        """
        shape, start = _shape(self.layout), index(start)
        if shape != saved.shape:
            names = sorted({*shape, *saved.shape})
            name = next(n for n in names if shape.get(n) != saved.shape.get(n))
            raise ValueError(
                f"buffer {name}: {saved.shape.get(name, 'absent')} when saved, "
                f"{shape.get(name, 'absent')} here. Load into a pool of the same layout."
            )
        if address.num_tokens != saved.num_tokens:
            raise ValueError(
                f"{saved.num_tokens} tokens were saved, the block table has {address.num_tokens}."
            )
        if not 0 <= start <= saved.num_tokens:
            raise ValueError(f"start: 0 to {saved.num_tokens}, the saved tokens, got {start}.")
        with pinned_by_call("load", address, self.layout, "received", start):
            for live in list(_live_items(self, address)):
                _write(self.layout, live, saved.items[live.buffer.name], start)


def _write(layout: PoolLayout, live: _Live, rows: torch.Tensor, start: int) -> None:
    """Writes saved rows `[item, byte]` to the live items of a buffer, from position `start` on."""
    view, space = live.view, live.space
    size, kept = space.entries_per_item, 0
    if not space.per_request:  # slots and rings come whole
        # rows of an open window change until it closes, so they come together
        step = space.window_step if space.wraps else 1
        first = start // space.tokens_per_entry // step * step
        kept = max(-(-first // size) - live.first, 0)  # items that keep all or some entries
        cut = first // size - live.first  # the item that `first` lies in
        if 0 <= cut < min(kept, live.ids.size):
            end = min((live.first + cut + 1) * size, live.alive.stop)
            entries = range(max(first, live.alive.start), end)
            offsets = torch.from_numpy(_entry_bytes(layout, live, entries))
            values = rows[cut][offsets].to(view.device)
            view[int(live.ids[cut])].index_copy_(0, offsets.to(view.device), values)
    ids = torch.from_numpy(live.ids[kept:].copy()).to(view.device)
    view.index_copy_(0, ids, rows[kept:].to(view.device))


def _entry_bytes(layout: PoolLayout, live: _Live, entries: range) -> Ints:
    """Offsets `[N]` in an item of the bytes of its `entries`, and of all those of regions without
    entries, which are one unit.
    """
    space, buffer = live.space, live.buffer
    steps = np.arange(entries.start, entries.stop) % space.entries_per_item % space.steps
    parts: list[Ints] = []
    for region in layout.regions_in[buffer.name]:
        entry = region.axis("entry")
        axes = [(axis.size, axis.stride) for axis in region.axes if axis is not entry]
        offsets = outer_sum(region.offset, [*axes, (region.width, 1)])
        if entry is not None:
            offsets = np.add.outer(steps * entry.stride, offsets).ravel()
        parts.append(offsets)
    return np.concatenate(parts)


def _live_items(pool: TypedAccess, address: RequestAddress) -> Iterator[_Live]:
    """The live items of a request, by buffer."""
    for buffer in pool.layout.buffers:
        space, view = pool.layout.space_by_name[buffer.space], pool.item_bytes_view(buffer)
        alive, items = space.alive(address.num_tokens), space.alive_items(address.num_tokens)
        if not alive:
            continue
        span = address.spans.get(space.id_list)
        if span is None:
            raise ValueError(f"no ids for space {space.id_list!r} of buffer {buffer.name}.")
        stop = span.first_item + span.ids.size
        if items.start < span.first_item or items.stop > stop:
            raise ValueError(
                f"space {space.name}: items {items.start} to {items.stop - 1} of the request are "
                f"live, its ids cover {span.first_item} to {stop - 1}."
            )
        ids = span.ids[items.start - span.first_item : items.stop - span.first_item]
        if ids.min() < space.reserved or ids.max() >= buffer.items:
            raise ValueError(
                f"space {space.name}: ids from {int(ids.min())} to {int(ids.max())}, items are "
                f"{space.reserved} to {buffer.items - 1}."
            )
        if view.is_meta:
            raise DeviceUnavailable(
                "a pool on the meta device has no memory to save or load. Build it with "
                "device='cpu'."
            )
        yield _Live(buffer=buffer, view=view, space=space, alive=alive, first=items.start, ids=ids)


def _shape(layout: PoolLayout) -> dict[str, object]:
    """What must be equal where saved bytes are loaded, by buffer name."""
    spaces, inside = layout.space_by_name, layout.regions_in
    return {b.name: [spaces[b.space], b.item_bytes, *inside[b.name]] for b in layout.buffers}
