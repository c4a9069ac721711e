"""Checks of how a pool describes its memory, copies whole items, and saves them on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvpool.layout import Buffer, PoolLayout, RequestAddress, Span
from kvpool.layout.grid import Ints
from kvpool.pools.base import KVPool
from kvpool.testing.case import Case, equal, fail, raises
from kvpool.testing.memory import PoolMemory, Trial, ids_on, off, same


def a_new_pool_is_zero_and_aligned(case: Case) -> None:
    """Zeroed memory of the device's kind, each slab aligned as the device says."""
    pool = case.make()
    PoolMemory(pool).check()
    for buffer in pool.layout.buffers:
        kind = buffer.memory.partition(":")[0]
        equal(f"buffer {buffer.name}: memory", kind, case.device.memory_kind)
    for slab in pool.layout.slabs():
        step = case.device.alignment
        if slab.base % step:
            fail(f"slab at {slab.base:#x}: {slab.base % step} bytes past a multiple of {step}.")
    # those of a block pool lie over one another
    if pool.nbytes < sum(slab.nbytes for slab in pool.layout.slabs()):
        fail(f"nbytes: {pool.nbytes:,}, fewer than the bytes of its buffers.")


def two_pools_share_no_byte(case: Case) -> None:
    """A write to one pool does not change the other."""
    trials = Trial(case, 0), Trial(case, 1)
    for trial in trials:
        trial.check()


def views_described_back_are_the_layout(case: Case) -> None:
    """`describe` of every view gives the region that it came from."""
    case.make().check_integrity()


def views_show_the_bytes_of_the_layout(trial: Trial) -> None:
    """Every byte of every region is the same through its view and by the layout's formula."""
    for region in trial.layout.regions:
        raw = off(trial.device, trial.pool.view(region.role, region.layer))
        if region.axis("entry") is not None:
            raw = raw.reshape(-1, *raw.shape[2:])
        same(f"view of {region}", raw, trial.bytes[trial.cells(region)])


def contiguous_lists_agree_with_the_layout(case: Case) -> None:
    """Pointers, lengths, item lengths and layers; each buffer is listed once."""
    pool = case.make()
    if pool.placement in ("page", "block"):
        raises(ValueError, "lists of pages of all layers", pool.get_contiguous_buf_infos)
        return
    main, states = pool.get_contiguous_buf_infos(), pool.get_state_buf_infos()
    listed = _listed(pool, "contiguous", main)
    sizes, first = pool.kv_buf_group_sizes, 0
    equal("kv_buf_group_sizes, in all", sum(sizes), len(main.layer_ids))
    for size in sizes:
        layers = main.layer_ids[first : first + size]
        equal(f"layers of the group from buffer {first} on, ascending", layers, sorted({*layers}))
        first += size
    for number, state in enumerate(states):
        what = f"state {number} ({state.state_type.value})"
        listed += _listed(pool, what, state[1:5])
        equal(f"{what}: sizes", len(state.dim_per_tensor), len(state.data_ptrs))
    equal("buffers listed", sorted(b.name for b in listed), sorted(pool.layout.buffer_by_name))


def layers_are_the_models(case: Case) -> None:
    """First, last and total layers agree with the layout."""
    pool = case.make()
    layers = {region.layer for region in pool.layout.regions}
    equal("start_layer", pool.start_layer, pool.layers[0])
    equal("end_layer", pool.end_layer, pool.layers[-1] + 1)
    equal("total_kv_layers of the layout", pool.layout.total_kv_layers, pool.total_kv_layers)
    equal("layers of regions that are not the pool's", layers - {*pool.layers}, set())
    equal("owners", {region.owner for region in pool.layout.regions}, {pool.owner})


def sizes_without_memory_are_the_same(case: Case) -> None:
    """A pool on the meta device has the same layout, without pointers."""
    layout, meta = case.make().layout, case.build(device="meta").layout
    equal("regions on meta", meta.regions, layout.regions)
    equal("spaces on meta", meta.spaces, layout.spaces)
    for sized, placed in zip(meta.buffers, layout.buffers):
        same = replace(sized, base=placed.base, memory=placed.memory)
        equal(f"buffer {sized.name} on meta", same, placed)


def copied_items_arrive_whole(trial: Trial) -> None:
    """Disjoint items of every id list: all bytes of an item, padding too, and no others."""
    _copies(trial, chains=False)


def chained_copies_read_before_they_write(trial: Trial) -> None:
    """Items that are both source and destination: chains and swaps."""
    _copies(trial, chains=True)


def saved_items_come_back_elsewhere(trial: Trial) -> None:
    """A request's items are saved to the host, and loaded into others once all is overwritten."""
    layout, most = trial.layout, capacity(trial.layout)
    for tokens in sorted({1, most // 2 + 1, most}):
        before, after = (place(layout, tokens, trial.random) for _ in range(2))
        contents, saved = trial.bytes, trial.pool.save(before)
        trial.fill(trial.random)
        trial.pool.load(after, saved)
        for buffer in layout.buffers:
            space = layout.space_by_name[buffer.space]
            entries = np.array(space.alive(tokens), dtype=np.int64)
            if not entries.size:
                continue
            numbers = np.unique(space.place(entries)[0])
            src, dst = (a.spans[space.id_list].ids[numbers] for a in (before, after))
            rows, items = contents[trial.items(buffer, src)], saved.items[buffer.name]
            trial.bytes[trial.items(buffer, dst)] = rows
            equal(f"buffer {buffer.name}: where saved items are", items.device.type, "cpu")
            equal(f"buffer {buffer.name}: saved bytes", items.numpy().tobytes(), rows.tobytes())
        trial.check()
        trial.fill(trial.random)


def capacity(layout: PoolLayout) -> int:
    """Tokens of the longest request for which `place` has items."""
    usable, most = usable_items(layout), 1 << 20
    for space in layout.spaces:
        if space.ids is None and not space.per_request:
            most = min(most, usable[space.name].size * space.tokens_per_item)
    return most if most < 1 << 20 else 9


def usable_items(layout: PoolLayout) -> dict[str, Ints]:
    """Ids that requests can use, by id list; those of a block pool are dealt out to its lists."""
    usable = {}
    for name, count in layout.items_by_list.items():
        space = layout.space_by_name[name]
        lists = layout.block_pools.get(space.block_pool or "", (name,))
        usable[name] = np.arange(space.reserved + lists.index(name), count, len(lists))
    return usable


def place(layout: PoolLayout, tokens: int, random: np.random.Generator) -> RequestAddress:
    """A block table for a request of `tokens` tokens, with items in random order."""
    spans = {}
    for name, ids in usable_items(layout).items():
        space = layout.space_by_name[name]
        count = 1 if space.per_request else -(-tokens // space.tokens_per_item)
        spans[name] = Span(random.permutation(ids)[:count])
    return RequestAddress(tokens, spans)


def chain(random: np.random.Generator, ids: Ints) -> tuple[Ints, Ints]:
    """Sources and destinations of copies that move every item to another in one random cycle."""
    order = random.permutation(ids.size)
    return ids[order], np.roll(ids, 1)[order]


def _copies(trial: Trial, chains: bool) -> None:
    for id_list, count in trial.layout.items_by_list.items():
        ids = np.arange(count)
        for on_device in (False, True):
            mixed = trial.random.permutation(ids)
            half = mixed.size // 2
            src, dst = mixed[:half], mixed[half : 2 * half]
            if chains:  # a cycle of all items, and a swap below
                src, dst = chain(trial.random, mixed)
            _move(trial, id_list, src, dst, on_device)
        if chains and ids.size > 1:
            _move(trial, id_list, ids[:2], ids[1::-1])
        _move(trial, id_list, ids[:0], ids[:0])


def _move(trial: Trial, id_list: str, src: Ints, dst: Ints, on_device: bool = False) -> None:
    passed: list[Any] = [src.tolist(), dst.tolist()]
    if on_device:
        passed = [ids_on(trial.tensors[0].device, ids) for ids in (src, dst)]
    trial.pool.copy_items(id_list, *passed)
    for buffer in trial.layout.buffers:
        if trial.layout.space_by_name[buffer.space].id_list == id_list:
            rows = trial.bytes[trial.items(buffer, src)]
            trial.bytes[trial.items(buffer, dst)] = rows


def _listed(pool: KVPool, what: str, columns: Sequence[list[int]]) -> list[Buffer]:
    """Buffers by pointers, lengths, item lengths and layers, each compared with the layout."""
    by_range = {(buffer.base, buffer.end): buffer for buffer in pool.layout.buffers}
    of_layer = {(region.buffer, region.layer) for region in pool.layout.regions}
    equal(f"{what}: lengths of its columns", {*map(len, columns)}, {len(columns[0])})
    buffers = []
    for ptr, size, item, layer in zip(*columns):
        buffer = by_range.get((ptr, ptr + size))
        if buffer is None:
            fail(f"{what}, layer {layer}: the layout has no buffer of {size:,} bytes at {ptr:#x}.")
        equal(f"{what}, layer {layer}: item length", item, buffer.item_bytes)
        if (buffer.name, layer) not in of_layer:
            words = f"is listed for layer {layer}, but has no such region."
            fail(f"{what}: buffer {buffer.name} {words}")
        buffers.append(buffer)
    return buffers
