"""Checks of whole items: copies within a pool, and offload to the host and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.layout import PoolLayout, RequestAddress, Span
from kvpool.layout.grid import Ints
from kvpool.testing.case import Case, equal
from kvpool.testing.memory import ids_on
from kvpool.testing.trial import Trial


def copied_items_arrive_whole(case: Case) -> None:
    """Disjoint items of every id list: all bytes of an item, padding too, and no others."""
    _copies(case, chains=False)


def chained_copies_read_before_they_write(case: Case) -> None:
    """Items that are both source and destination: chains and swaps."""
    _copies(case, chains=True)


def saved_items_come_back_elsewhere(case: Case) -> None:
    """A request's items are saved to host memory, and loaded into other items after the pool is
    overwritten.
    """
    trial = Trial(case)
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
    usable: dict[str, Ints] = {}
    for name, items in layout.items_by_space.items():
        lender = layout.space_by_name[layout.space_by_name[name].id_list]
        lists = layout.block_pools.get(lender.block_pool or "", (lender.name,))
        first = lender.reserved + lists.index(lender.name)
        ids = np.arange(first, items, len(lists), dtype=np.int64)
        usable[lender.name] = min(usable.get(lender.name, ids), ids, key=len)
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


def _copies(case: Case, chains: bool) -> None:
    trial = Trial(case, chains)
    for id_list, ids in _all_items(trial.layout).items():
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
    trial.check()


def _move(trial: Trial, id_list: str, src: Ints, dst: Ints, on_device: bool = False) -> None:
    passed: list[Any] = [src.tolist(), dst.tolist()]
    if on_device:
        passed = [ids_on(trial.tensors[0].device, ids) for ids in (src, dst)]
    trial.pool.copy_items(id_list, *passed)
    for buffer in trial.layout.buffers:
        if trial.layout.space_by_name[buffer.space].id_list == id_list:
            rows = trial.bytes[trial.items(buffer, src)]
            trial.bytes[trial.items(buffer, dst)] = rows


def _all_items(layout: PoolLayout) -> dict[str, Ints]:
    """All ids of each id list, including reserved ones."""
    counts: dict[str, int] = {}
    for buffer in layout.buffers:
        name = layout.space_by_name[buffer.space].id_list
        counts[name] = min(buffer.items, counts.get(name, buffer.items))
    return {name: np.arange(count, dtype=np.int64) for name, count in counts.items()}
