"""Allocates the items of every space to requests, and takes them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np
import numpy.typing as npt

from kvpool.allocation.free_list import OutOfPages
from kvpool.allocation.prefix_cache import PrefixCache
from kvpool.allocation.prefix_store import write_chunks
from kvpool.allocation.request import FREED, Request, rows_of, tokens_of_each, whole
from kvpool.allocation.tables import SETTLED, Tables
from kvpool.allocation.usage import Usage
from kvpool.layout import PoolLayout
from kvpool.layout.grid import Ints
from kvpool.layout.request_address import MAX_TOKENS
from kvpool.prefix.chain import Media, token_ids

if TYPE_CHECKING:
    from kvpool.pools.base import KVPool

__all__ = ["Allocator", "OutOfPages", "Request", "Usage"]


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
            allocator = None if pool.allocator is None else pool.allocator()
            if allocator is not None and allocator._tables.num_live:
                raise ValueError(
                    f"this pool already has an allocator, with {allocator._tables.num_live} live "
                    "requests. Use that one, or free them."
                )
        self.pools = pools
        self.on_fork: list[Callable[[Request, Request, int], None]] = []
        first, *others = (pool.layout for pool in pools)
        self.layout = PoolLayout.merge(first, *others) if others else first
        self._tables = Tables(self.layout)
        self.spaces, self.lists = self._tables.spaces, self._tables.lists
        self.prefix = prefix
        if prefix is not None:
            on_host = all(buffer.on_host for buffer in self.layout.buffers)
            prefix.attach(self.lists, self._copy_items, "CPU" if on_host else "GPU")
        for pool in pools:
            pool.allocator = ref(self)

    def __repr__(self) -> str:
        return f"Allocator({self.usage().words()})"

    @property
    def free_pages(self) -> int:
        """Free pages of tokens, in the id list that has the fewest; a page of a block pool is a
        block for each list that grows with the tokens of a request. Raises ValueError where none
        does.
        """
        growing = ((f, sum(space.grows for space in f.spaces)) for f in self._tables.free_lists)
        pages = [free_list.num_free // lists for free_list, lists in growing if lists]
        if not pages:
            raise ValueError(f"this pool has no pages of tokens: use free_items({[*self.lists]}).")
        return min(pages)

    def free_items(self, id_list: str) -> int:
        """Free items of an id list, or of its block pool."""
        return self.lists[id_list].free_list.num_free

    def usage(self) -> Usage:
        """Free and used items, and requests, now. Any thread may ask, as exporters do
        (`disagg.exporter.export(..., allocators={"kv": allocator})`).
        """
        lists = {name: table.free_list for name, table in self.lists.items()}
        free = {name: free_list.num_free for name, free_list in lists.items()}
        used = {name: free_list.usable - free[name] for name, free_list in lists.items()}
        stats = None if self.prefix is None else self.prefix.stats
        return Usage(free, used, self._tables.num_live, stats)

    def new_request(
        self, tokens: npt.ArrayLike = (), *, salt: str = "", media: Media = ()
    ) -> Request:
        """A request that begins with the longest prefix of `tokens`, int `[T]`, whose state is
        there; `num_tokens` says how many: none without a prefix cache. To allocate items for a
        number of tokens, `extend` it.

        Where the last token is to be computed, give all but that. Requests of different `salt`
        share nothing: what else the state depends on (an adapter, a tenant) belongs in it. `media`:
        pictures and the like among all tokens that the request will have. Raises ValueError for
        tokens outside 0 to 2**31 - 1, OutOfPages where a pinned checkpoint cannot be copied.
        """
        if self.prefix is None:
            token_ids(tokens)  # the same mistakes are refused with a cache and without
        request = self._begin(tokens, salt, media)
        if self.prefix is None or self._read_shared(request, self.prefix, tokens):
            return request
        self.free(request)
        return self._begin(tokens, salt, media)

    def _begin(self, tokens: npt.ArrayLike, salt: str, media: Media) -> Request:
        """A request that begins with what of its tokens is in this pool."""
        row = self._tables.add_row()
        request = Request(self, self._tables, row)
        if self.prefix is not None:
            try:
                reused = self.prefix.begin(row, tokens, salt, media)
            except BaseException:
                self.free(request)
                raise
            self._tables.tokens[row] = reused
            for space in self._tables.rings:  # of a checkpoint, what is alive is there
                self._tables.lost[space.name][row] = space.alive(reused).start
        return request

    def _read_shared(self, request: Request, prefix: PrefixCache, tokens: npt.ArrayLike) -> bool:
        """Goes on with what the prefix cache's store has; False if that was not read, and the
        request is of no use.
        """
        chain, before, store = prefix.chain(request._row), request.num_tokens, prefix.shared
        prompt = token_ids(tokens)
        if (
            chain is None
            or store is None
            or before >= prompt.size // store.chunk_tokens * store.chunk_tokens
        ):
            return True
        keys = store.keys(prompt, chain.salt, chain.media)
        hit = store.wait(store.ask(keys)).hit
        if (hit_tokens := hit.tokens) <= before:
            return True
        try:
            self.extend(request, hit_tokens - before, received=True)
        except OutOfPages:  # then it is computed, as far as there are pages
            return True
        positions = range(before, hit_tokens)
        job = store.read(keys, request.address(), positions, hit=hit)
        if store.wait(job).failure is not None:
            return False
        prefix.store(request._row, prompt[before:hit_tokens], hit_tokens, request.received_tokens)
        return True

    def store(self, request: Request, tokens: npt.ArrayLike) -> None:
        """Says that the state of the request's next tokens is written (in all pools), those after
        what was stored or reused, and which tokens, int `[T]`, they are. Full pages of them can be
        reused from now on, also when the request has ended. Without a prefix cache, does nothing.

        Pages are kept that the request still has: store before `extend` frees those of a window.
        Slots and rings are kept if `tokens` are the request's last, at a multiple of
        `checkpoint_tokens`. Raises ValueError for more tokens than the request has, RequestPinned
        while a room receives it.
        """
        rows = rows_of(self._tables, [request])
        (row,) = rows.tolist()
        self._tables.pins.check_written(row, "others would reuse")
        self._tables.check_settled(rows)
        if self.prefix is not None:
            chain = self.prefix.chain(row)
            before = chain.num_tokens if chain else 0
            self.prefix.store(row, tokens, request.num_tokens, request.received_tokens)
            if chain is not None and self.prefix.shared is not None:
                write_chunks(self.prefix.shared, chain, before, request.address())

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

        With pages of 16 and a window of 32, a new request that receives 100 tokens takes 3 pages
        for the window, those of tokens 64 to 99; one that receives at most 100 takes all 7, and
        `truncate(request, 70)` gives 2 of them back.

        If too few items are free, raises OutOfPages; RequestPinned if a room needs a state that the
        tokens would overwrite, or a page of a window that they would free. Both change nothing.
        """
        batch = self.extend_batch([request], whole(tokens), received=received, at_most=at_most)
        return {space: rows[0] for space, rows in batch.items()}

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
        rows = rows_of(self._tables, requests)
        self._tables.check_settled(rows)
        more = tokens_of_each(rows, tokens)
        before = self._tables.tokens[rows]
        if more.min(initial=0) < 0:
            raise ValueError(f"tokens: 0 or more, got {more.min()}. See truncate.")
        if (more > MAX_TOKENS - before).any():
            raise ValueError(f"tokens: {tokens!r} more exceed {MAX_TOKENS}, a request's limit.")
        self._tables.extend(rows, more, received=received, at_most=at_most)
        width = int(more.max(initial=0)) if rows.size else int(np.max(tokens, initial=0))
        return self._tables.locate(rows, before, width)

    def truncate(self, request: Request, tokens: int) -> None:
        """Takes back all but the first `tokens` tokens, such as drafts that were rejected, or what
        did not come of `extend(..., at_most=True)`; their items are freed, and the next `extend`
        goes on after them. A last page that other requests hold too is copied.

        `before = request.num_tokens; allocator.extend(request, 4)`, and if two are accepted:
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
        """`truncate` for a batch, all or none: `tokens` is one number, or one a request `[B]`."""
        rows, tables = rows_of(self._tables, requests), self._tables
        before, least, after = tables.tokens[rows], tables.least[rows], tokens_of_each(rows, tokens)
        wrong = np.flatnonzero((after < np.maximum(least, 0)) | (after > before))
        if wrong.size:
            low, most, asked = (int(counts[wrong[0]]) for counts in (least, before, after))
            raise ValueError(f"tokens: {max(low, 0)} to {most}, which it has, got {asked}.")
        unsettled = least != SETTLED
        for row in rows[unsettled].tolist():
            tables.pins.check_written(row, "truncate would count")
        fewer = (after < before) | unsettled
        rows, after = rows[fewer], after[fewer]
        if rows.size:
            tables.truncate(rows, after, self._copy_items)
        if self.prefix is not None:
            for row, left in zip(rows.tolist(), after.tolist()):
                self.prefix.truncate(row, left)

    def locations(self, request: Request) -> dict[str, Ints]:
        """Flat locations of all tokens of a request, int64 `[num_tokens]`, by space; -1 for tokens
        whose items were freed or overwritten.
        """
        rows = rows_of(self._tables, [request])
        locations = self._tables.locate(rows, np.zeros(1, dtype=np.int64), request.num_tokens)
        return {name: located[0] for name, located in locations.items()}

    def fork(self, request: Request, tokens: int) -> Request:
        """A new request with the first `tokens` tokens of `request`: whole pages are shared; a
        partial last page, slots and rings are copied.

        Raises ValueError if the state at that prefix is gone (slots and rings hold only the last
        token's; window pages are freed, or were dead when received), OutOfPages, and RequestPinned
        while a room receives the request; all change nothing.
        """
        tokens = whole(tokens)
        rows = rows_of(self._tables, [request])
        (row,) = rows.tolist()
        self._tables.pins.check_written(row, "a fork would share and copy")
        self._tables.check_settled(rows)
        if tokens > (most := request.num_tokens) or tokens < 0:
            raise ValueError(f"tokens: 0 to {most}, which the request has, got {tokens}.")
        child_row, copies = self._tables.fork(row, tokens)
        child = Request(self, self._tables, child_row)
        try:
            for hook in self.on_fork:
                hook(request, child, tokens)
            for id_list, (src, dst) in copies.items():
                self._copy_items(id_list, src, dst)
        except BaseException:
            self.free(child)
            raise
        if self.prefix is not None:
            self.prefix.fork(row, child_row, tokens)
        return child

    def free(self, request: Request) -> None:
        """Frees every item that only this request holds. Raises RequestPinned while a room offers
        or receives it.
        """
        rows = rows_of(self._tables, [request])
        (row,) = rows.tolist()
        self._tables.pins.check_free(row)
        self._tables.remove(rows)
        if self.prefix is not None:
            self.prefix.free(row)
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
        tables = self._tables
        live = np.setdiff1d(np.arange(tables.tokens.size), tables.free_rows)
        for free_list in tables.free_lists:
            names = [space.name for space in free_list.spaces]
            held_items = [self.lists[n].check_integrity(live, tables.tokens[live]) for n in names]
            if self.prefix is not None:
                held_items += [self.prefix.pinned_items(name) for name in names]
            free_list.check_integrity(np.concatenate(held_items))

    def _copy_items(self, id_list: str, src: Ints, dst: Ints) -> None:
        """Copies items in every pool that has the id list."""
        for pool in self.pools if src.size else ():
            if any(space.id_list == id_list for space in pool.layout.spaces):
                pool.copy_items(id_list, src, dst)
