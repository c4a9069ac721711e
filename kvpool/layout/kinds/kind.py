"""What differs between kinds of spaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.layout.types import need

if TYPE_CHECKING:
    from kvpool.layout.spaces import Space

Ints = npt.NDArray[np.int64]
RING_OF_PAGES = (
    "of the entries of a page, which one rank holds all of: leave it out of slots, rings and "
    "interleaved spaces."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceKind:
    """How positions of a request lie in the items of a space of this kind.

    Entries are numbered in the request, but for `place` and `entries_of` on this rank. `needed_*`
    take the positions of a chunk, and how many tokens the request has in all.
    """

    per_request: bool
    """A request has one item, which changes as the request grows."""
    has_entries: bool
    """An item has entries, which follow positions."""
    check: Callable[[Space], None]
    """Raises LayoutError for fields that a space of this kind cannot have."""
    wraps: Callable[[Space], bool]
    """Whether entries of an item are overwritten by later ones."""
    words: Callable[[Space], str]
    """What its items are, for tables: `pages of 64 entries`."""
    alive: Callable[[Space, int], range]
    """Live entries of a request of so many tokens."""
    alive_items: Callable[[Space, int], range]
    """Items with live entries on this rank, by number in the request."""
    place: Callable[[Space, Ints], tuple[Ints, Ints]]
    """For each entry the number of its item in the request, and its step there."""
    needed_entries: Callable[[Space, range, int], range]
    """Live entries that move with a chunk, whichever rank holds them."""
    needed_items: Callable[[Space, range, int], range]
    """Items with live entries that move whole with a chunk."""
    entries_of: Callable[[Space, range, int], range]
    """Live entries that lie in these items, of a request of so many tokens."""


def alive_in_window(space: Space, tokens: int) -> range:
    """Live entries where entries follow positions."""
    entries = tokens // space.tokens_per_entry
    if space.window is None:
        return range(entries)
    first = entries // space.window_step * space.window_step - space.window
    return range(max(0, first), entries)


def check_window_in_ring(space: Space) -> None:
    """Refuses a window whose live entries would be overwritten."""
    kept = None if space.window is None else space.window + space.window_step - 1
    need(
        kept is not None and kept <= space.steps,
        f"space {space.name}",
        f"window: at most {space.steps - space.window_step + 1} in a ring of {space.steps} entries "
        f"and steps of {space.window_step}, got {space.window}.",
    )


def check_whole(space: Space) -> None:
    """Refuses what only pages can have, for kinds of one item a request."""
    need(
        space.interleave is None,
        f"space {space.name} interleave",
        f"a {space.kind} is one request's whole state, of which a rank cannot hold some positions. "
        "Only paged spaces are interleaved.",
    )
    need(space.ring is None, f"space {space.name} ring", RING_OF_PAGES)


def one_item_kind(
    *,
    has_entries: bool,
    check: Callable[[Space], None],
    wraps: bool,
    words: Callable[[Space], str],
    alive: Callable[[Space, int], range] = alive_in_window,
) -> SpaceKind:
    """A kind of which a request has one item. It moves whole, with the last position: it changes
    until that is written.
    """

    def alive_items(space: Space, tokens: int) -> range:
        return range(min(len(alive(space, tokens)), 1))

    return SpaceKind(
        per_request=True,
        has_entries=has_entries,
        check=check,
        wraps=lambda space: wraps,
        words=words,
        alive=alive,
        alive_items=alive_items,
        place=lambda space, entries: (np.zeros_like(entries), entries % space.steps),
        needed_entries=lambda space, tokens, total: (
            alive(space, total) if tokens.stop == total else range(0)
        ),
        needed_items=lambda space, tokens, total: (
            alive_items(space, total) if tokens.stop == total else range(0)
        ),
        entries_of=lambda space, items, total: alive(space, total) if items else range(0),
    )
