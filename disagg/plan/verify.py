"""A slow, independent check of a plan: follows the meaning of every byte of a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from disagg.plan.bind import CopyBatch
from kvpool.layout import Key, PoolLayout, Region, RequestAddress, Space, Span
from kvpool.layout.grid import Ints, outer_sum, ragged

BindAll = Callable[[Sequence[RequestAddress], RequestAddress], list[CopyBatch]]


def verify(
    sources: Sequence[PoolLayout], dest: PoolLayout, missing: Collection[Key], bind_all: BindAll
) -> None:
    """Binds a request of up to three pages and compares what each byte means on both sides.

    Raises RuntimeError unless each byte that the destination requires is written exactly once, from
    the byte of the same owner, layer, role, position, axis steps and offset, and any other byte
    that is read or written is declared padding of the request's own items.
    """
    tokens = _tokens([*sources, dest])
    there = [_address(layout, tokens) for layout in sources]
    here = _address(dest, tokens)
    keys = {r.key: number for number, r in enumerate(dest.regions) if r.key not in missing}
    required = _meanings(dest, here, tokens, keys)
    written: list[tuple[Ints, Ints]] = []
    for number, (layout, address, batch) in enumerate(zip(sources, there, bind_all(there, here))):
        offered = _meanings(layout, address, tokens, keys)
        src, dst = _bytes(batch.src, batch.nbytes), _bytes(batch.dst, batch.nbytes)
        meaning = _look_up(src, *offered)
        _check_padding(src[meaning < 0], layout, address, f"read from source {number}")
        written.append((dst, meaning))
    where = np.concatenate([np.empty(0, dtype=np.int64), *(dst for dst, _ in written)])
    what = np.concatenate([np.empty(0, dtype=np.int64), *(meaning for _, meaning in written)])
    if np.unique(where).size != where.size:
        raise RuntimeError("a destination byte is written twice.")
    wanted = _look_up(where, *required)
    _check_padding(where[wanted < 0], dest, here, "written on the destination")
    if (wanted != what).any():
        at = int(np.flatnonzero(wanted != what)[0])
        raise RuntimeError(f"destination byte {where[at]} is written from the wrong byte.")
    if (wanted >= 0).sum() != required[0].size:
        raise RuntimeError(
            f"{required[0].size} bytes are required, {(wanted >= 0).sum()} are written."
        )


def _tokens(layouts: list[PoolLayout]) -> int:
    """A number of tokens that fits every buffer and ends within a page."""
    paged = [
        (layout.space_by_name[b.space], b.items)
        for layout in layouts
        for b in layout.buffers
        if layout.space_by_name[b.space].kind == "paged"
    ]
    if not paged:
        return 1
    fits = min(
        space.held.number((items - space.reserved) * space.entries_per_item)
        * space.tokens_per_entry
        for space, items in paged
    )
    longest = max(
        max(space.tokens_per_item, space.interleave.size if space.interleave else 1)
        * space.held.ranks
        for space, _ in paged
    )
    return max(1, min(fits, 2 * longest + 1))


def _address(layout: PoolLayout, tokens: int) -> RequestAddress:
    """Items in descending order, so that no two are adjacent by chance."""
    spans = {}
    for space in layout.spaces:
        items = max(
            1 if one.per_request else -(-one.alive(tokens).stop // one.entries_per_item)
            for one in layout.spaces
            if one.id_list == space.id_list
        )
        spans[space.name] = Span(np.arange(space.reserved + items - 1, space.reserved - 1, -1))
    return RequestAddress(tokens, spans)


def _meanings(
    layout: PoolLayout, address: RequestAddress, tokens: int, keys: dict[Key, int]
) -> tuple[Ints, Ints]:
    """Pointers to all live bytes of regions `keys`, sorted, and a number for what each means."""
    found = [
        part
        for region in layout.regions
        if region.key in keys
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
    along = region.axis("entry")
    alive = space.alive_in_request(tokens)
    for place, entry in enumerate(_entries(space, alive.stop)):
        if entry in alive:
            item = ids[place // space.entries_per_item] if space.kind == "paged" else ids[0]
            step = (place % space.entries_per_item) * along.stride if along else 0
            base = buffer.base + int(item) * buffer.item_stride + region.offset + step
            yield base + cell, (number * (tokens + 1) + entry) * inner + meaning


def _entries(space: Space, stop: int) -> Iterator[int]:
    """The entries of a request below `stop` that this rank holds, looked at one by one."""
    part = space.interleave
    for entry in range(stop):
        if part is None or entry * space.tokens_per_entry // part.size % part.ranks == part.rank:
            yield entry


def _check_padding(pointers: Ints, layout: PoolLayout, address: RequestAddress, what: str) -> None:
    """Raises RuntimeError unless all bytes are declared padding of the request's items."""
    foreign = np.setdiff1d(pointers, _padding(layout, address))
    if foreign.size:
        where = next(
            f"byte {byte} of item {item} of buffer {buffer.name}"
            for buffer in layout.buffers
            for item, byte in [divmod(int(foreign[0]) - buffer.base, buffer.item_stride)]
            if 0 <= item < buffer.items
        )
        raise RuntimeError(
            f"{where} is {what}: it is neither of a region that moves nor declared padding "
            f"({foreign.size} such bytes)."
        )


def _padding(layout: PoolLayout, address: RequestAddress) -> Ints:
    """Pointers to all declared padding of a request's items."""
    found = [np.empty(0, dtype=np.int64)]
    for buffer in layout.buffers:
        if buffer.padding:
            free = np.ones(buffer.item_bytes, dtype=bool)
            for region in layout.regions:
                if region.buffer == buffer.name:
                    axes = ((axis.size, axis.stride) for axis in region.axes)
                    free[outer_sum(region.offset, [*axes, (region.width, 1)])] = False
            ids = address.spans[layout.space_by_name[buffer.space].id_list].ids
            items = buffer.base + ids * buffer.item_stride
            found.append((items[:, None] + np.flatnonzero(free)).ravel())
    return np.concatenate(found)


def _bytes(starts: Ints, lengths: Ints) -> Ints:
    group, within = ragged(lengths)
    return starts[group] + within


def _look_up(addresses: Ints, where: Ints, what: Ints) -> Ints:
    """Meanings of pointers; -1 for those that have none."""
    if not where.size:
        return np.full(addresses.size, -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(where, addresses), where.size - 1)
    return np.where(where[at] == addresses, what[at], -1)
