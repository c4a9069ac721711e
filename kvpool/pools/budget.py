"""How many items of each space fit into a number of bytes: the one budget search."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING

from kvpool.layout import Space
from kvpool.layout.text import counted
from kvpool.pools.placement import count_argument, place

if TYPE_CHECKING:
    from kvpool.pools.base import KVPool


class DoesNotFit(ValueError):
    """The bytes are too few for a single page of tokens."""


def items_per_request(space: Space, chunk_tokens: int) -> int:
    """The most items that one request holds in a space that does not grow with its tokens.

    A window may begin anywhere in a page, and the tokens of a chunk are held too. A window of 8 and
    a chunk of 1 are 9 entries, which touch at most 3 pages of 4: 1 + 4 + 4.
    """
    if space.per_request:
        return 1
    per = space.tokens_per_entry
    chunk = -(-(chunk_tokens + per - 1) // per)  # a chunk may begin inside a compressed entry
    entries = (space.window or 0) + space.window_step - 1 + chunk
    return (entries - 2) // space.entries_per_item + 2


def state_bytes(memory: int, weights: int, utilisation: float, where: str) -> int:
    """Bytes for state of a device of `memory` bytes: the fraction `utilisation` of them, less
    `weights`. Raises DoesNotFit, beginning with `where`, if none are left, and TypeError for what
    is no number.
    """
    for name, value in (("nbytes", memory), ("weights", weights), ("utilisation", utilisation)):
        if not isinstance(value, Real):
            raise TypeError(
                f"{where} {name}: a number, got {value!r}. Bytes are a number here: 80 << 30 is "
                "80 GiB. kvpool.models.sizing.parse_memory reads text with a unit."
            )
    if weights < 0 or not 0 < utilisation <= 1:
        raise ValueError(
            "weights: 0 bytes or more; utilisation: over 0, up to 1; got "
            f"{weights:,}, {utilisation}."
        )
    usable = int(memory * utilisation)
    if usable - weights < 1:
        cure = ", or raise utilisation" if utilisation < 1 else ""
        raise DoesNotFit(
            f"{where}: {utilisation} of {memory:,} bytes are {usable:,}, and weights take "
            f"{weights:,}. Shard the weights over more ranks{cure}."
        )
    return usable - weights


def needed_items(
    spaces: Iterable[Space], requests: int, pages: int, chunk_tokens: int
) -> dict[str, int]:
    """Constructor arguments of pools with these spaces that hold `pages` pages of tokens, and the
    windows, slots and rings of `requests` requests at a time. In a block pool, each page is a block
    for every group of layers.
    """
    if requests < 1 or chunk_tokens < 1:
        raise ValueError(f"requests and chunk_tokens: 1 or more, got {requests}, {chunk_tokens}.")
    lists = {space.name: space for space in spaces if space.ids is None}
    counts: dict[str, int] = {"num_pages": 2}
    blocks: dict[str, int] = {}
    for space in lists.values():
        items = pages if space.grows else requests * items_per_request(space, chunk_tokens)
        if space.block_pool is not None:
            items += blocks.get(space.block_pool, 0)
            blocks[space.block_pool] = items
        name = count_argument(space)
        counts[name] = max(counts.get(name, 0), items + space.reserved)
    return counts


def spaces_of(pools: Sequence[KVPool]) -> list[Space]:
    """The spaces of several pools."""
    return [space for pool in pools for space in pool.layout.spaces]


def pages_of_tokens(pools: Sequence[KVPool], num_pages: int, requests: int) -> int | None:
    """The most pages of tokens in pools of so many pages or blocks, beside the windows, slots and
    rings of `requests` requests; None if no buffer grows with tokens.
    """
    spaces = spaces_of(pools)
    if not any(space.grows for space in spaces):
        return None
    return largest(lambda n: needed_items(spaces, requests, n, 1)["num_pages"] <= num_pages, 0)


def size(pools: Sequence[KVPool], counts: Mapping[str, int], step: int) -> int:
    """Bytes of pools like these with other numbers of items, aligned to `step` bytes."""
    total = 0
    for pool in pools:
        spaces = pool.layout.space_by_name
        items = {name: counts[count_argument(spaces[s.id_list])] for name, s in spaces.items()}
        total += place(pool, spaces, items, step)[1]
    return total


def fit(
    pools: Sequence[KVPool], nbytes: int, requests: int, chunk_tokens: int, *, step: int, where: str
) -> dict[str, int]:
    """Constructor arguments of the largest pools like these that take at most `nbytes` together.

    Pages of tokens fill what `requests` requests leave. Raises DoesNotFit, beginning with `where`.
    """
    spaces = spaces_of(pools)
    least = needed_items(spaces, requests, 1, chunk_tokens)
    nbytes_of_least = size(pools, least, step)
    if nbytes_of_least > nbytes:
        raise DoesNotFit(
            f"{where}: {nbytes:,} bytes are too few for a page of {pools[0].page_size} tokens, the "
            "reserved page, and the windows, slots and rings of "
            f"{counted(requests, 'request')}; {nbytes_of_least:,} bytes are enough."
        )
    if not any(space.grows for space in spaces):
        return least
    pages = least["num_pages"]
    pages = largest(lambda n: size(pools, {**least, "num_pages": n}, step) <= nbytes, pages)
    return {**least, "num_pages": pages}


def largest(fits: Callable[[int], bool], low: int) -> int:
    """The largest number that fits, where `low` does and a larger number needs more."""
    step = 1
    while fits(low + step):
        step *= 2
    return low + bisect_left(range(1, step), True, key=lambda more: not fits(low + more))
