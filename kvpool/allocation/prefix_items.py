"""The items of an id list that are kept for prefixes of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvpool.allocation.block_table import BlockTable
from kvpool.layout.grid import Ints
from kvpool.prefix.chain import Chain, Key
from kvpool.prefix.events import BlockStored
from kvpool.prefix.index import PrefixIndex


class PrefixItems:
    """An id list: item n is of `tokens` tokens, which are `pages` pages of the keys. A checkpoint
    counts as an item of the tokens since the one before.
    """

    def __init__(self, group: int, table: BlockTable, tokens: int, page: int) -> None:
        self.group, self.table, self.tokens, self.pages = group, table, tokens, tokens // page
        self.space, self.free_list = table.space, table.free_list
        if self.free_list.kept is None:
            self.free_list.kept = PrefixIndex(self.free_list.items)
        self.index = self.free_list.kept
        self.index.use(self.space.name)

    def keys(self, chain: Chain) -> list[Key]:
        """The keys of the prefixes that end with each item."""
        return chain.keys[self.pages - 1 :: self.pages]

    def find(self, chain: Chain) -> Ints:
        """The kept items of a chain by number; -1 where there is none."""
        return self.index.find(self.space.name, self.keys(chain))

    def first(self, ends: Ints) -> Ints:
        """The first item that a prefix of `ends` `[N]` tokens needs: of a slot, its checkpoint."""
        if self.space.per_request:
            return np.maximum(ends // self.tokens - 1, 0)
        return self.table.first(ends)

    def held(self, row: int, numbers: Ints) -> Ints:
        """The items `numbers` of a request; -1 where it has none."""
        return np.asarray(self.table.find(np.array([row]), numbers[None])[0])

    def stored_events(self, chain: Chain, numbers: Ints, medium: str) -> Iterator[BlockStored]:
        """Items `numbers` of a chain were stored, in `medium`: an event for each run of them."""
        space, tokens, keys = self.space, self.tokens, self.keys(chain)
        kind, window = "mamba" if space.per_request else "full_attention", None
        if not space.per_request and space.window is not None:
            kind, window = "sliding_window", space.window * space.tokens_per_entry
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
            first, stop = int(run[0]), int(run[-1]) + 1
            yield BlockStored(
                block_hashes=keys[first:stop],
                parent_block_hash=keys[first - 1] if first else None,
                token_ids=chain.tokens[first * tokens : stop * tokens].tolist(),
                block_size=tokens,
                lora_id=None,
                medium=medium,
                lora_name=None,
                extra_keys=[(chain.salt,)] * run.size if chain.salt else None,
                group_idx=self.group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
