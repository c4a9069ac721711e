"""Pages: items that a request has one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpool.layout.kinds.kind import (
    RING_OF_PAGES,
    Ints,
    SpaceKind,
    alive_in_window,
    check_window_in_ring,
)
from kvpool.layout.types import need, need_int

if TYPE_CHECKING:
    from kvpool.layout.spaces import Space


def _check(space: Space) -> None:
    subject, size = f"space {space.name}", space.entries_per_item
    if space.interleave is not None:
        need(
            space.interleave.size % space.tokens_per_entry == 0,
            f"{subject} interleave",
            f"stretches of {space.interleave.size} positions would cut entries of "
            f"{space.tokens_per_entry}: a multiple of {space.tokens_per_entry} is needed.",
        )
    if space.ring is None:
        return
    need_int(space.ring, 1, f"{subject} ring")
    need(space.interleave is None, f"{subject} ring", RING_OF_PAGES)
    need(
        size % space.ring == size % space.window_step == 0,
        f"{subject} ring",
        f"{space.ring} entries, in steps of {space.window_step}, do not divide an item of {size}.",
    )
    check_window_in_ring(space)


def _words(space: Space) -> str:
    entries = "entry" if space.entries_per_item == 1 else "entries"
    pages = f"pages of {space.entries_per_item:,} {entries}"
    if space.ring is None:
        return pages
    return f"{pages}, of which an item has room for the last {space.ring:,}"


def _alive_items(space: Space, tokens: int) -> range:
    alive, size = space.alive(tokens), space.entries_per_item
    return range(alive.start // size, (alive.stop - 1) // size + 1) if alive else range(0)


def _place(space: Space, entries: Ints) -> tuple[Ints, Ints]:
    items, steps = np.divmod(entries, space.entries_per_item)
    return items, steps if space.ring is None else steps % space.ring


def _needed_entries(space: Space, tokens: range, total: int) -> range:
    first = tokens.start // space.tokens_per_entry
    stop = tokens.stop // space.tokens_per_entry
    # a row of a ring may change until its window closes: it moves with the last position of its
    # window_step, or of the request
    step = space.window_step if space.wraps else 1
    if tokens.stop != total:
        stop = stop // step * step
    return range(max(space.alive_in_request(total).start, first // step * step), stop)


def _needed_items(space: Space, tokens: range, total: int) -> range:
    alive, size = space.alive_items(total), space.tokens_per_item
    # an item moves with its last position; the last item ends with the request
    stop = alive.stop if tokens.stop == total else min(alive.stop, tokens.stop // size)
    start = max(alive.start, tokens.start // size)
    return range(start, stop) if tokens and start < stop else range(0)


def _entries_of(space: Space, items: range, total: int) -> range:
    alive, size = space.alive(total), space.entries_per_item
    return range(max(alive.start, items.start * size), min(alive.stop, items.stop * size))


PAGED = SpaceKind(
    per_request=False,
    has_entries=True,
    check=_check,
    wraps=lambda space: space.ring is not None,
    words=_words,
    alive=alive_in_window,
    alive_items=_alive_items,
    place=_place,
    needed_entries=_needed_entries,
    needed_items=_needed_items,
    entries_of=_entries_of,
)
"""Entry e is in item `ids[e // entries_per_item]`: in pages of 4, entry 13 is at step 1 of item 3.
A page with a `ring` of 2 has room for its last two entries: there, entry 13 is at step 1 of 2.
"""
