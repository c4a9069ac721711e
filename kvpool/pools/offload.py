"""A request's state to host memory and back, in whole items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvpool.device import DeviceUnavailable
from kvpool.layout import Buffer, PoolLayout, RequestAddress

if TYPE_CHECKING:
    from kvpool.pools.base import KVPool


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


def save_items(pool: KVPool, address: RequestAddress) -> Saved:
    """See KVPool.save."""
    for pin in address.holder.pins() if address.holder else ():
        if pin.side == "received":
            raise pin.refusal("save would copy what is not there yet")
    rows = {}
    for buffer, ids in list(_alive(pool.layout, address)):
        view = _bytes(pool, buffer)
        where = torch.from_numpy(ids.copy()).to(view.device)
        rows[buffer.name] = view.index_select(0, where).cpu()
    return Saved(address.num_tokens, rows, _shape(pool.layout))


def load_items(pool: KVPool, address: RequestAddress, saved: Saved) -> None:
    """See KVPool.load."""
    for pin in address.holder.pins() if address.holder else ():
        raise pin.refusal("load would write to its items")
    shape = _shape(pool.layout)
    if shape != saved.shape:
        other = sorted({*shape, *saved.shape})
        name = next(n for n in other if shape.get(n) != saved.shape.get(n))
        raise ValueError(
            f"buffer {name}: {saved.shape.get(name, 'absent')} when saved, "
            f"{shape.get(name, 'absent')} here. Load into a pool of the same layout."
        )
    if address.num_tokens != saved.num_tokens:
        raise ValueError(
            f"{saved.num_tokens} tokens were saved, the block table has {address.num_tokens}."
        )
    rows = list(_alive(pool.layout, address))
    for buffer, ids in rows:
        view = _bytes(pool, buffer)
        where = torch.from_numpy(ids.copy()).to(view.device)
        view.index_copy_(0, where, saved.items[buffer.name].to(view.device))


def _bytes(pool: KVPool, buffer: Buffer) -> torch.Tensor:
    view = pool.item_bytes_view(buffer)
    if view.is_meta:
        raise DeviceUnavailable(
            "a pool on the meta device has no memory to save or load. Build it with device='cpu'."
        )
    return view


def _alive(layout: PoolLayout, address: RequestAddress) -> Iterator[tuple[Buffer, np.ndarray]]:
    """Buffers, and the ids of their live items."""
    for buffer in layout.buffers:
        space = layout.space_by_name[buffer.space]
        alive = space.alive(address.num_tokens)
        if not alive:
            continue
        span = address.spans.get(space.id_list)
        if span is None:
            raise ValueError(f"no ids for space {space.id_list!r} of buffer {buffer.name}.")
        first = 0 if space.per_request else alive.start // space.entries_per_item
        last = 0 if space.per_request else (alive.stop - 1) // space.entries_per_item
        held = range(span.first_item, span.first_item + span.ids.size)
        if first < held.start or last >= held.stop:
            raise ValueError(
                f"space {space.name}: items {first} to {last} of the request are live, its ids "
                f"cover {held.start} to {held.stop - 1}."
            )
        ids = span.ids[first - span.first_item : last + 1 - span.first_item]
        if ids.min() < space.reserved or ids.max() >= buffer.items:
            raise ValueError(
                f"space {space.name}: ids from {int(ids.min())} to {int(ids.max())}, items are "
                f"{space.reserved} to {buffer.items - 1}."
            )
        yield buffer, ids


def _shape(layout: PoolLayout) -> dict[str, object]:
    """What must be equal where saved bytes are loaded, by buffer name."""
    spaces = layout.space_by_name
    found: dict[str, list[object]] = {
        b.name: [spaces[b.space], b.item_bytes] for b in layout.buffers
    }
    for region in layout.regions:
        found[region.buffer].append(region)
    return dict(found)
