"""Block pools: an id is in use by one space of its pool at a time, also within a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpool.layout import PoolLayout, RequestAddress

if TYPE_CHECKING:
    from disagg.plan.bind import Columns


def id_clash(layout: PoolLayout, address: RequestAddress, columns: Columns) -> str | None:
    """Why a block table cannot be one of this layout: it lists an id of a block pool for two of its
    spaces. None if it does not. Reserved ids are nobody's, and may be listed for any.

    Uses `columns`, and no other memory that grows with the request.
    """
    for pool, lists in layout.block_pools.items():
        spans = {name: address.spans[name].ids for name in lists if name in address.spans}
        if len(spans) < 2:
            continue
        scratch = columns.take(sum(ids.size for ids in spans.values()))
        ids, same = scratch[0], scratch[1].view(np.bool_)
        np.concatenate(tuple(spans.values()), out=ids)
        ids.sort()
        ids = ids[np.searchsorted(ids, layout.space_by_name[lists[0]].reserved) :]
        same = np.equal(ids[1:], ids[:-1], out=same[: max(0, ids.size - 1)])
        if same.any():
            twice = int(ids[same.argmax()])
            first, second = [name for name, listed in spans.items() if twice in listed][:2]
            return (
                f"item {twice} of block pool {pool} is listed in spaces {first} and {second}, but "
                "it can be in use by one of them only. Give each space blocks of its own, and "
                "leave out those that a window has freed (Span.first_item)."
            )
    return None
