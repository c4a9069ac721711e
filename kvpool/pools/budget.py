"""How many items of each space fit into so many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.layout import PoolLayout, Space
from kvpool.pools.placement import count_argument, place

if TYPE_CHECKING:
    from kvpool.pools.base import KVPool


def items_per_request(space: Space, chunk_tokens: int) -> int:
    """Items that one request holds at most in a space that does not grow with it.

    A window may begin anywhere in a page, and the tokens of a chunk are there beside it.
    """
    if space.per_request:
        return 1
    per = space.tokens_per_entry
    chunk = -(-(chunk_tokens + per - 1) // per)  # it may begin inside a compressed entry
    entries = (space.window or 0) + space.window_step - 1 + chunk
    return (entries - 2) // space.entries_per_item + 2


def fixed_items(layout: PoolLayout, requests: int, chunk_tokens: int) -> dict[str, int]:
    """Constructor arguments for everything but pages of tokens: what `requests` need at once."""
    found: dict[str, int] = {}
    for space in layout.spaces:
        if space.ids is None and (space.per_request or space.window is not None):
            name = count_argument(space)
            items = requests * items_per_request(space, chunk_tokens) + space.reserved
            found[name] = max(found.get(name, 0), items)
    return found


def fit(pool: KVPool, nbytes: int, requests: int, chunk_tokens: int, step: int) -> dict[str, int]:
    """Constructor arguments of the largest pool like `pool` that takes at most `nbytes`."""
    if requests < 1 or chunk_tokens < 1:
        raise ValueError(f"requests and chunk_tokens: 1 or more, got {requests}, {chunk_tokens}.")
    fixed = fixed_items(pool.layout, requests, chunk_tokens)
    spaces = pool.layout.space_by_name

    def size(pages: int) -> int:
        counts = {"num_pages": pages, **fixed}
        return place(
            pool._declared,
            {s.name: counts[count_argument(spaces[s.id_list])] for s in pool.layout.spaces},
            owner=pool.owner,
            placement=pool.placement,
            step=step,
        )[1]

    least = size(2)
    if least > nbytes:
        raise ValueError(
            f"{pool.owner}: {nbytes:,} bytes hold no page of {pool.page_size} tokens beside the "
            f"reserved one and what {requests} requests need; {least:,} would."
        )
    page = sum(  # a page takes as much or, with gaps, more
        buffer.item_bytes
        for buffer in pool.layout.buffers
        if count_argument(spaces[spaces[buffer.space].id_list]) == "num_pages"
    )
    if page == 0:  # nothing grows with the tokens of a request
        return {"num_pages": 2, **fixed}
    low, high = 2, nbytes // page + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= nbytes else (low, middle)
    return {"num_pages": low, **fixed}
