"""Kinds of spaces: how positions of a request lie in items. A kind is a class here and its name in
`KINDS`; other code asks for its traits and calls its functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvpool.layout.grid import Numbers
from kvpool.layout.types import LayoutError, need_int

if TYPE_CHECKING:
    from kvpool.layout.spaces import Space

KindName = Literal["paged", "slot", "ring"]
RING_OF_PAGES = (
    "of the entries of a page, which one rank holds all of: leave it out of slots, rings and "
    "interleaved spaces."
)


PARTIAL_PAGES = "of entries that a token is written to after the other: of pages without a ring."


class SpaceKind:
    """A kind with one item per request. The item moves whole, with the last position: it changes
    until that is written. Entries are numbered in the request, but for `entries_of` on this rank.
    What `Space` has too is documented there.
    """

    per_request = True
    has_entries = True
    wraps = False
    plural = "items"
    """What users call its items."""

    def check(self, space: Space) -> None:
        """Raises LayoutError for fields that a space of this kind cannot have."""
        if space.interleave is not None:
            raise LayoutError(
                f"space {space.name} interleave: a {space.kind} is one request's whole state, of "
                "which a rank cannot hold some positions. Only paged spaces are interleaved."
            )
        if space.ring is not None:
            raise LayoutError(f"space {space.name} ring: {RING_OF_PAGES}")
        if space.partial:
            raise LayoutError(f"space {space.name} partial: {PARTIAL_PAGES}")

    def words(self, space: Space) -> str:
        """What its items are, for tables: `pages of 64 entries`."""
        return "one item a request"

    def alive(self, space: Space, tokens: int) -> range:
        """Live entries of a request of so many tokens; here, where entries follow positions."""
        return range(alive_start(space, tokens), space.written(tokens))

    def alive_items(self, space: Space, tokens: int) -> range:
        return range(min(len(self.alive(space, tokens)), 1))

    def needed_entries(self, space: Space, tokens: range, total: int) -> range:
        return self.alive(space, total) if tokens.stop == total else range(0)

    def needed_items(self, space: Space, tokens: range, total: int) -> range:
        return self.alive_items(space, total) if tokens.stop == total else range(0)

    def entries_of(self, space: Space, items: range, total: int) -> range:
        """Live entries that lie in these items, of a request of so many tokens."""
        return self.alive(space, total) if items else range(0)


class SlotKind(SpaceKind):
    """One state a request, as of linear attention: that after its last token, one entry."""

    has_entries = False
    plural = "slots"

    def check(self, space: Space) -> None:
        numbers = space.entries_per_item, space.tokens_per_entry, space.window_step
        if numbers != (1, 1, 1) or space.window is not None:
            raise LayoutError(
                f"space {space.name}: a slot has no entries: entries_per_item, tokens_per_entry "
                "and window_step are 1, window None."
            )
        super().check(space)

    def alive(self, space: Space, tokens: int) -> range:
        return range(min(tokens, 1))


class RingKind(SpaceKind):
    """One item a request, whose entries are overwritten by later ones: entry e is at step
    `e % entries_per_item`. The window's entries are alive. In a ring of 8, entry 13 is at step 5.
    """

    wraps = True
    plural = "rings"

    def check(self, space: Space) -> None:
        super().check(space)
        _check_window_in_ring(space)

    def words(self, space: Space) -> str:
        return f"one ring of {_entries(space)} a request"


class PagedKind(SpaceKind):
    """Items that a request has one after the other: entry e is in item `ids[e //
    entries_per_item]`. In pages of 4, entry 13 is at step 1 of item 3. A page with a `ring` of 2
    has room for its last two entries: there, entry 13 is at step 1 of 2.
    """

    per_request = False
    plural = "pages"

    def check(self, space: Space) -> None:
        subject, size = f"space {space.name}", space.entries_per_item
        if space.interleave is not None and space.interleave.size % space.tokens_per_entry:
            raise LayoutError(
                f"{subject} interleave: stretches of {space.interleave.size} positions would cut "
                f"entries of {space.tokens_per_entry}: a multiple of {space.tokens_per_entry} is "
                "needed."
            )
        if space.ring is None:
            return
        need_int(space.ring, 1, f"{subject} ring")
        if space.partial:
            raise LayoutError(f"{subject} partial: {PARTIAL_PAGES}")
        if space.interleave is not None:
            raise LayoutError(f"{subject} ring: {RING_OF_PAGES}")
        if size % space.ring or size % space.window_step:
            raise LayoutError(
                f"{subject} ring: {space.ring} entries, in steps of {space.window_step}, do not "
                f"divide an item of {size}."
            )
        _check_window_in_ring(space)

    def words(self, space: Space) -> str:
        words = f"pages of {_entries(space)}"
        if space.ring is None:
            return words
        return f"{words}; an item has room for the last {space.ring:,}"

    def alive_items(self, space: Space, tokens: int) -> range:
        alive, size = space.alive(tokens), space.entries_per_item
        return range(alive.start // size, (alive.stop - 1) // size + 1) if alive else range(0)

    def needed_entries(self, space: Space, tokens: range, total: int) -> range:
        if space.whole:
            return super().needed_entries(space, tokens, total)
        first = tokens.start // space.tokens_per_entry
        ends = tokens.stop == total
        stop = space.written(total) if ends else tokens.stop // space.tokens_per_entry
        # a row of a ring may change until its window closes: it moves with the last position of its
        # window_step, or of the request
        step = space.window_step if space.wraps else 1
        if not ends:
            stop = stop // step * step
        return range(max(self.alive(space, total).start, first // step * step), stop)

    def needed_items(self, space: Space, tokens: range, total: int) -> range:
        alive, size = self.alive_items(space, total), space.tokens_per_item
        if space.whole:
            return super().needed_items(space, tokens, total)
        # an item moves with its last position; the last item ends with the request
        stop = alive.stop if tokens.stop == total else min(alive.stop, tokens.stop // size)
        start = max(alive.start, tokens.start // size)
        return range(start, stop) if tokens and start < stop else range(0)

    def entries_of(self, space: Space, items: range, total: int) -> range:
        alive, size = space.alive(total), space.entries_per_item
        return range(max(alive.start, items.start * size), min(alive.stop, items.stop * size))


KINDS: dict[str, SpaceKind] = {"paged": PagedKind(), "slot": SlotKind(), "ring": RingKind()}


def alive_start(space: Space, tokens: Numbers) -> Numbers:
    """The first live entry of a request of so many tokens, or of each of several requests."""
    if space.window is None:
        return 0 * tokens
    step, per = space.window_step, space.tokens_per_entry
    counted = tokens if space.partial else tokens // per
    first = counted // step * step - space.window
    return first * (first > 0) // (per if space.partial else 1)


def _entries(space: Space) -> str:
    return f"{space.entries_per_item:,} entr{'y' if space.entries_per_item == 1 else 'ies'}"


def _check_window_in_ring(space: Space) -> None:
    """Refuses a window whose live entries would be overwritten."""
    kept = None if space.window is None else space.window + space.window_step - 1
    if kept is None or kept > space.steps:
        raise LayoutError(
            f"space {space.name}: window: at most {space.steps - space.window_step + 1} in a ring "
            f"of {space.steps} entries and steps of {space.window_step}, got {space.window}."
        )
