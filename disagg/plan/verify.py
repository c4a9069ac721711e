"""A second, slow proof of a plan: every byte of a made-up request is followed by its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvpool.layout import PoolLayout, Region, RequestAddress, Span
from kvpool.layout.grid import Ints, outer_sum, ragged

if TYPE_CHECKING:
    from disagg.plan.planner import TransferPlan


def verify(plan: TransferPlan) -> None:
    """Binds the longest request of up to three pages and compares what each byte means on both
    sides.

    Raises RuntimeError if a byte that the destination requires is not written exactly once with the
    byte of the same owner, layer, role, position, axis steps and number, or if any byte but padding
    is written besides.
    """
    tokens = _tokens([*plan.sources, plan.dest])
    sources = [_address(layout, tokens) for layout in plan.sources]
    dest = _address(plan.dest, tokens)
    keys = {region.key: number for number, region in enumerate(plan.dest.regions)}
    required = _meanings(plan.dest, dest, tokens, keys, skip=set(plan.missing))
    written: list[tuple[Ints, Ints]] = []
    for source, batch in enumerate(plan.bind_all(sources, dest)):
        offered = _meanings(plan.sources[source], sources[source], tokens, keys)
        src, dst = _bytes(batch.src, batch.nbytes), _bytes(batch.dst, batch.nbytes)
        written.append((dst, _look_up(src, *offered)))
    where = np.concatenate([np.empty(0, dtype=np.int64), *(dst for dst, _ in written)])
    what = np.concatenate([np.empty(0, dtype=np.int64), *(meaning for _, meaning in written)])
    if np.unique(where).size != where.size:
        raise RuntimeError("a destination byte is written twice.")
    wanted = _look_up(where, *required)
    if (wanted != what).any():
        at = int(np.flatnonzero(wanted != what)[0])
        raise RuntimeError(f"destination byte {where[at]} is filled with another byte's value.")
    if (wanted >= 0).sum() != required[0].size:
        raise RuntimeError(
            f"{required[0].size} bytes are required, {(wanted >= 0).sum()} are written."
        )


def _tokens(layouts: list[PoolLayout]) -> int:
    """A length that fits every buffer and ends in mid-page."""
    paged = [
        (layout.space_by_name[b.space], b.items)
        for layout in layouts
        for b in layout.buffers
        if layout.space_by_name[b.space].kind == "paged"
    ]
    if not paged:
        return 1
    fits = min((items - space.reserved) * space.tokens_per_item for space, items in paged)
    return max(1, min(fits, 2 * max(space.tokens_per_item for space, _ in paged) + 1))


def _address(layout: PoolLayout, tokens: int) -> RequestAddress:
    """Items in descending order, so that nothing fuses by luck."""
    spans = {}
    for space in layout.spaces:
        items = -(-tokens // space.tokens_per_item) if space.kind == "paged" else 1
        spans[space.name] = Span(np.arange(space.reserved + items - 1, space.reserved - 1, -1))
    return RequestAddress(tokens, spans)


def _meanings(
    layout: PoolLayout,
    address: RequestAddress,
    tokens: int,
    keys: dict[tuple[str, int, str], int],
    skip: set[tuple[str, int, str]] = frozenset(),  # type: ignore[assignment]
) -> tuple[Ints, Ints]:
    """Addresses of all live bytes, sorted, and a number that stands for what each means."""
    found = [
        part
        for region in layout.regions
        if region.key in keys and region.key not in skip
        for part in _region_bytes(layout, region, address, tokens, keys[region.key])
    ]
    where = np.concatenate([np.empty(0, dtype=np.int64), *(addresses for addresses, _ in found)])
    what = np.concatenate([np.empty(0, dtype=np.int64), *(meaning for _, meaning in found)])
    order = np.argsort(where)
    return where[order], what[order]


def _region_bytes(
    layout: PoolLayout, region: Region, address: RequestAddress, tokens: int, number: int
) -> Iterator[tuple[Ints, Ints]]:
    buffer, space = layout.buffer_of(region), layout.space_of(region)
    ids = address.spans[space.id_list].ids
    cell = outer_sum(0, [*((a.size, a.stride) for a in region.inner_axes), (region.width, 1)])
    inner, meaning = region.width, np.arange(region.width, dtype=np.int64)
    for axis in reversed(region.inner_axes):
        steps = np.arange(axis.start, axis.stop, dtype=np.int64) * inner
        meaning = (steps[:, None] + meaning.reshape(1, -1)).ravel()
        inner *= axis.total
    entry = region.axis("entry")
    for position in space.alive(tokens):
        item = ids[position // space.entries_per_item] if space.kind == "paged" else ids[0]
        step = (position % space.entries_per_item) * entry.stride if entry else 0
        base = buffer.base + int(item) * buffer.item_stride + region.offset + step
        yield base + cell, (number * (tokens + 1) + position) * inner + meaning


def _bytes(starts: Ints, lengths: Ints) -> Ints:
    group, within = ragged(lengths)
    return starts[group] + within


def _look_up(addresses: Ints, where: Ints, what: Ints) -> Ints:
    """Meanings of addresses; -1 for padding."""
    if not where.size:
        return np.full(addresses.size, -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(where, addresses), where.size - 1)
    return np.where(where[at] == addresses, what[at], -1)
