"""What a prefix cache keeps of one id list."""

from __future__ import annotations

import numpy as np

from kvpool.allocation.block_table import BlockTable
from kvpool.layout.grid import Ints
from kvpool.prefix.chain import Chain, PrefixKey


class KeptItems:
    """The items of an id list that are kept for prefixes: item n is of `tokens` tokens, which are
    `pages` pages of the keys. A checkpoint counts as an item of the tokens since the one before.
    """

    def __init__(self, group: int, table: BlockTable, tokens: int, page: int) -> None:
        self.group, self.table, self.tokens, self.pages = group, table, tokens, tokens // page
        self.space, self.free_list = table.space, table.free_list
        self.index = self.free_list.kept

    def keys(self, chain: Chain) -> list[PrefixKey]:
        """The keys of the prefixes that end with each item."""
        return chain.keys[self.pages - 1 :: self.pages]

    def first(self, ends: Ints) -> Ints:
        """The first item that a prefix of `ends` `[N]` tokens needs: of a slot, its checkpoint."""
        if self.space.per_request:
            return np.maximum(ends // self.tokens - 1, 0)
        return self.table.first(ends)
