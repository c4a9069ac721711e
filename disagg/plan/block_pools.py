"""Block pools: a block is in use by one space of its pool at a time, also within a request."""

from __future__ import annotations

import numpy as np

from kvpool.layout import PoolLayout, RequestAddress


def id_clash(layout: PoolLayout, address: RequestAddress) -> str | None:
    """Why a block table cannot be one of this layout: it lists items of one block of a block pool
    for two of its spaces. None if it does not. Reserved blocks are nobody's, and may be listed for
    any.
    """
    for pool, lists in layout.block_pools.items():
        items = {name: address.spans[name].ids for name in lists if name in address.spans}
        if len(items) < 2:
            continue
        sizes = {name: layout.space_by_name[name].items_per_block for name in lists}
        # a block's items in one space are no clash: each block once a space
        blocks = np.concatenate(
            [
                ids if sizes[name] == 1 else np.unique(ids // sizes[name])
                for name, ids in items.items()
            ]
        )
        blocks.sort()
        reserved = layout.space_by_name[lists[0]].reserved // sizes[lists[0]]
        twice = (blocks[1:] == blocks[:-1]) & (blocks[1:] >= reserved)
        if twice.any():
            block = int(blocks[twice.argmax()])
            listed = [
                f"{name} (item {ids[ids // sizes[name] == block][0]})"
                for name, ids in items.items()
                if (ids // sizes[name] == block).any()
            ]
            return (
                f"block {block} of block pool {pool} is listed in spaces "
                f"{' and '.join(listed[:2])}, but it can be in use by one of them only. Give each "
                "space blocks of its own, and leave out those that a window has freed "
                "(Span.first_item)."
            )
    return None
