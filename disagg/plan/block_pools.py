"""Block pools: a block is in use by one space of its pool at a time, also within a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpool.layout import PoolLayout, RequestAddress

if TYPE_CHECKING:
    from disagg.plan.columns import Columns


def id_clash(layout: PoolLayout, address: RequestAddress, columns: Columns) -> str | None:
    """Why a block table cannot be one of this layout: it lists items of one block of a block pool
    for two of its spaces. None if it does not. Reserved blocks are nobody's, and may be listed for
    any.

    Uses `columns`, and no other memory that grows with the request.
    """
    for pool, lists in layout.block_pools.items():
        held = {name: address.spans[name].ids for name in lists if name in address.spans}
        if len(held) < 2:
            continue
        sizes = {name: layout.space_by_name[name].items_per_block for name in lists}
        scratch = columns.take(sum(ids.size for ids in held.values()))
        blocks, same = scratch[0], scratch[1].view(np.bool_)
        start = 0
        for name, ids in held.items():
            mine = np.floor_divide(ids, sizes[name], out=blocks[start : start + ids.size])
            start += ids.size
            if sizes[name] > 1:  # a block's items in one space are no clash: all but one are no id
                mine.sort()
                again = np.equal(mine[1:], mine[:-1], out=same[: max(0, mine.size - 1)])
                np.copyto(mine[1:], -1, where=again)
        blocks.sort()
        reserved = layout.space_by_name[lists[0]].reserved // sizes[lists[0]]
        blocks = blocks[np.searchsorted(blocks, reserved) :]
        again = np.equal(blocks[1:], blocks[:-1], out=same[: max(0, blocks.size - 1)])
        if again.any():
            block = int(blocks[again.argmax()])
            items = {name: ids[ids // sizes[name] == block] for name, ids in held.items()}
            said = [f"{name} (item {found[0]})" for name, found in items.items() if found.size]
            return (
                f"block {block} of block pool {pool} is listed in spaces {' and '.join(said[:2])}, "
                "but it can be in use by one of them only. Give each space blocks of its own, and "
                "leave out those that a window has freed (Span.first_item)."
            )
    return None
