"""Rings: one item a request, whose entries are overwritten by later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.layout.kinds.kind import check_whole, check_window_in_ring, one_item_kind

if TYPE_CHECKING:
    from kvpool.layout.spaces import Space


def _check(space: Space) -> None:
    check_whole(space)
    check_window_in_ring(space)


def _words(space: Space) -> str:
    entries = "entry" if space.entries_per_item == 1 else "entries"
    return f"one ring of {space.entries_per_item:,} {entries} a request"


RING = one_item_kind(has_entries=True, check=_check, wraps=True, words=_words)
"""Entry e is at step `e % entries_per_item`: in a ring of 8, entry 13 is at step 5. The window's
entries are alive.
"""
