"""Prefix reuse: what requests have left in a pool's pages, found again by the tokens.

allocator = Allocator(pool, prefix=PrefixCache())
request = allocator.new_request(prompt[:-1])         # begins with what is there
known = request.num_tokens
allocator.extend(request, len(prompt) - known)
...                                                  # the forward
allocator.store(request, prompt[known:])             # its full pages are there from now on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd, lcm

import numpy as np
import numpy.typing as npt

from kvpool.allocation.block_table import BlockTable
from kvpool.allocation.free_list import FreeList, OutOfPages
from kvpool.allocation.kept_items import KeptItems
from kvpool.allocation.prefix_store import PrefixStore
from kvpool.layout.grid import Ints
from kvpool.prefix.chain import Chain, Media, PrefixKey, token_ids
from kvpool.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, extra_keys


@dataclass(slots=True)
class PrefixStats:
    """Counts since the cache was made: lookups of new requests, `hits` that found something; of
    `asked_tokens`, `found_tokens` needed no computation; items that were `stored` for a prefix, and
    `removed` again. `kept`: items that are a prefix's now, held or free, by id list.
    """

    lookups: int = 0
    hits: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    stored: int = 0
    removed: int = 0
    kept: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class PinnedPrefix:
    """A prefix whose items stay until it is unpinned. `items`: ids by id list."""

    num_tokens: int
    items: Mapping[str, Ints] = field(repr=False)


class PrefixCache:
    """Keeps the full pages of an allocator's requests under the tokens that they stand for, also
    after these have ended, until the pages are needed.

    A prefix can be reused where the pages of it are there that a request of so many tokens reads:
    of a window those that are alive. Slots and rings hold the state of one number of tokens, and
    belong to one request: where a pool has any, `store` at a multiple of `checkpoint_tokens` (which
    must be a multiple of the tokens of every page) copies them to free ones, and prefixes that can
    be reused end there. With `events`, what is stored and removed is noted for `take_events`.

    `store`: where chunks of tokens are kept beyond this process (`disagg.store.Store`). What is not
    here is looked for there, and what is stored here is written there too.
    """

    def __init__(
        self,
        *,
        checkpoint_tokens: int = 1024,
        events: bool = False,
        store: PrefixStore | None = None,
    ) -> None:
        if checkpoint_tokens < 1:
            raise ValueError(f"checkpoint_tokens: 1 or more, got {checkpoint_tokens}.")
        self.checkpoint_tokens, self.shared = checkpoint_tokens, store
        self._stats = PrefixStats()
        self._lists: dict[str, KeptItems] = {}
        self._chains: dict[int, Chain] = {}
        self._pinned: list[PinnedPrefix] = []
        self._events: list[Event] | None = [] if events else None  # since they were last taken

    def attach(
        self, lists: Mapping[str, BlockTable], copy: Callable[[str, Ints, Ints], None], medium: str
    ) -> None:
        """Called by the allocator whose block tables these are. `copy(id_list, from, to)` copies
        items in `medium`, the events' word for the memory.
        """
        if self._lists:
            raise ValueError("this PrefixCache belongs to another allocator. Make one for each.")
        sizes = [x.space.tokens_per_item for x in lists.values() if not x.space.per_request]
        if len(sizes) < len(lists):
            if self.checkpoint_tokens % lcm(*sizes):
                raise ValueError(
                    f"checkpoint_tokens: {self.checkpoint_tokens}, but pages end together only at "
                    f"multiples of {lcm(*sizes)} tokens. Give one of these."
                )
            sizes.append(self.checkpoint_tokens)
        self._page, self._step = gcd(*sizes), lcm(*sizes)
        self._copy, self._medium = copy, medium
        for group, (name, table) in enumerate(lists.items()):
            space = table.space
            tokens = self.checkpoint_tokens if space.per_request else space.tokens_per_item
            self._lists[name] = id_list = KeptItems(group, table, tokens, self._page)
            id_list.index.on_forget = self._removed

    @property
    def stats(self) -> PrefixStats:
        """The counts by now. Any thread may ask."""
        kept = {name: id_list.index.ids(name).size for name, id_list in self._lists.items()}
        return replace(self._stats, kept=kept)

    def lookup(self, tokens: npt.ArrayLike, *, salt: str = "", media: Media = ()) -> int:
        """With how many tokens a request of these would begin."""
        return self._match(self._chain(tokens, salt, media))[0]

    def pin(self, tokens: npt.ArrayLike, *, salt: str = "", media: Media = ()) -> PinnedPrefix:
        """Keeps the longest prefix that is there until it is unpinned: its items are not free."""
        tokens_found, items = self._match(self._chain(tokens, salt, media))
        pinned = PinnedPrefix(tokens_found, items)
        for name, ids in items.items():
            self._lists[name].free_list.share(ids)
        self._pinned.append(pinned)
        return pinned

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Lets go of a pinned prefix. Raises ValueError if it is not pinned."""
        if pinned not in self._pinned:
            raise ValueError("this prefix is not pinned here.")
        self._pinned.remove(pinned)
        for name, ids in pinned.items.items():
            self._lists[name].free_list.release(ids)

    def clear(self) -> None:
        """Forgets all prefixes, as after new weights. What requests that are live now have stored
        or will store is not kept either.
        """
        events, self._events = self._events, None
        for name, id_list in self._lists.items():
            id_list.free_list.forget(id_list.index.ids(name))
        self._chains.clear()
        self._events = events
        if events is not None:
            events.append(AllBlocksCleared())

    def take_events(self) -> list[Event]:
        """What was stored and removed since the last call, in order. Raises ValueError without
        `events=True`.
        """
        if self._events is None:
            raise ValueError("this cache notes no events. Make it with PrefixCache(events=True).")
        events, self._events = self._events, []
        return events

    def pinned_items(self, id_list: str) -> Ints:
        """Ids that pinned prefixes hold, each as often as they do."""
        none = np.empty(0, dtype=np.int64)
        return np.concatenate([none, *(pinned.items[id_list] for pinned in self._pinned)])

    def begin(self, row: int, tokens: npt.ArrayLike, salt: str, media: Media) -> int:
        """Gives a new request the longest prefix of `tokens` that is there; returns its tokens."""
        chain = self._chain(tokens, salt, media)
        asked, (reused, items) = chain.num_tokens, self._match(chain)
        if asked:
            self._stats.lookups += 1
            self._stats.hits += reused > 0
            self._stats.asked_tokens += asked
            self._stats.found_tokens += reused
        for name, ids in items.items():  # all of them, before any is taken for a copy
            self._lists[name].free_list.share(ids)
        try:
            self._check_copies(items)
            for name, id_list in self._lists.items() if reused else ():
                ids = items.pop(name)
                if id_list.space.per_request:
                    self._go_on(id_list, row, ids)
                else:
                    id_list.table.adopt(row, reused // id_list.tokens - ids.size, ids)
        finally:
            for name, ids in items.items():  # none, unless a copy failed
                self._lists[name].free_list.release(ids)
        chain.truncate(reused)
        self._chains[row] = chain
        return reused

    def store(self, row: int, tokens: npt.ArrayLike, num_tokens: int, received: int) -> None:
        """Keeps the full pages of the next tokens of a request of `num_tokens` tokens. Entries that
        were dead at `received` tokens were never there.
        """
        chain = self._chains.get(row)
        if chain is None:  # the cache was cleared since
            return
        more = token_ids(tokens)
        if (stored := chain.num_tokens + more.size) > num_tokens:
            raise ValueError(
                f"tokens: {stored} are stored then, the request has {num_tokens}. Extend it, "
                "and store what is written."
            )
        before = chain.pages
        chain.append(more)
        for id_list in self._lists.values() if chain.pages > before else ():
            if not id_list.space.per_request:
                whole = id_list.table.first_whole(received)
                self._keep(row, chain, id_list, max(before // id_list.pages, whole))
            elif stored == num_tokens and stored % id_list.tokens == 0:
                self._checkpoint(row, chain, id_list)

    def chain(self, row: int) -> Chain | None:
        """What a request has stored; None if the cache was cleared since."""
        return self._chains.get(row)

    def fork(self, row: int, child: int, tokens: int) -> None:
        """A request was forked at `tokens` tokens."""
        if row in self._chains:
            chain = self._chains[row].copy()
            chain.truncate(tokens)
            self._chains[child] = chain

    def truncate(self, row: int, tokens: int) -> None:
        """A request was truncated to `tokens` tokens: it will write to the rest of its last page,
        which is not kept any more. Pages that were stored after it stay until they are taken, or
        found again once it is stored again.
        """
        for id_list in self._lists.values():
            number, more = divmod(tokens, id_list.tokens)
            if more and not id_list.space.per_request:
                last = id_list.table.ids[row, [number]]
                id_list.free_list.forget(last[last >= 0])
        if row in self._chains:
            self._chains[row].truncate(tokens)

    def free(self, row: int) -> None:
        """A request has ended."""
        self._chains.pop(row, None)

    def _chain(self, tokens: npt.ArrayLike, salt: str, media: Media) -> Chain:
        chain = Chain(self._page, salt, media)
        chain.append(token_ids(tokens))
        return chain

    def _match(self, chain: Chain) -> tuple[int, dict[str, Ints]]:
        """The longest prefix that is there: its tokens, and the items it needs by id list."""
        ends = np.arange(0, chain.num_tokens + 1, self._step)
        fits, candidates = np.ones(ends.size, dtype=np.bool_), {}
        for name, id_list in self._lists.items():
            ids = id_list.index.find(name, id_list.keys(chain))
            first, stop = id_list.first(ends), ends // id_list.tokens
            counts = np.zeros(ids.size + 1, dtype=np.int64)
            np.cumsum(ids >= 0, out=counts[1:])
            fits &= counts[stop] - counts[first] == stop - first
            candidates[name] = ids, first, stop
        longest = int(np.flatnonzero(fits)[-1])
        items = {n: ids[int(i[longest]) : int(j[longest])] for n, (ids, i, j) in candidates.items()}
        return int(ends[longest]), items

    def _check_copies(self, items: Mapping[str, Ints]) -> None:
        """Raises OutOfPages unless something is free for a copy of each checkpoint that is pinned.
        Of others a copy needs nothing more: the checkpoint itself is free then.
        """
        needed: Counter[FreeList] = Counter()
        for name, ids in items.items():
            id_list = self._lists[name]
            if id_list.space.per_request and id_list.free_list.is_shared(ids).any():
                needed[id_list.free_list] += 1
        for free_list, count in needed.items():
            if count > free_list.num_free:
                raise OutOfPages(
                    f"{free_list.name}: {count} more items are needed, for copies of pinned ones, "
                    f"{free_list.num_free} of {free_list.usable} are free. Unpin a prefix, or free "
                    "a request."
                )

    def _go_on(self, id_list: KeptItems, row: int, kept: Ints) -> None:
        """Gives a request a copy of a checkpoint; where nothing is free, the checkpoint itself."""
        name = id_list.space.name
        if not id_list.free_list.num_free and not id_list.free_list.is_shared(kept).any():
            id_list.index.forget(kept)
            id_list.table.adopt(row, 0, kept)
            return
        try:
            own = id_list.free_list.take(1)
            id_list.table.adopt(row, 0, own)
            self._copy(name, kept, own)
        finally:
            id_list.free_list.release(kept)

    def _checkpoint(self, row: int, chain: Chain, id_list: KeptItems) -> None:
        """Copies the state of a request to a free item, if there is one, and keeps that."""
        number = np.array([chain.num_tokens // id_list.tokens - 1])
        key, name = chain.keys[-1:], id_list.space.name
        if id_list.index.find(name, key)[0] >= 0 or not id_list.free_list.num_free:
            return
        own, copy = id_list.table.ids[row, [0]], id_list.free_list.take(1)
        try:
            self._copy(name, own, copy)
            id_list.index.add_prefixes(name, key, copy)
        finally:
            id_list.free_list.release(copy)
        self._stored(id_list, chain, number)

    def _keep(self, row: int, chain: Chain, id_list: KeptItems, first: int) -> None:
        """Keeps a request's items from number `first` on."""
        keys = id_list.keys(chain)
        numbers = np.arange(first, len(keys))
        ids = id_list.table.ids[row, numbers]
        numbers, ids = numbers[ids >= 0], ids[ids >= 0]
        added = id_list.index.add_prefixes(
            id_list.space.name, [keys[number] for number in numbers], ids
        )
        self._stored(id_list, chain, numbers[added])

    def _stored(self, id_list: KeptItems, chain: Chain, numbers: Ints) -> None:
        """Items `numbers` of a chain were stored: an event for each run of them."""
        self._stats.stored += numbers.size
        if self._events is None or not numbers.size:
            return
        space, tokens, keys = id_list.space, id_list.tokens, id_list.keys(chain)
        kind, window = "mamba" if space.per_request else "full_attention", None
        if not space.per_request and space.window is not None:
            kind, window = "sliding_window", space.window * space.tokens_per_entry
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
            first, stop = int(run[0]), int(run[-1]) + 1
            event = BlockStored(
                block_hashes=keys[first:stop],
                parent_block_hash=keys[first - 1] if first else None,
                token_ids=chain.tokens[first * tokens : stop * tokens].tolist(),
                block_size=tokens,
                lora_id=None,
                medium=self._medium,
                lora_name=None,
                extra_keys=extra_keys(chain, range(first, stop), tokens),
                group_idx=id_list.group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                locality="LOCAL",
            )
            self._events.append(event)

    def _removed(self, id_list: str, keys: list[PrefixKey]) -> None:
        self._stats.removed += len(keys)
        if self._events is not None:
            group = self._lists[id_list].group
            self._events.append(BlockRemoved(keys, self._medium, group, "LOCAL"))
