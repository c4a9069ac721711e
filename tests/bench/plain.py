"""Plain Python references for the allocator, plans and binding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.layout import PoolLayout
from kvpool.layout.grid import Ints

Run = tuple[int, int, int]


class Lists:
    """Block tables of DeepSeek-V4's five spaces for many requests, as Python lists of ids.

    Pages of 256 tokens (64 and 2 compressed entries), window pages of 128, rings of 8 and 128.
    """

    def __init__(self, requests: int, pages: int) -> None:
        self.free = {name: list(range(pages, 0, -1)) for name in ("kv", "swa")}
        self.held: list[dict[str, list[int]]] = [{"kv": [], "swa": []} for _ in range(requests)]
        self.tokens = [0] * requests

    def extend(self) -> Ints:
        """Appends a token to each request; its location in every space, `[request, space]`."""
        found = []
        for number, held in enumerate(self.held):
            at = self.tokens[number]
            for name, size in (("kv", 256), ("swa", 128)):
                if at % size == 0:
                    held[name].append(self.free[name].pop())
            if at % 128 == 0 and len(held["swa"]) > 2:
                self.free["swa"].append(held["swa"].pop(0))
            page, slot = held["kv"][-1], number + 1
            row = (
                held["swa"][-1] * 128 + at % 128,
                page * 64 + at % 256 // 4,
                page * 2 + at % 256 // 128,
                slot * 8 + at % 8,
                slot * 128 + at % 128,
            )
            found.append(row)
            self.tokens[number] += 1
        return np.array(found)


def tuples(source: PoolLayout, dest: PoolLayout, ids: Sequence[dict[str, list[int]]]) -> list[Run]:
    """A tuple (source, destination, length) for each buffer and item; `ids` are both sides' block
    tables.
    """
    found = []
    for there, here in zip(source.buffers, dest.buffers):
        lists = (
            side[layout.space_by_name[buffer.space].id_list]
            for side, layout, buffer in zip(ids, (source, dest), (there, here))
        )
        for src, dst in zip(*lists):
            at = there.base + src * there.item_bytes, here.base + dst * here.item_bytes
            found.append((*at, here.item_bytes))
    return found


def regions(sources: Sequence[PoolLayout], dest: PoolLayout) -> list[tuple[int, Run]]:
    """A tuple (rank, (source, destination, length)) for each region of each rank that `dest` has
    too: the same names, one by one. Shards are not looked at, and nothing is joined or checked.
    """
    wanted = {region.key: region for region in dest.regions}
    found = []
    for rank, layout in enumerate(sources):
        for region in layout.regions:
            other = wanted.get(region.key)
            if other is not None:
                src = layout.buffer_by_name[region.buffer].base + region.offset
                dst = dest.buffer_by_name[other.buffer].base + other.offset
                found.append((rank, (src, dst, other.nbytes)))
    return found
