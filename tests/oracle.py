"""What bytes must be, computed from a definition of values and never from a plan.

Every byte of state has a value that follows from (owner, layer, role, entry, axis steps, byte
number) alone. `fill` writes those values into a source, `assert_holds` compares every byte of a
destination's memory: live bytes with the definition, all others with what lay there before.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from disagg.plan import CopyBatch, TransferPlan, plan
from disagg.runtime.staging import coalesce
from kvpool.item import Template, item_bytes, item_regions
from kvpool.layout import Buffer, PoolLayout, RequestAddress, Space, Span
from kvpool.pools.base import KVPool

SOURCE, DEST = 254, 255  # what lies where no state is; values are 0 to 253
GUARD = 192  # bytes before, between and behind hand-built buffers


@dataclass(frozen=True)
class State:
    """Memory and what it means: all its bytes, and by (owner, layer, role) a uint8 view
    `[item, axes in the region's order, byte]`.
    """

    layout: PoolLayout
    memory: Sequence[np.ndarray]
    views: Mapping[tuple[str, int, str], np.ndarray]


def state(holder: KVPool | State) -> State:
    """A pool's memory, as its typed views show it."""
    if isinstance(holder, State):
        return holder
    found = holder.__dict__.get("_oracle")
    if found is None:
        views = {
            region.key: holder.view(region.role, region.layer).view(torch.uint8).numpy()
            for region in holder.layout.regions
        }
        found = holder.__dict__["_oracle"] = State(holder.layout, [holder._slab.numpy()], views)
    return found


def merged(*holders: KVPool | State) -> State:
    """A target and its drafts as one holder."""
    states = [state(holder) for holder in holders]
    layout = PoolLayout.merge(*(each.layout for each in states))
    views = {key: view for each in states for key, view in each.views.items()}
    return State(layout, [memory for each in states for memory in each.memory], views)


def built(
    parts: Iterable[tuple[int, str, int, Template]],
    spaces: Iterable[Space] = (),
    *,
    page: int = 1,
    owner: str = "target",
    padding: bool = True,
) -> State:
    """State made by hand: one buffer for each (layer, space, items, template), guards in between.
    `padding`: whether the buffers declare what is in no region padding.

    The `kv` space, of `page` entries an item, is there without being named in `spaces`.
    """
    parts, spaces = list(parts), {space.name: space for space in spaces}
    if any(name == "kv" for _, name, _, _ in parts):
        spaces.setdefault("kv", Space("kv", "paged", entries_per_item=page))
    room = sum(items * item_bytes(template) + 2 * GUARD for _, _, items, template in parts)
    slab = np.zeros(room + GUARD, dtype=np.uint8)
    buffers, regions, at = [], [], GUARD
    for number, (layer, space, items, template) in enumerate(parts):
        name, size = f"{owner}.{number}", item_bytes(template)
        base = slab.ctypes.data + at
        buffers.append(Buffer(name, space, base, size, size, items, padding=padding))
        regions.extend(item_regions(template, owner=owner, layer=layer, buffer=name))
        at = -(-(at + items * size + GUARD) // 64) * 64
    layers = max(layer for layer, _, _, _ in parts) + 1
    return over(PoolLayout(tuple(buffers), tuple(regions), tuple(spaces.values()), layers), slab)


def over(layout: PoolLayout, slab: np.ndarray) -> State:
    """State in memory `[bytes]` in which all buffers of a layout lie."""
    return State(layout, [slab], {r.key: _grid(layout, r, slab) for r in layout.regions})


def overlaid(
    groups: Mapping[str, Sequence[tuple[int, Template]]],
    spaces: Iterable[Space],
    items: int,
    *,
    tensors: bool = False,
    padding: bool = False,
    leads: Mapping[str, int] = MappingProxyType({}),
) -> State:
    """State made by hand in which `items` blocks of all spaces lie over one another: each space's
    (layer, template) pairs side by side in a block of one allocation, or (`tensors`) the n-th of
    every space in a block of the n-th tensor. They begin at byte `leads[space]`, or 0; where a
    block is several items, in each of as many equal parts of it.

    `padding`: a space owns the rest of a block, or of a part, that it has.
    """
    spaces = list(spaces)
    cuts = {space.name: space.items_per_block for space in spaces}
    sizes = {name: [item_bytes(each) for _, each in parts] for name, parts in groups.items()}
    rows = [(cuts[name], leads.get(name, 0), held) for name, held in sizes.items()]
    if tensors:
        tops = [
            max(cut * (lead + held[n]) for cut, lead, held in rows if n < len(held))
            for n in range(max(map(len, sizes.values())))
        ]
    else:
        tops = [max(cut * (lead + sum(held)) for cut, lead, held in rows)]
    step = math.lcm(*cuts.values())
    strides = [-(-top // step) * step for top in tops]
    starts = [GUARD + n * GUARD + items * sum(strides[:n]) for n in range(len(strides))]
    slab = np.zeros(starts[-1] + items * strides[-1] + GUARD, dtype=np.uint8)
    buffers, regions = [], []
    for space, parts in groups.items():
        for number, (layer, template) in enumerate(parts):
            tensor, within = (number, 0) if tensors else (0, sum(sizes[space][:number]))
            within += leads.get(space, 0)
            stride, size = strides[tensor] // cuts[space], sizes[space][number]
            if padding and (tensors or number == len(parts) - 1):
                size = stride - within
            name = f"{space}.{number}"
            base, count = slab.ctypes.data + starts[tensor] + within, items * cuts[space]
            buffers.append(Buffer(name, space, base, stride, size, count, padding=padding))
            regions.extend(item_regions(template, owner="target", layer=layer, buffer=name))
    layers = 1 + max(layer for parts in groups.values() for layer, _ in parts)
    return over(PoolLayout(tuple(buffers), tuple(regions), tuple(spaces), layers), slab)


def _grid(layout, region, slab):
    """The formula of kvpool.layout, word for word."""
    buffer = layout.buffer_of(region)
    grid = [(buffer.items, buffer.item_stride), *((a.size, a.stride) for a in region.axes)]
    shape, strides = zip(*grid, (region.width, 1))
    start = buffer.base - slab.ctypes.data + region.offset
    return np.lib.stride_tricks.as_strided(slab[start:], shape, strides)


def of_layers(holder: KVPool | State, layers: range) -> State:
    """A holder to whom the bytes of all other layers are somebody else's."""
    held = state(holder)
    regions = tuple(region for region in held.layout.regions if region.layer in layers)
    inside = {region.buffer for region in regions}
    buffers = tuple(buffer for buffer in held.layout.buffers if buffer.name in inside)
    return replace(held, layout=replace(held.layout, regions=regions, buffers=buffers))


def place(holder: KVPool | State, tokens: int, seed: int | None = 0) -> RequestAddress:
    """An address of `tokens` tokens in items shuffled by `seed` (None: consecutive), or in items of
    shuffled blocks. No block of a block pool is taken twice.
    """
    layout, spans, random = holder.layout, {}, np.random.default_rng(seed)
    taken: dict[str, list[int]] = {}
    for space in layout.spaces:
        if space.ids is None:
            items = min(
                b.items
                for b in layout.buffers
                if layout.space_by_name[b.space].id_list == space.name
            )
            lists = [each for each in layout.spaces if each.id_list == space.name]
            count = max(_items(each, tokens) for each in lists)
            size = space.items_per_block
            blocks = np.arange(space.reserved // size, items // size)
            blocks = blocks if seed is None else random.permutation(blocks)
            if space.block_pool is not None:
                others = taken.setdefault(space.block_pool, [])
                blocks = blocks[~np.isin(blocks, others)]
                others.extend(blocks[: -(-count // size)].tolist())
            ids = (blocks[:, None] * size + np.arange(size)).ravel()
            assert ids.size >= count, f"space {space.name}: {ids.size} items are left"
            spans[space.name] = Span(ids[:count])
    return RequestAddress(tokens, spans)


def _items(space: Space, tokens: int) -> int:
    """Items of a request: enough for what this rank holds of it."""
    if space.kind != "paged":
        return 1
    if space.interleave is None:
        return -(-tokens // (space.entries_per_item * space.tokens_per_entry))
    return -(-len(packed(space, tokens)) // space.entries_per_item)


def packed(space: Space, tokens: int) -> dict[int, int]:
    """Where the entries of a rank lie that holds some stretches of positions: one behind the other,
    as they are met position by position.
    """
    part, found = space.interleave, {}
    stretch, left = 0, part.size  # whose turn it is, and for how many positions more
    for position in range(tokens):
        if stretch == part.rank and (position + 1) % space.tokens_per_entry == 0:
            found[position // space.tokens_per_entry] = len(found)
        left -= 1
        if left == 0:
            stretch, left = (stretch + 1) % part.ranks, part.size
    return found


def elsewhere(holder: KVPool | State, address: RequestAddress) -> RequestAddress:
    """An address of as many tokens, in items of which `address` has none."""
    spans: dict[str, Span] = {}
    pools = {space.name: space.block_pool for space in holder.layout.spaces}
    cuts = {space.name: space.items_per_block for space in holder.layout.spaces}
    for name, span in address.spans.items():
        spaces = [s for s in holder.layout.spaces if s.id_list == name]
        sizes = holder.layout.items_by_space
        items = min(sizes[space.name] for space in spaces if space.name in sizes)
        free = np.setdiff1d(np.arange(max(s.reserved for s in spaces), items), span.ids)
        for other, held in (*address.spans.items(), *spans.items()):
            if pools.get(name) is not None and pools.get(other) == pools[name]:
                free = free[~np.isin(free // cuts[name], held.ids // cuts[other])]
        assert free.size >= span.ids.size, f"space {name}: {free.size} items are left"
        spans[name] = Span(free[: span.ids.size], span.first_item)
    return RequestAddress(address.num_tokens, spans)


def pages_for(tokens: int, page: int) -> int:
    """Pages that hold `tokens` tokens, the reserved one, and three of other requests."""
    return -(-tokens // page) + 4


def values(key: tuple[str, int, str], coordinates: Sequence[np.ndarray], salt: int = 0):
    """The bytes of one region at a grid of coordinates, the last being the byte number."""
    seed = zlib.crc32(repr((*key, salt)).encode())
    mixed = np.array(seed, dtype=np.uint32)
    for coordinate in coordinates:
        steps = np.asarray(coordinate, dtype=np.uint32) * np.uint32(0x9E3779B1)
        mixed = mixed[..., None] ^ (steps + np.uint32(0x7F4A7C15))
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return ((mixed ^ (mixed >> np.uint32(16))) % np.uint32(254)).astype(np.uint8)


def live(space: Space, positions: range, tokens: int) -> np.ndarray:
    """Entries that `positions` complete and that are alive once a request has `tokens` tokens."""
    if space.kind != "paged":  # what changes with every token is handed over with the last
        positions = range(tokens) if positions.stop == tokens else range(0)
    if space.kind == "slot":
        return np.array([tokens - 1] if positions else [], dtype=np.int64)
    ends = np.array([p for p in positions if (p + 1) % space.tokens_per_entry == 0], dtype=np.int64)
    entries = ends // space.tokens_per_entry
    if space.ring:  # an open window may change until it closes
        step = space.window_step
        stop = positions.stop if positions.stop == tokens else positions.stop // step * step
        entries = np.arange(positions.start // step * step, stop)
    if space.window is None:
        return entries
    closed = tokens // space.tokens_per_entry
    while closed % space.window_step:
        closed -= 1
    return entries[entries >= closed - space.window]


def live_items(space: Space, positions: range, tokens: int) -> np.ndarray:
    """Items that `positions` complete, the last one with the request, and that hold live entries
    once it has `tokens` tokens.
    """
    held = live(space, range(tokens), tokens)
    if space.kind != "paged":
        return np.zeros(min(held.size, int(positions.stop == tokens)), dtype=np.int64)
    size = space.entries_per_item * space.tokens_per_entry
    ends = {p // size for p in positions if (p + 1) % size == 0 or p + 1 == tokens}
    return np.array(sorted(ends & set((held // space.entries_per_item).tolist())), dtype=np.int64)


def write(holder, address: RequestAddress, positions: range, salt: int = 0) -> None:
    """Writes the values of all live entries of `positions`, of packed regions those of items."""
    for view, where, what in _live_values(state(holder), address, positions, salt):
        view[where] = what


def holds(holder, address: RequestAddress, salt: int = 0) -> bool:
    """Whether all live entries of a request have their values. Touches nothing."""
    parts = _live_values(state(holder), address, range(address.num_tokens), salt)
    return all((view[where] == what).all() for view, where, what in parts)


def _live_values(held: State, address: RequestAddress, positions: range, salt: int):
    """For each region a view, where in it the live entries of `positions` lie, and their values."""
    for region in held.layout.regions:
        space, tokens = held.layout.space_of(region), address.num_tokens
        entries = at = (live_items if region.packing else live)(space, positions, tokens)
        if space.interleave is not None:
            place = packed(space, tokens)
            entries = np.array([e for e in entries.tolist() if e in place], dtype=np.int64)
            at = np.array([place[e] for e in entries.tolist()], dtype=np.int64)
        if entries.size:
            yield _spots(held, region, address, entries, at, salt)


def _spots(held: State, region, address: RequestAddress, entries, at, salt: int = 0):
    """A view of a region, where in it entries lie that are the `at`-th of this rank, and their
    values.
    """
    space, view = held.layout.space_of(region), held.views[region.key]
    if region.axis("entry") is None:
        view = view[:, None]
    inner = [np.arange(a.start, a.stop) for a in region.inner_axes]
    what = values(region.key, [entries, *inner, np.arange(region.width)], salt)
    span, size = address.spans[space.id_list], 1 if region.packing else space.entries_per_item
    item = at // size - span.first_item if space.kind == "paged" else np.zeros_like(at)
    return view, (span.ids[item], at % size % (space.ring or size)), what


def fill(holder, address: RequestAddress, positions: range | None = None) -> None:
    """Makes a source: its background everywhere, then the values of one request."""
    blank(holder, SOURCE)
    write(holder, address, range(address.num_tokens) if positions is None else positions)


def filled(holder, tokens: int, seed: int | None = 0) -> RequestAddress:
    """The block table of a request that a source holds."""
    address = place(holder, tokens, seed)
    fill(holder, address)
    return address


def blank(holder, byte: int = DEST) -> None:
    """Sets every byte of a holder's memory."""
    for memory in state(holder).memory:
        memory[...] = byte


def assert_holds(
    holder,
    address: RequestAddress,
    positions: range | None = None,
    *,
    kept: range = range(0),
    also: Sequence[RequestAddress] = (),
) -> None:
    """Every live byte of `positions` has its value, those of `kept` are as `write(salt=1)` left
    them, requests `also` are there too, and every other byte of the memory is still blank. Declared
    padding of the request's own items may be anything; dead entries of its last page may be what
    lay there on the source: a value of that very entry, or nothing.
    """
    held = state(holder)
    positions = range(address.num_tokens) if positions is None else positions
    actual = [memory.copy() for memory in held.memory]
    blank(holder)
    write(holder, address, kept, salt=1)
    write(holder, address, positions)
    for each in also:
        write(holder, each, range(each.num_tokens))
    expected = [memory.copy() for memory in held.memory]
    padding = _padding(held, address)
    wrong = [(a != e) & ~p for a, e, p in zip(actual, expected, padding)]
    if positions.stop == address.num_tokens:
        for w, a, dead in zip(wrong, actual, _dead_tail(held, address)):
            w &= ~((dead != DEST) & ((a == dead) | (a == SOURCE)))
    count = sum(int(w.sum()) for w in wrong)
    for memory, differs in zip(held.memory, wrong):
        memory[...] = differs
    names = [key for key, view in held.views.items() if view.any()] if count else []
    for memory, was in zip(held.memory, actual):
        memory[...] = was
    assert not count, f"{count} bytes differ; regions in which they lie: {names[:8]}"


def _dead_tail(held: State, address: RequestAddress) -> list[np.ndarray]:
    """Memory in which the dead entries of the request's last pages have the values of later
    positions, and every other byte is `DEST`.
    """
    blank(held)
    for region in held.layout.regions:
        space, tokens = held.layout.space_of(region), address.num_tokens
        size = space.entries_per_item
        entries = np.arange(tokens // space.tokens_per_entry + size)
        if space.interleave is not None:
            stretch = size * space.tokens_per_entry + space.interleave.size
            entries = np.array(list(packed(space, tokens + stretch * space.interleave.ranks)))
        closed = int((entries < tokens // space.tokens_per_entry).sum())
        if space.kind != "paged" or space.ring or region.packing or closed % size == 0:
            continue
        at = np.arange(closed, -(-closed // size) * size)
        view, where, what = _spots(held, region, address, entries[at], at)
        view[where] = what
    return [memory.copy() for memory in held.memory]


def _padding(held: State, address: RequestAddress) -> list[np.ndarray]:
    """Bytes of the request's items that no region claims and a buffer declares padding."""
    layout = held.layout
    claimed = dict.fromkeys(layout.buffer_by_name, 0)
    for region in layout.regions:
        claimed[region.buffer] += region.nbytes
    padded = [b for b in layout.buffers if b.padding and claimed[b.name] < b.item_bytes]
    if not padded:
        return [np.zeros(1, dtype=bool)] * len(held.memory)
    for memory in held.memory:
        memory[...] = 0
        for buffer in padded:
            at = buffer.base - memory.ctypes.data
            if 0 <= at < memory.size:
                for item in address.spans[layout.space_by_name[buffer.space].id_list].ids:
                    start = at + int(item) * buffer.item_stride
                    memory[start : start + buffer.item_bytes] = 1
    for region in layout.regions:  # of these items: what is not, another space may claim
        span = address.spans[layout.space_of(region).id_list]
        held.views[region.key][span.ids] = 0
    return [memory.astype(bool) for memory in held.memory]


def move(
    sources: Sequence[KVPool | State],
    dest: KVPool | State,
    source_addresses: Sequence[RequestAddress],
    dest_address: RequestAddress,
    tokens: range | None = None,
    **options,
) -> TransferPlan:
    """Plans, binds and copies, run by run; returns the plan."""
    made = plan([source.layout for source in sources], dest.layout, **options)
    for batch in made.bind_all(source_addresses, dest_address, tokens=tokens):
        apply(batch, sources, dest)
    return made


def staged(
    sources: Sequence[KVPool | State],
    dest: KVPool | State,
    tokens: int,
    *,
    prefix: int = 0,
    seed: int | None = 0,
) -> tuple[list[RequestAddress], RequestAddress]:
    """A request that sources hold, and of which a destination holds a prefix (with `salt` 1) and is
    blank but for it: its address on each source, and on the destination.
    """
    seeds = [None if seed is None else seed + number for number in range(len(sources) + 1)]
    into, *addresses = (place(side, tokens, n) for side, n in zip((dest, *sources), seeds))
    for source, address in zip(sources, addresses):
        fill(source, address)
    blank(dest)
    write(dest, into, range(prefix), salt=1)
    return addresses, into


def hand_off(
    sources: Sequence[KVPool | State],
    dest: KVPool | State,
    tokens: int,
    *,
    prefix: int = 0,
    seed: int | None = 0,
    **options,
) -> tuple[TransferPlan, list[int]]:
    """Fills sources, moves what follows a prefix that the destination holds, and compares every
    byte of its memory, but for regions that may be missing; the plan, and the bytes of each source.
    """
    addresses, into = staged(sources, dest, tokens, prefix=prefix, seed=seed)
    positions = range(prefix, tokens)
    transfer = move(sources, dest, addresses, into, positions, **options)
    whole = state(dest)
    kept = tuple(r for r in whole.layout.regions if r.key not in transfer.missing)
    held = replace(whole, layout=replace(whole.layout, regions=kept))
    assert_holds(held, into, positions, kept=range(prefix))
    batches = transfer.bind_all(addresses, into, tokens=positions)
    return transfer, [batch.total for batch in batches]


def apply(batch, sources: Sequence[KVPool | State], dest: KVPool | State) -> None:
    """Copies the runs of a batch one by one, once none is seen to leave memory."""
    _inside(batch.src, batch.nbytes, [m for source in sources for m in state(source).memory])
    _inside(batch.dst, batch.nbytes, state(dest).memory)
    copy(batch)


def copy(batch) -> None:
    """Copies the runs of a batch one by one."""
    for src, dst, nbytes in zip(*(column.tolist() for column in batch)):
        ctypes.memmove(dst, src, nbytes)


def covered(memory: np.ndarray, pointers: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Which bytes of a memory lie in these runs, none of which leaves it."""
    found = np.zeros(memory.size, dtype=bool)
    for start, size in zip((pointers - memory.ctypes.data).tolist(), nbytes.tolist()):
        assert start >= 0 and start + size <= found.size
        found[start : start + size] = True
    return found


def copy_through_buffer(batch: CopyBatch, source: PoolLayout) -> CopyBatch | None:
    """Copies a batch as decode does that reads it into a staging buffer; what it reads there, or
    None where it would not.
    """
    parts = coalesce(batch, source, 1 << 20)
    if parts is None:
        return None
    buffer = np.zeros(parts.read.total, dtype=np.uint8)
    copy(replace(parts.read, dst=parts.read.dst + buffer.ctypes.data))
    copy(replace(parts.scatter, src=parts.scatter.src + buffer.ctypes.data))
    return parts.read


def _inside(starts: np.ndarray, nbytes: np.ndarray, memory: Sequence[np.ndarray]) -> None:
    found = np.zeros(starts.shape, dtype=bool)
    for part in memory:
        base = part.ctypes.data
        found |= (starts >= base) & (starts + nbytes <= base + part.size)
    assert found.all(), "a run leaves the memory of its pool"
