"""A slow, independent check of a plan: follows the meaning of every byte of a request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import count, takewhile

import numpy as np

from disagg.plan import TransferPlan
from kvpool.layout import Key, PoolLayout, Region, RequestAddress, Space, Span
from kvpool.layout.grid import Ints, outer_sum, ragged


def verify(plan: TransferPlan) -> None:
    """Binds a request of up to three pages and compares what each byte means on both sides.

    Raises RuntimeError unless each byte that the destination requires is written exactly once, from
    the byte of the same owner, layer, role, position, axis steps and offset, and any other byte
    that is read or written is declared padding of the request's own items, or a dead entry of its
    last item, from the same entry.
    """
    sources, dest, missing = plan.sources, plan.dest, plan.missing
    tokens = _tokens([*sources, dest])
    there = [_address(layout, tokens) for layout in sources]
    here = _address(dest, tokens)
    keys = {r.key: number for number, r in enumerate(dest.regions) if r.key not in missing}
    # numbers of entries that no dead entry of a last item exceeds
    parts = [(s.entries_per_item, s.interleave) for e in [*sources, dest] for s in e.spaces]
    entries = tokens + max(size if p is None else (size + p.size) * p.ranks for size, p in parts)
    required = _meanings(dest, here, tokens, keys, entries)
    allowed = _meanings(dest, here, tokens, keys, entries, dead=True)
    written: list[tuple[Ints, Ints]] = []
    for number, (layout, address, batch) in enumerate(
        zip(sources, there, plan.bind_all(there, here))
    ):
        offered = _meanings(layout, address, tokens, keys, entries, dead=True)
        src, dst = _bytes(batch.src, batch.nbytes), _bytes(batch.dst, batch.nbytes)
        meaning = _look_up(src, *offered)
        _check_padding(src[meaning < 0], layout, address, f"read from source {number}")
        written.append((dst, meaning))
    where = np.concatenate([np.empty(0, dtype=np.int64), *(dst for dst, _ in written)])
    what = np.concatenate([np.empty(0, dtype=np.int64), *(meaning for _, meaning in written)])
    if np.unique(where).size != where.size:
        raise RuntimeError("a destination byte is written twice.")
    wanted = _look_up(where, *allowed)
    _check_padding(where[wanted < 0], dest, here, "written on the destination")
    if (wanted != what).any():
        at = int(np.flatnonzero(wanted != what)[0])
        raise RuntimeError(f"destination byte {where[at]} is written from the wrong byte.")
    found = np.isin(where, required[0]).sum()
    if found != required[0].size:
        raise RuntimeError(f"{required[0].size} bytes are required, {found} are written.")


def _tokens(layouts: list[PoolLayout]) -> int:
    """A number of tokens that fits every buffer and ends within a page; 0 if none fits."""
    paged = [
        layout.space_by_name[name]
        for layout in layouts
        for name in layout.items_by_space
        if layout.space_by_name[name].kind == "paged"
    ]
    longest = max(
        (
            max(space.tokens_per_item, space.interleave.size if space.interleave else 1)
            * space.held.ranks
            for space in paged
        ),
        default=0,
    )
    return bisect_left(
        range(1, 2 * longest + 2),
        True,
        key=lambda tokens: not all(_fits(layout, tokens) for layout in layouts),
    )


def _fits(layout: PoolLayout, tokens: int) -> bool:
    """Whether the ids of a request are items of every buffer."""
    spans = _address(layout, tokens).spans
    return all(
        int(spans[layout.space_by_name[name].id_list].ids.max(initial=-1)) < items
        for name, items in layout.items_by_space.items()
    )


def _address(layout: PoolLayout, tokens: int) -> RequestAddress:
    """Items in descending order, so that no two are adjacent by chance; those of one block pool
    follow one another.
    """
    spans, taken = {}, dict.fromkeys(layout.block_pools, 0)
    for space in layout.spaces:
        items = max(
            min(tokens, 1)
            if one.per_request
            else -(-one.alive(tokens).stop // one.entries_per_item)
            for one in layout.spaces
            if one.id_list == space.id_list
        )
        first = space.reserved
        if space.block_pool is not None:  # a block is one list's, whole
            first += taken[space.block_pool] * space.items_per_block
            taken[space.block_pool] += -(-items // space.items_per_block)
        spans[space.name] = Span(np.arange(first + items - 1, first - 1, -1))
    return RequestAddress(tokens, spans)


def _meanings(
    layout: PoolLayout,
    address: RequestAddress,
    tokens: int,
    keys: dict[Key, int],
    entries: int,
    dead: bool = False,
) -> tuple[Ints, Ints]:
    """Pointers to all live bytes of regions `keys`, sorted, and a number for what each means; with
    `dead`, also of the entries that follow in the last item. `entries` exceeds all their numbers.
    """
    found = [
        part
        for region in layout.regions
        if region.key in keys
        for part in _region_bytes(layout, region, address, tokens, keys[region.key] * entries, dead)
    ]
    where = np.concatenate([np.empty(0, dtype=np.int64), *(addresses for addresses, _ in found)])
    what = np.concatenate([np.empty(0, dtype=np.int64), *(meaning for _, meaning in found)])
    order = np.argsort(where)
    return where[order], what[order]


def _region_bytes(
    layout: PoolLayout,
    region: Region,
    address: RequestAddress,
    tokens: int,
    number: int,
    dead: bool,
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
    size = 1 if region.packing else space.entries_per_item
    alive = space.alive_items(tokens) if region.packing else space.alive_in_request(tokens)
    stop = sum(1 for _ in takewhile(lambda entry: entry < alive.stop, _entries(space)))
    if dead and space.kind == "paged" and not space.wraps:
        stop = -(-stop // size) * size
    for place, entry in zip(range(stop), _entries(space)):
        if entry >= alive.start:
            item = ids[place // size] if space.kind == "paged" else ids[0]
            step = place % size % (space.ring or size) * along.stride if along else 0
            base = buffer.base + int(item) * buffer.item_stride + region.offset + step
            yield base + cell, (number + entry) * inner + meaning


def _entries(space: Space) -> Iterator[int]:
    """The entries of a request that this rank holds, looked at one by one."""
    part = space.interleave
    for entry in count():
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
