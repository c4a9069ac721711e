"""A request in the pool of a model. Its bytes follow from layer, role and position alone, so that
those of two pools are compared without a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch

from disagg.cli.bench.work import need_equal, noise
from kvpool.layout import PoolLayout, Region, RequestAddress, Space, Span
from kvpool.layout.formats import Shard
from kvpool.layout.grid import Ints
from kvpool.models import declare
from kvpool.pools.base import KVPool

LAYERS = 8


class Model(NamedTuple):
    """A shipped config of a family, and the rank of so many that a pool is of."""

    config: str
    packing: str
    ranks: int = 1


FAMILIES = {
    "MHA": Model("llama_3_1_70b", "bf16", 4),
    "MLA": Model("deepseek_v3", "bf16"),
    "NSA": Model("deepseek_v32", "fp8"),
    "SWA": Model("gpt_oss_120b", "bf16"),
    "HybridLinear": Model("qwen3_next_80b", "bf16"),
    "DSv4": Model("deepseek_v4", "fp8"),
}


def pool_of(family: str, tokens: int, device: str) -> KVPool:
    """The pool of the first layers of a family's model, for one request of `tokens` tokens."""
    config, packing, ranks = FAMILIES[family]
    model = declare(config)
    return model.build(
        layers=range(LAYERS),
        packing=packing,
        num_pages=1 + -(-tokens // model.page_size),
        requests=1,
        shard=Shard(0, ranks),
        device=device,
    )


def block_table(layout: PoolLayout, tokens: int, seed: int) -> RequestAddress:
    """A request's items, in any order."""
    random = np.random.default_rng(seed)
    spans = {}
    for name, items in layout.items_by_space.items():
        space = layout.space_by_name[layout.space_by_name[name].id_list]
        alive = space.alive_items(tokens)
        ids = space.reserved + random.permutation(items - space.reserved)
        spans[space.name] = Span(ids[: len(alive)], alive.start)
    return RequestAddress(tokens, spans)


def chunk_bytes(layout: PoolLayout, tokens: range) -> int:
    """Bytes of state that come with the last positions `tokens` of a request."""
    return sum(entries.size * _width(region) for region, _, entries in _live(layout, tokens))


def fill(pool: KVPool, table: RequestAddress) -> None:
    """Writes a request's bytes."""
    tokens = range(table.num_tokens)
    for region, space, entries in _live(pool.layout, tokens):
        locations = _locations(space, table, entries)
        kind = pool.gather(region.role, region.layer, locations[:0])
        rows = _rows(region, entries).view(kind.dtype).view(-1, *kind.shape[1:])
        written = rows.to(kind.device)
        pool.scatter(region.layer, locations, {region.role: written})


def clear(pool: KVPool) -> None:
    """Sets all bytes of a pool to 0."""
    for buffer in pool.layout.buffers:
        pool.item_bytes_view(buffer).zero_()


def need_request(pool: KVPool, table: RequestAddress, start: int = 0) -> None:
    """Raises WrongBytes unless a request's positions from `start` on are what `fill` writes."""
    for region, space, entries in _live(pool.layout, range(start, table.num_tokens)):
        values = pool.gather(region.role, region.layer, _locations(space, table, entries))
        flat = values.flatten(1).view(torch.uint8)
        need_equal(f"entries of {region}", flat, _rows(region, entries))


def _live(layout: PoolLayout, tokens: range) -> Iterator[tuple[Region, Space, Ints]]:
    """What comes with the last positions `tokens` of a request: each region, its space, and the
    entries. Slots and rings come whole.
    """
    for region in layout.regions:
        space = layout.space_of(region)
        alive = space.alive(tokens.stop)
        first = 0 if space.per_request else tokens.start // space.tokens_per_entry
        entries = np.arange(max(first, alive.start), alive.stop)
        if entries.size:
            yield region, space, entries


def _locations(space: Space, table: RequestAddress, entries: Ints) -> Ints:
    span = table.spans[space.id_list]
    items, steps = space.place(entries)
    return span.ids[items - span.first_item] * space.steps + steps


def _rows(region: Region, entries: Ints) -> torch.Tensor:
    """The bytes of entries of a region, uint8 `[N, byte]`."""
    last = int(entries[-1]) + 1
    return noise(last, _width(region), seed=crc32(str(region).encode()))[int(entries[0]) :]


def _width(region: Region) -> int:
    """Bytes of an entry; a slot is one."""
    axis = region.axis("entry")
    return region.nbytes // (axis.size if axis else 1)
