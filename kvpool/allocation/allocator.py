"""Allocates the items of every space to requests, and takes them back.

Requests are rows of one block table per id list: extending a batch is a few array operations,
whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex
from weakref import ref

import numpy as np
import numpy.typing as npt

from kvpool.allocation.block_table import BlockTable
from kvpool.allocation.free_list import FreeLists, OutOfPages
from kvpool.allocation.pins import Pins
from kvpool.allocation.prefix_cache import PrefixCache, PrefixStats
from kvpool.allocation.truncation import alive_start, first_kept, need_kept, overwritten
from kvpool.layout import Pin, PoolLayout, RequestAddress, Span
from kvpool.layout.grid import Ints
from kvpool.layout.request_address import MAX_TOKENS
from kvpool.prefix.chain import token_ids

if TYPE_CHECKING:
    from kvpool.pools.base import KVPool

__all__ = ["Allocator", "OutOfPages", "Request", "Usage"]


class Usage(NamedTuple):
    """Free and used items by id list, or of its block pool (a shared item counts once, reserved
    ones not), live requests, and the counts of the prefix cache, if there is one.
    """

    free: dict[str, int]
    used: dict[str, int]
    requests: int
    prefix: PrefixStats | None = None


FREED = -1
"""The row of a request that was freed."""
SETTLED = -1
"""In place of the least tokens of a request of which the number of tokens is known."""


class Request:
    """One request: a row of its allocator's block tables."""

    __slots__ = ("__weakref__", "_allocator", "_row")

    def __init__(self, allocator: Allocator, row: int) -> None:
        self._allocator, self._row = allocator, row

    @property
    def num_tokens(self) -> int:
        """Tokens for which items are allocated; 0 once freed."""
        return int(self._allocator._tokens[self._row]) if self._row != FREED else 0

    @property
    def received_tokens(self) -> int:
        """`num_tokens` after the last `extend(received=True)`; 0 without one, or once freed."""
        return int(self._allocator._received[self._row]) if self._row != FREED else 0

    def address(self) -> RequestAddress:
        """The request's current block table, which plans read; endpoints that are given it pin the
        request (kvpool.layout.pin). Raises ValueError once freed.
        """
        row = self._live_row()
        spans = {name: Span(*each.span(row)) for name, each in self._allocator.lists.items()}
        return RequestAddress(self.num_tokens, spans, self)

    def pin(self, pin: Pin) -> None:
        """See Holder.pin; endpoints call it."""
        if pin.side == "offered":
            self._allocator._check_settled(np.array([self._live_row()]))
        self._allocator._pins.add(self._live_row(), self.num_tokens, pin)

    def unpin(self, pin: Pin) -> None:
        """See Holder.unpin."""
        self._allocator._pins.remove(self._row, pin)

    def pins(self) -> list[Pin]:
        """The pins that are held: while there are any, the request cannot be freed."""
        return self._allocator._pins.held(self._row)

    def _live_row(self) -> int:
        if self._row == FREED:
            raise ValueError("this request was freed: its items may belong to other requests.")
        return self._row


class Allocator:
    """Allocates the items of one pool, or of a target and its drafts, which then share ids. Each id
    list has a free list, or the id lists of a block pool one in common.

    Pages are reference counted, so that requests can share a prefix. Pages that have left a window
    are freed when their request is extended. A slot or ring belongs to one request. `on_fork` are
    called with (request, fork, tokens) before a fork copies items; what they raise undoes it.

    A request that a room offers or receives is pinned: until the room has ended, `free` raises
    RequestPinned, `extend` and `truncate` do where they would change what the room reads or writes,
    and `fork` and `store` while it is received. Then nothing was changed.

    `prefix` keeps the pages of requests for others that begin with the same tokens.
    """

    def __init__(self, *pools: KVPool, prefix: PrefixCache | None = None) -> None:
        if not pools:
            raise ValueError("an allocator needs at least one pool.")
        for pool in pools:
            other = None if pool.allocator is None else pool.allocator()
            if other is not None and other._num_live:
                raise ValueError(
                    f"this pool already has an allocator, with {other._num_live} live requests. "
                    "Use that one, or free them."
                )
        self.pools = pools
        self.on_fork: list[Callable[[Request, Request, int], None]] = []
        first, *others = (pool.layout for pool in pools)
        self.layout = PoolLayout.merge(first, *others) if others else first
        for space in self.layout.spaces:
            if space.items_per_block > 1:
                raise ValueError(
                    f"space {space.name}: a block of block pool {space.block_pool} is "
                    f"{space.items_per_block} items, but an allocator hands out single ones. Give "
                    "block tables of your own, or declare the space with items_per_block 1."
                )
        used = {self.layout.space_by_name[buffer.space].name for buffer in self.layout.buffers}
        self.spaces = tuple(space for space in self.layout.spaces if space.name in used)
        named = {space.id_list: self.layout.space_by_name[space.id_list] for space in self.spaces}
        self._free_lists = FreeLists(self.layout, named)
        free = self._free_lists.by_id_list
        self.lists = {
            name: BlockTable(space, self.spaces, free[name]) for name, space in named.items()
        }
        self._tokens: Ints = np.zeros(0, dtype=np.int64)
        # tokens after the last receipt: entries that were dead then were never received
        self._received: Ints = np.zeros(0, dtype=np.int64)
        # of requests that receive at most so many tokens, the fewest that they can have then
        self._least: Ints = np.zeros(0, dtype=np.int64)
        # entries before it were overwritten by tokens that a truncation took back, by ring
        rings = [space.name for space in self.spaces if space.wraps]
        self._lost: dict[str, Ints] = {name: np.zeros(0, dtype=np.int64) for name in rings}
        self._rows: list[int] = []  # free rows
        self._pins = Pins(self.lists)
        self.prefix = prefix
        if prefix is not None:
            on_host = all(buffer.on_host for buffer in self.layout.buffers)
            medium = "CPU" if on_host else "GPU"
            prefix.bind(self.lists, self._copy_items, medium)
        for pool in pools:
            pool.allocator = ref(self)

    @property
    def free_pages(self) -> int:
        """Free pages of tokens, in the id list that has the fewest; a page of a block pool is a
        block for each list that grows with the tokens of a request. Raises ValueError where none
        does.
        """
        if (pages := self._free_lists.pages) is None:
            raise ValueError(f"this pool has no pages of tokens: use free_items({[*self.lists]}).")
        return pages

    def free_items(self, id_list: str) -> int:
        """Free items of an id list, or of its block pool."""
        return self.lists[id_list].free_list.num_free

    def usage(self) -> Usage:
        """Free and used items, and requests, now. Any thread may ask, as exporters do
        (`disagg.exporter.export(..., allocators={"kv": allocator})`).
        """
        lists = {name: each.free_list for name, each in self.lists.items()}
        free = {name: each.num_free for name, each in lists.items()}
        used = {name: each.usable - free[name] for name, each in lists.items()}
        stats = None if self.prefix is None else self.prefix.stats
        return Usage(free, used, self._num_live, stats)

    def new_request(self, tokens: npt.ArrayLike = (), *, salt: str = "") -> Request:
        """A request that begins with the longest prefix of `tokens`, int `[T]`, whose state is
        there; `num_tokens` says how many: none without a prefix cache. To allocate items for a
        number of tokens, `extend` it.

        Where the last token is to be computed, give all but that. Requests of different `salt`
        share nothing: what else the state depends on (an adapter, a tenant) belongs in it. In place
        of an image, tokens are numbers made of its hash. Raises ValueError for tokens outside 0 to
        2**31 - 1, OutOfPages where a pinned checkpoint cannot be copied.
        """
        if self.prefix is None:
            token_ids(tokens)  # the same mistakes are refused with a cache and without
        request = self._new_row()
        if self.prefix is not None:
            try:
                found = self.prefix.begin(request._row, tokens, salt)
            except BaseException:
                self.free(request)
                raise
            self._tokens[request._row] = found
            for name, lost in self._lost.items():  # of a checkpoint, what is alive is there
                space = self.layout.space_by_name[name]
                lost[request._row] = alive_start(space, np.array([found]))[0]
        return request

    def store(self, request: Request, tokens: npt.ArrayLike) -> None:
        """Says that the state of the request's next tokens is written (in all pools), those after
        what was stored or reused, and which tokens, int `[T]`, they are. Full pages of them can be
        reused from now on, also when the request has ended. Without a prefix cache, does nothing.

        Pages are kept that the request still has: store before `extend` frees those of a window.
        Slots and rings are kept if `tokens` are the request's last, at a multiple of
        `checkpoint_tokens`. Raises ValueError for more tokens than the request has, RequestPinned
        while a room receives it.
        """
        rows = self._rows_of([request])
        (row,) = rows.tolist()
        self._pins.check_written(row, "others would reuse")
        self._check_settled(rows)
        if self.prefix is not None:
            held, received = int(self._tokens[row]), int(self._received[row])
            self.prefix.store(row, tokens, held, received)

    def _new_row(self) -> Request:
        if not self._rows:
            rows = self._tokens.size
            more = max(16, rows)
            self._tokens = np.append(self._tokens, np.zeros(more, dtype=np.int64))
            self._received = np.append(self._received, np.zeros(more, dtype=np.int64))
            self._least = np.append(self._least, np.full(more, SETTLED, dtype=np.int64))
            for name, lost in self._lost.items():
                self._lost[name] = np.append(lost, np.zeros(more, dtype=np.int64))
            self._rows.extend(range(rows + more - 1, rows - 1, -1))
            for each in self.lists.values():
                each.add_rows(more)
        return Request(self, self._rows.pop())

    def extend(
        self, request: Request, tokens: int, *, received: bool = False, at_most: bool = False
    ) -> dict[str, Ints]:
        """Allocates `tokens` more tokens; returns their flat locations by space.

        Locations are int64 `[tokens]`: the token's entry (a compressed entry has several tokens) or
        its slot; -1 where a later token of the same call overwrites it in a ring. Pages that have
        left a window are freed first. `received`: the tokens are computed elsewhere, so entries
        that are dead at the end get no page, and -1.

        `at_most`: they are received, and how many of them come is not known yet
        (`DecodeEndpoint.receive(..., at_most=True)`). Every page is allocated that is alive at any
        number of them, so a window takes pages for all `tokens`. Once the number is known,
        `truncate(request, number)` gives back what is beyond it, and has to be called, also if all
        came: until then the request is not extended, forked, stored, offered or saved.

        If too few items are free, raises OutOfPages; RequestPinned if a room needs a state that the
        tokens would overwrite, or a page of a window that they would free. Both change nothing.
        """
        found = self.extend_batch([request], _whole(tokens), received=received, at_most=at_most)
        return {space: rows[0] for space, rows in found.items()}

    def extend_batch(
        self,
        requests: Sequence[Request],
        tokens: npt.ArrayLike,
        *,
        received: bool = False,
        at_most: bool = False,
    ) -> dict[str, Ints]:
        """`extend` for a batch, all requests or none: `tokens` is one number, or one of each
        request `[B]`. Returns int64 `[B, most tokens]` by space, -1 after the tokens of a request.
        """
        rows = self._rows_of(requests)
        self._check_settled(rows)
        more = _of_each(rows, tokens)
        before = self._tokens[rows]
        if more.min(initial=0) < 0:
            raise ValueError(f"tokens: 0 or more, got {more.min()}. See truncate.")
        if (more > MAX_TOKENS - before).any():
            raise ValueError(
                f"tokens: {tokens!r} more exceed {MAX_TOKENS}, the limit of a request."
            )
        after = before + more
        # computed tokens read what is alive before them, received ones what is alive at the end,
        # which may be anywhere from `before` on if at most so many come
        reach = after if received and not at_most else before
        changes = {name: each.prepare(rows, reach, after) for name, each in self.lists.items()}
        needed = {name: change.needed for name, change in changes.items()}
        gone = {name: each.ids(changes[name].gone) for name, each in self.lists.items()}
        self._free_lists.check(needed, gone)
        self._pins.check_extend(rows, after, changes)
        width = int(more.max(initial=0)) if rows.size else int(np.max(tokens, initial=0))
        positions = before[:, None] + np.arange(width, dtype=np.int64)
        for name, each in self.lists.items():  # first, as one list may take what another frees
            each.give_back(changes[name])
        for name, each in self.lists.items():
            each.fill(changes[name])
        self._tokens[rows] = after
        if received or at_most:
            self._received[rows] = after
        if at_most:
            self._least[rows] = before
        if (more == width).all():
            return self._locate(rows, positions, after)
        there = positions < after[:, None]
        found = self._locate(rows, np.where(there, positions, 0), after)
        return {name: np.where(there, located, -1) for name, located in found.items()}

    def truncate(self, request: Request, tokens: int) -> None:
        """Takes back all but the first `tokens` tokens, such as drafts that were rejected, or what
        did not come of `extend(..., at_most=True)`; their items are freed, and the next `extend`
        goes on after them. A last page that other requests hold too is copied.

        `before = request.num_tokens; allocator.extend(request, 4)`, of which two are accepted:
        `allocator.truncate(request, before + 2)`.

        Raises ValueError if the state after `tokens` tokens is gone: a slot has that of the last
        token only, a ring's entries were overwritten, a window's pages were freed or dead when
        received. What a single `extend` has computed since can be taken back of pages and windows
        always, of a ring as far as it is longer than its window (`DSv4Pool(speculation=True)`), of
        a slot never: fork the request before. Raises OutOfPages if no page is free for a copy, and
        RequestPinned if a room offers or receives one of the tokens. All change nothing.
        """
        self.truncate_batch([request], tokens)

    def truncate_batch(self, requests: Sequence[Request], tokens: npt.ArrayLike) -> None:
        """`truncate` for a batch, all requests or none: `tokens` is one number, or one of each
        request `[B]`.
        """
        rows = self._rows_of(requests)
        before, after, least = self._tokens[rows], _of_each(rows, tokens), self._least[rows]
        wrong = np.flatnonzero((after < np.maximum(least, 0)) | (after > before))
        if wrong.size:
            low, held, asked = (int(each[wrong[0]]) for each in (least, before, after))
            raise ValueError(f"tokens: {max(low, 0)} to {held}, which it has, got {asked}.")
        unsettled = least != SETTLED
        for row in rows[unsettled].tolist():
            self._pins.check_written(row, "truncate would count")
        fewer = (after < before) | unsettled
        rows, before, after = rows[fewer], before[fewer], after[fewer]
        if rows.size:
            self._truncate(rows, before, after)

    def _truncate(self, rows: Ints, before: Ints, after: Ints) -> None:
        unsettled = self._least[rows] != SETTLED
        # of requests that receive at most so many tokens, nothing after those that came was written
        written = np.where(unsettled, after, before)
        received = np.where(unsettled, after, self._received[rows])
        lost = self._lost_at(rows, written, after, received)
        cuts = {name: each.prepare_cut(rows, after) for name, each in self.lists.items()}
        copied = [row for cut in cuts.values() for row in cut.copied[0].tolist()]
        self._pins.check_truncate(rows, after, copied)
        gone = {name: each.ids(cuts[name].gone) for name, each in self.lists.items()}
        self._free_lists.check({name: cut.copied[0].size for name, cut in cuts.items()}, gone)
        for name, each in self.lists.items():  # first, as one list may take what another frees
            each.give_back(cuts[name])
        copies = [(name, *each.cut(cuts[name])) for name, each in self.lists.items()]
        for name, source, dest in copies:
            self._copy_items(name, source, dest)
        for name, source, _ in copies:  # after the copies: nobody takes them before
            self.lists[name].free_list.release(source)
        if self.prefix is not None:
            for row, left in zip(rows.tolist(), after.tolist()):
                self.prefix.truncate(row, left)
        self._tokens[rows], self._least[rows] = after, SETTLED
        self._received[rows] = np.minimum(received, after)
        for name, entries in lost.items():
            self._lost[name][rows] = entries

    def _lost_at(self, rows: Ints, before: Ints, after: Ints, received: Ints) -> dict[str, Ints]:
        """First entries that rings have once requests of `before` `[B]` tokens have `after` `[B]`
        again, by space. Raises ValueError if state after those tokens is gone.
        """
        lost = {}
        for space in self.spaces:
            if space.wraps:
                gone = lost[space.name] = overwritten(
                    space, before, after, self._lost[space.name][rows]
                )
            else:
                gone = self.lists[space.id_list].freed(rows) * space.entries_per_item
            need_kept(space, before, after, received, gone)
        return lost

    def locations(self, request: Request) -> dict[str, Ints]:
        """Flat locations of all tokens of a request, int64 `[num_tokens]`, by space; -1 for tokens
        whose items were freed or overwritten.
        """
        rows = self._rows_of([request])
        after = self._tokens[rows]
        positions = np.arange(int(after[0]), dtype=np.int64)[None]
        return {name: found[0] for name, found in self._locate(rows, positions, after).items()}

    def fork(self, request: Request, tokens: int) -> Request:
        """A new request with the first `tokens` tokens of `request`: whole pages are shared; a
        partial last page, slots and rings are copied.

        Raises ValueError if the state at that prefix is gone (slots and rings hold only the last
        token's; window pages are freed, or were dead when received), OutOfPages, and RequestPinned
        while a room receives the request; all change nothing.
        """
        tokens = _whole(tokens)
        (row,) = self._rows_of([request])
        self._pins.check_written(request._row, "a fork would share and copy")
        self._check_settled(np.array([row]))
        held, received = int(self._tokens[row]), self._received[row : row + 1]
        if not 0 <= tokens <= held:
            raise ValueError(f"tokens: 0 to {held}, which the request has, got {tokens}.")
        end = np.array([tokens], dtype=np.int64)
        parts = {}
        for name, each in self.lists.items():
            if each.space.per_request and tokens not in (0, held):
                raise ValueError(
                    f"space {name}: holds the state after {held} tokens, not after {tokens}. Fork "
                    f"at {held} tokens."
                )
            first, stop = int(each.first(end)[0]), int(each.stop(end)[0])
            start, came = int(each.start(end)[0]), int(each.start(received)[0])
            if tokens and start < came:
                raise ValueError(
                    f"space {name}: entries {start} to {came - 1} of that prefix were dead when "
                    "it was received, and were not transferred."
                )
            copied = each.space.per_request or tokens % each.space.tokens_per_item > 0
            parts[name] = each.check_fork(int(row), first, max(stop - copied, first), stop)
        lost = {}
        for space in self.spaces:
            if space.wraps:
                was, before = self._lost[space.name][row : row + 1], self._tokens[row : row + 1]
                gone = lost[space.name] = overwritten(space, before, end, was)
                need_kept(space, before, end, received, gone)
        self._free_lists.check({name: part.src.size for name, part in parts.items()}, {})
        child = self._new_row()
        self._tokens[child._row] = tokens
        self._received[child._row] = min(int(received[0]), tokens)
        for name, entries in lost.items():
            self._lost[name][child._row] = entries[0]
        copies = [
            (name, *each.apply_fork(child._row, parts[name])) for name, each in self.lists.items()
        ]
        try:
            for hook in self.on_fork:
                hook(request, child, tokens)
            for name, src, dst in copies:
                self._copy_items(name, src, dst)
        except BaseException:
            self.free(child)
            raise
        if self.prefix is not None:
            self.prefix.fork(request._row, child._row, tokens)
        return child

    def free(self, request: Request) -> None:
        """Frees every item that only this request holds. Raises RequestPinned while a room offers
        or receives it.
        """
        rows = self._rows_of([request])
        self._pins.check_free(request._row)
        if self.prefix is None:
            self._release(rows)
        else:
            self.prefix.free(request._row, lambda: self._release(rows))
        self._tokens[rows] = self._received[rows] = 0
        self._least[rows] = SETTLED
        for lost in self._lost.values():
            lost[rows] = 0
        self._rows.append(request._row)
        request._row = FREED

    def check_unshared(self, id_list: str, ids: Ints) -> None:
        """Raises ValueError if several requests, or the prefix cache, need one of these items: then
        nothing may write to it. Of a list that is not this allocator's, nothing is known.
        """
        table = self.lists.get(id_list)
        if table is None:
            return
        shared = ids[table.free_list.is_wanted(ids)]
        if shared.size:
            raise ValueError(
                f"a copy would write to {table.sharers(shared)}. Copy to items of one request that "
                "shares nothing, or fork it."
            )

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every item is free or has as many holders as its reference
        count, every request holds the items of its tokens, and the prefix cache lists what it has.
        """
        live = np.setdiff1d(np.arange(self._tokens.size), self._rows)
        tokens = self._tokens[live]
        held = {name: each.check_integrity(live, tokens) for name, each in self.lists.items()}
        if self.prefix is not None:
            for name, ids in held.items():
                held[name] = np.concatenate([ids, self.prefix.pinned_items(name)])
        self._free_lists.check_integrity(held)

    def _release(self, rows: Ints) -> None:
        """Gives back the items of requests."""
        for each in self.lists.values():
            each.release(rows)

    def _copy_items(self, id_list: str, src: Ints, dst: Ints) -> None:
        """Copies items in every pool that has the id list."""
        for pool in self.pools if src.size else ():
            if any(space.id_list == id_list for space in pool.layout.spaces):
                pool.copy_items(id_list, src, dst)

    def _locate(self, rows: Ints, positions: Ints, after: Ints) -> dict[str, Ints]:
        found = {}
        for space in self.spaces:
            table, size = self.lists[space.id_list], space.entries_per_item
            entries = positions // space.tokens_per_entry
            numbers = np.zeros_like(positions) if space.per_request else entries // size
            items = table.find(rows, numbers)
            there = items >= 0
            if space.wraps:
                lost = self._lost[space.name][rows]
                there &= entries >= first_kept(space, entries, after[:, None], lost[:, None])
            found[space.name] = np.where(there, items * space.steps + entries % space.steps, -1)
        return found

    def _check_settled(self, rows: Ints) -> None:
        """Raises ValueError if of one of the rows it is not known how many tokens came."""
        unsettled = np.flatnonzero(self._least[rows] != SETTLED)
        if unsettled.size:
            row = rows[unsettled[0]]
            raise ValueError(
                f"this request receives from {self._least[row]} to {self._tokens[row]} tokens, and "
                "how many came was not said. Call truncate with that number first, such as "
                "decode.num_tokens(room)."
            )

    def _rows_of(self, requests: Sequence[Request]) -> Ints:
        known = [r._row if r._allocator is self else FREED for r in requests]
        if FREED in known:
            raise ValueError("this request was freed, or belongs to another allocator.")
        rows: Ints = np.array(known, dtype=np.int64)
        if len(set(rows.tolist())) != rows.size:
            raise ValueError("a request is named twice in the batch.")
        return rows

    @property
    def _num_live(self) -> int:
        """Requests that were not freed, dropped ones too: their items are still held."""
        return self._tokens.size - len(self._rows)


def _of_each(rows: Ints, tokens: npt.ArrayLike) -> Ints:
    """One number, or one of each request, as int64 `[B]`."""
    # an int of any size is one number; more than MAX_TOKENS is refused later
    given = np.asarray(min(tokens, MAX_TOKENS + 1) if isinstance(tokens, int) else tokens)
    whole = given.dtype.kind in "iu" or not given.size
    if not whole or given.shape not in ((), rows.shape):
        raise ValueError(
            f"tokens: a whole number, or one for each of {rows.size} requests, got {tokens!r}."
        )
    return np.broadcast_to(given.astype(np.int64), rows.shape)


def _whole(tokens: SupportsIndex) -> int:
    try:
        return index(tokens)
    except TypeError:
        raise TypeError(f"tokens: a whole number, got {tokens!r}.") from None
