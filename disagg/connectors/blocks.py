"""An engine's block ids, group by group of its cache, as block tables. Block 0 is the null block:
what its positions held is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvpool.layout import RequestAddress, Span

Blocks = tuple[Sequence[int], ...]
"""Block ids of a request, by group."""


@dataclass(frozen=True)
class BlockGroup:
    """Layers whose blocks one list of ids addresses.

    `space`: the space whose ids are this group's; empty if none of its layers is on this rank (a
    pipeline stage). `blocks`: kernel blocks a block, which are its items. `tokens`: positions a
    block holds, on all ranks that share them. `state`: which of a slot group's blocks is the live
    state of n tokens: the request's first, or that of position n - 1, block number
    `(n - 1) // tokens`.
    """

    space: str
    blocks: int
    tokens: int
    state: Literal["first", "position"] | None = None

    def span(self, blocks: Sequence[int], tokens: int) -> Span:
        """The items of the first `tokens` positions."""
        ids = np.asarray(blocks, dtype=np.int64)
        if self.state is None:
            ids = ids[: -(-tokens // self.tokens)]
            return Span.from_blocks(ids, null=0, items_per_block=self.blocks)
        live = 0 if self.state == "first" else (tokens - 1) // self.tokens
        ids = ids[live : live + 1]
        return Span(ids[ids != 0] * self.blocks)

    def unfilled(self, blocks: Sequence[int], start: int, stop: int) -> list[int]:
        """Blocks that positions `start` to `stop` do not fill to their end."""
        first = stop // self.tokens
        # positions before `start` in a block are decode's own
        partial = first * self.tokens >= start
        return [block for block in blocks[first if partial else first + 1 :] if block]


def block_table(groups: Sequence[BlockGroup], blocks: Blocks, tokens: int) -> RequestAddress:
    """The block table of a request's first `tokens` positions."""
    pairs = [(group, ids) for group, ids in zip(groups, blocks) if group.space]
    return RequestAddress(tokens, {group.space: group.span(ids, tokens) for group, ids in pairs})
