"""Which items and entries of both sides hold the same positions of a request.

Positions pair the two sides. A walk over them is the same for all layers of a pair of spaces: it is
made and coalesced once and then broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.grid import Ints, ragged


class IncompleteTransfer(ValueError):
    """A source does not hold positions that the destination needs."""


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """Entries of a request that lie in one item on both sides: items, steps in them and counts,
    `[F]` each.
    """

    src_item: Ints
    src_step: Ints
    dst_item: Ints
    dst_step: Ints
    count: Ints

    def part(self, which: slice | npt.NDArray[np.bool_]) -> Walk:
        """Those of a slice or mask."""
        return Walk(*(column[which] for column in self.columns()))

    def columns(self) -> tuple[Ints, ...]:
        """src_item, src_step, dst_item, dst_step, count."""
        return self.src_item, self.src_step, self.dst_item, self.dst_step, self.count

    def coalesced(self, src_entries: int, dst_entries: int) -> Walk:
        """The same entries in fewer parts where one goes on in the next item on both sides."""
        src = self.src_item * src_entries + self.src_step
        dst = self.dst_item * dst_entries + self.dst_step
        breaks = (src[1:] != src[:-1] + self.count[:-1]) | (dst[1:] != dst[:-1] + self.count[:-1])
        if breaks.all():
            return self
        first = np.flatnonzero(np.append(True, breaks))
        count = np.add.reduceat(self.count, first)
        return Walk(
            self.src_item[first],
            self.src_step[first],
            self.dst_item[first],
            self.dst_step[first],
            count,
        )

    def entries(self) -> Walk:
        """One part an entry."""
        part, within = ragged(self.count)
        src_item, src_step, dst_item, dst_step = (c[part] for c in self.columns()[:4])
        return Walk(src_item, src_step + within, dst_item, dst_step + within, np.ones_like(within))


def scattered(src_space: Space, dst_space: Space, tokens: int) -> Walk:
    """The walk of a request of `tokens` tokens of which no two items are neighbours."""
    needed = needed_entries(dst_space, range(tokens), tokens)
    sizes = src_space.entries_per_item, dst_space.entries_per_item
    starts, count = _parts(needed, *sizes)
    (src, src_step), (dst, dst_step) = (np.divmod(starts, size) for size in sizes)
    return Walk(2 * src, src_step, 2 * dst, dst_step, count)


class End:
    """One side of a walk: a space, the items that its buffers have, and the request's span."""

    def __init__(self, space: Space, layout: PoolLayout, address: RequestAddress) -> None:
        self.space, self.address = space, address
        self.items = layout.items_by_space[space.name]
        self.span: Span | None = address.spans.get(space.id_list)

    def item(self, index: Ints, who: str) -> Ints:
        """Ids of the request's items `index`; ids outside the buffer raise."""
        span = self.span
        if span is None:
            raise ValueError(f"{who}: no ids for space {self.space.id_list!r}.")
        at = index - span.first_item if self.space.kind == "paged" else np.zeros_like(index)
        if at[0] < 0 or at[-1] >= span.ids.size:
            size = self.space.tokens_per_item
            held = range(span.first_item * size, (span.first_item + span.ids.size) * size)
            wanted = f"{int(index[0]) * size} to {(int(index[-1]) + 1) * size - 1}"
            raise IncompleteTransfer(
                f"{who}: space {self.space.name} needs the items of positions {wanted}, "
                f"its ids cover {held.start} to {held.stop - 1}."
            )
        if at[-1] - at[0] + 1 == at.size:
            ids = span.ids[int(at[0]) : int(at[-1]) + 1]
        else:
            ids = span.ids[at]
        low, high = int(ids.min()), int(ids.max())
        if low < self.space.reserved or high >= self.items:
            wrong = low if low < self.space.reserved else high
            raise ValueError(
                f"{who}: item {wrong} of space {self.space.name} lies outside "
                f"{self.space.reserved} to {self.items - 1}."
            )
        return ids


def walk(src: End, dst: End, tokens: range) -> Walk:
    """Pairs the entries of `tokens` that the destination keeps alive."""
    needed = needed_entries(dst.space, tokens, dst.address.num_tokens)
    _check_offered(src, needed, tokens, dst.address.num_tokens)
    if not needed:
        none = np.empty(0, dtype=np.int64)
        return Walk(none, none, none, none, none)
    sizes = src.space.entries_per_item, dst.space.entries_per_item
    starts, count = _parts(needed, *sizes)
    src_index, src_step = np.divmod(starts, sizes[0])
    same = sizes[0] == sizes[1]
    dst_index, dst_step = (src_index, src_step) if same else np.divmod(starts, sizes[1])
    return Walk(
        src.item(src_index, "source"), src_step, dst.item(dst_index, "destination"), dst_step, count
    )


def needed_entries(space: Space, tokens: range, total: int) -> range:
    """Entries of `tokens` that are alive once a request has `total` tokens."""
    alive = space.alive(total)
    if space.per_request:  # may change until the last position is there
        return alive if tokens.stop == total else range(0)
    per = space.tokens_per_entry
    return range(max(alive.start, tokens.start // per), tokens.stop // per)


def _check_offered(src: End, needed: range, tokens: range, total: int) -> None:
    space, held = src.space, src.address.num_tokens
    if not needed:
        return
    if held < tokens.stop:
        raise IncompleteTransfer(
            f"source: space {space.name} holds positions up to {held - 1}, needed are those up to "
            f"{tokens.stop - 1}. Bind the positions that are computed, or wait for the rest."
        )
    if space.kind == "slot" and held != total:
        raise IncompleteTransfer(
            f"source: the state in space {space.name} is that of {held} tokens, needed is that of "
            f"{total}."
        )
    if space.window is not None:
        alive = space.alive(held)
        if needed.start < alive.start:
            raise IncompleteTransfer(
                f"source: space {space.name} keeps entries from {alive.start} alive, needed are "
                f"{needed.start} to {needed.stop - 1}. Give decode a window of at most "
                f"{space.window} entries."
            )


def _parts(entries: range, one: int, other: int) -> tuple[Ints, Ints]:
    """Starts and counts of the parts into which items of `one` and `other` entries cut a range."""

    def cuts(size: int) -> Ints:
        found = np.arange(entries.start // size * size, entries.stop, size, dtype=np.int64)
        found[:1] = entries.start
        return found

    nested = one % other == 0 or other % one == 0
    starts = cuts(min(one, other)) if nested else np.union1d(cuts(one), cuts(other))
    count = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=count[:-1])
    count[-1:] = entries.stop - starts[-1:]
    return starts, count
