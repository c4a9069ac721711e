"""The block tables of all id lists, and how far the request in each row is.

Row n of every table is one request: changing a batch of any size is a few array operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kvpool.allocation.block_table import BlockTable, Change
from kvpool.allocation.free_list import free_lists
from kvpool.allocation.request import Pins
from kvpool.layout import PoolLayout, Space
from kvpool.layout.grid import Ints
from kvpool.layout.kinds import alive_start
from kvpool.layout.request_address import MAX_TOKENS

SETTLED = -1
"""In place of a request's least tokens, if its number of tokens is known."""
CopyItems = Callable[[str, Ints, Ints], None]
"""Copies items of an id list, from ids to ids."""


class Tables:
    """The block tables of a layout by id list, their free lists, pins, and by row

    - `tokens`: the tokens of each request;
    - `received`: those after its last receipt: entries that were dead then were never received;
    - `least`: of requests that receive at most so many tokens, the fewest that they can have then;
    - `lost[ring]`: entries before it were overwritten by tokens that a truncation took back.
    """

    def __init__(self, layout: PoolLayout) -> None:
        for space in layout.spaces:
            if space.items_per_block > 1:
                raise ValueError(
                    f"space {space.name}: a block of block pool {space.block_pool} is "
                    f"{space.items_per_block} items, but an allocator hands out single ones. Give "
                    "block tables of your own, or declare the space with items_per_block 1."
                )
        used = {layout.space_by_name[buffer.space].name for buffer in layout.buffers}
        self.spaces = tuple(space for space in layout.spaces if space.name in used)
        named = {space.id_list: layout.space_by_name[space.id_list] for space in self.spaces}
        of_list = free_lists(layout, named)
        self.free_lists = tuple(dict.fromkeys(of_list.values()))
        self.lists = {
            name: BlockTable(space, self.spaces, of_list[name]) for name, space in named.items()
        }
        self.pins = Pins(self.lists)
        self.tokens: Ints = np.zeros(0, dtype=np.int64)
        self.received: Ints = np.zeros(0, dtype=np.int64)
        self.least: Ints = np.zeros(0, dtype=np.int64)
        self.rings = [space for space in self.spaces if space.wraps]
        self.lost: dict[str, Ints] = {r.name: np.zeros(0, dtype=np.int64) for r in self.rings}
        self.free_rows: list[int] = []

    @property
    def num_live(self) -> int:
        """Requests that were not freed, dropped ones too: their items are still held."""
        return self.tokens.size - len(self.free_rows)

    def add_row(self) -> int:
        """A row for a new request."""
        if not self.free_rows:
            rows = self.tokens.size
            more = max(16, rows)
            self.tokens = np.pad(self.tokens, (0, more))
            self.received = np.pad(self.received, (0, more))
            self.least = np.pad(self.least, (0, more), constant_values=SETTLED)
            self.lost = {name: np.pad(lost, (0, more)) for name, lost in self.lost.items()}
            self.free_rows.extend(range(rows + more - 1, rows - 1, -1))
            for table in self.lists.values():
                table.add_rows(more)
        return self.free_rows.pop()

    def remove(self, rows: Ints) -> None:
        """Gives back the items of requests, and their rows."""
        for table in self.lists.values():
            table.release(rows)
        self.tokens[rows] = self.received[rows] = 0
        self.least[rows] = SETTLED
        for lost in self.lost.values():
            lost[rows] = 0
        self.free_rows.extend(rows.tolist())

    def check_settled(self, rows: Ints) -> None:
        """Raises ValueError if of one of the rows it is not known how many tokens came."""
        unsettled = np.flatnonzero(self.least[rows] != SETTLED)
        if unsettled.size:
            row = rows[unsettled[0]]
            raise ValueError(
                f"this request receives from {self.least[row]} to {self.tokens[row]} tokens, and "
                "how many came was not said. Call truncate with that number first, such as "
                "decode.num_tokens(room)."
            )

    def extend(self, rows: Ints, more: Ints, *, received: bool, at_most: bool) -> None:
        """See Allocator.extend: `more` `[B]` tokens of requests `[B]`."""
        before = self.tokens[rows]
        after = before + more
        # computed tokens read what is alive before them, received ones what is alive at the end,
        # which may be anywhere from `before` on if at most so many come
        reach = after if received and not at_most else before
        changes = {name: table.extension(rows, reach, after) for name, table in self.lists.items()}
        self._check_free(changes)
        self.pins.check_extend(rows, after, changes)
        self._apply(changes)
        self.tokens[rows] = after
        if received or at_most:
            self.received[rows] = after
        if at_most:
            self.least[rows] = before

    def truncate(self, rows: Ints, after: Ints, copy: CopyItems) -> None:
        """See Allocator.truncate: requests `[B]` of more than `after` tokens, or unsettled ones."""
        unsettled = self.least[rows] != SETTLED
        # of requests that receive at most so many tokens, nothing after those that came was written
        written = np.where(unsettled, after, self.tokens[rows])
        received = np.where(unsettled, after, self.received[rows])
        for space in self.spaces:
            if not space.wraps:
                freed = self.lists[space.id_list].held_from[rows] * space.entries_per_item
                _need_kept(space, written, after, received, freed)
        lost = self._lost_at(rows, written, after, received)
        changes = {name: table.truncation(rows, after) for name, table in self.lists.items()}
        copied = [row for change in changes.values() for row in change.copied[0].tolist()]
        self.pins.check_truncate(rows, after, copied)
        self._check_free(changes)
        copies = self._apply(changes)
        for name, (src, dst) in copies.items():
            copy(name, src, dst)
        for name, (src, _) in copies.items():  # after the copies: no request takes them before
            self.lists[name].free_list.release(src)
        self.tokens[rows], self.least[rows] = after, SETTLED
        self.received[rows] = np.minimum(received, after)
        for name, entries in lost.items():
            self.lost[name][rows] = entries

    def fork(self, row: int, tokens: int) -> tuple[int, dict[str, tuple[Ints, Ints]]]:
        """See Allocator.fork; returns the fork's row, and the ids to copy from and to."""
        rows, end = np.array([row]), np.array([tokens], dtype=np.int64)
        copied = {name: self._copied(table, row, tokens) for name, table in self.lists.items()}
        lost = self._lost_at(rows, self.tokens[rows], end, self.received[rows])
        for free_list in self.free_lists:
            free_list.check(copied, dict.fromkeys(copied, rows[:0]))
        child = self.add_row()
        self.tokens[child], self.received[child] = tokens, min(int(self.received[row]), tokens)
        for name, entries in lost.items():
            self.lost[name][child] = entries[0]
        return child, {n: t.fork(row, child, end, copied[n]) for n, t in self.lists.items()}

    def locate(self, rows: Ints, before: Ints, width: int) -> dict[str, Ints]:
        """Flat locations `[B, width]` by space from `before` `[B]` on; -1 where there is none. In
        pages of 16 with ids 7, 3 and 11, position 45 is at 11 * 16 + 13 = 189.
        """
        after = self.tokens[rows, None]
        positions = before[:, None] + np.arange(width, dtype=np.int64)
        own = positions < after
        positions = np.where(own, positions, 0)
        locations = {}
        for space in self.spaces:
            entries = positions // space.tokens_per_entry
            numbers, steps = space.place(entries)
            items = self.lists[space.id_list].ids[rows[:, None], numbers]
            present = own & (items >= 0)
            if space.wraps:
                lost = self.lost[space.name][rows, None]
                present &= entries >= _first_kept(space, entries, after, lost)
            locations[space.name] = np.where(present, items * space.steps + steps, -1)
        return locations

    def _check_free(self, changes: Mapping[str, Change]) -> None:
        """Raises OutOfPages if too few items are free for changes by id list."""
        needed = {name: change.needed for name, change in changes.items()}
        gone = {name: table.ids[changes[name].gone] for name, table in self.lists.items()}
        for free_list in self.free_lists:
            free_list.check(needed, gone)

    def _apply(self, changes: Mapping[str, Change]) -> dict[str, tuple[Ints, Ints]]:
        """Applies changes by id list; returns the ids to copy from and to."""
        for name, table in self.lists.items():  # first, as one list may take what another frees
            table.free_cells(changes[name].gone)
        return {name: table.apply_change(changes[name]) for name, table in self.lists.items()}

    def _copied(self, table: BlockTable, row: int, tokens: int) -> int:
        """Items that a fork copies, the last or none; ValueError if what is alive of it is gone."""
        space, before = table.space, int(self.tokens[row])
        if space.per_request:
            if tokens not in (0, before):
                raise ValueError(
                    f"space {space.name}: holds the state after {before} tokens, not after "
                    f"{tokens}. Fork at {before} tokens."
                )
            return min(tokens, 1)
        start, came = space.alive(tokens).start, space.alive(int(self.received[row])).start
        if tokens and start < came:
            raise ValueError(
                f"space {space.name}: entries {start} to {came - 1} of that prefix were dead when "
                "it was received, and were not transferred."
            )
        first, freed = start // space.entries_per_item, int(table.held_from[row])
        if first < min(freed, -(-tokens // space.tokens_per_item)):
            raise ValueError(
                f"space {space.name}: items {first} to {freed - 1} of that prefix have left the "
                "window and were freed."
            )
        return int(tokens % space.tokens_per_item > 0)

    def _lost_at(self, rows: Ints, before: Ints, after: Ints, received: Ints) -> dict[str, Ints]:
        """First entries that rings have once requests of `before` `[B]` tokens have `after` `[B]`
        again, by space. Raises ValueError if state after those tokens is gone.
        """
        lost = {}
        for space in self.rings:
            stop = space.written(after)
            last = np.maximum(stop - 1, 0)
            size = space.entries_per_item if space.ring else MAX_TOKENS
            kept = _first_kept(space, last, before, self.lost[space.name][rows])
            # before it the last item has none; 0 if it has all
            gone = np.minimum(kept, stop)
            gone = np.where(gone > last // size * size, gone, 0)
            _need_kept(space, before, after, received, gone)
            lost[space.name] = gone
        return lost


def _first_kept(space: Space, entries: Ints, tokens: Ints, lost: Ints) -> Ints:
    """The first entry that the items of `entries` still have, of requests of `tokens` tokens that
    lack those before `lost`; of rings, whose later entries overwrite earlier ones.
    """
    size = space.entries_per_item if space.ring else MAX_TOKENS
    stop = (entries // size + 1) * size
    written = np.minimum(space.written(tokens), stop)
    first: Ints = np.maximum(written - space.steps, np.where(lost <= stop, lost, 0))
    return first


def _need_kept(space: Space, before: Ints, after: Ints, received: Ints, gone: Ints) -> None:
    """Raises ValueError unless requests of `before` `[B]` tokens, whose entries before `gone`
    `[B]` were freed or overwritten, have all that is alive of `after` `[B]`; after `received` `[B]`
    tokens were received, entries that were dead then never came.
    """
    if not space.has_entries:
        if (rows := np.flatnonzero((after > 0) & (after < before))).size:
            row = rows[0]
            raise ValueError(
                f"space {space.name}: a slot holds the state after {before[row]} tokens, and there "
                f"is no checkpoint of that after {after[row]}. Fork the request before it takes "
                "tokens that may be rejected."
            )
        return
    start, stop = alive_start(space, after), space.written(after)
    alive = start < stop
    why = "left the window and were freed. Truncate before the next tokens are extended"
    if space.wraps:
        why = (
            f"were overwritten in the ring of {space.steps}. Build the pool with longer "
            "rings, as for speculation"
        )
    never = "were dead when the request was received, and did not come. Keep what was received"
    for end, reason in ((gone, why), (alive_start(space, received), never)):
        rows = np.flatnonzero(alive & (start < end))
        if rows.size:
            row = rows[0]
            raise ValueError(
                f"space {space.name}: of the entries that are alive at {after[row]} tokens, "
                f"{start[row]} to {min(end[row], stop[row]) - 1} {reason}."
            )
